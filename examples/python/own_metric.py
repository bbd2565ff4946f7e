"""Metrics of your own: functions of all logits and targets of the test set."""

import shoal


def confidence(logits, targets):
    return logits.softmax(-1).max(-1).values.mean()


def share_of_nines(logits, targets):
    return (logits.argmax(-1) == 9).float().mean()


result = shoal.run("fedavg", metrics=[confidence, share_of_nines, "top3"], rounds=5)
print(result.history.last("confidence"), result.history.last("share_of_nines"))

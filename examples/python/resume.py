"""A run in a folder is stopped and goes on: with the same objects, for longer if you like."""

import shoal


def confidence(logits, targets):
    return logits.softmax(-1).max(-1).values.mean()


shoal.run("scaffold", metrics=[confidence], rounds=3, out="runs/scaffold")
# in another program: the metric is given again; another function would be refused
result = shoal.resume("runs/scaffold", metrics=[confidence], rounds=6)
print(result)

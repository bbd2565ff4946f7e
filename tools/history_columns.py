"""What the columns of a history mean; docs/reference/history.md is written from this.

Which columns there are, the code says: `generate_docs.py` refuses a list that lacks one of them, and
tests/docs/test_docs.py compares it with the rows of a run.
"""

COLUMNS = {
    "round": ("int", "the number of the round, from 0"),
    "devices": (
        "list of int",
        "the devices that took part, in rising order unless a part says otherwise; -1 is the server where it takes "
        "part itself",
    ),
    "accuracy": (
        "float or null",
        "share of test samples that the judged model gets right; null in rounds that are not evaluated",
    ),
    "loss": ("float or null", "its mean cross-entropy on the test samples; null likewise"),
    "train_loss": (
        "float or null",
        "mean loss over the local steps of the devices, weighted by the samples they went through. It is the loss that "
        "was minimised, with what parts add to it, so it cannot be compared between methods",
    ),
    "bytes_down": ("int", "bytes sent to all devices of the round"),
    "bytes_up": ("int", "bytes they sent back, and what devices told about themselves at first contact"),
    "macs_forward": (
        "int",
        "multiply-accumulates of one sample through the model, the mean over the devices (less than the whole model "
        "where a plan cuts it)",
    ),
    "macs_work": ("int", "multiply-accumulates of everything the devices did in the round, together"),
    "sim_seconds": ("float", "simulated seconds of the round: until the last reply that was waited for"),
    "bytes_by": (
        "object",
        'the bytes by cause: `{"down": {"model": ..., "scaffold": ...}, "up": {...}}`; `plan` and `enrol` where there '
        "are any",
    ),
    "bytes_down_by_blocks": (
        "int, where a part encodes the models that go down",
        "the bytes of the models that went down if all blocks of a model were of one size, as some papers count; of "
        "use where a method sends some blocks. What was really sent is `bytes_down`. Tables call the sum over rounds "
        '"bytes down, blocks counted alike"',
    ),
    "seconds_by": ("object", "`down`, `compute` and `up` of the slowest device that was waited for"),
    "joules": ("float, where the fleet knows", "energy of all devices in the round"),
    "wall_seconds": (
        "float",
        "real seconds of the round; the only field that differs between two runs of one recipe",
    ),
    "dropped": (
        "list, only if any",
        'replies that could not be used: `{"device": 7, "why": "its update is not finite"}`; where a part could do '
        "nothing with one, its name, the point and what was raised",
    ),
    "void": (
        "true, only then",
        "nobody's reply could be used, or the new model was not finite; the model stayed as it was",
    ),
    "top3": ("float, with `--metrics top3`", "share of samples whose class is among the three likeliest"),
    "perplexity": ("float, with `--metrics perplexity`", "e to the loss"),
    "per_class": ("list of float, with `--metrics per_class`", "the accuracy on each class"),
    "device_mean": (
        "float, with `--metrics devices`",
        "accuracy on the test set re-weighted to each device's labels: the mean over devices",
    ),
    "device_worst": ("float, with `--metrics devices`", "the mean of its worst tenth"),
    "device_spread": ("float, with `--metrics devices`", "its standard deviation"),
    "local_risk": (
        "float, with `--metrics local`",
        "the error of the models that devices came back with, averaged over the label mixes of all devices (the first "
        "1,000); each costs a pass over the test set",
    ),
    "class_kl": (
        "float, with `--metrics class_kl`",
        "how far those models are from doing equally well on each class of their own samples: the mean over classes of "
        "KL(P ‖ Q), P the mean probabilities by class, Q nearly the identity",
    ),
    "NAME": (
        "float, with `--metrics FILE.py:NAME`",
        "[your own metric](../how-to/recipes.md#a-metric-of-your-own) of the whole test set",
    ),
    "accuracy_NAME, loss_NAME": (
        "float, where a part says so",
        "the same for a further model that a part has judged",
    ),
}
"""For each column its type, with when it is there, and its meaning, in Markdown."""

"""The registry of metrics: every number that a row of a history may hold, and what readers of it need to know.

History, tables, plots, the page, comparisons, loggers, the help of `--metrics` and docs/reference/history.md read it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shoal.core.errors import ShoalError

if TYPE_CHECKING:
    from shoal.core.compose import Method

AMOUNTS = ("bytes", "macs", "seconds", "joules")
"""Units of costs: such a number is never below 0, and never missing where its column is."""
CHOICES = {
    "unit": ("", "share", *AMOUNTS),
    "better": ("", "up", "down"),
    "total": ("last", "sum"),
    "over": ("mean", "sum", "max"),
}


@dataclass(frozen=True)
class Metric:
    """One number of a row. A part lists its own in `metrics`; their columns are called `part.name`."""

    name: str
    title: str
    """What an axis or a line of a table says."""
    unit: str = ""
    """share (from 0 to 1), bytes, macs, seconds, joules, or none of these."""
    better: str = ""
    """Whether a run is better where it goes "up" or "down"; "" where neither is."""
    total: str = "last"
    """What stands for all rounds: the "sum" of the rounds, or the "last" number that is there."""
    over: str = "mean"
    """How the numbers of several devices become one: their mean, sum or max."""
    on_device: bool = False
    """Whether devices tell it, by `device.tell`; it then travels beside their replies."""
    drawn: bool = False
    """Whether reports draw its curve."""
    compared: bool = False
    """Whether tables that compare methods have a column for it."""
    asked: str = ""
    """The word of `--metrics` that asks for it; "" where it need not be asked for."""
    when: str = ""
    """In which rounds or at which settings it is there, in words; "" where every row has it."""
    about: str = ""
    """What docs/reference/history.md says of it, in Markdown."""
    label: str = ""
    """A few words for buttons and heads of tables; without one, its name."""
    judge: Callable[[Tensor, Tensor], Tensor] | None = field(default=None, repr=False, compare=False)
    """For means over the test set: (logits, targets) -> a number for each target. A note of a registry has none."""
    make: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    """For other numbers: makes an object with `update(predictions, targets)` and `compute()` for one evaluation, or is
    a function of all predictions and targets. A note has none."""

    def __post_init__(self):
        for choice, known in CHOICES.items():
            if getattr(self, choice) not in known:
                problem = f"The metric {self.name} has {choice} = {getattr(self, choice)!r}, which means nothing."
                raise ShoalError("bad-part", problem, f"Known are {', '.join(map(repr, known))}.")

    @property
    def is_in_every_row(self) -> bool:
        """Whether every row has it (None in rounds that are not evaluated, where it is no cost)."""
        return not (self.asked or self.when)

    @property
    def is_common(self) -> bool:
        """Whether the rows of every run have it, whatever the method."""
        return self.is_in_every_row and "." not in self.name


@dataclass(frozen=True)
class Column:
    """A column of a history that holds no single number."""

    kind: str
    about: str
    asked: str = ""


def is_among_likeliest(count: int, logits: Tensor, targets: Tensor) -> Tensor:
    """For each target whether it is one of so many classes with the largest logits."""
    likeliest = logits.topk(min(count, logits.shape[-1]), -1).indices
    return (likeliest == targets.unsqueeze(-1)).any(-1)


EVALUATED = (
    Metric("accuracy", "test accuracy", "share", "up", drawn=True, compared=True, label="Accuracy",
           about="share of test samples that the judged model gets right; null in rounds that are not evaluated"),
    Metric("loss", "test loss", "", "down", drawn=True, compared=True, label="Loss",
           about="its mean loss on the test samples: the cross-entropy, or what the [task](../how-to/tasks.md) has; "
           "null likewise"),
    Metric("top3", "top-3 accuracy", "share", "up", drawn=True, compared=True, asked="top3", label="Top-3",
           about="share of samples whose class is among the three likeliest",
           judge=partial(is_among_likeliest, 3)),
    Metric("perplexity", "perplexity", "", "down", drawn=True, compared=True, asked="perplexity",
           label="Perplexity", about="e to the loss"),
    Metric("device_mean", "accuracy, mean over devices", "share", "up", drawn=True, asked="devices",
           label="Device mean",
           about="accuracy on the test set re-weighted to each device's labels: the mean over devices"),
    Metric("device_worst", "accuracy, worst tenth of devices", "share", "up", drawn=True, asked="devices",
           label="Worst 10 %", about="the mean of its worst tenth"),
    Metric("device_spread", "spread of accuracy over devices", "share", "down", drawn=True, asked="devices",
           label="Device spread", about="its standard deviation"),
    Metric("local_risk", "error of local models, over all devices' labels", "share", "down", drawn=True,
           asked="local", label="Local risk",
           about="the error of the models that devices came back with, averaged over the label mixes of all devices "
           "(the first 1,000); each costs a pass over the test set"),
    Metric("class_kl", "unevenness of local models over their classes", "", "down", drawn=True, asked="class_kl",
           label="Unevenness",
           about="how far those models are from doing equally well on each class of their own samples: the mean over "
           "classes of KL(P ‖ Q), P the mean probabilities by class, Q nearly the identity"),
    Metric("balanced_accuracy", "balanced accuracy", "share", "up", drawn=True, compared=True,
           asked="balanced_accuracy", label="Balanced accuracy",
           about="the mean of the accuracy on each class that the test set has"),
    Metric("f1_macro", "F1, mean over classes", "share", "up", drawn=True, compared=True, asked="f1_macro",
           label="F1 macro", about="the mean over classes, or labels, of the F1 score"),
    Metric("f1_micro", "F1 over all", "share", "up", drawn=True, compared=True, asked="f1_micro", label="F1 micro",
           about="the F1 score of all classes, or labels, counted together"),
    Metric("auroc", "area under the ROC curve", "share", "up", drawn=True, compared=True, asked="auroc", label="AUROC",
           about="the area under the ROC curve; with several classes or labels, the mean over those that some test "
           "samples have and others have not; null where there is none"),
    Metric("average_precision", "average precision", "share", "up", drawn=True, compared=True,
           asked="average_precision", label="Average precision",
           about="the area under the curve of precision and recall; with several classes or labels, the mean over "
           "those that the test set has; null where it has none"),
    Metric("log_loss", "log loss", "", "down", drawn=True, compared=True, asked="log_loss", label="Log loss",
           about="the cross-entropy without label smoothing, focal exponent or class weights"),
    Metric("calibration_error", "calibration error", "share", "down", drawn=True, compared=True,
           asked="calibration_error", label="Calibration error",
           about="how far the probability of the likeliest class is from the share that is right, over 15 bins"),
    Metric("mae", "mean absolute error", "", "down", drawn=True, compared=True, when="of the task `regress`",
           label="MAE", about="mean absolute error"),
    Metric("rmse", "root mean squared error", "", "down", drawn=True, compared=True, asked="rmse", label="RMSE",
           about="root of the mean squared error, over all numbers of all samples"),
    Metric("r2", "R²", "", "up", drawn=True, compared=True, asked="r2", label="R²",
           about="the share of the targets' variance that is explained; with several numbers per sample, the mean "
           "over them"),
)  # fmt: skip
"""Judgements of models."""
COSTS = (
    Metric("train_loss", "training loss", "", "down",
           about="mean loss over the local steps of the devices, weighted by the samples they went through. It is the "
           "loss that was minimised, with what parts add to it, so it cannot be compared between methods"),
    Metric("bytes_down", "bytes sent to devices", "bytes", "down", "sum",
           about="bytes sent to all devices of the round"),
    Metric("bytes_up", "bytes sent by devices", "bytes", "down", "sum",
           about="bytes they sent back, and what devices told about themselves at first contact"),
    Metric("macs_forward", "multiply-accumulates of a sample", "macs", "down",
           about="multiply-accumulates of one sample through the model, the mean over the devices (less than the whole "
           "model where a plan cuts it)"),
    Metric("macs_work", "multiply-accumulates", "macs", "down", "sum",
           about="multiply-accumulates of everything the devices did in the round, together"),
    Metric("sim_seconds", "simulated seconds", "seconds", "down", "sum",
           about="simulated seconds of the round: until the last reply that was waited for"),
    Metric("joules", "energy of devices", "joules", "down", "sum", when="where the fleet knows",
           about="energy of all devices in the round"),
    Metric("wall_seconds", "wall seconds", "seconds", "down", "sum",
           about="real seconds of the round; the only field that differs between two runs of one recipe"),
    Metric("bytes_down_by_blocks", "bytes down, blocks counted alike", "bytes", "", "sum", compared=True,
           when="in folders of version 0.1", label="blocks alike",
           about="bytes sent to devices, all blocks counted alike; a part tells it now"),
)  # fmt: skip
"""What rounds cost."""
DEVICE_TESTS = (
    Metric("personal_mean", "accuracy on devices' own tests, mean over devices", "share", "up", drawn=True,
           compared=True, when="with `local_test`", label="Own tests, mean",
           about="accuracy, or the headline of the [task](../how-to/tasks.md), of the model that each device would use "
           "on its [own test samples](../how-to/personal.md): the mean over devices (the first 1,000 that test)"),
    Metric("personal_pooled", "accuracy on devices' own tests, over all samples", "share", "up", drawn=True,
           compared=True, when="with `local_test`", label="Own tests, pooled",
           about="the same over all test samples of these devices together"),
    Metric("personal_worst", "accuracy on devices' own tests, worst tenth", "share", "up", drawn=True, compared=True,
           when="with `local_test`", label="Own tests, worst 10 %", about="the mean of the worst tenth of devices"),
    Metric("personal_spread", "spread of accuracy on devices' own tests", "share", "down", drawn=True,
           when="with `local_test`", label="Own tests, spread", about="the standard deviation over devices"),
    Metric("personal_loss", "loss on devices' own tests", "", "down", drawn=True, when="with `local_test`",
           label="Own tests, loss", about="the mean loss over all test samples of these devices"),
    Metric("personal_devices", "devices that tested", "", "", when="with `local_test`", label="Devices that tested",
           about="how many these devices are; of [real devices](../how-to/devices.md) those of a round that replied"),
)  # fmt: skip
"""Judgements of the models that devices would use, on samples of their own."""
METRICS: dict[str, Metric] = {metric.name: metric for metric in (*EVALUATED, *DEVICE_TESTS, *COSTS)}
"""The loop's own metrics, by column."""
COLUMNS: dict[str, Column] = {
    "round": Column("int", "the number of the round, from 0"),
    "devices": Column(
        "list of int",
        "the devices that took part, in rising order unless a part says otherwise; -1 is the server where it takes "
        "part itself",
    ),
    "bytes_by": Column(
        "object",
        'the bytes by cause: `{"down": {"model": ..., "scaffold": ...}, "up": {...}}`; `plan` and `enrol` where there '
        "are any, and `judge` where real devices test",
    ),
    "seconds_by": Column("object", "`down`, `compute` and `up` of the slowest device that was waited for"),
    "dropped": Column(
        "list, only if any",
        'replies that could not be used: `{"device": 7, "why": "its update is not finite"}`; where a part could do '
        "nothing with one, its name, the point and what was raised",
    ),
    "void": Column(
        "true, only then", "nobody's reply could be used, or the new model was not finite; the model stayed as it was"
    ),
    "log": Column(
        "list, only if any", 'words of parts to the user: `[["damp", "the share is 1"]]`, each text once in a run'
    ),
    "stopped": Column(
        "text, only then", "why the run ended with this round: a callback stopped it, or its `patience` was over"
    ),
    "per_class": Column("list of float", "the accuracy on each class", asked="per_class"),
    "confusion": Column(
        "list of lists of int", "how many test samples of each true class (row) got each class", asked="confusion"
    ),
}
"""The columns that hold no single number."""
ASKED = tuple(dict.fromkeys(known.asked for known in (*METRICS.values(), *COLUMNS.values()) if known.asked))
"""The words that `--metrics` knows."""


ON_ONE_HALF = ("devices", "local", "class_kl", "per_class", "confusion")
"""Words of `--metrics` for what is measured on validation samples alone where there are any, not on the test half."""


def list_part_metrics(method: "Method") -> dict[str, Metric]:
    """By column `part.name`: what the parts of a method tell."""
    found: dict[str, Metric] = {}
    for part in method.parts:
        for metric in part.metrics:
            column = f"{part.name()}.{metric.name}"
            label = f"{part.name()}: {metric.label}" if metric.label else column
            found[column] = replace(metric, name=column, title=f"{part.name()}: {metric.title}", label=label)
    return found


def list_run_metrics(
    method: "Method", asked: Iterable[str] = (), evaluated: Iterable[Metric] = (*EVALUATED, *DEVICE_TESTS)
) -> dict[str, Metric]:
    """The registry of a run, by column: what its task is judged by (`evaluated`), costs, what its parts tell, and the
    user's own of `--metrics`."""
    own = {spec.rpartition(":")[2]: spec for spec in asked if is_own_metric(spec)}
    custom = {
        k: Metric(k, k, "", "up", drawn=True, compared=True, asked=spec) for k, spec in own.items() if k not in METRICS
    }
    known = {metric.name: metric for metric in (*evaluated, *COSTS)}
    return known | list_part_metrics(method) | custom


def add_test_metrics(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """The registry of a run that is judged on validation samples, and on the test half in columns `test_NAME`."""
    costs = {metric.name for metric in COSTS}
    judged = {k: m for k, m in metrics.items() if "." not in k and k not in costs and m.asked not in ON_ONE_HALF}
    held = {k: replace(m, title=name_half(m.title, "validation")) for k, m in judged.items()}
    tested = {
        f"test_{k}": replace(
            m, name=f"test_{k}", title=name_half(m.title, "test"), label=f"Test {m.label.lower() or m.name}",
            when="where samples are held back for validation", judge=None,
        )
        for k, m in judged.items()
    }  # fmt: skip
    return {**metrics, **held, **tested}


def name_half(title: str, half: str) -> str:
    """The title of a metric with the half of the data that it is measured on."""
    return f"{half} {title.removeprefix('test ')}"


def is_own_metric(spec: str) -> bool:
    """Whether a word of `--metrics` names one of the user's own: `FILE.py:NAME`, or `own-...:NAME` of a program."""
    return ":" in spec


def find_metric(column: str, metrics: Mapping[str, Metric]) -> Metric | None:
    """The metric of a column; that of `accuracy_NAME`, of a further model that is judged, is `accuracy`."""
    if column in metrics:
        return metrics[column]
    judged = [m for name, m in metrics.items() if "." not in name and column.startswith(f"{name}_")]
    return max(judged, key=lambda m: len(m.name), default=None)


def encode_metrics(metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """A registry as JSON can hold it."""
    return {column: list_noted_fields(metric) for column, metric in metrics.items()}


def list_noted_fields(metric: Metric) -> dict[str, Any]:
    """The fields of a metric that a note can hold, by name."""
    return {f.name: getattr(metric, f.name) for f in fields(metric) if f.name not in ("judge", "make")}


def decode_metrics(note: Any) -> dict[str, Metric]:
    """The registry that `encode_metrics` wrote, over the loop's own; a ValueError says what does not fit."""
    known, found = list_noted_fields(Metric("", "")), dict(METRICS)
    if not isinstance(note, Mapping):
        raise ValueError("it is not a table of metrics")
    for column, noted in note.items():
        if not isinstance(noted, dict) or noted.get("name") != column or "title" not in noted:
            raise ValueError(f"{column} is not a metric")
        kept = {key: value for key, value in noted.items() if key in known}
        if any(type(value) is not type(known[key]) for key, value in kept.items()):
            raise ValueError(f"{column} has a value of another type than a metric has")
        try:
            found[column] = Metric(**kept)
        except ShoalError as error:
            raise ValueError(error.problem) from error
    return found

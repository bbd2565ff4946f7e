"""The registry of metrics: every number that a row of a history may hold, and what readers of it need to know.

History, tables, plots, the page, comparisons, loggers, the help of `--metrics` and docs/reference/history.md read it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
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
           about="its mean cross-entropy on the test samples; null likewise"),
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
METRICS: dict[str, Metric] = {metric.name: metric for metric in (*EVALUATED, *COSTS)}
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
        "are any",
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
    "per_class": Column("list of float", "the accuracy on each class", asked="per_class"),
}
"""The columns that hold no single number."""
ASKED = tuple(dict.fromkeys(known.asked for known in (*METRICS.values(), *COLUMNS.values()) if known.asked))
"""The words that `--metrics` knows."""


def list_part_metrics(method: "Method") -> dict[str, Metric]:
    """By column `part.name`: what the parts of a method tell."""
    found: dict[str, Metric] = {}
    for part in method.parts:
        for metric in part.metrics:
            column = f"{part.name()}.{metric.name}"
            label = f"{part.name()}: {metric.label}" if metric.label else column
            found[column] = replace(metric, name=column, title=f"{part.name()}: {metric.title}", label=label)
    return found


def list_run_metrics(method: "Method", asked: Iterable[str] = ()) -> dict[str, Metric]:
    """The registry of a run, by column: the loop's own metrics, those of its parts, and the user's of `--metrics`."""
    own = {spec.rpartition(":")[2]: spec for spec in asked if ".py:" in spec}
    custom = {k: Metric(k, k, "", "up", drawn=True, asked=spec) for k, spec in own.items() if k not in METRICS}
    return METRICS | list_part_metrics(method) | custom


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
    return {name: value for name, value in asdict(metric).items() if name != "judge"}


def decode_metrics(note: Any) -> dict[str, Metric]:
    """The registry that `encode_metrics` wrote, over the loop's own; a ValueError says what does not fit."""
    known, found = list_noted_fields(Metric("", "")), dict(METRICS)
    if not isinstance(note, Mapping):
        raise ValueError("it is not a table of metrics")
    for column, fields in note.items():
        if not isinstance(fields, dict) or fields.get("name") != column or "title" not in fields:
            raise ValueError(f"{column} is not a metric")
        kept = {key: value for key, value in fields.items() if key in known}
        if any(type(value) is not type(known[key]) for key, value in kept.items()):
            raise ValueError(f"{column} has a value of another type than a metric has")
        try:
            found[column] = Metric(**kept)
        except ShoalError as error:
            raise ValueError(error.problem) from error
    return found

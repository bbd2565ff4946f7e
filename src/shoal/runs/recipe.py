"""The recipe of a run: all its settings with defaults, limits and help texts."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from math import isfinite
from typing import Any

from shoal.core.errors import unknown_name_error
from shoal.core.metric import ASKED
from shoal.core.optimiser import OPTIMISER_KINDS
from shoal.engines.registry import ENGINES
from shoal.runs.recipe_optimiser import SCHEDULE_FORMS, parse_lr_schedule
from shoal.runs.recipe_values import bad_value_error, fit_value, format_toml

NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
LISTED_ENGINES = ", ".join(f"{name} ({kind.about})" if kind.about else name for name, kind in ENGINES.items())


def recipe_field(
    default: Any, help: str, low: float | None = None, high: float | None = None, among: tuple = (), page="", **more
) -> Any:
    """A field with its help text and the values it may take; `steers=False` keeps it out of the fingerprint.

    `page` is what docs/how-to/recipes.md says of it, in Markdown, where that is more than the help text.
    """
    rule = {"help": help, "low": low, "high": high, "among": among, "page": page}
    return field(default=default, metadata={**rule, **more})


@dataclass(frozen=True)
class Recipe:
    """One run. Every field is a flag of the command line and a key of the TOML file under the same name."""

    method: str = recipe_field(
        "fedavg",
        "What to run: parts with + between them, like 'fedprox(mu=0.1)+scaffold'.",
        page="See [expressions](#expressions).",
    )
    parts: tuple[str, ...] = recipe_field(
        (), "Python files with parts of your own.", page="On the command line, `--parts` once per file."
    )
    data: str = recipe_field(
        "digits",
        "Data set, a folder of images, a CSV table, or FILE.py:FUNCTION.",
        page="Names: {names}; see [data](data.md).",
    )
    data_dir: str = recipe_field("", "Folder with data sets.", page="See [data](data.md).", steers=False)
    model: str = recipe_field(
        "mlp", "Model, or FILE.py:NAME.", page="Names: {names}; see [models](../reference/models.md)."
    )
    split: str = recipe_field(
        "dirichlet:0.5",
        "How samples are spread over devices; see shoal list splits.",
        page="Kinds: {names}; see [splits](splits.md).",
    )
    server_data: str = recipe_field(
        "",
        "Samples the server keeps: share:0.05, share:0.05:5 classes, per-class:20.",
        page="They are taken from the devices; see [splits](splits.md).",
    )
    devices: int = recipe_field(20, "Number of devices.", 1, 10**9)
    sample: int = recipe_field(
        5, "Devices that take part in a round.", 1, 10**9, page="At most `devices`; fewer where fewer hold data."
    )
    rounds: int = recipe_field(30, "Number of rounds.", 1, 10**9, steers=False)
    epochs: str = recipe_field(
        "1",
        "Local epochs: 2, a part like 0.5, or 1-5 drawn anew per device and round.",
        page="Whole numbers are drawn where both ends are whole.",
    )
    steps: str = recipe_field("", "Local steps instead of epochs: 10, or 5-20 drawn anew per device and round.")
    batch: int = recipe_field(16, "Samples in a batch.", 1, 10**9)
    lr: float = recipe_field(0.1, "Local learning rate.", 0)
    lr_decay: float = recipe_field(
        1.0, "Factor on the learning rate per round.", 0, 10, page="`lr * lr_decay ** round`, rounds from 0."
    )
    lr_schedule: str = recipe_field(
        "",
        "Learning rate over rounds: linear:100, cosine:100 (both to 0, or cosine:100:0.1 to a tenth), step:30:0.1.",
        page="The number is in rounds; see [optimisers](optimisers.md#learning-rates).",
        later=True,
    )
    lr_warmup: int = recipe_field(
        0,
        "Rounds in which the learning rate rises to lr.",
        0,
        10**9,
        page="In round r it is (r + 1) / N of it.",
        later=True,
    )
    local_lr_schedule: str = recipe_field(
        "",
        "Learning rate over the local steps of a round: linear, cosine (to 0 at the last), cosine:50:0.1, step:30:0.1.",
        page="As `lr_schedule`, in steps; without a number, over all steps that a device makes in the round.",
        later=True,
    )
    local_lr_warmup: int = recipe_field(
        0, "Local steps in which the learning rate rises, in every round.", 0, 10**9, later=True
    )
    optimiser: str = recipe_field(
        "sgd",
        "Local optimiser: sgd, adam, adamw.",
        among=OPTIMISER_KINDS,
        page="Its state begins anew in every round; see [optimisers](optimisers.md).",
        later=True,
    )
    momentum: float = recipe_field(0.0, "Local momentum of sgd, reset every round.", 0, 0.9999)
    nesterov: bool = recipe_field(False, "Nesterov's form of the momentum.", later=True)
    beta1: float = recipe_field(
        0.9, "Momentum of adam and adamw: share of the old mean gradient.", 0, 0.9999, later=True
    )
    beta2: float = recipe_field(
        0.999, "Share of the old mean squared gradient in adam and adamw.", 0, 0.999999, later=True
    )
    eps: float = recipe_field(1e-8, "What adam and adamw add to the root that they divide by.", 0, 1, later=True)
    weight_decay: float = recipe_field(
        0.0,
        "Weight decay.",
        0,
        page="Added to the gradient after clipping, as in torch; `adamw` takes it off the weights themselves.",
    )
    clip: float = recipe_field(
        0.0, "Largest norm of a gradient; 0 for no bound.", 0, page="Shared and personal tensors have a norm each."
    )
    accumulate: int = recipe_field(
        1,
        "Micro-batches of a batch, whose gradients are added up: less memory.",
        1,
        10**9,
        page="A step still goes along the gradient of the whole batch; not with batch norm.",
        later=True,
    )
    normalise: bool = recipe_field(
        False, "Bring every input channel to mean 0 and deviation 1.", page="Taken over the training samples."
    )
    augment: str = recipe_field(
        "", "Augmentation of images: flip, crop:4 or flip,crop:4.", page="`crop:4` shifts by up to 4 pixels."
    )
    init: str = recipe_field(
        "",
        "Safetensors file with the first weights.",
        page="`shoal export` writes such files; all weights must be finite.",
    )
    seed: int = recipe_field(
        0, "Seed of all randomness.", 0, 2**63 - 1, page="See [randomness](../explanation/randomness.md)."
    )
    eval_every: int = recipe_field(
        1,
        "Rounds between evaluations; the last round is always evaluated.",
        1,
        10**9,
        page="So is the round in which a budget ends the run.",
    )
    metrics: tuple[str, ...] = recipe_field(
        (),
        f"Further metrics: {', '.join(ASKED)}, or FILE.py:NAME.",
        page="See [one of your own](#a-metric-of-your-own) and the [columns](../reference/history.md) they fill.",
    )
    validation: float = recipe_field(
        0.0, "Share of the training samples to judge on, instead of the test half.", 0, 0.9
    )
    headline: str = recipe_field(
        "accuracy",
        "Metric that target, until_accuracy and comparisons at equal cost are about.",
        page="Any [column](../reference/history.md) of which more or less is better, such as `loss` or `device_worst`; "
        "more of a metric of your own counts as better.",
        later=True,
    )
    target: float = recipe_field(0.0, "Accuracy, or other headline, whose cost is reported.", 0, steers=False)
    until_accuracy: float = recipe_field(0.0, "Stop at this accuracy, or other headline; 0 for never.", 0, steers=False)
    until_seconds: float = recipe_field(0.0, "Stop after so many simulated seconds; 0 for never.", 0, steers=False)
    until_bytes: float = recipe_field(0.0, "Stop after so many bytes both ways; 0 for never.", 0, steers=False)
    until_macs: float = recipe_field(0.0, "Stop after so many multiply-accumulates; 0 for never.", 0, steers=False)
    engine: str = recipe_field(
        "auto",
        f"How devices train: {LISTED_ENGINES}; auto: what is quickest on this one.",
        among=("auto", *ENGINES),
        page="See [engines](engines.md), [clusters](cluster.md) and [real devices](devices.md).",
    )
    width: int = recipe_field(
        0, "Devices that batched, pool or ray train in one call; 0: as many as usually pays.", 0, 10**5
    )
    address: str = recipe_field(
        "",
        "Ray cluster to train on: auto, HOST:PORT or ray://HOST:PORT; none: this machine.",
        page="See [clusters](cluster.md).",
        steers=False,
    )
    compute: str = recipe_field("cpu", "Compute device: cpu, cuda or cuda:N.")
    precision: str = recipe_field(
        "auto",
        "Numbers to compute with: float32, tf32, bf16, float64; auto: tf32 on a GPU, else float32.",
        among=("auto", "float32", "tf32", "bf16", "float64"),
    )
    threads: int = recipe_field(
        0,
        "Threads of a process that trains; 0: one, and more where engine auto finds that they pay.",
        0,
        1024,
        page="See [threads](engines.md#threads).",
        later=True,
    )
    deterministic: bool = recipe_field(
        False,
        "On a GPU, only operations that give the same bits every time; nothing is compiled.",
        page="See [the same bits on a GPU](engines.md#the-same-bits-on-a-gpu).",
        later=True,
    )
    fleet: str = recipe_field(
        "uniform",
        "Speed and links of the devices: uniform, 5g, fedbr, tiers, trace:FILE.",
        page="Kinds: {names}; see [fleets](fleets.md).",
    )
    failures: float = recipe_field(
        0.0, "Chance that a device does not answer.", 0, 1, page="It is sent its job all the same."
    )
    deadline: float = recipe_field(0.0, "Simulated seconds after which a reply is late; 0 for none.", 0)
    over_select: float = recipe_field(0.0, "Share of further devices to ask; the first to answer count.", 0, 100)
    checkpoint_every: int = recipe_field(
        0, "Rounds between checkpoints; 0: so often that they cost 5 % of the time.", 0, 10**9, steers=False
    )
    memory_mb: int = recipe_field(1024, "RAM for what devices remember; the rest goes to disk.", 0, 10**9, steers=False)
    out: str = recipe_field("", "Run folder.", page="Without one nothing is written.", steers=False)

    def __post_init__(self):
        for f in fields(self):
            object.__setattr__(self, f.name, fit_value(f.name, getattr(self, f.name), f.default))
            check_field_value(f.name, getattr(self, f.name), f.metadata)
            if isinstance(getattr(self, f.name), str) and not is_encodable(getattr(self, f.name)):
                raise bad_value_error(f.name, getattr(self, f.name), "text that can be written to a file")
        for name in ("epochs", "steps"):
            parse_amount(name, getattr(self, name))
        for name in SCHEDULE_FORMS:
            parse_lr_schedule(name, getattr(self, name))
        if self.sample > self.devices:
            raise bad_value_error("sample", self.sample, f"at most devices, which is {self.devices}")

    def fingerprint(self) -> str:
        """16 hexadecimal digits for the keys that decide what is computed; not for budgets and paths.

        A key that came `later` counts only where it is set, so that checkpoints from before it still fit.
        """
        unset = {f.name for f in fields(self) if f.metadata.get("later") and getattr(self, f.name) == f.default}
        names = [f.name for f in fields(self) if f.metadata.get("steers", True) and f.name not in unset]
        values = {name: getattr(self, name) for name in names}
        return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()

    def to_toml(self) -> str:
        return "".join(f"{key} = {format_toml(value)}\n" for key, value in asdict(self).items())

    def with_values(self, /, **values: Any) -> "Recipe":
        """The recipe with other values; unknown keys and values of a wrong type are refused."""
        for key in values:
            if key not in DEFAULTS:
                raise unknown_name_error("recipe key", key, DEFAULTS)
        return replace(self, **values)


DEFAULTS = {f.name: f.default for f in fields(Recipe)}


def check_field_value(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    low, high, among = rule["low"], rule["high"], rule["among"]
    if among and value not in among:
        raise unknown_name_error(name, str(value), among)
    if isinstance(value, float) and not isfinite(value):
        raise bad_value_error(name, value, "a finite number")
    if low is not None and value < low or high is not None and value > high:
        raise bad_value_error(name, value, f"from {low:g} to {high:g}" if high is not None else f"at least {low:g}")


def parse_amount(name: str, text: str) -> tuple[float, float] | None:
    """`3` or `1-5` as the lowest and the highest amount; None for an empty text."""
    if not text:
        return None
    match = re.fullmatch(rf"({NUMBER})(?:-({NUMBER}))?", text.replace(" ", ""))
    ends = (float(match[1]), float(match[2] or match[1])) if match else (0.0, 0.0)
    if name == "steps" and any(end != int(end) for end in ends):
        raise bad_value_error(name, text, "a whole number of steps")
    if not (0 < ends[0] <= ends[1] < 1e6):
        raise bad_value_error(name, text, "a number above 0 or two with a dash between, like 1-5")
    return ends


def is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

"""The recipe of a run: all its settings with defaults, limits and help texts."""

import json
from collections.abc import Mapping
from dataclasses import Field, asdict, dataclass, field, fields, replace
from hashlib import blake2b
from math import isfinite
from typing import Any

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.metric import ASKED
from shoal.core.optimiser import OPTIMISER_KINDS
from shoal.data.dataset import parse_moments
from shoal.data.table import MISSING_RULES
from shoal.display.html import render_html_table
from shoal.engines.registry import ENGINES
from shoal.runs.recipe_optimiser import SCHEDULE_FORMS, parse_lr_groups, parse_lr_schedule
from shoal.runs.recipe_values import bad_value_error, fit_value, format_toml
from shoal.runs.work_amounts import parse_amount

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
        "Data set, a table, arrays, a folder of images, hf:FOLDER, or FILE.py:FUNCTION.",
        page="Names: {names}; or a CSV, parquet, npz or safetensors file, or a folder of images, parquet or npy files; "
        "see [data](data.md).",
    )
    data_dir: str = recipe_field("", "Folder with data sets.", page="See [data](data.md).", steers=False)
    label: str = recipe_field(
        "",
        "Column of a table with the target; several with commas between them.",
        page="Without it the column `label` or `target`, or else the last.",
        later=True,
    )
    owner: str = recipe_field(
        "",
        "Column of a table that names the device of a sample.",
        page="Makes `split` `owner` and `devices` 0 where they are not given; see [data](data.md#whose-samples).",
        later=True,
    )
    order: str = recipe_field(
        "",
        "Column of a table with the time of a sample: the newest are the test half.",
        page="Numbers or dates; those held back by `validation` are the newest, too.",
        later=True,
    )
    missing: str = recipe_field(
        "refuse",
        f"Missing values of a table: {', '.join(MISSING_RULES)}.",
        among=MISSING_RULES,
        page="`flag` fills with the mean and adds an input that says so; see [data](data.md#tables).",
        later=True,
    )
    text_length: int = recipe_field(
        0,
        "Most tokens of a text, where the model's tokenizer makes them; 0: as many as the model has positions.",
        0,
        10**6,
        page='For `model = "hf:FOLDER"` and columns of text; see [Hugging Face](hugging-face.md#texts).',
        later=True,
    )
    model: str = recipe_field(
        "mlp",
        "Model, hf:FOLDER, or FILE.py:NAME.",
        page="Names: {names}; `hf:FOLDER` is a [model of Hugging Face](hugging-face.md); see "
        "[models](../reference/models.md).",
    )
    task: str = recipe_field(
        "",
        "What is learnt: classify, binary, multilabel, regress, tokens, or FILE.py:NAME; none: found from the targets.",
        page="See [tasks](tasks.md).",
        later=True,
    )
    split: str = recipe_field(
        "dirichlet:0.5",
        "How samples are spread over devices; see shoal list splits.",
        page="Kinds: {names}; see [splits](splits.md). Data of your own that say whose each sample is have the split "
        "`owner` where neither this nor `devices` is given; see [data](data.md#whose-samples).",
    )
    server_data: str = recipe_field(
        "",
        "Samples the server keeps: share:0.05, share:0.05:5 classes, per-class:20.",
        page="They are taken from the devices; see [splits](splits.md).",
    )
    devices: int = recipe_field(
        20,
        "Number of devices; 0: as many as the data has owners.",
        0,
        10**9,
        page="0 needs the split `owner`.",
    )
    sample: int = recipe_field(
        5, "Devices that take part in a round.", 1, 10**9, page="At most `devices`; fewer where fewer hold data."
    )
    rounds: int = recipe_field(30, "Number of rounds.", 1, 10**9, steers=False)
    epochs: str = recipe_field(
        "1",
        "Local epochs: 2, 0.5, 1-5 drawn anew per device and round, 1,2,5 by device, or speed:2, a mean by speed.",
        page="Whole numbers are drawn where both ends are whole; see [work](optimisers.md#work-of-a-device).",
    )
    steps: str = recipe_field(
        "",
        "Local steps instead of epochs: 10, 5-20 drawn per device and round, 5,10,20 by device, size:10, speed:10.",
        page="As `epochs`; `size:10` and `speed:10` are means, in proportion to samples or speed.",
    )
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
    lr_groups: str = recipe_field(
        "",
        "Factors on the learning rate by parameter names: head.*=10,embed*=0.1.",
        page='In a file also a table, `{"head.*" = 10.0}`; see [optimisers](optimisers.md#groups-of-parameters).',
        later=True,
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
    gradient_checkpointing: bool = recipe_field(
        False,
        "Compute layers again on the way back in place of keeping them: less memory, more time.",
        page="With `engine` `serial`; see [Hugging Face](hugging-face.md#memory).",
        later=True,
    )
    loss: str = recipe_field(
        "",
        "Loss: FILE.py:NAME; of regress also squared, absolute, huber; none: that of the task.",
        page="A function of outputs and targets that gives a loss per sample; see [tasks](tasks.md#your-own-loss).",
        later=True,
    )
    label_smoothing: float = recipe_field(
        0.0, "Share of a label that is spread over all classes.", 0, 0.99, page="As in torch.", later=True
    )
    focal: float = recipe_field(
        0.0,
        "Exponent gamma of the focal loss.",
        0,
        20,
        page="The loss is multiplied by (1 - p)^gamma, p the probability of the true class.",
        later=True,
    )
    class_weights: str = recipe_field(
        "",
        "Weights of the losses of classes: balanced, or a number for each, like 1,2,0.5.",
        page="`balanced` is n / (C n_c). A batch is averaged over samples, not over weights.",
        later=True,
    )
    normalise: bool = recipe_field(
        False, "Bring every input channel to mean 0 and deviation 1.", page="Taken over the training samples."
    )
    normalise_by: str = recipe_field(
        "",
        "Mean and deviation to normalise by, like 0.5:0.5, or of every channel; none: those of the training samples.",
        page="One number of each for every channel: `0.49,0.48,0.45:0.25,0.24,0.26`. Pixels are from 0 to 1.",
        later=True,
    )
    augment: str = recipe_field(
        "",
        "Augmentation of images: crop:4+flip, rotate, shear, zoom, brightness, contrast, erase, rand:2:9.",
        page="See [augmentation](optimisers.md#augmentation).",
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
        0.0, "Share of the training samples to hold back and judge on; the test half has columns of its own.", 0, 0.9
    )
    stratify_validation: bool = recipe_field(
        False,
        "Hold the same share of every class back for validation.",
        page="Sequences and numbers have no class: samples are drawn at random; [`shoal tune`](tune.md) sets it.",
        later=True,
    )
    evaluate_test: bool = recipe_field(
        True,
        "Where samples are held back for validation, evaluate on the test half, too.",
        page="Its columns are called `test_accuracy` and so on; nothing is chosen by them. See [watching](watch.md).",
        steers=False,
    )
    local_test: float = recipe_field(
        0.0,
        "Share of each device's own samples that it tests on and does not train on.",
        0,
        0.9,
        page="The same share of every class; see [personal models](personal.md).",
        later=True,
    )
    local_test_of: str = recipe_field(
        "train",
        "What devices test on: a share of train, of all (both halves are spread over devices), or owner: the data say.",
        among=("train", "all", "owner"),
        page="With `all` the test samples of all devices together are the test set; `owner` needs the split `owner`, "
        "and data that say whose their test samples are (LEAF, Shakespeare).",
        later=True,
    )
    headline: str = recipe_field(
        "",
        "Metric that target, until_accuracy and comparisons at equal cost are about; none: that of the task.",
        page="Any [column](../reference/history.md) of which more or less is better, such as `loss` or `device_worst`; "
        "more of a metric of your own counts as better. Of [tasks](tasks.md) it is the accuracy, of `regress` `mae`; "
        "with `local_test` it is `personal_mean`.",
        later=True,
        same=("accuracy",),
    )
    target: float = recipe_field(0.0, "Accuracy, or other headline, whose cost is reported.", 0, steers=False)
    until_accuracy: float = recipe_field(0.0, "Stop at this accuracy, or other headline; 0 for never.", 0, steers=False)
    patience: int = recipe_field(
        0,
        "Stop after so many rounds without a better headline on validation samples; 0 for never.",
        0,
        10**9,
        page="Needs `validation`; see [watching](watch.md#stop-early).",
        steers=False,
    )
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
    keep_best: bool = recipe_field(
        False,
        "Keep the model with the best headline on validation samples; shoal export --best writes it.",
        page="Needs `validation`; see [watching](watch.md#keep-the-best-model).",
        steers=False,
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
        parse_lr_groups(self.lr_groups)
        if self.normalise_by:
            parse_moments(self.normalise_by)
        for name in SCHEDULE_FORMS:
            parse_lr_schedule(name, getattr(self, name))
        refuse_choice_by_test_data(self)
        if self.devices == 0 and not makes_devices_of_owners(self.split):
            raise bad_value_error(
                "devices", 0, f"at least 1 with the split {self.split}: only owner finds their number"
            )
        if self.sample > self.devices > 0:
            raise bad_value_error("sample", self.sample, f"at most devices, which is {self.devices}")

    def __repr__(self) -> str:
        """The keys that differ from the recipe of defaults."""
        given = {key: getattr(self, key) for key, default in DEFAULTS.items() if getattr(self, key) != default}
        return f"Recipe({', '.join(f'{key}={value!r}' for key, value in given.items())})"

    def _repr_html_(self) -> str:
        given = [(key, repr(getattr(self, key))) for key in DEFAULTS if getattr(self, key) != DEFAULTS[key]]
        return render_html_table(["key", "value"], given, "Recipe: all other keys have their defaults")

    @property
    def has_own_tests(self) -> bool:
        """Whether devices test on samples of their own."""
        return bool(self.local_test) or self.local_test_of == "owner"

    @property
    def normalises(self) -> bool:
        """Whether inputs are normalised, by their own moments or by given ones."""
        return self.normalise or bool(self.normalise_by)

    def fingerprint(self) -> str:
        """16 hexadecimal digits for the keys that decide what is computed; not for budgets and paths.

        A key that came `later` counts only where it is set, so that checkpoints from before it still fit; values that
        mean the `same` as none count as none.
        """
        unset = {f.name for f in fields(self) if f.metadata.get("later") and is_unset(f, getattr(self, f.name))}
        names = [f.name for f in fields(self) if f.metadata.get("steers", True) and f.name not in unset]
        values = {name: getattr(self, name) for name in names}
        return blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=8).hexdigest()

    def to_toml(self) -> str:
        return "".join(f"{key} = {format_toml(value)}\n" for key, value in asdict(self).items())

    def with_values(self, /, **values: Any) -> "Recipe":
        """The recipe with other values; unknown keys and values of a wrong type are refused.

        A column `owner` makes the devices, unless split or devices are given beside it.
        """
        for key in values:
            if key not in DEFAULTS:
                raise unknown_key_error(key)
        if values.get("owner") and not self.owner:
            values = {"split": "owner"} | values
            if makes_devices_of_owners(values["split"]):
                values = {"devices": 0} | values
        return replace(self, **values)


def is_unset(key: Field, value: Any) -> bool:
    """Whether a key has its default, or a value that means the same."""
    return value in (key.default, *key.metadata.get("same", ()))


DEFAULTS = {f.name: f.default for f in fields(Recipe)}


OTHER_NAMES = {
    "data": "dataset dataset_name",
    "method": "algorithm strategy",
    "text_length": "max_length max_seq_length seq_len",
    "gradient_checkpointing": "activation_checkpointing checkpoint_activations",
    "devices": "clients num_clients n_clients num_supernodes total_clients users",
    "sample": "clients_per_round fraction_fit participation join_ratio sample_clients cohort_size",
    "rounds": "num_rounds global_rounds communication_rounds comm_round n_rounds",
    "epochs": "local_epochs num_epochs local_epoch",
    "steps": "local_steps max_steps num_steps",
    "batch": "batch_size local_batch_size bs",
    "lr": "learning_rate local_learning_rate client_lr step_size",
    "lr_schedule": "lr_scheduler scheduler",
    "optimiser": "optimizer optim",
    "normalise": "normalize",
    "clip": "grad_clip max_grad_norm clip_norm",
    "split": "partition partitioner",
    "augment": "augmentation transform transforms",
    "compute": "device gpu",
    "out": "output output_dir save_dir log_dir",
    "weight_decay": "wd l2",
}
"""What keys are called elsewhere."""


def unknown_key_error(key: str) -> ShoalError:
    """The error for a key that no recipe has, with the key that does what it does elsewhere."""
    for known, names in OTHER_NAMES.items():
        if key.lower() in names.split():
            return ShoalError("unknown-name", f"There is no recipe key called {key!r}.", f"It is called {known} here.")
    return unknown_name_error("recipe key", key, DEFAULTS)


def check_field_value(name: str, value: Any, rule: Mapping[str, Any]) -> None:
    low, high, among = rule["low"], rule["high"], rule["among"]
    if among and value not in among:
        raise unknown_name_error(name, str(value), among)
    if isinstance(value, float) and not isfinite(value):
        raise bad_value_error(name, value, "a finite number")
    if low is not None and value < low or high is not None and value > high:
        raise bad_value_error(name, value, f"from {low:g} to {high:g}" if high is not None else f"at least {low:g}")


def makes_devices_of_owners(split: Any) -> bool:
    """Whether a split makes a device of each owner, so that their number follows from the data."""
    return str(split).partition("+")[0] == "owner"


def refuse_choice_by_test_data(recipe: Recipe) -> None:
    """Refuse `keep_best` and `patience` without validation samples: the test half may not choose what it judges."""
    for key in ("keep_best", "patience"):
        if getattr(recipe, key) and not recipe.validation:
            problem = f"{key} chooses by validation samples, and none are held back; test samples may not choose."
            raise ShoalError("bad-value", problem, "Add --validation 0.1, a tenth of the training samples.")


def is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

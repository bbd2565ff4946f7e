"""Runs of other learning tasks than classification: found, trained on every engine, resumed, exported, reported."""

import json
import logging
import os
import pickle
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import InProcessTransport, history_rows, play_with_devices
from torch import Tensor, nn

import shoal
from shoal.cli.render import make_summary_table
from shoal.core.builtin_tasks import TASKS
from shoal.core.errors import ShoalError
from shoal.data.user_data import build_user_dataset
from shoal.report.write import write_report
from shoal.runs.build import assemble_run
from shoal.runs.given_objects import OBJECTS
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_task import parse_class_weights
from shoal.runs.start import run_recipe
from shoal.runs.task_targets import derive_labels, find_task_name
from shoal.service.client import DeviceClient
from shoal.service.server_run import adapt_recipe_to_devices
from shoal.storage.python_file import load_named_object

EXAMPLES = Path(__file__).parents[2] / "examples"
X = torch.randn(120, 5, generator=torch.Generator().manual_seed(0))
Y = X @ torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
SHORT: dict[str, Any] = dict(devices=4, sample=2, rounds=3, batch=16, lr=0.05, engine="serial", split="iid")
DATA: dict[str, Any] = {
    "classify": (X, Y.argmax(1)),
    "binary": (X, (Y[:, 0] > 0).float()),
    "multilabel": (X, Y > 0),
    "regress": (X, Y[:, 0]),
    "tokens": ((X[:, :4] * 3).round().long().clamp(0, 5), (X[:, :4] * 3).round().long().clamp(0, 5).flip(1)),
}
HEADLINES = dict.fromkeys(TASKS, "accuracy") | {"regress": "mae"}


class Words(nn.Module):
    """A logit for each word at each position."""

    def __init__(self, classes: int = 6):
        super().__init__()
        self.embed, self.head = nn.Embedding(classes, 4), nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x))


def play(recipe: dict[str, Any], **more: Any) -> shoal.Result:
    return shoal.run(**{**recipe, **more})


def settings(task: str, /, **more: Any) -> dict[str, Any]:
    model = {"model": Words()} if task == "tokens" else {}
    return SHORT | {"data": DATA[task]} | model | more


def refused(**recipe: Any) -> str:
    with pytest.raises(ShoalError) as error:
        shoal.run(**SHORT | recipe)
    assert error.value.advice
    return str(error.value)


# which task -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("task", TASKS)
def test_a_task_is_found_from_the_targets(task, caplog):
    dataset = build_user_dataset(DATA[task])
    assert find_task_name(dataset.inputs, dataset.targets) == task
    caplog.set_level(logging.INFO, "shoal")
    torch.manual_seed(0)
    result = shoal.run(**settings(task))
    assert result.net.task.name == task and result.history.headline == HEADLINES[task]
    assert result.headline == result.history.rows[-1][HEADLINES[task]]
    said = [r.getMessage() for r in caplog.records if "found from the targets" in r.getMessage()]
    assert len(said) == (task not in ("classify", "tokens"))
    losses = result.history["loss"]
    assert losses[-1] < losses[0]


def test_whole_numbers_can_be_learnt_as_amounts():
    result = shoal.run(**settings("classify", task="regress"))
    assert result.history.headline == "mae" and "accuracy" not in result.history.rows[0]


@pytest.mark.parametrize(
    "words, recipe",
    [
        ("needs whole numbers from 0 up", {"data": DATA["regress"], "task": "classify"}),
        ("needs 0 or 1 for each sample", {"data": DATA["classify"], "task": "binary"}),
        ("needs a row of 0 and 1", {"data": DATA["regress"], "task": "multilabel"}),
        ("needs a whole number for each position", {"data": DATA["classify"], "task": "tokens"}),
        ("no task called 'clasify'", {"data": DATA["classify"], "task": "clasify"}),
        (
            "balanced_softmax cannot be used with the task regress",
            {"data": DATA["regress"], "method": "balanced_softmax"},
        ),
        ("task classify with 2 classes", {"data": DATA["binary"], "method": "fedlc"}),
        ("The metric top3 means nothing for the task regress", {"data": DATA["regress"], "metrics": ("top3",)}),
        ("The metric devices means nothing for the task regress", {"data": DATA["regress"], "metrics": ("devices",)}),
        ("The metric local means nothing for the task multilabel", {"data": DATA["multilabel"], "metrics": ("local",)}),
        ("There is no headline called 'accuracy'", {"data": DATA["regress"], "headline": "accuracy"}),
        ("label_smoothing is an option", {"data": DATA["regress"], "label_smoothing": 0.1}),
        ("class_weights is '1,2'", {"data": DATA["classify"], "class_weights": "1,2"}),
        ("has one loss of its own", {"data": DATA["binary"], "loss": "huber"}),
        ("no loss called 'hubert'", {"data": DATA["regress"], "loss": "hubert"}),
        ("accumulate cannot be used with the task", {"data": DATA["regress"], "accumulate": 2, "task": "SURVIVAL"}),
        ("Samples with several labels each", {"data": DATA["multilabel"], "split": "dirichlet:0.5"}),
        ("it does not take (outputs, targets)", {"data": DATA["regress"], "loss": lambda outputs: outputs}),
        ("gives shape () for 2 samples", {"data": DATA["regress"], "loss": lambda o, t: o.sum()}),
        ("it raises", {"data": DATA["regress"], "loss": lambda o, t: o @ t @ t}),
        ("it has no gradient", {"data": DATA["regress"], "loss": lambda o, t: t * 1.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_told_in_a_sentence(words, recipe):
    if recipe.get("task") == "SURVIVAL":
        recipe = recipe | {"task": f"{EXAMPLES / 'survival.py'}:survival", "data": load_survival().make_patients(80)}
    assert words in refused(**recipe)


def test_what_needs_torchmetrics_says_so(monkeypatch):
    monkeypatch.setattr("shoal.core.library_metrics.find_spec", lambda name: None)
    assert "pip install 'shoal[metrics]'" in refused(data=DATA["classify"], metrics=("auroc",))
    shoal.run(**settings("classify", rounds=1, metrics=("top3", "log_loss", "confusion")))


def test_few_whole_numbers_as_real_ones_are_doubted(caplog):
    play(settings("classify", rounds=1), data=(X, Y.argmax(1).float()))
    assert any("If they are classes" in r.getMessage() for r in caplog.records)


# labels of splits -----------------------------------------------------------------------------------------------------
def test_numbers_are_split_by_ranges_of_equally_many():
    labels, count = derive_labels(TASKS["regress"], torch.arange(100.0).flip(0))
    assert count == 10 and labels.tolist() == [9 - i // 10 for i in range(100)]
    result = shoal.run(**settings("regress", split="dirichlet:0.1"))
    assert result.history.headline == "mae"


def test_a_sample_with_several_labels_counts_for_each():
    labels, count = derive_labels(TASKS["multilabel"], torch.tensor([[1.0, 0, 1], [0, 0, 0]]))
    assert count == 3 and labels.tolist() == [[0, -1, 2], [-1, -1, -1]]


# options of the loss --------------------------------------------------------------------------------------------------
def test_balanced_weights():
    classify, binary, multilabel = (TASKS[name] for name in ("classify", "binary", "multilabel"))
    assert parse_class_weights("balanced", classify, 3, torch.tensor([0, 0, 0, 1])) == (4 / 9, 4 / 3, 4 / 3)
    assert parse_class_weights("1,2,0.5", classify, 3, torch.tensor([0])) == (1.0, 2.0, 0.5)
    assert parse_class_weights("balanced", binary, 1, torch.tensor([0.0, 0, 0, 1])) == (4 / 6, 4 / 2)
    labels = torch.tensor([[1, 1], [0, 1], [0, 1], [0, 0]]).bool()
    assert parse_class_weights("balanced", multilabel, 2, labels) == (3.0, 1 / 3)
    with pytest.raises(ShoalError, match="class_weights is '1,2,3'"):
        parse_class_weights("1,2,3", binary, 1, torch.tensor([0.0, 1.0]))


@pytest.mark.parametrize("engine", ["batched", "pool"])
@pytest.mark.parametrize("task", ["classify", "tokens", "binary", "multilabel"])
def test_options_train_alike_on_other_engines(task, engine):
    if engine == "pool" and not hasattr(os, "fork"):
        pytest.skip("there are no forks")
    more: dict[str, Any] = {"label_smoothing": 0.1, "focal": 2.0, "class_weights": "balanced", "metrics": ("log_loss",)}
    runs = []
    for e in ("serial", engine):
        torch.manual_seed(0)
        runs.append(shoal.run(**settings(task, **more, engine=e)).history)
    assert all(abs(told - plain) > 0.01 for told, plain in zip(runs[0]["loss"], runs[0]["log_loss"]))
    for one, other in zip(*(run["loss"] for run in runs)):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("engine", ["batched", "pool"])
def test_engines_agree(task, engine):
    if engine == "pool" and not hasattr(os, "fork"):
        pytest.skip("there are no forks")
    torch.manual_seed(0)
    model: dict[str, Any] = {"model": Words()} if task == "tokens" else {}
    runs = [play(settings(task) | model, engine=e).history for e in ("serial", engine)]
    for one, other in zip(*(run["loss"] for run in runs)):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("task", [*TASKS, "several numbers"])
@pytest.mark.parametrize("of", ["train", "all"])
def test_devices_test_their_own_samples_of_every_task(task, of):
    recipe = settings("regress", data=(X, Y)) if task == "several numbers" else settings(task)
    torch.manual_seed(0)
    result = play(
        recipe, model=Words() if task == "tokens" else "mlp", method="ditto", local_test=0.25, local_test_of=of
    )
    judged = HEADLINES.get(task, "mae")
    row = result.history.rows[-1]
    assert result.history.headline == "personal_mean" and result.history.better == ("down" if judged == "mae" else "up")
    assert (
        row["personal_worst"] >= row["personal_mean"]
        if judged == "mae"
        else row["personal_worst"] <= row["personal_mean"]
    )
    torch.manual_seed(0)
    plain = play(
        recipe, model=Words() if task == "tokens" else "mlp", local_test=0.25, local_test_of="all"
    ).history.rows[-1]
    assert plain["personal_pooled"] == pytest.approx(plain[judged]) and plain["personal_loss"] == pytest.approx(
        plain["loss"]
    )


def test_positions_that_do_not_count_are_left_out_on_every_engine():
    x, y = DATA["tokens"]
    y = y.masked_fill(torch.arange(4) >= 1 + torch.arange(120)[:, None] % 4, -100)
    torch.manual_seed(0)
    recipe = settings("tokens") | {"data": (x, y), "metrics": ("perplexity",)}
    runs = [play(recipe, engine=engine) for engine in ("serial", "batched")]
    assert runs[0].net.task.skips_padding
    assert runs[0].history["loss"] == pytest.approx(runs[1].history["loss"], rel=1e-5)
    # what does not count changes nothing: neither what is learnt nor how it is judged
    other = play(recipe, data=(torch.where(y < 0, 5, x), y))
    assert other.history["loss"] == runs[0].history["loss"]


def test_a_loss_that_a_recipe_names():
    absolute = shoal.run(**settings("regress", loss="absolute"))
    assert absolute.history["loss"] == pytest.approx(absolute.history["mae"])


# the user's own -------------------------------------------------------------------------------------------------------
def load_survival() -> Any:
    return SimpleNamespace(
        make_patients=load_named_object(f"{EXAMPLES / 'survival.py'}:make_patients"),
        survival=load_named_object(f"{EXAMPLES / 'survival.py'}:survival"),
    )


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_survival(engine, tmp_path):
    data = load_survival().make_patients(200)
    recipe: dict[str, Any] = SHORT | {"data": data, "task": f"{EXAMPLES / 'survival.py'}:survival", "engine": engine}
    result = shoal.run(**recipe, out=str(tmp_path / "run"), target=0.55)
    assert result.history.headline == "c_index" and result.history.better == "up"
    assert result.history["loss"][-1] < result.history["loss"][0] and (result.headline or 0) > 0.5
    # unequal devices: the last batch of each is padded on the engine `batched`
    if engine == "batched":
        serial = play(recipe, engine="serial")
        assert serial.history["loss"] == pytest.approx(result.history["loss"], rel=1e-4)


def compute_fourth_power(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets) ** 4


def compute_third_power(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).abs() ** 3


def test_a_loss_of_a_program_is_needed_again(tmp_path, monkeypatch):
    out = str(tmp_path / "run")
    shoal.run(**settings("regress", loss=compute_fourth_power, out=out))
    monkeypatch.setattr("shoal.runs.given_objects.OBJECTS", {k: ({}, f) for k, (_, f) in OBJECTS.items()})
    with pytest.raises(ShoalError, match="used data and a loss that a Python program had made"):
        shoal.resume(out, rounds=4)


def test_a_run_with_a_loss_of_a_program_goes_on(tmp_path):
    whole = shoal.run(**settings("regress", loss=compute_fourth_power, rounds=5))
    out = str(tmp_path / "run")
    shoal.run(**settings("regress", loss=compute_fourth_power, out=out))
    with pytest.raises(ShoalError, match="The loss is not the one"):
        shoal.resume(out, rounds=5, loss=compute_third_power)
    again = shoal.resume(out, rounds=5, loss=compute_fourth_power, data=DATA["regress"])
    assert again.history.equals_except_wall_time(whole.history)


def test_a_task_of_a_program_goes_on(tmp_path):
    survival = load_survival()
    recipe: dict[str, Any] = SHORT | {"data": survival.make_patients(100), "task": survival.survival}
    whole = play(recipe, rounds=5)
    shoal.run(**recipe, out=str(tmp_path / "run"))
    again = shoal.resume(tmp_path / "run", rounds=5, task=survival.survival)
    assert again.history.equals_except_wall_time(whole.history) and again.history.headline == "c_index"
    with pytest.raises(ShoalError, match="The task is not the one"):
        shoal.resume(tmp_path / "run", rounds=6, task=replace(survival.survival, outputs=2))


# models ---------------------------------------------------------------------------------------------------------------
class InDict(nn.Module):
    def __init__(self, outputs: int = 3):
        super().__init__()
        self.layer = nn.Linear(5, outputs)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.layer(x), "hidden": x}


class Alone(InDict):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Flat(nn.Module):
    """One number per sample, without a dimension for it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


class Noisy(Alone):
    """Draws random numbers in training and in tests."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn(len(x), 5))


def test_what_a_model_draws_by_itself_depends_on_the_seed_alone():
    runs = []
    for engine in ("serial", "batched", "serial"):
        torch.manual_seed(0)
        model = Noisy()
        torch.manual_seed(len(runs))
        runs.append(shoal.run(**settings("classify", model=model, engine=engine)).history["loss"])
    assert runs[0] == runs[2] and runs[0] == pytest.approx(runs[1], rel=1e-6)


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_outputs_in_a_dict_train_as_those_alone(engine, tmp_path):
    histories = []
    for kind in (InDict, Alone):
        torch.manual_seed(0)
        histories.append(shoal.run(**settings("classify", model=kind(), engine=engine)).history)
    assert histories[0]["loss"] == histories[1]["loss"]


def test_a_model_with_outputs_in_a_dict_is_exported(tmp_path):
    result = shoal.run(**settings("classify", model=InDict(), out=str(tmp_path / "run")))
    made = shoal.export(result, tmp_path / "model.pt2")
    program = torch.export.load(made.path).module()
    assert program(X[:7]).shape == (7, 3)
    assert isinstance(result.module()(X[:2]), dict)


def test_one_output_may_have_no_dimension_of_its_own():
    assert shoal.run(**settings("regress", model=Flat())).history["mae"][-1] is not None


# what follows the headline --------------------------------------------------------------------------------------------
def test_less_is_better_everywhere(tmp_path):
    both = shoal.compare(
        ["fedavg", "fedprox(mu=5.0)"], **settings("regress", out=str(tmp_path / "both"), target=1.0, rounds=4)
    )
    rows = both.table()
    assert both.headline == "mae" and both.pick_best(row["accuracy"] for row in rows) == min(
        row["accuracy"] for row in rows
    )
    history = both.results["fedavg"][0].history
    assert history.best == min(history["mae"])
    level = history["mae"][1]
    cost = history.cost_to_target(level)
    assert cost and cost["rounds"] == next(n + 1 for n, value in enumerate(history["mae"]) if value <= level)
    stopped = shoal.run(**settings("regress", until_accuracy=level, rounds=9))
    assert stopped.history["mae"][-1] <= level
    page, *pictures = write_report([tmp_path / "both"], tmp_path / "page")
    assert "mae.png" in {p.name for p in pictures} and "The last mae within" in page.read_text()
    again = shoal.resume(tmp_path / "both", data=DATA["regress"])
    assert again.headline == "mae"


def test_a_report_of_samples_with_several_labels(tmp_path):
    shoal.run(**settings("multilabel", out=str(tmp_path / "run"), metrics=("f1_macro",)))
    page, *pictures = write_report([tmp_path / "run"], tmp_path / "page")
    assert "F1" in page.read_text() and "f1_macro.png" in {p.name for p in pictures}


def test_what_a_run_prints_is_its_headline():
    table = make_summary_table(shoal.run(**settings("regress", metrics=("r2",))))
    names = list(table.columns[0].cells)
    assert names[:2] == ["mae", "loss"] and "accuracy" not in names and "R²" in names


def test_an_exported_file_says_its_headline(tmp_path):
    result = shoal.run(**settings("regress", out=str(tmp_path / "run")))
    made = shoal.export(result, tmp_path / "model.safetensors")
    assert made.about["mae"] == result.headline and f"mae {result.headline:.4f} after round 3" in str(made)
    assert json.loads((tmp_path / "run" / "task.json").read_text()) == {"name": "regress", "headline": "mae"}


def test_a_model_that_diverges_is_told(caplog):
    shoal.run(**settings("regress", lr=1e4, rounds=4, steps="40"))
    assert any("not finite" in r.getMessage() or "void" in r.getMessage() for r in caplog.records)


def test_processes_of_a_comparison_get_tasks_and_losses():
    assert pickle.loads(pickle.dumps(TASKS["regress"])).headline == "mae"


# real devices ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "task, more",
    [
        ("regress", {"loss": "huber"}),
        ("multilabel", {"class_weights": "balanced"}),
        ("binary", {"class_weights": "balanced", "focal": 1.0}),
        ("classify", {"class_weights": "balanced"}),
    ],
)
def test_devices_learn_the_task_of_the_server(task, more, tmp_path):
    x, y = DATA[task]
    torch.save((x, y), tmp_path / "data.pt")
    code = f"import torch\n\ndef load():\n    return torch.load({str(tmp_path / 'data.pt')!r})\n"
    (tmp_path / "own.py").write_text(code)
    recipe = Recipe().with_values(
        **SHORT | {"engine": "auto", "sample": 4} | more, data=f"{tmp_path / 'own.py'}:load", task=task
    )
    setup = assemble_run(recipe).loop.host.setup
    clients = []
    for device in range(4):
        index = setup.samples(device).index
        dataset = build_user_dataset((x, y))
        torch.save((dataset.inputs[index], dataset.targets[index]), tmp_path / f"{device}.pt")
        own = code.replace("data.pt", f"{device}.pt")
        (tmp_path / f"device_{device}.py").write_text(own)
        clients.append(DeviceClient(f"{tmp_path / f'device_{device}.py'}:load", tmp_path / f"home-{device}"))
    adapted = adapt_recipe_to_devices(recipe.with_values(out=str(tmp_path / "run")))
    remote = play_with_devices(adapted, InProcessTransport(clients))
    simulated = run_recipe(recipe.with_values(engine="serial"))
    assert remote.history.headline == HEADLINES[task]
    for one, other in zip(history_rows(remote), history_rows(simulated)):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_real_devices_run_no_task_of_a_file():
    for key in ("task", "loss"):
        with pytest.raises(ShoalError, match=f"{key} names a file"):
            adapt_recipe_to_devices(Recipe().with_values(**{key: "own.py:thing"}))

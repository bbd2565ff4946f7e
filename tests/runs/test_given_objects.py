"""Data and models that a program hands over as objects: only the same ones go on with a run, in whatever program."""

import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal
from shoal import models
from shoal.cli.commands import run_command_line
from shoal.core.errors import ShoalError
from shoal.data import dataset as datasets
from shoal.data.user_data import build_user_dataset
from shoal.runs.fingerprint import fingerprint_architecture, fingerprint_dataset, fingerprint_weights
from shoal.runs.recipe import Recipe
from shoal.runs.start import run_recipe
from shoal.storage.python_file import load_named_object

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=4, batch=8, split="iid", engine="serial", checkpoint_every=1)


class Small(nn.Module):
    def __init__(self, width: int = 5, slope: float = 0.1):
        super().__init__()
        self.first, self.last, self.slope = nn.Linear(3, width), nn.Linear(width, 2), slope

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.leaky_relu(self.first(x), self.slope))


def samples(seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(60, 3, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] > 0).long()


def seeded(seed: int = 0, **settings: Any) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Small(**settings)


def end_of_program() -> None:
    """What a program handed over goes with it."""
    datasets.HANDED_OVER.clear()
    models.HANDED_OVER.clear()


def stop_after(rounds: int):
    def watch(recipe, row, history):
        if len(history) == rounds:
            raise KeyboardInterrupt

    return watch


def broken_off(out: Path, rounds: int = 2, **more: Any) -> ShoalError:
    """A run that is stopped after two of its rounds, by a program that then ends."""
    recipe: dict[str, Any] = dict(data=samples(), model=seeded(), out=str(out), **TINY) | more
    with pytest.raises(ShoalError, match="Stopped after") as error:
        shoal.run("scaffold", watch=stop_after(rounds), **recipe)
    end_of_program()
    return error.value


def assert_same(result: shoal.Result, wanted: shoal.Result) -> None:
    assert result.history.equals_except_wall_time(wanted.history)
    assert all(torch.equal(v, wanted.params[k]) for k, v in result.params.items())


@pytest.fixture
def whole() -> shoal.Result:
    return shoal.run("scaffold", data=samples(), model=seeded(), **TINY)


def refused(kind: str, words: str, folder: Path, **given: Any) -> ShoalError:
    with pytest.raises(ShoalError, match=words) as error:
        shoal.resume(folder, **given)
    assert error.value.kind.name == kind
    return error.value


# Fingerprints


def test_data_are_called_after_what_is_in_them():
    x, y = samples()
    sparse = torch.stack([x, x], -1)[..., 0]
    name = shoal.hand_over_objects({"data": (x, y, x, y)})["data"]
    for same in (
        (sparse, y, x.double(), y.tolist()),
        (TensorDataset(x, y), TensorDataset(x, y)),
        build_user_dataset((x, y, x, y)),
    ):
        assert shoal.hand_over_objects({"data": same})["data"] == name
    other_x, other_y = x.clone(), y.clone()
    other_x[59, 2] += 1e-6
    other_y[0] = 1 - other_y[0]
    others = [(other_x, y, x, y), (x, other_y, x, y), (x, y, other_x, y), (x, y, x, other_y), (x[:59], y[:59], x, y)]
    others += [(x[:, None], y, x[:, None], y), ({"x": x, "y": y, "owners": y, "test_x": x, "test_y": y})]
    names = {shoal.hand_over_objects({"data": other})["data"] for other in others}
    assert len(names) == len(others) and name not in names
    assert fingerprint_dataset(build_user_dataset((x, y, x, y), classes=3)) != fingerprint_dataset(
        build_user_dataset((x, y, x, y))
    )


def test_pieces_and_places_of_tensors_do_not_matter(monkeypatch):
    data = build_user_dataset((*samples(), *samples(1)))
    once = fingerprint_dataset(data)
    monkeypatch.setattr("shoal.core.model.tensor_digest.PIECE", 50)
    assert fingerprint_dataset(data) == once


def test_a_module_is_known_by_its_layers_settings_and_weights():
    frozen, one = seeded(), seeded()
    frozen.first.weight.requires_grad_(False)
    assert fingerprint_architecture(one) == fingerprint_architecture(seeded(1))
    assert fingerprint_weights(one) == fingerprint_weights(seeded()) != fingerprint_weights(seeded(1))
    others = [one, seeded(width=6), seeded(slope=0.2), frozen, nn.Sequential(one), nn.Sequential(*one.children())]
    others += [nn.Sequential(nn.Linear(3, 2), nn.ReLU()), nn.Sequential(nn.Linear(3, 2), nn.Tanh())]
    others += [nn.Sequential(nn.Linear(3, 2), nn.Dropout(p)) for p in (0.1, 0.2)]
    assert len(set(map(fingerprint_architecture, others))) == len(others)
    normed = nn.BatchNorm1d(3)
    before = fingerprint_weights(normed)
    normed(torch.randn(4, 3))
    assert fingerprint_weights(normed) != before


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), nn.TransformerEncoderLayer(8, 2), nn.LazyLinear(3)])
def test_weights_are_no_part_of_the_architecture(layer):
    before = fingerprint_architecture(layer)
    with torch.no_grad():
        for p in layer.parameters():
            if not nn.parameter.is_lazy(p):
                p += 1
    assert fingerprint_architecture(layer) == before
    fingerprint_weights(layer)


def test_a_module_is_known_by_its_code_wherever_it_is_defined(tmp_path):
    text = "from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)"
    changes = {"one": "", "commented": "  # as it is\n", "doubled": " * 2", "set": "\n    token_inputs = False"}
    found = {}
    for name, change in changes.items():
        (tmp_path / f"{name}.py").write_text(text + change)
        found[name] = fingerprint_architecture(load_named_object(f"{tmp_path}/{name}.py:Net")(3, 2))
    assert found["one"] == found["commented"] and len(set(found.values())) == 3


# Resume


def test_a_run_on_own_data_goes_on_in_another_program(tmp_path, whole):
    broken_off(tmp_path / "x")
    assert_same(shoal.resume(tmp_path / "x", data=samples(), model=seeded()), whole)


def test_a_run_on_own_data_goes_on_in_the_same_program(tmp_path, whole):
    with pytest.raises(ShoalError, match="Stopped"):
        shoal.run("scaffold", watch=stop_after(2), data=samples(), model=seeded(), out=str(tmp_path / "x"), **TINY)
    assert_same(shoal.resume(tmp_path / "x"), whole)
    assert len(shoal.resume(tmp_path / "x", rounds=6).history) == 6


@pytest.mark.parametrize("rounds", [0, 2])
def test_other_objects_do_not_go_on_with_a_run(tmp_path, rounds):
    out = tmp_path / "x"
    broken_off(out, max(rounds, 1), checkpoint_every=1 if rounds else 1000)
    if not rounds:
        (out / "checkpoint.safetensors").unlink()
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    refused("other-recipe", "data are not those", out, data=samples(1), model=seeded())
    refused("other-recipe", "layers, their settings or its code differ", out, data=samples(), model=seeded(width=6))
    refused("other-recipe", "other weights than", out, data=samples(), model=seeded(1))
    end_of_program()
    refused("no-data", "used a model that a Python program had made", out, data=samples())
    end_of_program()
    refused("no-data", "used data that", out, model=seeded())
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_second_program_with_other_data_is_told_apart_from_the_first(tmp_path):
    """Both programs hand over their first objects, which a counter would call by one name."""
    broken_off(tmp_path / "x")
    shoal.run("scaffold", data=samples(1), model=seeded(1), **TINY)
    refused("no-data", "used data and a model that a Python program had made", tmp_path / "x")


def test_data_that_were_changed_in_place_do_not_go_on_with_a_run(tmp_path):
    (x, y), model = samples(), seeded()
    recipe: dict[str, Any] = dict(data=(x, y, x, y), model=model, **TINY)
    shoal.run("scaffold", out=str(tmp_path / "x"), **recipe)
    shoal.run("scaffold", out=str(tmp_path / "y"), **recipe)
    x += 1
    refused("other-recipe", "data are not those", tmp_path / "x", rounds=6)
    x -= 1
    x.copy_(samples()[0])
    nn.init.zeros_(model.first.weight)
    refused("other-recipe", "other weights", tmp_path / "y", rounds=6)


def test_a_model_without_a_seed_gets_its_first_weights_back_from_the_folder(tmp_path, whole):
    broken_off(tmp_path / "x")
    model = seeded(7)
    advice = refused("other-recipe", "other weights", tmp_path / "x", data=samples(), model=model).advice
    code = advice.removeprefix("Give it those: ").removesuffix(".")
    exec(f"import safetensors.torch; {code}", {"model": model})
    assert_same(shoal.resume(tmp_path / "x", data=samples(), model=model), whole)


def test_what_is_found_by_its_name_is_not_handed_over(tmp_path):
    out = tmp_path / "x"
    named: dict[str, Any] = TINY | dict(rounds=1)
    shoal.run("fedavg", out=str(out), **named)
    refused("other-recipe", "was begun with the data digits", out, data=samples())
    refused("other-recipe", "was begun with the model mlp", out, model=seeded())
    refused("bad-value", "data of a run cannot be changed", out, data="mnist")
    refused("bad-value", "is no comparison", out, workers=2)
    refused("no-run", "holds no run", tmp_path, data=samples())
    assert len(shoal.resume(out, data="digits", model="mlp", rounds=2).history) == 2


def test_a_folder_without_fingerprints_takes_what_it_is_given_and_says_so(tmp_path, whole, caplog):
    out, data = tmp_path / "x", build_user_dataset(samples())
    datasets.HANDED_OVER["own-0"] = data
    models.HANDED_OVER["own-0"] = lambda shape, classes: models.user_model.build_user_net(seeded(), shape, classes)
    recipe = Recipe().with_values(method="scaffold", data="own-0", model="own-0", out=str(out), **TINY)
    with pytest.raises(ShoalError, match="Stopped"):
        run_recipe(recipe, stop_after(2))
    end_of_program()
    shoal.run("scaffold", data=samples(1), model=seeded(1), **TINY)
    refused("no-data", "used data and a model", out)
    assert_same(shoal.resume(out, data=samples(), model=seeded()), whole)
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert all(f"no fingerprint of its {key}" in text for key, text in zip(("data", "model"), told, strict=True))
    refused("no-data", "used data and a model", out)


# What is said


PROGRAM = """
import sys
import torch
import shoal

if __name__ == "__main__":
    torch.manual_seed(5)
    x = torch.randn(60, 3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    data, shared = (x, (x[:, 0] > 0).long()), dict(devices=4, sample=2, batch=8, split="iid", engine="serial")
    try:
        if "again" in sys.argv:
            result = shoal.resume("runs/x", data=data, model=model)
        else:
            result = shoal.run("scaffold", data=data, model=model, rounds=int(sys.argv[1]), out=sys.argv[2], **shared)
        print(result.history.to_dict()["loss"], [float(v.double().sum()) for v in result.params.values()])
    except shoal.ShoalError as error:
        sys.exit(f"{error.kind.name}: {error}")
"""


@pytest.fixture
def started(tmp_path, monkeypatch, capsys) -> Callable[..., tuple[str, str]]:
    """Start the program, or with `-m shoal.cli` the command: what it prints, and what it ends with."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(PROGRAM)

    def start(*words: str) -> tuple[str, str]:
        end_of_program()
        monkeypatch.setattr("sys.argv", ["train.py", *words])
        ended = ""
        with torch.random.fork_rng(devices=[]):
            try:
                run_command_line() if words[0] in ("run", "resume") else runpy.run_path("train.py", run_name="__main__")
            except SystemExit as error:
                ended = str(error)
        out, errors = capsys.readouterr()
        return out, f"{ended} {errors}".strip()

    return start


def test_a_program_that_is_killed_says_how_to_go_on_when_it_is_started_again(tmp_path, started):
    words = ("300", "runs/x")
    process = subprocess.Popen([sys.executable, "train.py", *words], cwd=tmp_path)
    history, limit = tmp_path / "runs/x/history.jsonl", time.monotonic() + 180
    while not history.exists() or history.read_bytes().count(b"\n") < 5:
        assert process.poll() is None and time.monotonic() < limit, "the run ended before it could be killed"
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    way = "Go on with it by shoal.resume('runs/x', data=..., model=...) in the program"
    assert started(*words)[1] == f"folder-exists: runs/x is already there and not empty. {way}, or give another --out."
    said = started("resume", "runs/x")[1]
    assert said.startswith("16 no-data: runs/x used data and a model")
    assert "Call shoal.resume('runs/x', data=..., model=...) in a program" in said
    went_on, problem = started("again")
    assert went_on == started("300", "runs/whole")[0] != "" and not problem


def test_a_recipe_alone_does_not_bring_the_data_back(tmp_path, started):
    broken_off(tmp_path / "x")
    said = started("run", "x/recipe.toml", "--out", "y")[1]
    assert said.startswith("16 no-data: The recipe names data and a model") and not (tmp_path / "y").exists()


def test_ctrl_c_says_how_the_program_goes_on(tmp_path):
    said = broken_off(tmp_path / "x")
    assert said.advice == f"shoal.resume('{tmp_path}/x', data=..., model=...) in the program goes on from there."
    assert "shoal.resume('y', data=...) in" in broken_off(tmp_path / "y", model="mlp").advice.replace(
        f"{tmp_path}/", ""
    )
    said = broken_off(tmp_path / "z", model="mlp", data="digits")
    assert said.advice == f"`shoal resume {tmp_path}/z` goes on from there."


# Comparisons


def compared(**more: Any) -> shoal.Comparison:
    recipe: dict[str, Any] = dict(data=samples(), model=seeded(), **TINY) | more
    return shoal.compare(["fedavg", "scaffold"], **recipe)


def assert_alike(one: shoal.Comparison, other: shoal.Comparison) -> None:
    for label, results in one.results.items():
        for a, b in zip(results, other.results[label], strict=True):
            assert_same(a, b)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_comparison_on_own_data_goes_on_in_another_program(tmp_path, workers):
    whole, out = compared(), tmp_path / "both"
    with pytest.raises(ShoalError, match="Stopped") as stopped:
        compared(out=str(out), watch=stop_after(2))
    assert stopped.value.advice == f"shoal.resume('{out}', data=..., model=...) in the program goes on from there."
    end_of_program()
    with pytest.raises(ShoalError, match="not empty") as taken:
        compared(out=str(out))
    assert f"shoal.resume('{out}', data=..., model=...)" in taken.value.advice
    end_of_program()
    said = refused("no-data", "used data and a model", out)
    assert f"shoal.resume('{out}', data=..., model=...)" in said.advice
    refused("other-recipe", "data are not those", out, data=samples(1), model=seeded())
    again = shoal.resume(out, data=samples(), model=seeded(), workers=workers)
    assert_alike(again, whole)


def test_a_comparison_by_name_is_resumed_from_python(tmp_path):
    recipe: dict[str, Any] = TINY | dict(rounds=1)
    shoal.compare(["fedavg", "fedprox"], out=str(tmp_path / "both"), **recipe)
    longer = shoal.resume(tmp_path / "both", rounds=2)
    assert [len(result.history) for (result,) in longer.results.values()] == [2, 2]


def test_objects_are_given_to_the_processes_of_a_comparison():
    assert_alike(compared(workers=2), compared())


def test_a_module_that_no_process_can_be_given(tmp_path):
    class Inner(Small):
        pass

    with pytest.raises(ShoalError, match="The model cannot be given to other processes") as error:
        compared(model=Inner(), workers=2, out=str(tmp_path / "both"))
    assert "leave `workers` at 1" in error.value.advice and not (tmp_path / "both").exists()

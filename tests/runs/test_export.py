"""A trained model in a file: it computes what the model does, needs no shoal, and says what it is."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

import shoal
from shoal.cli.commands import run_command_line
from shoal.core.errors import ERROR_KINDS
from shoal.data import dataset as datasets
from shoal.data.dataset import DATASETS
from shoal.runs.export import ExportedModel
from shoal.storage.files import read_tree, write_tree

ENDINGS = ("pt2", "onnx", "safetensors")
TINY = {"devices": 4, "sample": 2, "steps": "2", "batch": 8, "rounds": 1, "split": "iid", "engine": "serial"}
MODELS = '''
import torch
from torch import nn

from shoal.models.resnet import resnet18


def narrow(input_shape, classes):
    """The zoo's ResNet18 with batch norm, thin."""
    return resnet18(input_shape, classes, width=4)


class Own(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(input_shape[0], 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout())
        self.fc = nn.Linear(6, classes)

    def forward(self, x):
        return self.fc(self.body(x).view(len(x), 6, -1).mean(2))


class Branches(Own):
    def forward(self, x):
        return super().forward(x) if x.sum() >= 0 else super().forward(-x)


class OneByOne(Own):
    def forward(self, x):
        return torch.cat([super(OneByOne, self).forward(one[None]) for one in x])


class Draws(Own):
    def forward(self, x):
        return super().forward(x) + torch.randn(x.shape[0], 1)
'''
PARTS = '''
from dataclasses import dataclass

import torch

from shoal import Part
from shoal.core.model.plan import Plan


@dataclass(frozen=True)
class Shed(Part):
    """After each round the first unit of every axis goes."""

    def prune(self, plan, state, round):
        return Plan({a.name: torch.arange(min(1, a.size - 1), a.size) for a in round.net.axes}), state


@dataclass(frozen=True)
class Halfway(Part):
    """Judged is the model half-way to the newest one."""

    def init_server(self, round):
        return {"before": round.anchor}

    def serve(self, params, state, round):
        return params, {"before": round.anchor}

    def evaluate(self, judged, state, round):
        return {"": {k: (v + state["before"][k]) / 2 for k, v in judged[""].items()}}
'''
RUNS = {
    "mlp": {"model": "mlp"},
    "lenet": {"model": "lenet"},
    "resnet": {"model": "models.py:narrow"},
    "lstm": {"model": "lstm", "data": "noise-ptb"},
    "own": {"model": "models.py:Own"},
    "normalised": {"model": "mlp", "data": "noise-cifar10", "normalise": True},
    "by-halves": {"model": "mlp", "data": "noise-cifar10", "normalise_by": "0.5:0.5"},
    "pruned": {"model": "lenet", "method": "shed", "parts": ("parts.py",), "rounds": 2},
    "halfway": {"model": "mlp", "method": "halfway", "parts": ("parts.py",)},
    "double": {"model": "lenet", "precision": "float64"},
}
"""Run name -> what is special about its recipe."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("workshop")
    (folder / "models.py").write_text(MODELS)
    (folder / "parts.py").write_text(PARTS)
    return folder


@pytest.fixture(scope="module")
def kept_runs() -> dict[str, shoal.Result]:
    return {}


@pytest.fixture(scope="module")
def kept_files() -> dict[str, ExportedModel]:
    return {}


@pytest.fixture
def run(workshop, kept_runs, monkeypatch) -> Callable[[str], shoal.Result]:
    """A run by name, made once; its folder lies in the working folder under that name."""
    monkeypatch.chdir(workshop)

    def made(name: str) -> shoal.Result:
        if name not in kept_runs:
            recipe = TINY | {"out": name} | RUNS[name]
            kept_runs[name] = shoal.run(recipe.pop("method", "fedavg"), **recipe)
        return kept_runs[name]

    return made


@pytest.fixture
def file(run, kept_files) -> Callable[[str, str], ExportedModel]:
    """The model of such a run in a file, made once."""

    def made(name: str, ending: str) -> ExportedModel:
        if ending == "onnx":
            need_onnx()
        run(name)
        path = f"{name}.{ending}"
        if path not in kept_files:
            kept_files[path] = shoal.export(name, path)
        return kept_files[path]

    return made


def need_onnx() -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)


def loaded(path: Path, result: shoal.Result) -> Callable[[Tensor], Tensor]:
    """What a file computes; the tensors of a safetensors file are put into the run's own net."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    if path.suffix == ".safetensors":
        return lambda x: result.net.forward(load_file(path), x)[0]
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(["logits"], {"input": x.numpy()})[0])


def about(path: Path) -> dict:
    """The facts that a file tells about itself."""
    if path.suffix == ".pt2":
        extra = {"about.json": ""}
        torch.export.load(path, extra_files=extra)
        return json.loads(extra["about.json"])
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as opened:
            return json.loads(opened.metadata()["about"])
    import onnxruntime

    return json.loads(onnxruntime.InferenceSession(path).get_modelmeta().custom_metadata_map["about"])


def inputs_of(result: shoal.Result) -> Tensor:
    """Samples as they are read; bytes as numbers from 0 to 1."""
    return DATASETS[result.recipe.data]().to(torch.float32, torch.device("cpu")).test_inputs


# what a file computes -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    "name", ["mlp", "lenet", pytest.param("resnet", marks=pytest.mark.whole), "lstm", "own", "pruned"]
)
def test_a_file_computes_what_the_model_does(run, file, name, ending):
    result, made = run(name), file(name, ending)
    compute = loaded(made.path, result)
    for size in (1, 7):
        x = inputs_of(result)[:size]
        with torch.no_grad():
            assert_close(compute(x), result.net.forward(result.params, x)[0], rtol=1e-5, atol=1e-5)
    assert made.deviation is None if ending == "safetensors" else made.deviation.max_error < 1e-5


def test_it_is_the_model_that_is_judged(run, file):
    """Not the one that is sent on."""
    result, found = run("halfway"), load_file(file("halfway", "safetensors").path)
    sent = read_tree(Path("halfway/checkpoint.safetensors"))["params"]
    assert all(torch.equal(found[k], v) and not torch.equal(v, sent[k]) for k, v in result.params.items())


@pytest.mark.parametrize(
    "name, given, ending", [*(("normalised", "", ending) for ending in ENDINGS), ("by-halves", "0.5:0.5", ENDINGS[0])]
)
def test_inputs_are_given_as_they_are_read(run, file, name, given, ending):
    """Programs normalise by themselves; beside bare tensors stands how it is done."""
    result, made = run(name), file(name, ending)
    data = DATASETS["noise-cifar10"]().to(torch.float32, torch.device("cpu"))
    scale = about(made.path)["normalise"]
    mean, deviation = (torch.tensor(scale[k]).view(1, 3, 1, 1) for k in ("mean", "deviation"))
    x, normal = data.test_inputs[:7], data.normalise(given).test_inputs[:7]
    assert_close((x - mean) / deviation, normal)
    with torch.no_grad():
        found = loaded(made.path, result)(normal if ending == "safetensors" else x)
        assert_close(found, result.net.forward(result.params, normal)[0], rtol=1e-5, atol=1e-5)
    assert about(made.path)["input_range"] == [0, 1]
    assert ("normalise inputs first" if ending == "safetensors" else "normalises inputs itself") in str(made)


def test_a_program_needs_no_shoal(run, file, tmp_path):
    """In a fresh process in which shoal cannot be imported."""
    wanted = {}
    for name in ("lenet", "resnet", "lstm", "own", "pruned"):
        result, made = run(name), file(name, "pt2")
        x = inputs_of(result)[:3]
        with torch.no_grad():
            wanted[str(made.path.resolve())] = x.tolist(), result.net.forward(result.params, x)[0].tolist()
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    code = """
        import json, sys
        sys.modules["shoal"] = None
        import torch
        for path, (x, y) in json.load(open(sys.argv[1])).items():
            found = torch.export.load(path).module()(torch.tensor(x))
            torch.testing.assert_close(found, torch.tensor(y), rtol=1e-5, atol=1e-5)
        print([name for name in sys.modules if name.startswith("shoal.")])
    """
    words = [sys.executable, "-I", "-c", dedent(code), str(tmp_path / "wanted.json")]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_numbers_of_64_bits(run, file):
    """A program keeps them; an ONNX model has 32, since runtimes know few operations on 64."""
    result, x = run("double"), inputs_of(run("double"))[:7]
    with torch.no_grad():
        wanted = result.net.forward(result.params, x.double())[0]
        assert_close(loaded(file("double", "pt2").path, result)(x.double()), wanted, rtol=1e-12, atol=1e-12)
        made = file("double", "onnx")
        assert_close(loaded(made.path, result)(x).double(), wanted, rtol=1e-5, atol=1e-5)
    assert about(made.path)["input_dtype"] == made.about["input_dtype"] == "float32"


# what a file says -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_says_what_it_is(run, file, ending):
    result, made = run("lenet"), file("lenet", ending)
    assert about(made.path) == made.about
    assert made.about == {
        "shoal": shoal.__version__,
        "model": "lenet",
        "method": "fedavg",
        "rounds": 1,
        "accuracy": result.accuracy,
        "accuracy_after": 1,
        "parameters": 61_706,
        "classes": 10,
        "input_shape": [1, 8, 8],
        "input_dtype": "float32",
        "input_range": [0, 1],
        "output_shape": [10],
    }


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_pruning_left(run, file, ending):
    """Two rounds, and with each the first unit of every axis: numbered as in the model before the first one."""
    result, made = run("pruned"), file("pruned", ending)
    found = about(made.path)["kept"]
    assert {axis.name: axis.size for axis in result.net.axes} == {axis: len(units) for axis, units in found.items()}
    assert found["conv1"] == [2, 3, 4, 5]
    assert "4 units of conv1" in str(made)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_does_not_say_where_it_comes_from(workshop, file, ending):
    made = file("own", ending)
    assert made.about["model"] == "models.py:Own"
    content = made.path.read_bytes()
    assert not [path for path in (workshop, Path(shoal.__file__).parent) if str(path).encode() in content]


def test_the_same_run_gives_the_same_bytes(run, tmp_path):
    run("mlp")
    made = [shoal.export("mlp", tmp_path / f"{i}.safetensors").path.read_bytes() for i in range(5)]
    assert len(set(made)) == 1


def test_a_run_that_is_not_finished(run, tmp_path):
    def stop(recipe, row, history):
        if len(history) == 2:
            raise KeyboardInterrupt

    with pytest.raises(shoal.ShoalError):
        shoal.run(**TINY | {"rounds": 9, "eval_every": 5, "out": str(tmp_path / "x")}, watch=stop)
    made = shoal.export(tmp_path / "x", tmp_path / "model.safetensors")
    assert (made.about["rounds"], made.about["accuracy"]) == (2, None) and "not evaluated yet" in str(made)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_run_that_came_to_nothing(tmp_path, ending):
    """What the model computes is no number, and so it is in the file."""
    if ending == "onnx":
        need_onnx()
    result = shoal.run(**TINY | {"steps": "1", "lr": 1e30, "out": str(tmp_path / "x")})
    assert not result.net.forward(result.params, inputs_of(result))[0].isfinite().all()
    assert shoal.export(result, tmp_path / f"model.{ending}").path.is_file()


def test_a_run_of_a_machine_with_a_gpu(tmp_path):
    """The same folder, as if its recipe had said so from the start."""
    result = shoal.run(**TINY, out=str(tmp_path / "x"))
    there = result.recipe.with_values(compute="cuda", precision="tf32")
    (tmp_path / "x/recipe.toml").write_text(there.to_toml())
    state = read_tree(tmp_path / "x/checkpoint.safetensors")
    write_tree(tmp_path / "x/checkpoint.safetensors", state | {"recipe": there.fingerprint()})
    found = load_file(shoal.export(tmp_path / "x", tmp_path / "model.safetensors").path)
    assert all(torch.equal(found[k], v) for k, v in result.params.items())


def test_a_result_stands_for_its_folder(run, tmp_path):
    made = shoal.export(run("mlp"), tmp_path / "a" / "model.safetensors")
    assert made.path.is_file() and made.about["model"] == "mlp"


# the command ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def command(capsys, monkeypatch) -> Callable[..., tuple[int, str, str]]:
    """`shoal export` in this process: exit code, output, errors."""

    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", "export", *map(str, words)])
        code = 0
        try:
            run_command_line()
        except SystemExit as end:
            code = int(end.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def refused(command) -> Callable[..., None]:
    """That the command ends with its kind of error, at most three lines, and the words that matter."""

    def check(kind: str, words: list, *said: str) -> None:
        code, out, err = command(*words)
        assert (code, err.split(":")[0], out) == (ERROR_KINDS[kind].code, kind, ""), err
        assert len(err.splitlines()) <= 3 and "Traceback" not in err
        assert [word for word in said if word not in err] == []

    return check


def test_what_the_command_prints(run, command, tmp_path):
    result, target = run("lenet"), tmp_path / "model.pt2"
    reach = result.net.forward(result.params, inputs_of(result)[:7])[0].abs().max()
    code, out, err = command("lenet", target)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"{target}: lenet trained by fedavg for 1 round",
        f"61,706 numbers, accuracy {result.accuracy:.4f} after round 1",
        "takes float32 (batch, 1, 8, 8) as read from the data, 0 to 1",
        "gives logits (batch, 10)",
        f"tried on batches of 1 and 7: logits up to {reach:.2g}, at most 0 away from the model's",
    ]


def test_a_run_that_is_not_there_is_told_before_a_file_that_is(refused, tmp_path):
    (tmp_path / "model.safetensors").write_text("mine")
    refused("no-run", [tmp_path / "nowhere", tmp_path / "model.safetensors"], "nowhere")


def test_a_file_that_is_there(run, command, refused, tmp_path):
    run("mlp")
    target = tmp_path / "model.safetensors"
    target.write_text("mine")
    refused("bad-value", ["mlp", target], "already there", "--force")
    assert target.read_text() == "mine"
    assert command("mlp", target, "--force", "--quiet") == (0, "", "")
    assert len(load_file(target)) == 4


def test_the_checkpoint_is_never_replaced(run, refused):
    run("mlp")
    refused("bad-value", ["mlp", "mlp/../mlp/checkpoint.safetensors", "--force"], "checkpoint")


@pytest.mark.parametrize("name", ["model", "model.pt", "model.pth", ".pt2", "onnx", ""])
def test_an_unknown_ending(run, refused, tmp_path, name):
    run("mlp")
    refused("bad-value", ["mlp", tmp_path / name], ".pt2", ".onnx", ".safetensors")


def test_a_folder_without_a_run(run, refused, tmp_path):
    run("mlp")
    refused("no-run", [tmp_path, tmp_path / "model.pt2"], "recipe.toml")
    refused("no-run", ["nowhere", tmp_path / "model.pt2"], "nowhere")
    refused("disk", ["long" * 100, tmp_path / "model.pt2"])
    with pytest.raises(shoal.ShoalError, match="has no folder"):
        shoal.export(shoal.run(**TINY), tmp_path / "model.pt2")


def test_a_run_without_a_checkpoint(run, refused, tmp_path):
    run("mlp")
    (tmp_path / "recipe.toml").write_text(Path("mlp/recipe.toml").read_text())
    refused("no-run", [tmp_path, tmp_path / "model.pt2"], "no checkpoint", "shoal resume")


def test_a_checkpoint_that_is_damaged(run, refused, tmp_path):
    run("mlp")
    for name in ("recipe.toml", "history.jsonl"):
        (tmp_path / name).write_bytes((Path("mlp") / name).read_bytes())
    (tmp_path / "checkpoint.safetensors").write_bytes(b"nothing like it")
    refused("damaged", [tmp_path, tmp_path / "model.pt2"], "checkpoint.safetensors")


def test_a_disk_that_fails(run, refused, tmp_path, monkeypatch):
    run("mlp")
    (tmp_path / "file").write_text("a file")
    refused("disk", ["mlp", tmp_path / "file" / "model.safetensors"])
    refused("disk", ["mlp", tmp_path / f"{'long' * 100}.safetensors"], "too long")

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    target = tmp_path / "model.safetensors"
    target.write_text("mine")
    monkeypatch.setattr("os.replace", full)
    refused("disk", ["mlp", target, "--force"], "No space left")
    assert target.read_text() == "mine" and {p.name for p in tmp_path.iterdir()} == {"file", "model.safetensors"}


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_onnx_without_its_extra(run, refused, tmp_path, monkeypatch, package):
    need_onnx()
    run("mlp")
    monkeypatch.setitem(sys.modules, package, None)
    refused("missing-extra", ["mlp", tmp_path / "model.onnx"], package, "shoal[export]")


def test_onnx_without_a_runtime_is_not_tried(run, command, tmp_path, monkeypatch):
    need_onnx()
    run("mlp")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    code, out, _ = command("mlp", tmp_path / "model.onnx")
    assert code == 0 and "not tried: onnxruntime is not installed" in out


@pytest.mark.parametrize(
    "name, why",
    [("Branches", "cannot follow"), ("OneByOne", "one size of batch"), ("Draws", "away from what the model")],
)
def test_a_model_that_no_program_can_be_made_of(run, refused, tmp_path, name, why):
    run("own")
    out = tmp_path / "x"
    shoal.run(**TINY, model=f"models.py:{name}", out=str(out))
    refused("bad-part", [out, tmp_path / "model.pt2"], name, why, ".safetensors")
    assert not list(tmp_path.glob("*model*"))


def test_data_that_went_with_a_program(refused, tmp_path):
    x, y = torch.rand(40, 3), torch.arange(40) % 2
    shoal.run(**TINY, data=(x, y), out=str(tmp_path / "x"))
    assert shoal.export(tmp_path / "x", tmp_path / "model.pt2").about["input_shape"] == [3]
    datasets.HANDED_OVER.clear()
    refused("no-data", [tmp_path / "x", tmp_path / "other.pt2"], "Python program", "shoal.export(", "data=...")
    assert shoal.export(tmp_path / "x", tmp_path / "other.pt2", data=(x, y)).about["input_shape"] == [3]
    with pytest.raises(shoal.ShoalError, match="data are not those"):
        shoal.export(tmp_path / "x", tmp_path / "third.pt2", data=(x + 1, y))

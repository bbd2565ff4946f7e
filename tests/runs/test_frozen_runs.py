"""A stranger's model with a frozen backbone: what a run sends, remembers and stores is the head alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_models import Backboned, TiedWords, draw_words
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shoal
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.types import Job, Work
from shoal.core.wire import pack_message
from shoal.models import build_model
from shoal.remote.messages import RequestStamp, TrainRequest
from shoal.storage.files import read_tree

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=2, batch=8, split="iid", engine="serial", checkpoint_every=1)
HEAD = {"head.weight", "head.bias"}
HEAD_BYTES = 4 * (64 * 10 + 10)
BACKBONE_NUMBERS = 4 * 9 + 4 + 4 * 4 + 1 + 256 * 64 + 64


def seeded(seed: int = 0, **settings: Any) -> Backboned:
    torch.manual_seed(7)
    return Backboned(seed=seed, **settings)


def test_messages_memories_checkpoints_and_results_hold_the_head_alone(tmp_path):
    result = shoal.run("scaffold", model=seeded(), out=str(tmp_path / "x"), **TINY)
    rows = result.history.rows
    assert set(result.params) == HEAD
    assert [row["bytes_by"]["down"]["model"] for row in rows] == [2 * HEAD_BYTES] * 2
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "x").rglob("*.safetensors")}
    assert len(sizes) >= 3 and max(sizes.values()) < 4 * HEAD_BYTES < 4 * BACKBONE_NUMBERS
    content = read_tree(tmp_path / "x" / "checkpoint.safetensors")
    assert set(content["params"]) == HEAD and content["model_digest"] == result.net.digest


def test_of_a_frozen_resnet18_the_head_travels_and_nothing_else():
    """20,520 bytes each way and device, of 44.8 MB; batch norm is frozen with the layers around it."""
    model = build_model("resnet18-nobias", (3, 32, 32), 10, 0).module
    last = [module for module in model.modules() if isinstance(module, torch.nn.Linear)][-1]
    model.requires_grad_(False)
    last.requires_grad_(True)
    given: dict[str, Any] = TINY | {"data": "noise-cifar10", "steps": "1", "batch": 2, "rounds": 1}
    result = shoal.run("fedavg", model=model, **given)
    head = 4 * (512 * 10 + 10)
    assert result.history.rows[0]["bytes_by"] == {"down": {"model": 2 * head}, "up": {"model": 2 * head}}
    whole = sum(t.nbytes for t in model.state_dict().values())
    assert head == 20_520 and whole > 44_700_000
    request = TrainRequest(
        RequestStamp("run", 0, 0, "n"),
        {"model_digest": result.net.digest},
        Job(0, 0, WHOLE_MODEL, pack_message(result.params, {}, WHOLE_MODEL, result.net.slicer, list(result.params)),
            Work(1.0, 0, 2, 0.1)),
        (), None, 1.0,
    )  # fmt: skip
    assert head < len(request.to_bytes()) < head + 2_000, "a request to a real device, with all that is around it"


def test_the_trained_module_is_whole_and_its_own():
    model: Any = seeded()
    result = shoal.run(model=model, **TINY)
    module: Any = result.module()
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(module(x), result.net.forward(result.params, x)[0], rtol=0, atol=0)
    assert torch.equal(module.backbone[4].weight, model.backbone[4].weight)
    module.backbone[4].weight.zero_()
    assert result.net.frozen["backbone.4.weight"].abs().max() > 0


def write_model_file(folder: Path, seed: int) -> str:
    file, models = folder / "own.py", Path(__file__).parents[1] / "frozen_models.py"
    file.write_text(f"{models.read_text()}\n\ndef make(classes):\n    return Backboned(classes, seed={seed})\n")
    return f"{file}:make"


def test_resume_refuses_another_backbone_and_goes_on_with_the_same(tmp_path):
    model = write_model_file(tmp_path, seed=0)
    whole = shoal.run(model=model, **dict[str, Any](TINY | {"rounds": 3}))
    shoal.run(model=model, out=str(tmp_path / "x"), **TINY)
    write_model_file(tmp_path, seed=1)
    with pytest.raises(shoal.ShoalError, match="other frozen tensors") as error:
        shoal.resume(tmp_path / "x", rounds=3)
    assert error.value.kind.name == "other-recipe" and "backbone" in error.value.advice
    write_model_file(tmp_path, seed=0)
    again = shoal.resume(tmp_path / "x", rounds=3)
    assert all(torch.equal(again.params[name], value) for name, value in whole.params.items())


def test_a_module_with_another_backbone_is_refused_too(tmp_path):
    shoal.run(model=seeded(), out=str(tmp_path / "x"), **TINY)
    with pytest.raises(shoal.ShoalError, match="other weights"):
        shoal.resume(tmp_path / "x", model=seeded(seed=1), rounds=3)


def test_an_export_holds_the_head_and_the_digest_or_everything(tmp_path):
    result = shoal.run(model=seeded(), out=str(tmp_path / "x"), **TINY)
    made = shoal.export(tmp_path / "x", tmp_path / "head.safetensors")
    assert set(load_file(made.path)) == HEAD and f"without its {BACKBONE_NUMBERS:,} frozen numbers" in str(made)
    with safe_open(made.path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
    assert about["frozen"] == {"digest": result.net.digest, "parameters": BACKBONE_NUMBERS}
    whole = shoal.export(tmp_path / "x", tmp_path / "whole.safetensors", with_frozen=True)
    assert set(load_file(whole.path)) == set(Backboned().state_dict())
    Backboned().load_state_dict(load_file(whole.path))
    program = shoal.export(tmp_path / "x", tmp_path / "model.pt2")
    assert program.deviation is not None and program.deviation.max_error == 0


def test_first_weights_may_bring_a_backbone_and_need_not(tmp_path):
    other = seeded(seed=1).state_dict()
    save_file(other, tmp_path / "all.safetensors")
    save_file({name: other[name] for name in HEAD}, tmp_path / "head.safetensors")
    model = write_model_file(tmp_path, seed=0)
    nets = [shoal.run(model=model, init=str(tmp_path / f"{name}.safetensors"), **TINY).net for name in ("all", "head")]
    weights = [net.frozen["backbone.4.weight"] for net in nets]
    assert torch.equal(weights[0], other["backbone.4.weight"])
    assert torch.equal(weights[1], seeded(seed=0).state_dict()["backbone.4.weight"])


FREEZE_FIRST = """
from dataclasses import dataclass, replace

from shoal import Part


@dataclass(frozen=True)
class FreezeFirst(Part):
    '''The first tensor of the model is frozen.'''

    def model(self, net):
        return replace(net, roles=dict(net.roles) | {net.trainable[0]: "frozen"})
"""


def test_a_part_freezes_by_a_role(tmp_path):
    (tmp_path / "mine.py").write_text(FREEZE_FIRST)
    plain = shoal.run(model="mlp", **TINY)
    result = shoal.run("freezefirst", parts=[str(tmp_path / "mine.py")], model="mlp", **TINY)
    (name,) = result.net.frozen
    assert torch.equal(result.net.frozen[name], plain.net.initial[name])
    less = plain.net.initial[name].nbytes
    down = [row["bytes_by"]["down"]["model"] for row in (*plain.history.rows, *result.history.rows)]
    assert down[0] - down[-1] == 2 * less


@pytest.mark.parametrize("method", ["fedavg", "scaffold+topk", "fedadam+half"])
def test_tied_models_train_as_one_tensor(method):
    result = shoal.run(method, model=TiedWords(), data=draw_words(), **TINY)
    assert set(result.params) == {"words.weight", "middle.weight", "middle.bias"}
    module: Any = result.module()
    assert module.last.weight is module.words.weight
    assert torch.equal(module.last.weight, result.params["words.weight"])

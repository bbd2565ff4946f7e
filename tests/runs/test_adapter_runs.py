"""Runs with adapters: what a folder holds, resuming, exports, devices' own models, one backbone for fifty devices."""

import json
from typing import Any

import pytest
import torch
from adapted_models import draw_texts, make_transformer
from safetensors import safe_open
from safetensors.torch import load_file

import shoal
from shoal.core.errors import ShoalError
from shoal.core.model.tree import count_tree_bytes
from shoal.core.task import Task
from shoal.engines.batched.slot import DeviceSlot
from shoal.engines.batched.stack import DeviceStack
from shoal.models.lenet import lenet
from shoal.plugins.smoke_run import prepare_local_trainings
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.storage.files import read_tree

TINY: dict[str, Any] = dict(devices=4, sample=4, rounds=2, batch=8, engine="serial", checkpoint_every=1, lr=0.1)


@pytest.mark.parametrize("method", ["lora+hetlora(gamma=0.5, lam=0.5)", "fedsalora", "ffalora+fedavgm", "biasonly"])
def test_a_resumed_run_equals_one_that_was_never_stopped(method, tmp_path):
    recipe: dict[str, Any] = TINY | {"model": "lenet", "local_test": 0.2}
    whole = shoal.run(method, **dict[str, Any](recipe | {"rounds": 3}))
    shoal.run(method, out=str(tmp_path / "x"), **recipe)
    again = shoal.resume(tmp_path / "x", rounds=3)
    assert all(torch.equal(again.params[name], value) for name, value in whole.params.items())
    drop = lambda row: {k: v for k, v in row.items() if "seconds" not in k}  # noqa: E731
    assert [drop(row) for row in again.history.rows] == [drop(row) for row in whole.history.rows]


def test_a_checkpoint_holds_adapters_and_the_digest(tmp_path):
    result = shoal.run("lora(rank=2)", model="lenet", out=str(tmp_path / "x"), **TINY)
    content = read_tree(tmp_path / "x" / "checkpoint.safetensors")
    assert set(content["params"]) == set(result.params) and content["model_digest"] == result.net.digest
    assert (tmp_path / "x" / "checkpoint.safetensors").stat().st_size < count_tree_bytes(result.net.frozen) / 3


def test_devices_with_a_second_factor_of_their_own_are_judged_with_it():
    recipe: dict[str, Any] = TINY | {"model": "lenet", "rounds": 4, "devices": 6, "local_test": 0.25}
    rows = shoal.run("fedsalora", split="dirichlet:0.1", **recipe).history.rows
    assert rows[-1]["personal_mean"] > rows[-1]["accuracy"]


# exports --------------------------------------------------------------------------------------------------------------
def test_exports_hold_adapters_or_the_merged_model(tmp_path):
    result = shoal.run("lora(rank=2)", model="lenet", out=str(tmp_path / "x"), **TINY)
    alone = shoal.export(tmp_path / "x", tmp_path / "adapters.safetensors")
    assert set(load_file(alone.path)) == set(result.net.initial)
    assert f"frozen numbers, whose digest is {result.net.digest}" in str(alone)
    merged = shoal.export(tmp_path / "x", tmp_path / "merged.safetensors", merged=True)
    base = lenet(result.net.input_shape, 10).module.eval()  # type: ignore[arg-type]
    base.load_state_dict(load_file(merged.path))
    x = torch.rand(5, *result.net.input_shape)  # type: ignore[misc]
    with torch.no_grad():
        torch.testing.assert_close(base(x), result.module().eval()(x))
    assert "which have the names of the model without adapters" in str(merged)
    with safe_open(merged.path, framework="pt") as file:
        assert json.loads(file.metadata()["about"])["merged"] is True
    for kind in ("pt2", "onnx"):
        program = shoal.export(tmp_path / "x", tmp_path / f"model.{kind}")
        assert program.deviation is not None and program.deviation.max_error < 1e-4
        with pytest.raises(ShoalError, match="is a program, in which adapters are computed"):
            shoal.export(tmp_path / "x", tmp_path / f"other.{kind}", merged=True)


def test_a_model_without_adapters_is_not_merged(tmp_path):
    shoal.run(out=str(tmp_path / "x"), **TINY)
    with pytest.raises(ShoalError, match="no adapters that could be merged"):
        shoal.export(tmp_path / "x", tmp_path / "merged.safetensors", merged=True)
    assert not (tmp_path / "merged.safetensors").exists()


def test_adapters_of_conv1d_are_merged_the_other_way_round(tmp_path):
    pytest.importorskip("transformers")
    data, model = draw_texts(), make_transformer("gpt2")
    result = shoal.run(
        "lora", model=model, data=data, out=str(tmp_path / "x"), **dict[str, Any](TINY | {"lr": 1.0, "split": "iid"})
    )
    merged = shoal.export(tmp_path / "x", tmp_path / "merged.safetensors", merged=True)
    tensors = {name.removeprefix("model."): value for name, value in load_file(merged.path).items()}
    base = make_transformer("gpt2").eval()
    before = base.transformer.h[0].attn.c_attn.weight.detach().clone()
    base.load_state_dict(tensors, strict=False)
    assert (base.transformer.h[0].attn.c_attn.weight - before).abs().max() > 1e-5
    with torch.no_grad():
        torch.testing.assert_close(base(**data[0]).logits, result.module().eval()(data[0]), rtol=1e-4, atol=1e-5)


# one backbone ---------------------------------------------------------------------------------------------------------
def test_fifty_devices_in_one_call_share_one_backbone():
    values = {"method": "lora(rank=1)", "model": "mlp-256", "devices": 50, "sample": 50, "split": "iid", "batch": 4}
    assembly = assemble_run(Recipe().with_values(**values))
    loop = assembly.loop
    state = loop.start(assembly.net)
    jobs = [training.job for training in prepare_local_trainings(loop, state)]
    slots = [DeviceSlot(Task(loop.host.setup, job, {})) for job in jobs]
    stack = DeviceStack(slots, (), 4, 50, channels_last=False)
    held = [t for t in stack.data if isinstance(t, torch.Tensor)]
    frozen = {t.data_ptr() for t in assembly.net.frozen.values()}
    assert frozen <= {t.data_ptr() for t in held}
    stacked = count_tree_bytes(list(stack.stack_initial_states()))
    assert stacked < 50 * 3 * count_tree_bytes(state.params) < 50 * count_tree_bytes(assembly.net.frozen)

"""Evaluations by traced programs: the outputs are those of the model itself, and where they cannot be, it is used."""

import pytest
import torch
from torch import nn

from shoal import run
from shoal.core.batch import Samples
from shoal.core.measures.evaluate import Evaluator
from shoal.core.measures.forward_pass import _forward_pass, compute_outputs, run_model, use_forward_pass
from shoal.core.model.net import Net
from shoal.engines.batched import forward_program
from shoal.engines.batched.forward_program import ROWS, NativeForwardPass
from shoal.engines.batched.native_library import load_native_kernels
from shoal.engines.threads import use_threads
from shoal.models import build_model
from shoal.runs import session


class BranchesOnData(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, 5)

    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        return self.head(x if x.sum() > 0 else -x)


class DrawsNoise(BranchesOnData):
    def forward(self, x):
        x = self.conv(x).mean((2, 3))
        return self.head(x + torch.randn_like(x))


class ReadsPastTorch(BranchesOnData):
    """All images of a test set may have the same brightest pixel, and then no half of them tells it from a constant."""

    def forward(self, x):
        return self.head(self.conv(x).mean((2, 3))) * float(x.numpy()[:, 0, 0, 0].max())


class NormalisesByBatch(BranchesOnData):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


class NormalisesEachImage(NormalisesByBatch):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(4)


class FrozenConvolution(BranchesOnData):
    def __init__(self):
        super().__init__()
        self.conv.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.relu(self.conv(x)).mean((2, 3)))


def make_net(module: nn.Module) -> Net:
    torch.manual_seed(3)
    return Net(module.double(), (3, 12, 12), 5)


def count_model_calls(monkeypatch) -> list[int]:
    """How many samples the model itself is given, call by call."""
    calls: list[int] = []

    def counted(net, params, inputs):
        calls.append(len(inputs))
        return run_model(net, params, inputs)

    monkeypatch.setattr(forward_program, "run_model", counted)
    return calls


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["lenet", "cnn", "resnet18"])
def test_outputs_are_those_of_the_model(name, threads, monkeypatch):
    net = build_model(name, (3, 32, 32), 10, 0)
    net.module.double()
    net = Net(net.module, (3, 32, 32), 10)
    images = torch.randn(2 * ROWS + 5, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), use_threads(1):
        wanted = run_model(net, net.initial, images)
        forward_pass = NativeForwardPass(threads)
        torch.testing.assert_close(forward_pass(net, net.initial, images), wanted, rtol=1e-10, atol=1e-10)
        calls = count_model_calls(monkeypatch)
        changed = {k: v + 0.01 if v.is_floating_point() else v for k, v in net.initial.items()}
        found = forward_pass(net, changed, images)
        assert not calls
        torch.testing.assert_close(found, run_model(net, changed, images), rtol=1e-10, atol=1e-10)
        assert not torch.allclose(found, wanted)


def test_the_number_of_threads_changes_no_bit():
    net = build_model("lenet", (3, 32, 32), 10, 0)
    images = torch.randn(5 * ROWS, 3, 32, 32)
    with torch.no_grad(), use_threads(1):
        one, two = (NativeForwardPass(threads)(net, net.initial, images) for threads in (1, 2))
    assert torch.equal(one, two)


@pytest.mark.parametrize("module", [BranchesOnData, DrawsNoise, NormalisesByBatch])
def test_what_cannot_be_traced_is_run_as_it_is_written(module, monkeypatch):
    net = make_net(module())
    images = torch.randn(ROWS + 1, 3, 12, 12, dtype=torch.float64)
    forward_pass = NativeForwardPass()
    with torch.no_grad(), use_threads(1):
        torch.manual_seed(5)
        traced = forward_pass(net, net.initial, images)
        calls = count_model_calls(monkeypatch)
        torch.manual_seed(5)
        found = forward_pass(net, net.initial, images)
        assert calls == [len(images)]
        torch.manual_seed(5)
        assert torch.equal(found, run_model(net, net.initial, images)) and torch.equal(found, traced)


@pytest.mark.parametrize("module, is_traced", [(NormalisesByBatch, False), (NormalisesEachImage, True)])
def test_normalisation_over_the_batch_is_seen_while_the_last_layer_is_all_zeros(module, is_traced, monkeypatch):
    net = make_net(module())
    zeros = {k: torch.zeros_like(v) if k.startswith("head") else v for k, v in net.initial.items()}
    images = torch.randn(2 * ROWS, 3, 12, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    images[ROWS:] += 3
    forward_pass = NativeForwardPass()
    with torch.no_grad(), use_threads(1):
        assert not forward_pass(net, zeros, images).any()
        calls = count_model_calls(monkeypatch)
        torch.testing.assert_close(forward_pass(net, net.initial, images), run_model(net, net.initial, images))
    assert calls == ([] if is_traced else [len(images)])


def test_a_number_that_the_trace_read_from_the_images_is_seen():
    net, images = make_net(ReadsPastTorch()), torch.rand(2 * ROWS, 3, 12, 12, dtype=torch.float64)
    images[::8, 0, 0, 0], images[ROWS:, 0, 0, 0] = 3.0, 2.0
    forward_pass = NativeForwardPass()
    with torch.no_grad(), use_threads(1):
        forward_pass(net, net.initial, images[:ROWS])
        found = forward_pass(net, net.initial, images[ROWS:])
        assert torch.equal(found, run_model(net, net.initial, images[ROWS:]))


def test_tensors_may_come_in_any_order(monkeypatch):
    net = make_net(FrozenConvolution())
    images = torch.randn(ROWS, 3, 12, 12, dtype=torch.float64)
    forward_pass = NativeForwardPass()
    with torch.no_grad(), use_threads(1):
        wanted = forward_pass(net, net.initial, images)
        calls = count_model_calls(monkeypatch)
        assert torch.equal(forward_pass(net, dict(reversed(net.initial.items())), images), wanted)
    assert not calls


def test_frozen_tensors_are_inputs_of_the_program():
    net = make_net(FrozenConvolution())
    assert net.frozen
    images = torch.randn(ROWS, 3, 12, 12, dtype=torch.float64)
    forward_pass = NativeForwardPass()
    with torch.no_grad(), use_threads(1):
        torch.testing.assert_close(forward_pass(net, net.initial, images), run_model(net, net.initial, images))
        assert all(program is not None for program in forward_pass.programs[net].values())
        net.frozen["conv.weight"].data.mul_(2)
        torch.testing.assert_close(forward_pass(net, net.initial, images), run_model(net, net.initial, images))


def test_a_program_that_gives_other_outputs_is_not_used(monkeypatch):
    monkeypatch.setattr(forward_program, "pick_fastest_call", lambda module: lambda *t: ([module(*t)[0][0] + 1], t[0]))
    net = make_net(FrozenConvolution())
    images = torch.randn(4, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad(), use_threads(1):
        assert torch.equal(NativeForwardPass()(net, net.initial, images), run_model(net, net.initial, images))


def test_vectors_and_several_threads_are_left_to_the_model(monkeypatch):
    calls = count_model_calls(monkeypatch)
    mlp = build_model("mlp", (3, 32, 32), 10, 0)
    lenet = build_model("lenet", (3, 32, 32), 10, 0)
    with torch.no_grad(), use_threads(1):
        NativeForwardPass()(mlp, mlp.initial, torch.randn(7, 3, 32, 32))
    with torch.no_grad(), use_threads(2):
        NativeForwardPass()(lenet, lenet.initial, torch.randn(9, 3, 32, 32))
    assert calls == [7, 9]


def test_an_evaluation_gives_the_same_numbers():
    net = build_model("lenet", (3, 32, 32), 10, 0)
    images = torch.randint(256, (700, 3, 32, 32), dtype=torch.uint8)
    samples = Samples(images, torch.randint(10, (700,)), torch.arange(700))
    evaluator = Evaluator(samples, 10, ("per_class", "confusion"))
    with use_threads(1):
        wanted = evaluator(net, net.initial)
        with use_forward_pass(NativeForwardPass(2)):
            found = evaluator(net, net.initial)
    assert found.pop("loss") == pytest.approx(wanted.pop("loss"), rel=1e-6)
    assert found == wanted


@pytest.mark.skipif(not load_native_kernels(), reason="needs a compiler")
def test_runs_with_own_kernels_are_evaluated_by_programs(monkeypatch):
    """The forward_pass is that of the run's engine, inside of it alone."""
    used: list[type] = []

    def watch(recipe, row, history):
        used.append(type(_forward_pass.get()))

    monkeypatch.setattr(session, "is_evaluation_due", lambda *_: True)
    monkeypatch.setattr("shoal.runs.engine_choice.NATIVE_MACS", 0.0)
    settings = {"data": "digits", "model": "lenet", "devices": 4, "sample": 2, "rounds": 2, "watch": watch}
    found = run("fedavg", engine="batched", **settings)
    assert used == [NativeForwardPass] * 2
    wanted = run("fedavg", engine="serial", **settings)
    assert used[2:] == [type(run_model)] * 2
    assert found.history.rows[-1]["loss"] == pytest.approx(wanted.history.rows[-1]["loss"], rel=1e-4)
    assert compute_outputs(found.net, found.params, torch.rand(2, *found.net.input_shape)).shape == (2, 10)

"""The kernels for a processor: torch's numbers, where a compiler is found; without one torch's operations stay."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from open_engine import OpenEngine
from torch import Tensor, nn

from shoal.engines.batched import native_library
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.batched.native_library import find_library, load_native_kernels
from shoal.engines.serial import SerialEngine
from shoal.engines.threads import use_threads
from shoal.runs.engine_choice import choose_engine
from shoal.runs.given_objects import hand_over_objects
from shoal.runs.recipe import Recipe
from shoal.runs.session import play_runs
from shoal.runs.start import prepare_new_run
from shoal.testing.rounds import assert_trees_close

aten = torch.ops.aten
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-5}
IMAGES = torch.channels_last

needs_kernels = pytest.mark.skipif(not load_native_kernels(), reason="no C++ compiler that can build the kernels")


def draw_images(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=dtype).contiguous(memory_format=IMAGES)


@needs_kernels
@settings(max_examples=150, deadline=None)
@given(
    images=st.integers(1, 3),
    channels=st.integers(1, 20),
    out=st.integers(1, 80),
    filters=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    room=st.tuples(st.integers(0, 30), st.integers(0, 30)),
    has_bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_convolutions_are_torchs(images, channels, out, filters, stride, padding, room, has_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    rows, columns = (max(1, f - 2 * p) + r for f, p, r in zip(filters, padding, room))
    x = draw_images(generator, dtype, images, channels, rows, columns)
    w = draw_images(generator, dtype, out, channels, *filters)
    b = torch.randn(out, generator=generator, dtype=dtype) if has_bias else None
    options = (list(stride), list(padding), [1, 1], False, [0, 0], 1)
    expected = aten.convolution(x, w, b, *options)
    found = torch.ops.shoal_native.conv2d(x, w, b, list(stride), list(padding))
    assert found.is_contiguous(memory_format=IMAGES)
    assert_near(found, expected)
    slopes = torch.randn(expected.shape, generator=generator, dtype=dtype)  # with channels first, as a part may give
    gradients = aten.convolution_backward(slopes, x, w, [out], *options, [True] * 3)
    own = torch.ops.shoal_native.conv2d_backward(slopes, x, w, list(stride), list(padding), True, True, True)
    for ours, theirs in zip(own, gradients):
        assert_near(ours, theirs)


def assert_near(found: Tensor, expected: Tensor) -> None:
    scale = float(expected.abs().max()) + 1e-30
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert float((found - expected).abs().max()) <= TOLERANCES[expected.dtype] * max(1.0, scale)


@needs_kernels
@settings(max_examples=150, deadline=None)
@given(
    channels=st.integers(1, 40),
    window=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    room=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    relu=st.booleans(),
    broken=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_max_pooling_has_torchs_bits(channels, window, stride, room, relu, broken, dtype):
    generator = torch.Generator().manual_seed(1)
    rows, columns = (w + r for w, r in zip(window, room))
    x = torch.randint(-2, 3, (2, channels, rows, columns), generator=generator).to(dtype)  # with many ties
    if broken:
        x[0, 0, rows // 2, columns // 2] = float("nan")
        x[1, -1, 0, 0] = float("-inf")
    source = aten.relu(x) if relu else x
    expected, indices = aten.max_pool2d_with_indices(source, list(window), list(stride))
    found, places = torch.ops.shoal_native.max_pool2d(x, list(window), list(stride), relu)
    assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    slopes = torch.randint(-5, 6, expected.shape, generator=generator).to(dtype)
    wanted = aten.max_pool2d_with_indices_backward(
        slopes, source, list(window), list(stride), [0, 0], [1, 1], False, indices
    )
    wanted = aten.threshold_backward(wanted, source, 0) if relu else wanted
    own = torch.ops.shoal_native.max_pool2d_backward(
        slopes, found, places, list(x.shape), list(window), list(stride), relu
    )
    assert torch.equal(own, wanted)


@needs_kernels
@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(0, 3),
    rows=st.integers(1, 30),
    inner=st.integers(1, 70),
    columns=st.integers(1, 90),
    is_transposed=st.booleans(),
    has_bias=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCES)),
)
def test_products_are_torchs(count, rows, inner, columns, is_transposed, has_bias, dtype):
    generator, stack = torch.Generator().manual_seed(3), (count,) if count else ()
    draw = lambda *shape: torch.randn(*stack, *shape, generator=generator, dtype=dtype)  # noqa: E731
    left = draw(rows, inner)
    right = draw(columns, inner).transpose(-1, -2) if is_transposed else draw(inner, columns)
    bias = (draw(1, columns) if stack else draw(columns)) if has_bias else None
    product = left @ right
    assert_near(torch.ops.shoal_native.matmul(bias, left, right), product if bias is None else product + bias)
    weights, slopes = draw(columns, inner), draw(rows, columns)
    expected = weights - 0.5 * slopes.transpose(-1, -2) @ left
    assert torch.ops.shoal_native.add_matmul_(weights, slopes.transpose(-1, -2), left, -0.5) is not None
    assert_near(weights, expected)


class ReadTwice(nn.Module):
    """A ReLU whose output is read by a pooling and by something else, convolutions that the kernels do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=8)
        self.dilated = nn.Conv2d(8, 4, 2, dilation=2)
        self.last = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).relu()
        pooled = nn.functional.max_pool2d(hidden, 3, 2)
        pooled = nn.functional.max_pool2d(self.dilated(self.grouped(pooled)), 2, 1)
        return self.last(pooled.flatten(1)) + hidden.mean((1, 2, 3), keepdim=True)[:, :, 0, 0]


SMALL = dict(devices=4, sample=3, rounds=2, epochs=1, batch=4, lr=0.05, split="dirichlet:0.3", eval_every=2)


def make_data(size: int = 16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(60, 3, size, size, generator=generator), torch.randint(0, 10, (60,), generator=generator)
    return x, y, x[:20], y[:20]


def list_operations(engine: BatchedEngine) -> set[str]:
    nodes = [n for program in engine.programs.values() for n in program.module.graph.nodes]  # pyright: ignore
    return {str(n.target) for n in nodes if n.op == "call_function"}


@needs_kernels
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("model", ["cnn", "read-twice", "mlp"])
@pytest.mark.parametrize("method", ["fedavg", "fedprox(mu=0.1)+scaffold"])
def test_training_with_the_kernels_is_training(model, method, width):
    given = ReadTwice() if model == "read-twice" else model
    size = 16 if model == "read-twice" else 32
    values = SMALL | dict(data=make_data(size), model=given, method=method, precision="float64")
    values = hand_over_objects(values)
    results = {}
    for engine in (SerialEngine(), OpenEngine(width, native=True)):
        with use_threads(1):
            results[type(engine)] = play_runs([prepare_new_run(Recipe().with_values(**values))], engine)[0]
        if isinstance(engine, OpenEngine):
            used = list_operations(engine)
            assert "shoal_native.matmul.default" in used
            assert method != "fedavg" or "shoal_native.add_matmul_.default" in used
            if model != "mlp" and width == 1:
                assert {"shoal_native.conv2d.default", "shoal_native.max_pool2d_backward.default"} <= used
            if model == "read-twice":
                assert {"aten.convolution.default", "aten.relu.default"} <= used
    assert results[SerialEngine].history["bytes_up"] == results[OpenEngine].history["bytes_up"]
    assert_trees_close(results[SerialEngine].params, results[OpenEngine].params, 1e-9, "kernels")


class FrozenFilters(nn.Module):
    """Convolutions with frozen filters and a bias that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 3), nn.Linear(5, 10)
        self.first.weight.requires_grad_(False)
        self.second.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).relu()).mean((2, 3)))


@needs_kernels
def test_a_bias_is_trained_where_the_filters_are_frozen():
    module = FrozenFilters()
    for filters in (module.first.weight, module.second.weight):
        filters.data = filters.data.contiguous(memory_format=IMAGES)
    values = hand_over_objects(SMALL | dict(data=make_data(), model=module, precision="float64"))
    with use_threads(1):
        expected, found = (
            play_runs([prepare_new_run(Recipe().with_values(**values))], engine)[0]
            for engine in (SerialEngine(), BatchedEngine(1, native=True))
        )
    assert_trees_close(expected.params, found.params, 1e-9, "kernels")


def test_long_runs_alone_ask_for_the_kernels():
    """By the sizes of a run, never by the clock or by what was built before."""
    values = hand_over_objects(SMALL | dict(data=make_data(32), model="lenet", engine="batched"))
    for rounds, expected in ((2, False), (100_000, True)):
        run = prepare_new_run(Recipe().with_values(**values | dict(rounds=rounds)))
        assert choose_engine(run.assembly).native is expected
    for other in (dict(engine="serial"), dict(threads=2)):
        run = prepare_new_run(Recipe().with_values(**values | dict(rounds=100_000) | other))
        assert not choose_engine(run.assembly).native


def test_without_a_compiler_or_when_told_off_torch_computes(monkeypatch, tmp_path, caplog):
    load = load_native_kernels.__wrapped__
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("SHOAL_NATIVE_KERNELS", "off")
    assert not load()
    monkeypatch.delenv("SHOAL_NATIVE_KERNELS")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not load() and not list(tmp_path.rglob("*.so"))


@needs_kernels
def test_a_build_that_fails_is_said_and_leaves_nothing(monkeypatch, tmp_path, caplog):
    caplog.set_level("INFO", "shoal")
    source = tmp_path / "kernels.cpp"
    source.write_text("int broken = ;\n")
    monkeypatch.setattr(native_library, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not load_native_kernels.__wrapped__()
    assert "could not be built" in caplog.text and "expected primary-expression" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


@needs_kernels
def test_another_source_is_another_library(monkeypatch, tmp_path):
    compiler = native_library.find_compiler()
    before = find_library(compiler)
    changed = tmp_path / "kernels.cpp"
    changed.write_bytes(Path(native_library.SOURCE).read_bytes() + b"\n// changed\n")
    monkeypatch.setattr(native_library, "SOURCE", changed)
    assert find_library(compiler) != before
    assert os.path.dirname(find_library(compiler)) == os.path.dirname(before)

"""The judged model as an average over rounds: EMA, a window, SWA."""

from collections.abc import Sequence

import pytest
import torch
from one_weight import one_weight
from torch import nn

from shoal.core.compose import Method, compose
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.parts.ema import EMA
from shoal.parts.fedacg import FedACG
from shoal.parts.feddyn import FedDyn
from shoal.parts.fedexp import FedExP
from shoal.parts.hrank import HRank
from shoal.parts.lib.float_tensors import select_float_tensors
from shoal.parts.scaffold import Scaffold
from shoal.parts.swa import SWA
from shoal.parts.window import Window
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import play_rounds
from shoal.testing.toy import toy

AVERAGES: list[Part] = [EMA(0.9), Window(2), Window(4, blocks=2), SWA(start=1)]
FEDAVG = [1.19, 1.3439, 1.468559, 1.56953279]
"""Two devices with the targets 0 and 4 and two steps of rate 0.1 each, from 1."""


def play(parts: Sequence[Part], rounds: int = 4) -> tuple[list[float], list[float]]:
    sent, judged, _ = one_weight(parts, [[0], [4]], rounds, steps=lambda _: 2, start=1.0)
    return sent, judged


@pytest.mark.parametrize(
    "part, expected",
    [
        # 0.9 * 1.19 + 0.1 * 1.3439 = 1.20539, and so on
        (EMA(0.9), [1.19, 1.20539, 1.231707, 1.265489]),
        (Window(2), [1.19, 1.26695, 1.40623, 1.519046]),
        # sums over two rounds; the fifth model drops the first sum
        (Window(4, blocks=2), [1.19, 1.26695, 1.334153, 1.392998]),
        # the third round is number 2; until then the model itself
        (SWA(start=2), [1.19, 1.3439, 1.468559, 1.519046]),
        (SWA(start=0, every=2), [1.19, 1.19, 1.3292795, 1.3292795]),
    ],
    ids=str,
)
def test_the_judged_model_is_the_average_and_training_does_not_notice(part: Part, expected: list[float]):
    sent, judged = play([part])
    assert judged == pytest.approx(expected, abs=1e-6)
    assert sent == play([])[0] == pytest.approx(FEDAVG)


def test_a_window_of_sums_drops_the_oldest_sum_as_a_whole():
    sent, judged = play([Window(4, blocks=2)], 7)
    # rounds 1 to 4; then without 1 and 2; 3 to 6; then without 3 and 4
    assert judged[3] == pytest.approx(sum(sent[0:4]) / 4)
    assert judged[4] == pytest.approx(sum(sent[2:5]) / 3)
    assert judged[5] == pytest.approx(sum(sent[2:6]) / 4)
    assert judged[6] == pytest.approx(sum(sent[4:7]) / 3)


def test_a_window_holds_no_more_sums_than_it_says():
    run = toy([Window(5, blocks=3)])
    counts = []
    for _ in range(9):
        run.play()
        counts.append([block["count"] for block in run.states["window"]["blocks"]])
    assert max(map(len, counts)) == 3 and max(map(sum, counts)) == 5 and min(map(sum, counts[4:])) == 4


@pytest.mark.parametrize("part", [*AVERAGES, SWA(every=2)], ids=str)
def test_the_average_of_a_model_that_stands_still_is_that_model(part: Part):
    run, still = toy([part]), {"a": torch.tensor([0.1, 0.7, -3.3], dtype=torch.float64)}
    state = part.init_server(run.round())
    for number in range(6):
        state = part.observe(still, state, run.round(number=number))
        judged = part.evaluate({"": still}, state, run.round(number=number))[""]
        torch.testing.assert_close(judged["a"], still["a"], rtol=1e-15, atol=0)
        if not isinstance(part, Window):
            assert torch.equal(judged["a"], still["a"]), "to the last bit"


@pytest.mark.parametrize("part", AVERAGES, ids=str)
@pytest.mark.parametrize("other", [FedDyn(1.0), FedACG(), FedExP()], ids=str)
def test_behind_a_part_that_judges_another_model_its_judged_models_are_averaged(part: Part, other: Part):
    sent, judged = play([other, part])
    alone_sent, alone_judged = play([other])
    assert sent == alone_sent, "the training path is the same"
    models = [{"weight": torch.tensor(w, dtype=torch.float64)} for w in alone_judged]
    state, expected = part.init_server(toy().round()), []
    for number, model in enumerate(models):
        state = part.observe(model, state, toy().round(number=number))
        expected.append(float(part.evaluate({"": model}, state, toy().round())[""]["weight"]))
    assert judged == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("part", AVERAGES, ids=str)
def test_the_training_path_is_the_same_to_the_bit(part: Part):
    ends = []
    for method in (Method((Scaffold(), part)), Method((Scaffold(),))):
        loop, net = build_tiny_run(method)
        server_state, _ = play_rounds(loop, loop.start(net), 0, 3)
        ends.append([server_state.params, server_state.states["scaffold"]])
    assert tree.is_same_tree(*ends)


@pytest.mark.parametrize("part", AVERAGES, ids=str)
def test_a_void_round_leaves_no_trace(part: Part):
    x = [float("inf"), float("nan")]
    _, judged, rows = one_weight([part], [[0], [4]], 2, start=1.0, x=x)
    assert judged == [1.0, 1.0] and all(row["void"] for row in rows)


@pytest.mark.parametrize("part", AVERAGES, ids=str)
def test_after_pruning_the_average_is_cut_with_the_model(part: Part):
    run = toy([HRank(rate=0.4, at=1), part])
    rows = run.play(4)
    kept = run.params["a.weight"].shape
    assert kept[0] < 3 and all(row["accuracy"] is not None for row in rows)
    averaged = part.evaluate({"": run.params}, run.states[part.name()], run.round())[""]
    assert averaged["a.weight"].shape == kept and not torch.equal(averaged["a.weight"], run.params["a.weight"])


class Counting(nn.Module):
    """Batch norm: float statistics, and a counter."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x))


@pytest.mark.parametrize("part", [EMA(0.5), Window(2), SWA()], ids=str)
def test_statistics_are_averaged_and_counters_are_those_of_the_last_model(part: Part):
    generator = torch.Generator().manual_seed(0)
    inputs = 3 * torch.randn(12, 4, generator=generator, dtype=torch.float64) + 1
    net = Net(Counting().double(), (4,), 2)
    run = toy([part], net=net, inputs=inputs, targets=torch.arange(12) % 2)
    models = []
    for _ in range(2):
        run.play()
        models.append(run.params)
    averaged = part.evaluate({"": run.params}, run.states[part.name()], run.round())[""]
    for name, value in averaged.items():
        expected = (models[0][name] + models[1][name]) / 2 if value.is_floating_point() else models[1][name]
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    assert "norm.num_batches_tracked" not in select_float_tensors(averaged)
    assert models[1]["norm.num_batches_tracked"] > models[0]["norm.num_batches_tracked"]


def test_two_averages_compose_in_the_order_of_listing():
    # of the EMA's 1.19, 1.20539, 1.231707 the last two
    _, judged = play([EMA(0.9), Window(2)], 3)
    assert judged[-1] == pytest.approx((1.20539 + 1.231707) / 2, abs=1e-6)
    assert str(compose([EMA(), Window()])) == "ema+window"


@pytest.mark.parametrize(
    "make",
    [lambda: EMA(1.0), lambda: EMA(-0.1), lambda: Window(0), lambda: Window(3, 0), lambda: SWA(-1), lambda: SWA(0, 0)],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()

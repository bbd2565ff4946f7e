"""Data-sharing, Hybrid-FL, FedDF and FedKT, which use the server's samples; and FedDA, whose server has a momentum."""

import logging
from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from one_weight import OneWeight, Squared, one_weight
from tiny_parts import KeepMask
from torch import Tensor, nn

import shoal
from shoal.core.batch import Samples
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.local.device import TrainingSetup
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.core.round import Loop
from shoal.core.server_state import EnrolmentRegister, ServerState
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.core.task import Engine
from shoal.core.types import SERVER, Optimiser, Outcome, Reply, Round, Work
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.fleet.fleets import UniformFleet
from shoal.parts.datasharing import DataSharing, draw_shared_rows, quantise_inputs, shrink_integers
from shoal.parts.fedda import FedDA
from shoal.parts.feddf import FedDF, compute_distillation_loss, compute_logits
from shoal.parts.feddyn import FedDyn
from shoal.parts.fedkt import FedKT, vote_labels
from shoal.parts.hybridfl import HybridFL
from shoal.plugins.smoke_run import build_tiny_run
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.storage.memory import DeviceMemory
from shoal.testing.laws import check_pair
from shoal.testing.rounds import assert_trees_close, play_rounds

PARTS: list[Part] = [DataSharing(), HybridFL(), FedDF(), FedKT(), FedDA()]
COMPOSITIONS = ["datasharing+fedprox", "hybridfl+scaffold", "feddf+fjord", "fedkt+topk(ratio=0.1)", "fedda+feddu"]
DOUBLE = torch.float64


@pytest.mark.parametrize("first", PARTS, ids=str)
def test_they_go_together(first: Part):
    for second in PARTS:
        if second is not first:
            check_pair(first, second)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataSharing(-0.1),
        lambda: DataSharing(1.1),
        lambda: FedDF(lr=0.0),
        lambda: FedDF(lr=float("inf")),
        lambda: FedDF(steps=-1),
        lambda: FedDF(patience=0),
        lambda: FedDF(batch=10**10),
        lambda: FedKT(epochs=-1),
        lambda: FedKT(epochs=10**9),
        lambda: FedDA(beta=1.0),
        lambda: FedDA(walk="random"),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()


@pytest.mark.parametrize("part", PARTS[:4], ids=str)
def test_a_server_without_samples_is_refused(part: Part):
    with pytest.raises(ShoalError, match="--server-data") as error:
        shoal.run(method=str(part), rounds=1, devices=4, sample=2, engine="serial")
    assert error.value.kind.name == "no-data"


# one weight, and a server with samples ----------------------------------------------------------------------------


def served(parts: list[Part], targets: list[list[int]], server: list[int], rounds: int = 1) -> tuple[list, list[dict]]:
    """As `one_weight`, one step of rate 0.1 on all samples in each round; the server holds samples too."""
    net, method, streams = Net(OneWeight(), (1,), 8), compose([*parts, Squared()]), RandomStreams(0)
    ends = np.cumsum([0, *map(len, targets)])
    y = torch.tensor([v for own in [*targets, server] for v in own])
    x = torch.ones(len(y), 1, dtype=DOUBLE)

    def samples(device: int) -> Samples:
        own = torch.arange(ends[-1], len(y)) if device == SERVER else torch.arange(ends[device], ends[device + 1])
        return Samples(x, y, own)

    loop = Loop(
        method,
        LocalDevices(TrainingSetup(method, net, streams, Optimiser(), samples), DeviceMemory(), SerialEngine()),
        UniformFleet(),
        streams,
        np.array([len(own) for own in targets]),
        len(targets),
        lambda round, device: Work(0.0, 1, 1000, 0.1),
        lambda net, params: {"accuracy": float(params["weight"])},
        lambda row: True,
        server=samples(SERVER),
    )
    standing, sent, told = loop.start(net), [], []
    for number in range(rounds):
        standing, rows = play_rounds(loop, standing, number, number + 1)
        sent.append(float(standing.params["weight"]))
        told += rows
    return sent, told


def test_devices_share_the_servers_samples_and_weigh_by_their_own():
    # A: mean of 1, 7, 7 is 5; B: mean of 3, 3, 3, 7, 7 is 4.6; one step of 0.1 each, weights 1/4 and 3/4
    sent, _ = served([DataSharing()], [[1], [3, 3, 3]], [7, 7])
    assert sent == pytest.approx([0.1 * (5 / 4 + 4.6 * 3 / 4)])


def test_samples_travel_once():
    # a weight of 8 bytes; two samples of a byte each, their labels, and the least and largest number of the one channel
    _, rows = served([DataSharing()], [[1], [3, 3, 3]], [7, 7], rounds=3)
    assert [row["bytes_down"] for row in rows] == [2 * (8 + 2 + 2 + 8), 2 * 8, 2 * 8]
    assert rows[0]["bytes_by"]["down"] == {"model": 16, "datasharing": 24}
    assert [row["bytes_up"] for row in rows] == [2 * 8] * 3


def test_the_server_is_one_more_device():
    # 0.1 * (1 + 3 * 3 + 2 * 7) / 6
    sent, rows = served([HybridFL()], [[1], [3, 3, 3]], [7, 7])
    assert sent == pytest.approx([0.1 * (1 + 9 + 14) / 6])
    assert rows[0]["devices"] == [0, 1, SERVER] and rows[0]["bytes_down"] == rows[0]["bytes_up"] == 2 * 8
    more, _ = served([HybridFL()], [[1], [3, 3, 3]], [7, 7], rounds=4)
    plain, _ = served([], [[1], [3, 3, 3], [7, 7]], [0], rounds=4)
    assert more == pytest.approx(plain, abs=1e-12)


def test_the_server_counts_in_the_measure_of_the_others():
    # feddyn weighs each device 1; 2 samples where devices hold 2 on average make the server 1 too: the mean of 1, 3, 7
    _, rows = served([HybridFL(), FedDyn(alpha=1.0)], [[1], [3, 3, 3]], [7, 7])
    assert rows[0]["accuracy"] == pytest.approx(0.1 * (1 + 3 + 7) / 3)


def test_fedda_returns_what_the_momenta_would_have_made():
    # round 1: g -1, m -1; at 0.1 g -0.9, m -0.95; so w = 0.1 * 1.95
    # round 2: g -0.805, m -0.8775; at 0.2755 g -0.7245, m -0.801
    sent, _, rows = one_weight([FedDA(beta=0.5)], [[1]], rounds=2, steps=lambda _: 2)
    assert sent == pytest.approx([0.195, 0.195 + 0.1 * (0.8775 + 0.801)])
    assert [row["bytes_down"] for row in rows] == [8, 16] and [row["bytes_up"] for row in rows] == [16, 16]


def test_fedda_may_walk_along_its_momentum():
    # round 1: m -1, w 0.1; g -0.9, m -0.95, w 0.195. round 2: m -0.8775, w 0.28275; g -0.71725, m -0.797375
    sent, _, _ = one_weight([FedDA(beta=0.5, walk="momentum")], [[1]], rounds=2, steps=lambda _: 2)
    assert sent == pytest.approx([0.195, 0.195 + 0.1 * (0.8775 + 0.797375)])


def test_fedda_means_momenta_by_samples():
    # m_A = -1, m_B = -3, weights 1/4 and 3/4: m = -2.5, w = 0.25
    # round 2: A: 0.5 * -2.5 + 0.5 * (0.25 - 1) = -1.625; B: -1.25 + 0.5 * (0.25 - 3) = -2.625
    sent, _, _ = one_weight([FedDA(beta=0.5)], [[1], [3, 3, 3]], rounds=2)
    assert sent == pytest.approx([0.25, 0.25 + 0.1 * (1.625 / 4 + 2.625 * 3 / 4)])


# how samples travel -----------------------------------------------------------------------------------------------


def test_pixels_of_a_byte_come_back_as_they_were():
    pixels = torch.randint(0, 256, (9, 3, 4, 4), generator=torch.Generator().manual_seed(0))
    pixels[0, :, 0, 0], pixels[0, :, 0, 1] = 0, 255
    spread = torch.tensor([0.2, 0.3, 0.4]).view(1, 3, 1, 1)
    level, extent = quantise_inputs((pixels / 255 - 0.5) / spread)
    assert level.dtype == torch.uint8 and torch.equal(level.long(), pixels)
    low, high = extent.view(2, 1, 3, 1, 1)
    torch.testing.assert_close(low + level / 255 * (high - low), (pixels / 255 - 0.5) / spread)
    assert torch.equal(quantise_inputs(torch.full((3, 2), 4.0))[0], torch.zeros(3, 2, dtype=torch.uint8))


def test_words_and_labels_take_the_fewest_bytes():
    for top, kind in ((255, torch.uint8), (256, torch.int16), (40_000, torch.int32)):
        whole, extent = quantise_inputs(torch.tensor([[0, top]]))
        assert whole.dtype == kind and whole.tolist() == [[0, top]] and extent.nbytes == 0
    assert shrink_integers(torch.tensor([-100, 9])).dtype == torch.int16


def test_a_share_is_drawn_for_each_device_once_and_for_all():
    first, again, other = (draw_shared_rows(RandomStreams(0), "datasharing", d, 100, 30).tolist() for d in (1, 1, 2))
    assert first == again == sorted(set(first)) and len(first) == 30 and first != other
    assert draw_shared_rows(RandomStreams(0), "datasharing", 1, 5, 5).tolist() == [0, 1, 2, 3, 4]


def test_a_device_that_did_not_answer_is_sent_them_again():
    loop, net = build_tiny_run(compose([DataSharing()]))
    loop = replace(loop, deadlines=replace(loop.deadlines, failures=0.5))
    seen: set[int] = set()
    standing = loop.start(net)
    for number in range(8):
        asked = loop.open_round(standing, number)
        for job in asked.jobs:
            assert ("datasharing" in job.message.beside) == (job.device not in seen)
        standing, row = loop.close_round(asked, train_jobs(loop.host, asked.jobs_to_train), 0.0)
        seen |= {d for d in row["devices"] if d not in {gone["device"] for gone in row.get("dropped", ())}}
    assert seen == {0, 1}


# teachers ---------------------------------------------------------------------------------------------------------


def straight(models: list) -> tuple[Net, Round]:
    """A round about to be served: two samples, a model whose logits are W x from W = 0, and a reply for each W."""
    layer = nn.Linear(2, 2, bias=False).double()
    layer.weight.data = torch.zeros(2, 2, dtype=DOUBLE)
    net = Net(nn.Sequential(layer), (2,), 2)
    replies = [
        Reply(d, 1, {"0.weight": torch.tensor(w, dtype=DOUBLE)}, {}, {}, Outcome(d)) for d, w in enumerate(models)
    ]
    loop, _ = build_tiny_run(compose([]))
    return net, replace(
        loop.make_round(ServerState(net, net.initial, {}), 0, EnrolmentRegister({}, loop.host.enrol)),
        server=Samples(torch.eye(2, dtype=DOUBLE), torch.tensor([0, 0]), torch.arange(2)),
        replies=replies,
        weights=torch.full((len(models),), 1 / len(models), dtype=DOUBLE),
        part="teacher",
    )


TEACHERS = [[[3.0, 1.0], [0.0, 0.0]], [[1.0, -1.0], [0.0, 0.0]]]
"""The means of their logits are (2, 0) and (0, 0)."""


def test_the_gap_is_the_divergence_of_the_mean_logits():
    # softmax of (log 3, 0) is (3/4, 1/4), of (0, 0) it is (1/2, 1/2)
    student, target = torch.zeros(1, 2, dtype=DOUBLE), torch.tensor([[log(3), 0.0]], dtype=DOUBLE)
    assert float(compute_distillation_loss(student, target)) == pytest.approx(0.75 * log(1.5) + 0.25 * log(0.5))
    assert float(compute_distillation_loss(target, target)) == pytest.approx(0.0, abs=1e-15)
    words = torch.stack((student, target), 1)
    assert float(compute_distillation_loss(words, target.expand(1, 2, 2))) == pytest.approx(
        (0.75 * log(1.5) + 0.25 * log(0.5)) / 2
    )


def test_one_step_of_feddf_by_hand():
    # the outputs for (1, 0) must move apart, those for (0, 1) are right; the first step of Adam is as long as its rate
    net, round = straight(TEACHERS)
    made, _ = FedDF(lr=0.1, steps=1, batch=2).serve(net.initial, {}, round)
    expected = torch.tensor([[0.1, 0.0], [-0.1, 0.0]], dtype=DOUBLE)
    torch.testing.assert_close(made["0.weight"], expected, atol=1e-6, rtol=0)
    assert not net.initial["0.weight"].any()


def test_feddf_comes_to_its_teachers():
    net, round = straight(TEACHERS)
    assert round.server is not None
    gaps = []
    for steps in (0, 10, 100, 10_000):
        made, _ = FedDF(lr=0.01, steps=steps).serve(net.initial, {}, round)
        gaps.append(
            float(
                compute_distillation_loss(
                    compute_logits(net, made, round.server), torch.tensor([[2.0, 0.0], [0.0, 0.0]]).double()
                )
            )
        )
    p = 1 / (1 + exp(-2))
    assert gaps[0] == pytest.approx((log(2) + p * log(p) + (1 - p) * log(1 - p)) / 2)
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 1e-6 < gaps[-2]


def test_feddf_loses_patience_and_never_ends_further_off_than_it_began(monkeypatch):
    net, round = straight([[[2.0, 0.0], [0.0, 0.0]]])
    steps, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self: (steps.append(1), step(self)))
    near = {"0.weight": torch.tensor([[1.9, 0.0], [0.0, 0.0]], dtype=DOUBLE)}
    made, _ = FedDF(lr=5.0, steps=1000, patience=11, batch=1).serve(near, {}, round)
    assert torch.equal(made["0.weight"], near["0.weight"]) and len(steps) == 12


def test_most_votes_decide_and_ties_go_to_the_lowest_class():
    def ballot(*classes: int) -> Tensor:
        return nn.functional.one_hot(torch.tensor(classes), 4).double()

    votes = [ballot(3, 1, 0, 2), ballot(3, 2, 2, 3), ballot(1, 2, 1, 1)]
    assert vote_labels(votes).tolist() == [3, 2, 0, 1]
    words = [ballot(3, 1, 0, 2).view(2, 2, 4) for _ in range(2)]
    assert vote_labels(words).tolist() == [[3, 1], [0, 2]]


def test_one_epoch_of_fedkt_by_hand():
    # both models call (1, 0) class 1 and (0, 1) class 0; the server's own labels say otherwise and are not looked at
    # softmax of 0 is 1/2, so the mean gradient over two samples is 1/4 up or down: one step of rate 0.1
    net, round = straight([[[0.0, 1.0], [2.0, 0.0]], [[-1.0, 3.0], [0.0, 1.0]]])
    made, _ = FedKT(epochs=1).serve(net.initial, {}, replace(round, work=Work(9.0, 0, 2, 0.1)))
    torch.testing.assert_close(made["0.weight"], torch.tensor([[-0.025, 0.025], [0.025, -0.025]], dtype=DOUBLE))
    assert round.server is not None and round.server.targets.tolist() == [0, 0]


def test_a_reply_that_does_not_count_teaches_nothing():
    models = [[[2.0, 0.0], [0.0, 0.0]], [[-9.0, 0.0], [0.0, 0.0]]]
    (net, both), (_, one) = straight(models), straight(models[:1])
    both = replace(both, weights=torch.tensor([1.0, 0.0], dtype=DOUBLE))
    for part in (FedDF(steps=5), FedKT(epochs=2)):
        first, second = (part.serve(net.initial, {}, round)[0]["0.weight"] for round in (both, one))
        assert torch.equal(first, second) and bool(first.any())


# on the engines, with real samples --------------------------------------------------------------------------------


def ends(crew: Engine, rounds: int = 2, **recipe: Any) -> list[Any]:
    """Where the server comes to."""
    given = {"devices": 6, "sample": 4, "server_data": "share:0.02", "split": "dirichlet:0.5", "precision": "float64"}
    loop, net = (made := assemble_run(Recipe(**(given | recipe)))).loop, made.net
    loop.host.engine = crew
    standing, _ = play_rounds(loop, loop.start(net), 0, rounds)
    return [standing.params, standing.states]


def agrees(caplog, **recipe: Any) -> None:
    """Side by side the same numbers come out as one by one, and nothing falls back."""
    crew = BatchedEngine(3)
    with caplog.at_level(logging.WARNING, logger="shoal"):
        found = ends(crew, **recipe)
    assert not crew.unvectorisable and not caplog.records
    assert_trees_close(found, ends(SerialEngine(), **recipe), 1e-9, f"{recipe}: other numbers side by side")


class Normed(nn.Module):
    """Batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.fc = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.norm(self.conv(x)).relu().flatten(1)))


@pytest.mark.parametrize("method", ["datasharing", "hybridfl", "feddf(steps=5)", "fedkt(epochs=1)", "fedda"])
def test_layers_that_mix_or_draw(method: str, caplog):
    torch.manual_seed(0)
    model = shoal.hand_over_objects({"model": Normed()})["model"]
    agrees(caplog, method=method, model=model, batch=8, momentum=0.5)


@pytest.mark.parametrize("method", ["datasharing", "feddf(steps=5)", "fedkt(epochs=1)"])
def test_language_models(method: str, caplog):
    text = torch.randint(0, 11, (60, 6), generator=torch.Generator().manual_seed(0))
    data = shoal.hand_over_objects({"data": (text[:, :-1].contiguous(), text[:, 1:].contiguous())})["data"]
    agrees(caplog, method=method, data=data, model="lstm", split="iid", server_data="share:0.1", steps="1", batch=3)


@pytest.mark.whole
@pytest.mark.parametrize("method", COMPOSITIONS)
def test_compositions_train_side_by_side(method: str, caplog):
    agrees(caplog, method=method.replace("feddf", "feddf(steps=20)"), batch=16)


@pytest.mark.whole
@pytest.mark.parametrize("method", COMPOSITIONS)
def test_compositions_learn(method: str):
    recipe = {"devices": 8, "sample": 8, "server_data": "share:0.05", "split": "dirichlet:0.5", "rounds": 8}
    method = method.replace("feddf", "feddf(steps=50)")
    rows = shoal.run(method=method, engine="batched", **recipe).history.rows
    assert rows[-1]["accuracy"] > rows[0]["accuracy"] + 0.1


def test_images_travel_as_bytes():
    # 72 of 1,437 samples: 64 pixels and a label each, and the extent of one channel
    recipe = {"devices": 8, "sample": 3, "server_data": "share:0.05", "rounds": 4, "engine": "serial"}
    rows = shoal.run(method="datasharing", **recipe).history.rows
    known: set[int] = set()
    for row in rows:
        new = set(row["devices"]) - known
        known |= new
        assert row["bytes_by"]["down"].get("datasharing", 0) == len(new) * (72 * 65 + 8)
        assert row["bytes_down"] == 3 * 38_440 + len(new) * (72 * 65 + 8)


def test_fedda_doubles_what_travels():
    rows = shoal.run(method="fedda", rounds=3, devices=4, sample=2, engine="serial").history.rows
    assert [row["bytes_down"] for row in rows] == [2 * 38_440, 2 * 76_880, 2 * 76_880]
    assert [row["bytes_up"] for row in rows] == [2 * 76_880] * 3


def test_momentum_does_not_move_what_another_part_holds():
    loop, net = build_tiny_run(compose([FedDA(beta=0.5), KeepMask()]))
    standing, _ = play_rounds(loop, loop.start(net), 0, 3)
    first, *others = net.trainable
    assert torch.equal(standing.params[first], net.initial[first])
    assert not any(torch.equal(standing.params[k], net.initial[k]) for k in others)

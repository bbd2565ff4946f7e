"""Codecs: what they leave out they owe, what they write is as small as they say, and what does not fit is refused."""

from dataclasses import dataclass
from math import ceil, log2

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_parts import CutOnce, DropRows, HalfWidth
from torch import Tensor

import shoal
from shoal.core import wire
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL, Axis, Cut, Plan, Slicer
from shoal.core.part import Part
from shoal.core.streams import RandomStreams
from shoal.core.types import Outcome, Reply
from shoal.core.wire import CodecLink, Message
from shoal.parts.dgc import DGC
from shoal.parts.fedpaq import FedPAQ
from shoal.parts.half import Half
from shoal.parts.lib.position_codec import (
    LIST_DTYPES,
    POSITION_CODES,
    count_positions,
    pack_positions,
    unpack_positions,
)
from shoal.parts.lib.sparse_codec import count_sent_elements, find_largest
from shoal.parts.randomk import RandomK, draw_positions
from shoal.parts.signsgd import SignSGD, take_majority_vote
from shoal.parts.stc import STC
from shoal.parts.topk import TopK
from shoal.plugins.smoke_run import build_tiny_run
from shoal.testing.rounds import play_rounds

CODECS: list[Part] = [
    TopK(0.3),
    TopK(0.3, feedback=False, positions="golomb"),
    TopK(0.5, positions="64"),
    TopK(0.2, positions="32"),
    TopK(0.4, positions="bitmap"),
    DGC(0.3, warmup="", positions="auto"),
    STC(0.3),
    STC(0.3, positions="auto"),
    FedPAQ(),
    FedPAQ(16),
    FedPAQ(4),
    FedPAQ(2),
    Half(),
    Half("bfloat16"),
    RandomK(0.3),
    RandomK(0.3, feedback=False),
    SignSGD(),
]
CHAINS: list[list[Part]] = [
    [TopK(0.3), FedPAQ()],
    [TopK(0.3, positions="golomb"), FedPAQ(4)],
    [DGC(0.3, positions="auto"), Half()],
    [STC(0.3, positions="golomb"), FedPAQ(16)],
    [RandomK(0.3), SignSGD()],
]
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def link_of(
    like: dict[str, Tensor], round: int = 0, plan: Plan = WHOLE_MODEL, axes: tuple[Axis, ...] = ()
) -> CodecLink:
    return CodecLink("up", 0, round, plan, Slicer(axes, like), RandomStreams(0), like)


def sent(values: dict[str, Tensor], codecs: list[Part], memory=None, link: CodecLink | None = None):
    """A message through codecs: what travels, what comes back, what is remembered."""
    link = link or link_of(values)
    plain = wire.pack_message(values, {}, link.plan, link.slicer, list(values))
    coded, memory = wire.encode_message(plain, codecs, memory or {}, link)
    back = wire.decode_message(coded, codecs, link)
    return coded, {k: e["value"] for k, e in back.body.items()}, memory


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-42, 1e-30, 1e30, -1e37, 2.5, 1e5]),
    st.floats(-10, 10, width=32),
)
tensors = st.builds(
    lambda values, dtype: torch.tensor(values, dtype=dtype),
    st.lists(numbers, max_size=70),
    st.sampled_from([torch.float32, torch.float64]),
)


# the laws ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(tensors)
@quick
def test_what_is_decoded_is_what_was_encoded_or_as_near_as_stated(codec: Part, value: Tensor):
    coded, back, _ = sent({"w": value}, [codec])
    assert back["w"].shape == value.shape and back["w"].dtype == value.dtype
    assert ((back["w"] - value).abs() <= codec.error(value) * (1 + 1e-6) + 1e-12).all()
    assert coded.nbytes == len(coded.to_bytes())


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_shapes_and_counters_are_kept(codec: Part):
    values = {
        "w": torch.randn(3, 4, 2).transpose(0, 1),
        "s": torch.tensor(2.0),
        "n": torch.tensor(7),
        "e": torch.zeros(0, 3),
    }
    _, back, memory = sent(values, [codec])
    _, back, _ = sent(values, [codec], memory)
    assert {k: v.shape for k, v in back.items()} == {k: v.shape for k, v in values.items()}
    assert back["n"] == 7 and back["n"].dtype == torch.int64


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_encoded(codec: Part, bad: float):
    with pytest.raises(ShoalError, match="not finite"):
        sent({"w": torch.tensor([1.0, bad, 2.0])}, [codec])


# refusals ---------------------------------------------------------------------------------------------------------
def mutated(tensor: Tensor, how: str, where: int, bit: int) -> Tensor:
    """A tensor damaged on its way."""
    flat = tensor.flatten()
    if how == "short":
        return flat[:-1]
    if how == "long":
        return torch.cat((flat, flat[-1:]))
    if how == "type":
        return tensor.to(torch.int16 if tensor.dtype != torch.int16 else torch.float32)
    raw = np.frombuffer(wire.copy_tensor_bytes(tensor), np.uint8).copy()
    raw[where % len(raw)] ^= 1 << bit
    return torch.from_numpy(raw).view(tensor.dtype).view(tensor.shape)


def refused_or_sound(codecs: list[Part], value: Tensor, how: str, where: int, bit: int) -> None:
    """Every tensor of a message damaged in turn: it is refused, or what comes back has the right form."""
    coded, _, _ = sent({"w": value}, codecs)
    link = link_of({"w": value})
    for key, tensor in coded.body["w"].items():
        if not tensor.numel():
            continue
        damaged = Message({"w": coded.body["w"] | {key: mutated(tensor, how, where, bit)}})
        try:
            back = wire.decode_message(damaged, codecs, link).body["w"]["value"]
        except ShoalError as error:
            assert error.kind.name == "damaged" and str(error).count(". ") == 1
            continue
        assert how == "flip", f"{key} was taken although its {how} was wrong"
        assert back.shape == value.shape and back.dtype == value.dtype and back.isfinite().all()


@pytest.mark.parametrize("codec", CODECS, ids=str)
@given(
    tensors.filter(len), st.sampled_from(["short", "long", "type", "flip"]), st.integers(0, 10**6), st.integers(0, 7)
)
@settings(quick, max_examples=150)
def test_a_damaged_message_is_refused_and_never_decoded_to_garbage(codec, value, how, where, bit):
    refused_or_sound([codec], value, how, where, bit)


@pytest.mark.parametrize("codecs", CHAINS, ids=lambda c: "+".join(map(str, c)))
@given(
    tensors.filter(len), st.sampled_from(["short", "long", "type", "flip"]), st.integers(0, 10**6), st.integers(0, 7)
)
@quick
def test_so_is_one_that_went_through_two_codecs(codecs, value, how, where, bit):
    refused_or_sound(codecs, value, how, where, bit)


@pytest.mark.parametrize("way", POSITION_CODES)
@given(st.sets(st.integers(0, 199), min_size=1), st.integers(0, 10**6), st.integers(0, 7))
@settings(quick, max_examples=150)
def test_damaged_positions_are_refused_or_are_as_many_others(way: str, at: set[int], where: int, bit: int):
    packed = mutated(pack_positions(torch.tensor(sorted(at)), 200, way), "flip", where, bit)
    try:
        found = unpack_positions(packed, 200, len(at), way)
    except ShoalError:
        return
    assert len(found) == len(at) and found.min() >= 0 and found.max() < 200 and (found[1:] > found[:-1]).all()


@pytest.mark.parametrize("at", [[3, 3], [4, 3], [-1, 3], [3, 10], [3], [3, 4, 5]])
@pytest.mark.parametrize("way", LIST_DTYPES)
def test_positions_that_do_not_fit_are_refused(at: list[int], way: str):
    with pytest.raises(ShoalError, match="positions"):
        unpack_positions(torch.tensor(at, dtype=LIST_DTYPES[way]), 10, 2, way)


@pytest.mark.parametrize(
    "packed", [[], [9, 0, 0], [0, 1], [1, 1, 0, 0], [3, 255, 255], [3, 128], [2], [2, 99, 1, 0, 0, 0, 0]]
)
def test_a_header_or_bitmap_that_does_not_fit_is_refused(packed: list[int]):
    with pytest.raises(ShoalError, match="message"):
        unpack_positions(torch.tensor(packed, dtype=torch.uint8), 10, 2, "auto")


def test_an_entry_without_its_positions_is_refused():
    value = torch.arange(10.0)
    coded, _, _ = sent({"w": value}, [TopK(0.3)])
    with pytest.raises(ShoalError, match="belongs"):
        wire.decode_message(Message({"w": {"value": coded.body["w"]["value"]}}), [TopK(0.3)], link_of({"w": value}))


def test_signs_without_positions_are_refused():
    value = torch.tensor([-2.0])
    coded, _, _ = sent({"w": value}, [STC()])
    for gone in ("at", "signs"):
        entry = {k: v for k, v in coded.body["w"].items() if k != gone}
        with pytest.raises(ShoalError, match="without"):
            wire.decode_message(Message({"w": entry}), [STC()], link_of({"w": value}))


# positions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("way", POSITION_CODES)
@given(st.integers(1, 300), st.sets(st.integers(0, 299)))
@quick
def test_positions_come_back(way: str, n: int, some: set[int]):
    at = torch.tensor(sorted(i for i in some if i < n), dtype=torch.int64)
    packed = pack_positions(at, n, way)
    assert unpack_positions(packed, n, len(at), way).tolist() == at.tolist() and count_positions(packed, n, way) == len(
        at
    )


@given(st.integers(1, 300), st.sets(st.integers(0, 299)))
@quick
def test_auto_is_the_smallest_and_a_byte(n: int, some: set[int]):
    at = torch.tensor(sorted(i for i in some if i < n), dtype=torch.int64)
    found = min(pack_positions(at, n, way).nbytes for way in POSITION_CODES if way != "auto") if len(at) < n else 0
    assert pack_positions(at, n, "auto").nbytes == 1 + found


@pytest.mark.parametrize("p", [0.0025, 0.01, 0.1])
def test_golomb_is_near_the_entropy(p: float):
    n = 400_000
    at = (torch.rand(n, generator=torch.Generator().manual_seed(0)) < p).nonzero().flatten()
    bound = n * (-p * log2(p) - (1 - p) * log2(1 - p)) / 8
    assert 0.97 * bound < pack_positions(at, n, "golomb").nbytes < 1.06 * bound


def test_golomb_by_hand():
    """Gaps 2, 0, 5: with b=1 the quotients 1, 0, 2 in unary are 01 1 001, the remainders 0 0 1; 011001 001 0000000."""
    packed = pack_positions(torch.tensor([2, 3, 9]), 16, "golomb")
    assert packed.tolist() == [1, 3, 0, 0, 0, 0b01100100, 0b10000000]


def test_32_bit_positions_are_refused_where_they_do_not_reach():
    with pytest.raises(ShoalError, match="32-bit"):
        pack_positions(torch.tensor([1]), 2**31, "32")


@pytest.mark.parametrize("n", [1000, 300_000])
@pytest.mark.parametrize("ratio", [0.0001, 0.01, 0.2, 0.9, 1.0])
def test_the_largest_are_found_and_of_equal_ones_the_first(n: int, ratio: float):
    generator, k = torch.Generator().manual_seed(n), count_sent_elements(n, ratio)
    for sizes in (torch.rand(n, generator=generator), torch.randint(0, 5, (n,), generator=generator).float()):
        expected = sizes.sort(descending=True, stable=True).indices[:k].sort().values
        assert torch.equal(find_largest(sizes, k), expected)
    spike = torch.zeros(n)
    spike[1:9] = 1.0
    assert find_largest(spike, 12).tolist() == sorted([*range(1, 9), 0, 9, 10, 11])


def test_how_many_travel():
    assert [count_sent_elements(n, 0.01) for n in (0, 1, 99, 100, 101, 1000)] == [0, 1, 1, 1, 2, 10]
    assert count_sent_elements(100, 0.07) == 7 and count_sent_elements(10, 1.0) == 10


# top-k ------------------------------------------------------------------------------------------------------------
def test_the_largest_travel_and_the_rest_is_owed():
    value = torch.tensor([4.0, -1.0, 0.5, -3.0])
    coded, back, memory = sent({"w": value}, [TopK(0.25)])
    assert back["w"].tolist() == [4.0, 0.0, 0.0, 0.0] and memory["topk"]["owed"]["w"].tolist() == [0.0, -1.0, 0.5, -3.0]
    assert coded.nbytes == 4 + 1 + 1
    _, back, memory = sent({"w": torch.zeros(4)}, [TopK(0.25)], memory)
    assert back["w"].tolist() == [0.0, 0.0, 0.0, -3.0] and memory["topk"]["owed"]["w"].tolist() == [0.0, -1.0, 0.5, 0.0]


FEEDBACK: list[Part] = [TopK(0.1), DGC(0.1, momentum=0.0, warmup=""), STC(0.1), RandomK(0.1)]
OWED = {"topk": "owed", "dgc": "v", "stc": "owed", "randomk": "owed"}


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(1, 6))
@quick
def test_nothing_is_lost(codec: Part, seed: int, n: int, rounds: int):
    generator, memory = torch.Generator().manual_seed(seed), {}
    given_, arrived = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for number in range(rounds):
        value = torch.randn(n, generator=generator, dtype=torch.float64)
        _, back, memory = sent({"w": value}, [codec], memory, link_of({"w": value}, number))
        given_, arrived = given_ + value, arrived + back["w"]
    torch.testing.assert_close(arrived + memory[codec.name()][OWED[codec.name()]]["w"], given_)


AXIS = Axis("a", 4, (Cut("w", 0),))


@pytest.mark.parametrize("codec", FEEDBACK[:3], ids=str)
def test_what_a_plan_leaves_out_stays_owed(codec: Part):
    like = {"w": torch.arange(1.0, 13.0).view(4, 3)}
    _, _, memory = sent(like, [codec])
    before = memory[codec.name()][OWED[codec.name()]]["w"]
    link = link_of(like, 1, Plan({"a": torch.tensor([0, 2])}), (AXIS,))
    coded, back, memory = sent({"w": torch.zeros(4, 3)}, [codec], memory, link)
    after = memory[codec.name()][OWED[codec.name()]]["w"]
    assert back["w"].shape == (2, 3) and coded.body["w"]["value"].tolist() == [9.0]
    assert torch.equal(after[[1, 3]], before[[1, 3]]) and after[2].tolist() == [7.0, 8.0, 0.0]


@pytest.mark.parametrize("codec", FEEDBACK[:2], ids=str)
def test_what_a_codec_of_rows_leaves_out_stays_owed(codec: Part):
    like = {"w": torch.arange(12.0, 0.0, -1.0).view(4, 3)}
    owed = {codec.name(): {OWED[codec.name()]: {"w": torch.full((4, 3), 0.5)}}}
    _, back, memory = sent(like, [DropRows(), codec], owed)
    after = memory[codec.name()][OWED[codec.name()]]["w"]
    assert (
        after[0].tolist() == [0.5] * 3 and after[1].tolist() == [0.0, 8.5, 7.5] and back["w"][1].tolist() == [9.5, 0, 0]
    )


# DGC --------------------------------------------------------------------------------------------------------------
def test_dgc_counts_12_bytes_for_each_element_as_its_users_do():
    coded, _, _ = sent({"w": torch.randn(1000)}, [DGC(0.01, warmup="")])
    assert coded.nbytes == 10 * 12
    like = {"w": torch.randn(1000)}
    assert sent(like, [DGC(0.001)], link=link_of(like, 0))[0].nbytes == 250 * 12
    assert sent(like, [DGC(0.001)], link=link_of(like, 49))[0].nbytes == ceil(1000 / 256) * 12
    assert sent(like, [DGC(0.001)], link=link_of(like, 50))[0].nbytes == 12


def test_dgc_warms_up():
    """With rounds from 0, as in the code it comes from: 75 % are left out up to round 20, 99.9 % from round 50 on."""
    part = DGC()
    stages = {0.25: (0, 20), 0.0625: (21, 29), 0.015625: (30, 39), 0.00390625: (40, 49), 0.001: (50, 1000)}
    assert {part.compute_ratio(r): (r, s) for r, s in stages.values()} == stages
    assert all(part.compute_ratio(first) == part.compute_ratio(last) for first, last in stages.values())
    assert DGC(0.1).compute_ratio(25) == 0.1 and DGC(warmup="").compute_ratio(0) == 0.001


def test_dgc_by_hand():
    """m=0.5 on (1, 4, 2), then (0, 0, 2): u = (1, 0, 2) and v the same; then u = (.5, 0, 3), v = (1.5, 0, 5)."""
    part = DGC(0.3, momentum=0.5, warmup="")
    _, back, memory = sent({"w": torch.tensor([1.0, 4.0, 2.0])}, [part])
    assert back["w"].tolist() == [0, 4, 0] and memory["dgc"]["u"]["w"].tolist() == [1, 0, 2]
    _, back, memory = sent({"w": torch.tensor([0.0, 0.0, 2.0])}, [part], memory)
    assert back["w"].tolist() == [0, 0, 5]
    assert memory["dgc"]["u"]["w"].tolist() == [0.5, 0, 0] and memory["dgc"]["v"]["w"].tolist() == [1.5, 0, 0]


def test_dgc_clips_the_norm_of_the_whole_update():
    values = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}
    _, back, _ = sent(values, [DGC(1.0, clip=1.0, warmup="")])
    torch.testing.assert_close(back, {"a": torch.tensor([0.6]), "b": torch.tensor([0.0, 0.8])})
    _, back, _ = sent(values, [DGC(1.0, clip=6.0, warmup="")])
    torch.testing.assert_close(back, values)


def test_dgc_without_momentum_and_warmup_is_topk():
    values, memories = {"w": torch.randn(200)}, ({}, {})
    for _ in range(4):
        _, one, a = sent(values, [DGC(0.05, momentum=0.0, warmup="")], memories[0])
        _, two, b = sent(values, [TopK(0.05)], memories[1])
        memories = a, b
        assert torch.equal(one["w"], two["w"])


# STC --------------------------------------------------------------------------------------------------------------
def test_stc_by_hand():
    coded, back, memory = sent({"w": torch.tensor([4.0, -1.0, 0.5, -3.0])}, [STC(0.5)])
    assert back["w"].tolist() == [3.5, 0.0, 0.0, -3.5] and memory["stc"]["owed"]["w"].tolist() == [0.5, -1.0, 0.5, 0.5]
    assert coded.nbytes == 2 * 8 + 1 + 4


def test_stc_takes_a_bit_and_a_position_for_each_element_and_one_size():
    like = {"w": torch.randn(4000), "b": torch.randn(100)}
    assert sent(like, [STC()])[0].nbytes == (10 * 8 + 2 + 4) + (8 + 1 + 4)
    assert sent(like, [STC(positions="32")])[0].nbytes == (10 * 4 + 2 + 4) + (4 + 1 + 4)


# quantisers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width,size", [(16, 2000), (8, 1000), (4, 500), (2, 250)])
def test_fedpaq_takes_as_many_bits_as_asked_and_a_scale(width: int, size: int):
    like = {"w": torch.randn(1000), "odd": torch.randn(3)}
    coded, _, _ = sent(like, [FedPAQ(width)])
    assert coded.nbytes == size + 4 + ceil(3 * width / 8) + 4


@pytest.mark.parametrize("width", [2, 4, 8])
def test_fedpaq_is_right_on_average(width: int):
    value = torch.linspace(-1, 1, 41, dtype=torch.float64)
    backs = [sent({"w": value}, [FedPAQ(width)], link=link_of({"w": value}, r))[1]["w"] for r in range(2000)]
    step = 1 / FedPAQ(width).levels
    torch.testing.assert_close(torch.stack(backs).mean(0), value, atol=4 * step / 2 / 2000**0.5, rtol=0)
    assert len({float(b[3]) for b in backs}) > 1


def test_fedpaq_keeps_the_largest_and_zero_as_they_are():
    value = torch.tensor([0.0, -3.0, 1.3, 3.0])
    for round in range(20):
        _, back, _ = sent({"w": value}, [FedPAQ()], link=link_of({"w": value}, round))
        assert back["w"][[0, 1, 3]].tolist() == [0.0, -3.0, 3.0]


def test_half_takes_two_bytes_and_clamps_what_is_too_large():
    value = torch.tensor([1.0, 1e6, -1e38, 3.4e38])
    coded, back, _ = sent({"w": value}, [Half()])
    assert coded.nbytes == 8 and back["w"].tolist() == [1.0, 65504.0, -65504.0, 65504.0]
    coded, back, _ = sent({"w": value}, [Half("bfloat16")])
    assert coded.nbytes == 8 and back["w"].isfinite().all() and back["w"][1] == 999424.0


def test_half_goes_both_ways_if_asked():
    assert Half().directions == {"up"} and Half(down=True).directions == {"up", "down"}
    loop, net = build_tiny_run(compose([Half(down=True)]))
    _, rows = play_rounds(loop, loop.start(net), 0, 1)
    assert rows[0]["bytes_down"] == rows[0]["bytes_up"] == 2 * 2 * 23


def test_signs_are_a_bit_each_and_zero_is_sent_as_plus():
    coded, back, _ = sent({"w": torch.tensor([0.0, -0.0, 1e-40, -1e-40, 5.0, -5.0, 0.0, 1.0, -1.0])}, [SignSGD()])
    assert coded.nbytes == 2 and back["w"].tolist() == [1, 1, 1, -1, 1, -1, 1, 1, -1]


def test_most_signs_decide_and_a_tie_moves_nothing():
    def reply(delta: list[float], covered: list[bool] | None = None) -> Reply:
        mask = {"w": torch.tensor(covered)} if covered else {}
        return Reply(0, 1, {"w": torch.tensor(delta)}, mask, {}, Outcome(0))

    told = [
        reply([1.0, 1.0, -1.0, 0.0]),
        reply([1.0, -1.0, -1.0, 1.0]),
        reply([-1.0, 0.0, 1.0, 1.0], [True, True, False, True]),
    ]
    assert take_majority_vote("w", told).tolist() == [1.0, 0.0, -1.0, 1.0]


def test_signsgd_moves_every_weight_by_its_rate():
    loop, net = build_tiny_run(compose([SignSGD(0.125)]), sizes=(5, 3, 4))
    standing, rows = play_rounds(loop, loop.start(net), 0, 1)
    steps = torch.cat([(standing.params[k] - net.initial[k]).abs().flatten() for k in net.initial])
    torch.testing.assert_close(steps, torch.full_like(steps, 0.125))
    assert rows[0]["bytes_up"] == 3 * (2 + 1 + 1 + 1)


# random-k ---------------------------------------------------------------------------------------------------------
def test_positions_that_both_ends_draw_do_not_travel():
    like = {"w": torch.randn(1000), "b": torch.randn(10)}
    coded, back, memory = sent(like, [RandomK(0.05)])
    assert coded.nbytes == (50 + 1) * 4 and int((back["w"] != 0).sum()) == 50
    _, other, _ = sent(like, [RandomK(0.05)], link=link_of(like, 1))
    assert not torch.equal(other["w"] != 0, back["w"] != 0)


def test_without_feedback_random_k_is_right_on_average():
    value = torch.linspace(-1, 1, 20, dtype=torch.float64)
    backs = [sent({"w": value}, [RandomK(0.25, False)], link=link_of({"w": value}, r))[1]["w"] for r in range(3000)]
    torch.testing.assert_close(torch.stack(backs).mean(0), value, atol=0.15, rtol=0)


def test_every_element_is_drawn_equally_often():
    generator = torch.Generator().manual_seed(0)
    counts = torch.bincount(torch.cat([draw_positions(20, 0.25, generator) for _ in range(4000)]), minlength=20)
    assert counts.sum() == 20_000 and ((counts - 1000).abs() < 130).all()


# one behind the other ---------------------------------------------------------------------------------------------
def test_a_quantiser_codes_what_a_sparsifier_left():
    like = {"w": torch.randn(1000)}
    coded, back, _ = sent(like, [TopK(0.1, positions="32"), FedPAQ()])
    assert coded.nbytes == 100 * (4 + 1) + 4 and int((back["w"] != 0).sum()) <= 100
    assert ((back["w"] - like["w"]).abs() <= like["w"].abs().max() / 127 + like["w"].abs() * (back["w"] == 0)).all()


@pytest.mark.parametrize("codecs", CHAINS, ids=lambda c: "+".join(map(str, c)))
def test_codecs_stand_behind_each_other_and_behind_plans_and_rows(codecs: list[Part]):
    for before in ([], [DropRows()], [HalfWidth()], [HalfWidth(), DropRows()]):
        loop, net = build_tiny_run(compose([*before, *codecs]))
        standing, rows = play_rounds(loop, loop.start(net), 0, 3)
        assert tree.is_tree_finite(standing.params) and not any(row.get("void") or row.get("dropped") for row in rows)
        assert not tree.is_same_tree(standing.params, net.initial)


def test_what_a_sparsifier_leaves_out_is_covered_and_what_a_plan_leaves_out_is_not():
    like = {"w": torch.arange(12.0).view(4, 3)}
    link = link_of(like, 0, Plan({"a": torch.tensor([0, 2])}), (AXIS,))
    coded, _, _ = sent(like, [TopK(0.1), FedPAQ()], link=link)
    message = wire.decode_message(coded, [TopK(0.1), FedPAQ()], link)
    values, covered, _ = wire.unpack_message(message, like, link.plan, link.slicer)
    assert covered["w"].tolist() == [[True] * 3, [False] * 3, [True] * 3, [False] * 3]
    assert values["w"].flatten().nonzero().flatten().tolist() == [8]


@dataclass(frozen=True, eq=False)
class Told(CodecLink):
    """A link that says which tensors are trained."""

    trained: frozenset[str] | None = None


@pytest.mark.parametrize("codec", [TopK(), DGC(), STC(), FedPAQ(), RandomK(feedback=False), SignSGD()], ids=str)
def test_running_statistics_travel_as_they_are(codec: Part):
    like = {"w": torch.randn(100), "running": torch.randn(100)}
    link = Told("up", 0, 0, WHOLE_MODEL, Slicer((), like), RandomStreams(0), like, trained=frozenset({"w"}))
    coded, back, _ = sent(like, [codec], link=link)
    assert torch.equal(back["running"], like["running"]) and coded.body["w"]["value"].nbytes < 400


@pytest.mark.parametrize("codec", FEEDBACK, ids=str)
def test_what_is_owed_is_cut_when_the_model_is(codec: Part):
    loop, net = build_tiny_run(compose([CutOnce(), codec]))
    standing, rows = play_rounds(loop, loop.start(net), 0, 3)
    owed = loop.host.memory.get(0)[codec.name()][OWED[codec.name()]]
    assert {k: v.shape for k, v in owed.items()} == {k: v.shape for k, v in standing.params.items()}
    assert owed["a.weight"].shape == (2, 4) and not any(row.get("void") for row in rows)


# bad values -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(positions="16"),
        lambda: DGC(momentum=1.0),
        lambda: DGC(clip=-1.0),
        lambda: DGC(warmup="30,20"),
        lambda: DGC(warmup="a"),
        lambda: DGC(warmup="0,5"),
        lambda: STC(0.0),
        lambda: STC(positions="8"),
        lambda: FedPAQ(7),
        lambda: Half("float8"),
        lambda: RandomK(0.0),
        lambda: SignSGD(0.0),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="needs"):
        make()


# in a run ---------------------------------------------------------------------------------------------------------
SMALL = {"data": "digits", "devices": 10, "sample": 5, "seed": 1}


def run(method: str, rounds: int = 5) -> list[dict]:
    return shoal.run(method=method, rounds=rounds, **SMALL).history.rows


@pytest.fixture(scope="module")
def plain() -> list[dict]:
    return run("fedavg")


SHARES = {
    "dgc(ratio=0.05)": 0.25 * 3,
    "dgc(ratio=0.05, warmup='')": 0.05 * 3,
    "topk(ratio=0.05)": 0.05 * 1.2,
    "stc(ratio=0.05)": 0.05 * 2.03,
    "randomk(ratio=0.1)": 0.1,
    "fedpaq": 0.25,
    "half": 0.5,
    "signsgd": 1 / 32,
    "topk(ratio=0.1)+fedpaq": 0.1 * 0.41,
}
"""What is sent up of what FedAvg sends, apart from what is rounded up in small tensors."""


@pytest.mark.parametrize("method", SHARES)
def test_a_real_run_sends_less_and_learns(method: str, plain: list[dict]):
    rows = run(method)
    ratio = sum(r["bytes_up"] for r in rows) / sum(r["bytes_up"] for r in plain)
    assert 0.97 * SHARES[method] < ratio < 1.08 * SHARES[method]
    assert [r["bytes_down"] for r in rows] == [r["bytes_down"] for r in plain]
    assert rows[-1]["loss"] < rows[0]["loss"]


PAIRS = [
    "fjord+dgc(ratio=0.1)",
    "afd+dgc(ratio=0.1)",
    "fedad+stc(ratio=0.1)",
    "scaffold+topk",
    "feddrop+topk(ratio=0.1)+fedpaq",
    "heterofl+topk+half",
]


@pytest.mark.parametrize("method", PAIRS)
def test_codecs_go_with_sub_models(method: str):
    plain = run(method.split("+")[0], 4)
    rows = run(method, 4)
    assert sum(r["bytes_up"] for r in rows) < sum(r["bytes_up"] for r in plain)
    assert rows[-1]["loss"] < rows[0]["loss"] and not any(r.get("void") or r.get("dropped") for r in rows)

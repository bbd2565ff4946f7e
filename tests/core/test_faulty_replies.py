"""One device may answer what it likes: the run goes on, and where it was not heard, as if it had been away."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.expression import parse_method
from shoal.core.extras import Extra
from shoal.core.ledger import Row
from shoal.core.local.device import TrainingSetup
from shoal.core.model import tree
from shoal.core.model.flops import FlopCache
from shoal.core.part import Part
from shoal.core.round import Loop
from shoal.core.server_state import ServerState
from shoal.core.session import train_jobs
from shoal.core.types import Outcome
from shoal.engines.host import LocalDevices
from shoal.engines.serial import SerialEngine
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.smoke_run import build_tiny_run
from shoal.remote.engine import RemoteDevices, RemoteEngine
from shoal.remote.messages import TrainRequest, reply_to_bytes
from shoal.remote.tree_bytes import tree_from_bytes, tree_to_bytes
from shoal.storage.memory import DeviceMemory
from shoal.testing.hosts import RecordingHost
from shoal.testing.rounds import play_rounds

MOST = 1 << 24
Answer = dict[str, Any]
Tamper = Callable[[int, int, Answer], Answer | str]
"""(device, round, the honest answer) -> what is sent instead, or why there is none; enrolment is round -1."""
METHODS = [
    *find_shipped_parts(),
    *PRESETS,
    "feddh(lr_b=1.0, gradient_from='client_grad')",
    "fedad(check=1, force=0, direction='literal')",
    "fedap(at=2)",
    "fedacd(lam=0.5, cadence='round', reduce='sum')",
    "prunefl(rate=0.3, every=1, change=0.5, half_life=2)",
    "feddst(sparsity=0.5, alpha=0.5, every=1)",
    "topk(ratio=0.3, positions='golomb')",
    "dgc(ratio=0.3, momentum=0.5, positions='auto')",
    "stc(ratio=0.3, positions='auto', down=True)",
    "fedbiad(rate=0.4, window=1, combining='fill')",
    "scaffold+fedpaq+topk",
]


ROUNDS, STRIDE = 16, 7
"""At most so many answers are altered for each method; the stride mixes places and kinds where there are more."""


def talks(text: str) -> bool:
    """Whether devices send anything but the change of their model."""
    parts = parse_method(text, find_shipped_parts(), PRESETS).parts
    return any(p.acts_at("measure") or p.acts_at("enrol") or p.stage for p in parts)


class Elsewhere:
    """Devices behind a wire: they read orders and write answers as bytes, and remember what they did."""

    def __init__(self, site: TrainingSetup, tamper: Tamper):
        self.site, self.tamper = site, tamper
        self.memories: dict[tuple[int, int], Any] = {}
        self.pruned: dict[int, TrainingSetup] = {0: site}
        """The site by how often the model was pruned."""

    def exchange(self, questions: Mapping[int, bytes], kind: str, seconds: float) -> Iterator[tuple[int, bytes | str]]:
        for device, question in questions.items():
            answer = self.enrolled(question) if kind == "enrol" else self.trained(question)
            found = self.tamper(device, answer["stamp"]["round"], answer)
            yield device, found if isinstance(found, str) else tree_to_bytes(found)

    def enrolled(self, question: bytes) -> Answer:
        stamp = tree_from_bytes(question, MOST)["stamp"]
        device = stamp["device"]
        return {"stamp": stamp, "size": len(self.site.samples(device)), "card": self.site.enrol(device)}

    def trained(self, question: bytes) -> Answer:
        order, memory, held = TrainRequest.from_bytes(question, MOST), DeviceMemory(), None
        device = order.stamp.device
        for number, cut in enumerate((*order.cuts, None)):
            if order.since and number == order.since[1]:
                held = self.memories[device, order.since[0]]
            if cut is not None:
                site = self.pruned[number]
                held = held and site.net.slicer.cut_tree(held, cut)
                self.pruned.setdefault(number + 1, replace(site, net=site.net.cut(cut), tally=FlopCache()))
        if held:
            memory.held[device] = held
        host = LocalDevices(self.pruned[len(order.cuts)], memory, SerialEngine())
        [outcome] = train_jobs(host, [order.job])
        memory.commit(order.stamp.round)
        self.memories[device, order.stamp.round] = memory.held.get(device)
        return tree_from_bytes(reply_to_bytes(order.stamp, outcome, device in memory.held), MOST)


def federation(method: Method, sizes: tuple[int, ...], tamper: Tamper) -> tuple[Loop, ServerState]:
    """A tiny run with devices that are elsewhere, before its first round."""
    loop, net = build_tiny_run(method, sizes)
    site = loop.host.setup
    remote = RemoteEngine(Elsewhere(site, tamper), "run", {}, 60.0, 1e6)
    distant = RemoteDevices(site, DeviceMemory(), remote)
    there = distant.ask_sample_counts(range(len(sizes)))
    loop = replace(loop, host=distant, sizes=loop.sizes * [d in there for d in range(len(sizes))])
    return loop, loop.start(net)


def honest(device: int, round: int, answer: Answer) -> Answer:
    return answer


# what a device may say instead ----------------------------------------------------------------------------------------
def doubled(t: Tensor) -> Tensor:
    return torch.cat((t.reshape(1, *t.shape),) * 2) if t.dim() == 0 else torch.cat((t, t))


ODD: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda t: torch.ones((), dtype=t.dtype),
    "longer": doubled,
    "flat": lambda t: t.flatten()[:1],
    "empty": lambda t: t.flatten()[:0],
    "zero": torch.zeros_like,
    "negative": lambda t: -t.abs() - 1 if t.dtype.is_signed else ~t,
    "huge": lambda t: torch.full_like(t, 1e3 if t.is_floating_point() else torch.iinfo(t.dtype).max),
    "other type": lambda t: t.long() if t.is_floating_point() else t.float(),
    "a number": lambda t: 1,
    "a dict": lambda t: {"x": t},
    "missing": lambda t: None,
}
WELL_FORMED = {"zero", "negative", "huge"}
"""A model of the right form that is wrong is no business of these tests: robust rules are there for that."""


def places(node: Mapping[str, Any], way: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where a tree has tensors, and the dicts above them; of the tensors in one dict, the first two."""
    for number, (name, below) in enumerate(node.items()):
        if isinstance(below, Mapping):
            if way:
                yield (*way, name)
            yield from places(below, (*way, name))
        elif number < 2:
            yield (*way, name)


def altered(answer: Answer, way: tuple[str, ...], odd: Callable[[Tensor], Any]) -> Answer:
    """The same answer with something else in one place."""
    name, *rest = way
    below = answer[name]
    if rest:
        return answer | {name: altered(below, tuple(rest), odd)}
    made = odd(below if isinstance(below, Tensor) else torch.ones(()))
    return {k: v for k, v in answer.items() if k != name} if made is None else answer | {name: made}


def alterations(answer: Answer) -> list[tuple[tuple[str, ...], str]]:
    """All that is tried: each place of what lies beside the model, the codecs' own entries, and what was counted."""
    ways = [("beside", *way) for way in places(answer["beside"])]
    every = [(way, odd) for way in ways for odd in ODD]
    entries = [(name, list(entry)) for name, entry in answer["body"].items()][:2]
    every += [
        (("body", name, key), odd) for name, keys in entries for key in keys for odd in ODD if odd not in WELL_FORMED
    ]
    every += [(("beside",), "extra"), (("numbers",), "0"), (("numbers",), "1")]
    return [every[(i * STRIDE) % len(every)] for i in range(len(every))] if len(every) % STRIDE else every


class Liar:
    """One device that says something else in every round, through all that can be altered."""

    def __init__(self, device: int):
        self.device, self.tried, self.said = device, dict[tuple, int](), list[str]()

    def __call__(self, device: int, round: int, answer: Answer) -> Answer:
        if device != self.device or round < 0:
            return answer
        way, odd = min(alterations(answer), key=lambda what: self.tried.get(what, 0))
        self.tried[way, odd] = self.tried.get((way, odd), 0) + 1
        self.said.append(f"{'/'.join(way)} {odd}")
        if way == ("numbers",):
            counts = {k: v if k == "loss" else (2**50 if odd == "1" else 0) for k, v in answer["numbers"].items()}
            return answer | {"numbers": counts | {"loss": 3e38 if odd == "1" else 0.0}}
        if odd == "extra":
            return answer | {"beside": answer["beside"] | {"stranger": {"x": torch.ones(3)}}}
        return altered(answer, way, ODD[odd])


CASES = [
    *((text, (5, 3, 4)) for text in METHODS if text not in PRESETS),
    *(pytest.param(text, (5, 3, 4), marks=pytest.mark.whole) for text in PRESETS),
    *(pytest.param(text, (4, 5), marks=pytest.mark.whole) for text in METHODS if talks(text)),
]


@pytest.mark.parametrize(("text", "sizes"), CASES, ids=lambda case: case if isinstance(case, str) else len(case))
def test_no_answer_ends_a_run_or_is_half_used(text, sizes):
    """Where the liar was not heard, the model and all states are those of a run in which it was away."""
    method = parse_method(text, find_shipped_parts(), PRESETS)
    liar = Liar(device=1)
    loop, first = federation(method, sizes, liar)
    last, rows, number = first, [], 0
    while number < 5 or (liar.tried and max(liar.tried.values()) < 2 and number < ROUNDS):
        last, more = play_rounds(loop, last, number, number + 1)
        rows += more
        number += 1
    heard = [all(gone["device"] != 1 for gone in row.get("dropped", ())) for row in rows]
    others = [gone for row in rows for gone in row.get("dropped", ()) if gone["device"] != 1]
    assert not others, (others, liar.said)

    again = Liar(device=1)

    def away(device: int, round: int, answer: Answer) -> Answer | str:
        said = again(device, round, answer)
        return "it was away" if device == 1 and round >= 0 and not heard[round] else said

    loop, first = federation(method, sizes, away)
    expected, _ = play_rounds(loop, first, 0, len(rows))
    assert tree.is_same_tree([last.params, last.states], [expected.params, expected.states])


CARDS: dict[str, Callable[[Tensor], Any]] = ODD | {"text": lambda t: "labels", "far too many": lambda t: t * 10**6}


@pytest.mark.parametrize("odd", CARDS)
@pytest.mark.parametrize("sizes", [(5, 3, 4), (4, 5)], ids=len)
@pytest.mark.parametrize("text", ["feddh", "feddu", "fedap(at=2)"])
def test_no_card_ends_a_run(text, sizes, odd):
    """What a device tells at first contact is an answer too; with it or without its device, rounds are played."""

    def tamper(device: int, round: int, answer: Answer) -> Answer:
        return altered(answer, ("card", "labels"), CARDS[odd]) if device == 1 and round < 0 else answer

    loop, first = federation(parse_method(text, find_shipped_parts(), PRESETS), sizes, tamper)
    last, rows = play_rounds(loop, first, 0, 3)
    assert not any(row.get("void") for row in rows) and tree.is_tree_finite([last.params, last.states])
    assert all(gone["device"] == 1 for row in rows for gone in row.get("dropped", ()))


def test_labels_count_no_more_than_the_samples_they_belong_to():
    def tamper(device: int, round: int, answer: Answer) -> Answer:
        return altered(answer, ("card", "labels"), lambda t: t * 10**6) if device == 1 and round < 0 else answer

    told = [
        federation(parse_method("feddh", find_shipped_parts(), PRESETS), (5, 3, 4), t)[1].states["feddh"]
        for t in (honest, tamper)
    ]
    for one, other in zip(*(state["labels"].values() for state in told)):
        torch.testing.assert_close(one, other)


def test_a_device_that_never_introduces_itself_is_left_out():
    """Also where the method must know everybody, as after a restart of the server with a device gone."""

    def tamper(device: int, round: int, answer: Answer) -> Answer | str:
        return "it was late" if device == 1 else answer

    loop, net = build_tiny_run(compose([Asks()]), (5, 3, 4))
    site = loop.host.setup
    loop = replace(
        loop, host=RemoteDevices(site, DeviceMemory(), RemoteEngine(Elsewhere(site, tamper), "run", {}, 60.0, 1e6))
    )
    _, rows = play_rounds(loop, loop.start(net), 0, 2)
    assert [row["devices"] for row in rows] == [[0, 2], [0, 2]]


@dataclass(frozen=True)
class Asks(Part):
    """Wants to know every device, before the first round and before each one."""

    def init_server(self, round):
        return {"known": sorted(round.roster.fetch_cards([int(d) for d in round.eligible]))}

    def select(self, devices, state, round):
        round.roster.fetch_cards([int(d) for d in round.eligible])
        return devices, state


@dataclass(frozen=True)
class Remembers(Part):
    """Reports how often it was visited, by its own memory, and breaks on what it does not expect."""

    def begin(self, params, memory, device):
        return params, {"visits": memory.get("visits", torch.zeros(())) + 1}

    def end(self, params, state, memory, device):
        return params, {"visits": state["visits"]}

    def measure(self, params, state, device):
        return {"visits": state["visits"]}

    def serve(self, params, state, round):
        visits = [reply.report[self.name()]["visits"] for reply in round.replies]
        return params, {"total": torch.stack(visits).sum()}


@dataclass(frozen=True)
class BreaksAlways(Part):
    def serve(self, params, state, round):
        raise OSError("no such luck")


def simulated(part: Part, sizes: tuple[int, ...], tamper: Tamper) -> tuple[Loop, ServerState, list[Row]]:
    """Three rounds of a simulation in which one answer is exchanged."""
    loop, net = build_tiny_run(compose([part]), sizes)

    def exchange_answers(outcomes: list[Outcome]) -> list[Outcome]:
        number, messages = len(spy.jobs) - 1, [outcome.message for outcome in outcomes]
        said: list[Any] = [tamper(o.device, number, {"beside": m.beside}) for o, m in zip(outcomes, messages) if m]
        return [replace(o, message=replace(m, beside=s["beside"])) for o, m, s in zip(outcomes, messages, said) if m]

    spy = RecordingHost(loop.host, exchange_answers)
    loop = replace(loop, host=spy)
    standing, rows = play_rounds(loop, loop.start(net), 0, 3)
    return loop, standing, rows


def test_in_a_simulation_one_answer_costs_one_device_the_round_and_what_it_remembers_of_it(caplog):
    def tamper(device: int, round: int, answer: Answer) -> Answer:
        return altered(answer, ("beside", "remembers", "visits"), doubled) if (device, round) == (1, 1) else answer

    loop, standing, rows = simulated(Remembers(), (5, 3, 4), tamper)
    [[gone]] = [row["dropped"] for row in rows if "dropped" in row]
    assert gone["device"] == 1 and gone["why"].startswith(
        "its answer cannot be used by remembers at serve (RuntimeError"
    )
    assert [int(loop.host.memory.get(d)["remembers"]["visits"]) for d in range(3)] == [3, 2, 3]
    assert int(standing.states["remembers"]["total"]) == 3 + 2 + 3
    assert "device 1, round 1: its answer cannot be used" in caplog.text


@dataclass(frozen=True)
class Steers(Part):
    """Lets devices say how the next selection is made: what one says is used a round later."""

    def init_server(self, round):
        return {"stride": torch.tensor(1)}

    def select(self, devices, state, round):
        return devices[:: int(state["stride"])], state

    def measure(self, params, state, device):
        return {"stride": torch.tensor(1)}

    def declare_extras(self, net, plan):
        return {"stride": Extra(kind="int")}

    def serve(self, params, state, round):
        return params, {"stride": torch.stack([r.report["steers"]["stride"] for r in round.replies]).min()}


def test_an_answer_cannot_spoil_the_next_round_either():
    """Before anything of it is kept: a checkpoint with it would end the run again after every restart."""

    def tamper(device: int, round: int, answer: Answer) -> Answer:
        return (
            altered(answer, ("beside", "steers", "stride"), torch.zeros_like) if device == 1 and round >= 0 else answer
        )

    loop, first = federation(compose([Steers()]), (5, 3, 4), tamper)
    last, rows = play_rounds(loop, first, 0, 3)
    assert [row["dropped"][0]["device"] for row in rows] == [1, 1, 1] and int(last.states["steers"]["stride"]) == 1
    assert "steers at select (ValueError" in rows[0]["dropped"][0]["why"]


def test_where_nobody_is_to_blame_the_part_is():
    with pytest.raises(OSError, match="no such luck"):
        simulated(BreaksAlways(), (5, 3, 4), honest)
    loop, first = federation(compose([BreaksAlways()]), (5, 3, 4), honest)
    with pytest.raises(OSError, match="no such luck"):
        play_rounds(loop, first, 0, 1)


def test_a_device_alone_cannot_end_a_run_either():
    def tamper(device: int, round: int, answer: Answer) -> Answer:
        return altered(answer, ("beside", "fednova", "steps"), torch.zeros_like) if round == 0 else answer

    loop, first = federation(compose([find_shipped_parts()["fednova"]()]), (5,), tamper)
    _, rows = play_rounds(loop, first, 0, 2)
    assert rows[0]["void"] and "void" not in rows[1]
    assert rows[0]["dropped"][0]["why"] == (
        "its extras for fednova are not as declared: 'steps': it has numbers outside 1 to 1e+18"
    )


def test_a_part_that_does_not_declare_what_it_sends_is_refused_with_real_devices():
    with pytest.raises(ShoalError, match="remembers does not declare what it sends at measure") as error:
        federation(compose([Remembers()]), (5, 3), honest)
    assert error.value.kind.name == "bad-part" and "declare_extras" in error.value.advice


def test_what_is_told_of_an_answer_holds_no_text_of_its_device():
    name = "\x1b[2J\nevil"

    def tamper(device: int, round: int, answer: Answer) -> Answer:
        return answer | {"beside": {"scaffold": {"change": {name: torch.ones(1)}}}} if device == 1 else answer

    loop, first = federation(compose([find_shipped_parts()["scaffold"]()]), (4, 5), tamper)
    _, [row] = play_rounds(loop, first, 0, 1)
    assert row["dropped"][0]["device"] == 1 and row["dropped"][0]["why"].isprintable()


def test_a_server_that_fails_for_another_reason_says_so():
    """What is raised with every answer is raised: here, by a server that has nothing to train on."""
    loop, net = build_tiny_run(parse_method("feddu", find_shipped_parts(), PRESETS))
    with pytest.raises(ShoalError, match="needs samples|trains on"):
        replace(loop, server=None).start(net)

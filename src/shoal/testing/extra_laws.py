"""Laws 9 and 10: parts read on the server what they declare, and survive whatever devices send instead."""

from dataclasses import replace

from shoal.core.compose import Method
from shoal.core.extra_checks import get_declared_card, get_declared_extras
from shoal.core.model import tree
from shoal.core.part import Part
from shoal.core.types import Job, Outcome
from shoal.plugins.smoke_run import (
    build_tiny_run,
)
from shoal.testing.hosts import TamperingHost
from shoal.testing.read_spies import spy_on_part
from shoal.testing.rounds import ROUNDS, play_rounds
from shoal.testing.wrong_extras import list_wrong_extras

SIZES_WITH_LIARS = (5, *(2,) * 10, 4)
LIARS = range(1, 11)
"""Samples of the devices, and those of them that send wrong extras, where a law is about these."""


def check_reads_are_declared(part: Part, *other_settings: Part) -> None:
    """Law 9: on the server a part reads what it declares, and nothing else, of single devices.

    With other settings of the part, all that it declares must be read at one of them.
    """
    everything: set[str] = set()
    for setting in (part, *other_settings):
        seen: set[str] = set()
        loop, net = build_tiny_run(Method((spy_on_part(setting, seen),)))
        play_rounds(loop, loop.start(net), 0, ROUNDS)
        assert seen <= part.reads, f"{setting} reads {', '.join(sorted(seen - part.reads))} and does not declare it"
        everything |= seen
    never = sorted(part.reads - everything)
    assert not other_settings or not never, f"{part} declares that it reads {', '.join(never)}, and never does"


def check_survives_wrong_extras(part: Part) -> None:
    """Law 10: a device whose extras are not as declared is left out of the round, which goes on without it.

    Most devices send something wrong in every round, each something else. The model and all states are those of a run
    in which they never answer.
    """
    if not part.acts_at("measure") or not part.acts_at("declare_extras"):
        return
    name, tried = part.name(), set[str]()

    def spoil_extras(job: Job, outcome: Outcome) -> Outcome:
        message = outcome.message
        if job.device not in LIARS or message is None:
            return outcome
        declared = get_declared_extras(part, loop.host.setup.net, job.plan) or {}
        wrong = dict(list_wrong_extras(message.beside.get(name, {}), declared))
        words = next((words for words in wrong if words not in tried), "a name too many")
        tried.add(words)
        return replace(outcome, message=replace(message, beside=message.beside | {name: wrong[words]}), finite=False)

    def stay_silent(job: Job, outcome: Outcome) -> Outcome:
        return Outcome(job.device, problem="it was away") if job.device in LIARS else outcome

    ends = []
    for tamper in (spoil_extras, stay_silent):
        loop, net = build_tiny_run(Method((part,)), SIZES_WITH_LIARS)
        loop = replace(loop, host=TamperingHost(loop.host, tamper))
        server_state, rows = play_rounds(loop, loop.start(net), 0, ROUNDS)
        ends.append([server_state.params, server_state.states])
        for row in rows:
            dropped = {gone["device"]: gone["why"] for gone in row.get("dropped", [])}
            heard = [device for device in LIARS if device not in dropped]
            assert not heard, f"{part}: wrong extras of device {heard[0]} are used in round {row['round']}"
    assert tree.is_same_tree(*ends), f"{part}: wrong extras leave a trace"


def check_survives_wrong_cards(part: Part) -> None:
    """Law 10: an enrolment card that is not as declared counts as none, and the run goes on."""
    loop, net = build_tiny_run(Method((part,)), SIZES_WITH_LIARS)
    declared = get_declared_card(part, net)
    if not declared:
        return
    wrong_cards = [card for _, card in list_wrong_extras(loop.host.setup.enrol(1), declared)]
    ends = []
    for cards in (dict(zip(LIARS, wrong_cards)), dict.fromkeys(range(1, 1 + len(wrong_cards)))):
        loop, net = build_tiny_run(Method((part,)), SIZES_WITH_LIARS)
        loop = replace(loop, host=TamperingHost(loop.host, lambda job, outcome: outcome, cards))
        server_state, _ = play_rounds(loop, loop.start(net), 0, ROUNDS)
        ends.append([server_state.params, server_state.states])
    assert tree.is_same_tree(*ends), f"{part}: a wrong enrolment card leaves a trace"

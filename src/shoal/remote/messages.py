"""What a server and a device write to each other: a job and its answer, checked field by field before use."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Tree
from shoal.core.types import Job, Outcome, Work
from shoal.core.wire import Message
from shoal.remote.tree_bytes import is_finite_and_bounded, make_message_error, tree_from_bytes, tree_to_bytes

REPLY_SLACK_BYTES = 1 << 16
"""Bytes that a reply may have beside what a model accounts for."""
MAX_MODEL_MULTIPLE = 4
"""How many times a model's own bytes a reply may have: values, their places, and what parts send beside."""

DEVICE_PROBLEMS = {
    "data": "its data are missing or do not fit",
    "disk": "its disk is full or out of reach",
    "memory": "it has lost what it remembered",
    "unread": "it could not read what it was sent",
    "time": "its time was up",
    "not-finite": "its update is not finite",
    "failed": "its program failed",
}
"""All that a device may say about what went wrong; no text of its own ever travels."""


@dataclass(frozen=True)
class RequestStamp:
    """Which question an answer belongs to; it is sent back as it came."""

    run: str
    round: int
    device: int
    nonce: str

    def __post_init__(self):
        """Devices name a folder after the run, so it must not lead anywhere else."""
        words, numbers = (self.run, self.nonce), (self.round, self.device)
        if not all(isinstance(w, str) and w.isascii() and w.isalnum() for w in words):
            raise make_message_error("is stamped with something else than letters and digits")
        if not all(type(n) is int and -1 <= n < 2**31 for n in numbers):
            raise make_message_error("is stamped with numbers that cannot be")


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A job with everything that a device needs for it."""

    stamp: RequestStamp
    setup: dict[str, Any]
    """What all devices of a run have in common."""
    job: Job
    cuts: tuple[Plan, ...]
    """How the model was pruned so far."""
    since: tuple[int, int] | None
    """The round that the device's memory is to be of, and how often the model had been pruned then."""
    seconds: float

    def to_bytes(self) -> bytes:
        job = self.job
        told = {"work": asdict(job.work), "plan": plan_to_dict(job.plan)}
        return tree_to_bytes(
            {
                "stamp": asdict(self.stamp),
                "setup": self.setup,
                "job": told | {"body": job.message.body, "beside": job.message.beside},
                "cuts": [plan_to_dict(cut) for cut in self.cuts],
                "since": None if self.since is None else list(self.since),
                "seconds": self.seconds,
            }
        )

    @classmethod
    def from_bytes(cls, content: bytes, most: int) -> "TrainRequest":
        """The other way, on the device."""
        found = tree_from_bytes(content, most)
        try:
            stamp, job = RequestStamp(**found["stamp"]), found["job"]
            message = Message(job["body"], job["beside"])
            own = Job(stamp.device, stamp.round, plan_from_dict(job["plan"]), message, Work(**job["work"]))
            since = None if found["since"] is None else (int(found["since"][0]), int(found["since"][1]))
            cuts = tuple(plan_from_dict(cut) for cut in found["cuts"])
            return cls(stamp, dict(found["setup"]), own, cuts, since, float(found["seconds"]))
        except (LookupError, TypeError, ValueError) as error:
            raise make_message_error("is no order") from error


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    sent = None if plan.sent is None else sorted(plan.sent)
    return {"kept": dict(plan.kept), "masks": dict(plan.masks), "sent": sent, "known": plan.known, "level": plan.level}


def plan_from_dict(told: Mapping[str, Any]) -> Plan:
    sent = None if told["sent"] is None else frozenset(told["sent"])
    return Plan(told["kept"], told["masks"], sent, bool(told["known"]), bool(told["level"]))


def reply_to_bytes(stamp: RequestStamp, outcome: Outcome, remembers: bool) -> bytes:
    """A device's answer to an order, and whether it remembers anything of it."""
    if outcome.message is None:
        return problem_to_bytes(stamp, "not-finite")
    numbers = {k: getattr(outcome, k) for k in ("steps", "samples", "loss", "macs_forward", "macs_work")}
    content = {"body": outcome.message.body, "beside": outcome.message.beside}
    return tree_to_bytes({"stamp": asdict(stamp), "numbers": numbers, "remembers": remembers} | content)


def problem_to_bytes(stamp: RequestStamp, code: str) -> bytes:
    """An answer that says why there is none."""
    return tree_to_bytes({"stamp": asdict(stamp), "problem": code})


def compute_max_reply_bytes(net: Net) -> int:
    """The most bytes that an answer about this model may have."""
    return MAX_MODEL_MULTIPLE * tree.count_tree_bytes(net.initial) + REPLY_SLACK_BYTES * (1 + len(net.initial))


def read_reply_bytes(
    content: bytes, stamp: RequestStamp, job: Job, net: Net, coded: bool, bound: float
) -> tuple[Outcome, bool]:
    """What a device's answer says, and whether it remembers; anything that the job does not account for is refused.

    `coded` says that codecs will read the body, which check for themselves; otherwise it must be the plan's slice.
    """
    found = tree_from_bytes(content, compute_max_reply_bytes(net))
    if not isinstance(found, dict) or found.get("stamp") != asdict(stamp):
        raise make_message_error("answers another question")
    if "problem" in found:
        if found["problem"] not in tuple(DEVICE_PROBLEMS):
            raise make_message_error("has an unknown excuse")
        return Outcome(job.device, problem=DEVICE_PROBLEMS[found["problem"]]), False
    if set(found) != {"stamp", "numbers", "remembers", "body", "beside"} or type(found["remembers"]) is not bool:
        raise make_message_error("has other parts than an answer")
    body, beside, numbers = found["body"], found["beside"], found["numbers"]
    check_reply_body(body, job, net, coded)
    check_reply_extras(beside, job, net)
    if not is_finite_and_bounded([body, beside], bound):
        raise make_message_error("has numbers that are not finite or too large")
    return Outcome(job.device, Message(body, beside), **check_counts(numbers)), found["remembers"]


def check_counts(numbers: Any) -> dict[str, Any]:
    """What a device counted, each within reason."""
    whole = ("steps", "samples", "macs_forward", "macs_work")
    if not isinstance(numbers, dict) or set(numbers) != {*whole, "loss"}:
        raise make_message_error("does not tell what was done")
    if any(type(numbers[k]) is not int or not 0 <= numbers[k] < 2**60 for k in whole):
        raise make_message_error("counts what cannot be")
    if type(numbers["loss"]) is not float or not abs(numbers["loss"]) <= torch.finfo(torch.float32).max:
        raise make_message_error("has a loss that is no number")
    return numbers


def check_reply_body(body: Any, job: Job, net: Net, coded: bool) -> None:
    """The tensors of the model: those that are shared, each as the plan cuts it."""
    like = net.slicer.take({k: net.initial[k] for k in net.names_with_role("shared")}, job.plan)
    if not isinstance(body, dict) or not all(isinstance(entry, dict) for entry in body.values()):
        raise make_message_error("has no values of a model")
    if set(body) - set(like) or (not coded and set(body) != set(like)):
        raise make_message_error("has other tensors than the model")
    for name, entry in body.items():
        if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in entry.items()) or "value" not in entry:
            raise make_message_error(f"has no values for {name}")
        if not coded and (set(entry) != {"value"} or not has_same_form(entry["value"], like[name])):
            raise make_message_error(f"has values of another form for {name}")


def check_reply_extras(beside: Any, job: Job, net: Net) -> None:
    """What parts report: named tensors, and trees of them that are shaped like the model where they use its names."""
    if not isinstance(beside, dict) or not all(isinstance(own, dict) for own in beside.values()):
        raise make_message_error("has reports of nobody")
    like = net.slicer.take(net.initial, job.plan)

    def check_node(node: Any) -> None:
        if isinstance(node, dict):
            if not all(isinstance(k, str) for k in node):
                raise make_message_error("has reports without names")
            if node and net.slicer.names.issuperset(node):
                for name, value in node.items():
                    if not isinstance(value, Tensor) or value.shape != like[name].shape:
                        raise make_message_error(f"has a report of another form for {name}")
                return
            for value in node.values():
                check_node(value)
        elif not isinstance(node, Tensor):
            raise make_message_error("reports what is no tensor")

    check_node(beside)


def has_same_form(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype


def read_enrolment_bytes(content: bytes, stamp: RequestStamp, most: int, largest: int) -> tuple[int, dict[str, Tensor]]:
    """How many samples a device has, and what its parts tell of themselves at first contact."""
    found: Tree = tree_from_bytes(content, most)
    if not isinstance(found, dict) or found.get("stamp") != asdict(stamp):
        raise make_message_error("answers another question")
    if found.get("problem") in DEVICE_PROBLEMS:
        raise make_message_error(f"says that {DEVICE_PROBLEMS[found['problem']]}")
    size, card = found.get("size"), found.get("card")
    if type(size) is not int or not 0 <= size <= largest:
        raise make_message_error("claims more samples than a device may have")
    if not isinstance(card, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in card.items()):
        raise make_message_error("introduces its device with something else than tensors")
    if not is_finite_and_bounded(card, torch.finfo(torch.float32).max):
        raise make_message_error("has numbers that are not finite")
    return size, card

"""Messages between a server and a device: requests and replies as bytes, checked field by field before use."""

from collections.abc import Collection, Mapping
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

MESSAGE_VERSION = 3
"""The version of messages. A request of version 1, which had none, is read; one of a later version is refused.

Devices of versions 1 and 2 passed over what they did not know of a run; those of 3 refuse it.
"""
REPLY_SLACK_BYTES = 1 << 16
"""Bytes that a reply may have beside what a model accounts for."""
MAX_MODEL_MULTIPLE = 4
"""How many times a model's own bytes a reply may have: values, their positions, and the extras of parts."""

DEVICE_PROBLEMS = {
    "data": "its data are missing or do not fit",
    "disk": "its disk is full or out of reach",
    "memory": "it has lost what it remembered",
    "unread": "it could not read what it was sent, perhaps since its shoal is older than the server's",
    "unknown": "it does not know all that the run uses, in its version of shoal or among its parts",
    "time": "its time was up",
    "model": "its frozen tensors are not those of the run",
    "absent": "it does not have the model of the run",
    "not-finite": "its update is not finite",
    "failed": "its program failed",
}
"""The codes by which a device tells what went wrong, and what they mean; no text of a device is ever sent."""


@dataclass(frozen=True)
class RequestStamp:
    """Which request a reply belongs to: the device sends it back unchanged."""

    run: str
    round: int
    device: int
    nonce: str
    version: int = MESSAGE_VERSION

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> "RequestStamp":
        """The stamp of a request; without a version it is of the first, whose replies had none either."""
        return RequestStamp(**dict[str, Any](version=1) | dict(fields))

    def to_dict(self) -> dict[str, Any]:
        """The stamp as it travels, in the form of its version."""
        return {name: value for name, value in asdict(self).items() if name != "version" or self.version > 1}

    def __post_init__(self):
        """Refuse odd values: devices name a folder after `run`, so it must not be a path."""
        words, numbers = (self.run, self.nonce), (self.round, self.device)
        if not all(isinstance(w, str) and w.isascii() and w.isalnum() for w in words):
            raise make_message_error("is stamped with something else than letters and digits")
        if not all(type(n) is int and -1 <= n < 2**31 for n in numbers):
            raise make_message_error("is stamped with numbers that cannot be")
        if type(self.version) is not int or not 1 <= self.version <= MESSAGE_VERSION:
            raise make_message_error(
                f"is of version {str(self.version)[:20]}, and this program reads 1 to {MESSAGE_VERSION}"
            )


UNREAD_STAMP = RequestStamp("unknown", -1, -1, "unknown")
"""What a device answers with in place of the stamp of a request that it cannot read."""


@dataclass(frozen=True, eq=False)
class TrainRequest:
    """A job with everything that a device needs for it."""

    stamp: RequestStamp
    run_description: dict[str, Any]
    """What every device needs to build the model and the method; see `build_run_description`."""
    job: Job
    cuts: tuple[Plan, ...]
    """The plans by which the model was pruned so far."""
    since: tuple[int, int] | None
    """The version of its memory that the device is to use: the round, and how often the model had been pruned."""
    time_limit: float
    """Seconds after which the server does not wait any longer."""

    def to_bytes(self) -> bytes:
        job = self.job
        fields = {"work": asdict(job.work), "plan": plan_to_dict(job.plan)}
        return tree_to_bytes(
            {
                "stamp": self.stamp.to_dict(),
                "setup": self.run_description,
                "job": fields | {"body": job.message.body, "beside": job.message.beside},
                "cuts": [plan_to_dict(cut) for cut in self.cuts],
                "since": None if self.since is None else list(self.since),
                "seconds": self.time_limit,
            }
        )

    @classmethod
    def from_bytes(cls, payload: bytes, max_bytes: int) -> "TrainRequest":
        """The request in some bytes; bytes that hold no request are refused."""
        content = tree_from_bytes(payload, max_bytes)
        try:
            refuse_other_keys(content, ("stamp", "setup", "job", "cuts", "since", "seconds"))
            refuse_other_keys(content["job"], ("work", "plan", "body", "beside"))
            stamp, job = RequestStamp.from_dict(content["stamp"]), content["job"]
            message = Message(job["body"], job["beside"])
            read_job = Job(stamp.device, stamp.round, plan_from_dict(job["plan"]), message, Work(**job["work"]))
            since = None if content["since"] is None else (int(content["since"][0]), int(content["since"][1]))
            cuts = tuple(plan_from_dict(cut) for cut in content["cuts"])
            return cls(stamp, dict(content["setup"]), read_job, cuts, since, float(content["seconds"]))
        except (LookupError, TypeError, ValueError) as error:
            raise make_message_error("is no order") from error


def refuse_other_keys(fields: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse what this version does not know: passed over, it could mean that a device trains in another way."""
    if not set(fields) <= set(known):
        raise make_message_error("has parts that this version does not know")


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    sent = None if plan.sent is None else sorted(plan.sent)
    return {"kept": dict(plan.kept), "masks": dict(plan.masks), "sent": sent, "known": plan.known, "level": plan.level}


def plan_from_dict(fields: Mapping[str, Any]) -> Plan:
    refuse_other_keys(fields, ("kept", "masks", "sent", "known", "level"))
    sent = None if fields["sent"] is None else frozenset(fields["sent"])
    return Plan(fields["kept"], fields["masks"], sent, bool(fields["known"]), bool(fields["level"]))


def reply_to_bytes(stamp: RequestStamp, outcome: Outcome, remembers: bool) -> bytes:
    """A device's reply to a training request; `remembers` says whether it has stored a memory."""
    if outcome.message is None:
        return problem_to_bytes(stamp, "not-finite")
    numbers = {k: getattr(outcome, k) for k in ("steps", "samples", "loss", "macs_forward", "macs_work")}
    tensors = {"body": outcome.message.body, "beside": outcome.message.beside}
    return tree_to_bytes({"stamp": stamp.to_dict(), "numbers": numbers, "remembers": remembers} | tensors)


SCORE_NAMES = ("sum", "count", "loss")
"""What a device tells of its own test, beside its number of samples; see `DeviceScores`."""


@dataclass(frozen=True)
class DeviceTestScore:
    """What a device got on its own test samples: the sum of the metric, over how many targets, the loss, samples."""

    sum: float
    count: float
    loss: float
    samples: int


def score_to_bytes(stamp: RequestStamp, score: DeviceTestScore) -> bytes:
    """A device's reply to a request to test: four numbers, and nothing of its samples or of its model."""
    return tree_to_bytes({"stamp": stamp.to_dict(), "score": asdict(score)})


def decode_score_bytes(
    payload: bytes, stamp: RequestStamp, max_samples: int, max_targets: int, max_value: float
) -> DeviceTestScore:
    """The score in a device's reply; refused unless it can be one of so many samples, targets of each, and values."""
    content = read_stamped_reply(payload, stamp, REPLY_SLACK_BYTES)
    if content.get("problem") in tuple(DEVICE_PROBLEMS):
        raise make_message_error(f"says that {DEVICE_PROBLEMS[content['problem']]}")
    fields = content.get("score")
    if set(content) != {"stamp", "score"} or not isinstance(fields, dict) or set(fields) != {*SCORE_NAMES, "samples"}:
        raise make_message_error("has other parts than a score")
    samples = fields["samples"]
    if type(samples) is not int or not 0 <= samples <= max_samples:
        raise make_message_error("was tested on more samples than its device can have held back")
    bound = torch.finfo(torch.float32).max
    if not all(type(fields[name]) is float and abs(fields[name]) <= bound for name in SCORE_NAMES):
        raise make_message_error("has a score that is no number")
    if not 0 <= fields["count"] <= samples * max_targets or not 0 <= fields["sum"] <= fields["count"] * max_value:
        raise make_message_error("counts what cannot be")
    return DeviceTestScore(**fields)


def problem_to_bytes(stamp: RequestStamp, code: str) -> bytes:
    """A reply with the code of what went wrong in place of a result."""
    return tree_to_bytes({"stamp": stamp.to_dict(), "problem": code})


def read_stamped_reply(payload: bytes, stamp: RequestStamp, max_bytes: int) -> dict[str, Any]:
    """The contents of a reply to the request with this stamp; replies to others, and what is none, are refused.

    A device that cannot read the stamp, such as that of a later version, says so under UNREAD_STAMP.
    """
    content = tree_from_bytes(payload, max_bytes)
    if isinstance(content, dict) and content.get("stamp") == stamp.to_dict():
        return content
    own = content.get("stamp") if isinstance(content, dict) else None
    if isinstance(own, dict) and own | {"version": 1} == vars(UNREAD_STAMP) | {"version": 1}:
        raise make_message_error(f"says that {DEVICE_PROBLEMS['unread']}")
    raise make_message_error("answers another question")


def compute_max_reply_bytes(net: Net) -> int:
    """The most bytes that a reply about this model may have."""
    return MAX_MODEL_MULTIPLE * tree.count_tree_bytes(net.initial) + REPLY_SLACK_BYTES * (1 + len(net.initial))


def decode_reply_bytes(
    payload: bytes, stamp: RequestStamp, job: Job, net: Net, has_codecs: bool, max_norm: float
) -> tuple[Outcome, bool]:
    """The outcome in a device's reply, and whether the device has stored a memory; a reply of another form is refused.

    With `has_codecs` the body is checked by the codecs that decode it; otherwise it must be the plan's slice.
    """
    content = read_stamped_reply(payload, stamp, compute_max_reply_bytes(net))
    if "problem" in content:
        if content["problem"] not in tuple(DEVICE_PROBLEMS):
            raise make_message_error("has an unknown excuse")
        return Outcome(job.device, problem=DEVICE_PROBLEMS[content["problem"]]), False
    if set(content) != {"stamp", "numbers", "remembers", "body", "beside"} or type(content["remembers"]) is not bool:
        raise make_message_error("has other parts than an answer")
    body, beside, numbers = content["body"], content["beside"], content["numbers"]
    check_reply_body(body, job, net, has_codecs)
    check_reply_extras(beside, job, net)
    if not is_finite_and_bounded([body, beside], max_norm):
        raise make_message_error("has numbers that are not finite or too large")
    return Outcome(job.device, Message(body, beside), **check_counts(numbers)), content["remembers"]


def check_counts(numbers: Any) -> dict[str, Any]:
    """The counts and the loss in a reply, if each of them is possible."""
    count_names = ("steps", "samples", "macs_forward", "macs_work")
    if not isinstance(numbers, dict) or set(numbers) != {*count_names, "loss"}:
        raise make_message_error("does not tell what was done")
    if any(type(numbers[k]) is not int or not 0 <= numbers[k] < 2**60 for k in count_names):
        raise make_message_error("counts what cannot be")
    if type(numbers["loss"]) is not float or not abs(numbers["loss"]) <= torch.finfo(torch.float32).max:
        raise make_message_error("has a loss that is no number")
    return numbers


def check_reply_body(body: Any, job: Job, net: Net, has_codecs: bool) -> None:
    """Refuse a body unless it has the shared tensors of the model, each in the shape that the plan gives it."""
    expected = net.slicer.take({k: net.initial[k] for k in net.names_with_role("shared")}, job.plan)
    if not isinstance(body, dict) or not all(isinstance(entry, dict) for entry in body.values()):
        raise make_message_error("has no values of a model")
    if set(body) - set(expected) or (not has_codecs and set(body) != set(expected)):
        raise make_message_error("has other tensors than the model")
    for name, entry in body.items():
        if not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in entry.items()) or "value" not in entry:
            raise make_message_error(f"has no values for {name}")
        if not has_codecs and (set(entry) != {"value"} or not has_same_form(entry["value"], expected[name])):
            raise make_message_error(f"has values of another form for {name}")


def check_reply_extras(extras: Any, job: Job, net: Net) -> None:
    """Refuse extras of parts unless they are trees of named tensors, shaped like the model where they use its names."""
    if not isinstance(extras, dict) or not all(isinstance(entries, dict) for entries in extras.values()):
        raise make_message_error("has reports of nobody")
    expected = net.slicer.take(net.initial, job.plan)

    def check_node(node: Any) -> None:
        if isinstance(node, dict):
            if not all(isinstance(k, str) for k in node):
                raise make_message_error("has reports without names")
            if node and net.slicer.names.issuperset(node):
                for name, value in node.items():
                    if not isinstance(value, Tensor) or value.shape != expected[name].shape:
                        raise make_message_error(f"has a report of another form for {name}")
                return
            for value in node.values():
                check_node(value)
        elif not isinstance(node, Tensor):
            raise make_message_error("reports what is no tensor")

    check_node(extras)


def has_same_form(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype


def read_enrolment_bytes(
    payload: bytes, stamp: RequestStamp, max_bytes: int, max_samples: int
) -> tuple[int, dict[str, Tensor]]:
    """The number of samples that a device claims, and its enrolment card; anything else is refused."""
    content: Tree = read_stamped_reply(payload, stamp, max_bytes)
    if content.get("problem") in tuple(DEVICE_PROBLEMS):
        raise make_message_error(f"says that {DEVICE_PROBLEMS[content['problem']]}")
    size, card = content.get("size"), content.get("card")
    if type(size) is not int or not 0 <= size <= max_samples:
        raise make_message_error("claims more samples than a device may have")
    if not isinstance(card, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in card.items()):
        raise make_message_error("introduces its device with something else than tensors")
    if not is_finite_and_bounded(card, torch.finfo(torch.float32).max):
        raise make_message_error("has numbers that are not finite")
    return size, card

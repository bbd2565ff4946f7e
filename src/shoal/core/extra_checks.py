"""Compares what devices send beside the model, and their enrolment cards, with what the parts of a method declare."""

from typing import Any

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.extras import Declaration, Extra, find_fault
from shoal.core.metric import list_part_metrics
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.part import Part
from shoal.core.telling import TOLD, make_told_key
from shoal.core.types import Job
from shoal.core.wire import Message

FLOAT32_MAX = 3.4e38


def get_declared_extras(part: Part, net: Net, plan: Plan) -> Declaration | None:
    """What a part declares to measure; nothing where it measures nothing, None where it does not say."""
    return part.declare_extras(net, plan) if part.acts_at("measure") else {}


def get_declared_card(part: Part, net: Net) -> Declaration | None:
    """What a part declares to add to an enrolment card; nothing where it adds nothing, None where it does not say."""
    return part.declare_card(net) if part.acts_at("enrol") else {}


def find_reply_fault(method: Method, job: Job, message: Message, net: Net) -> str:
    """Why the extras of a reply cannot be used, in one sentence; "" where they are as their parts declare."""
    asked_to_tell = TOLD in job.message.beside
    for sender in message.beside:
        if sender not in method.names and not (sender == TOLD and asked_to_tell):
            return f"it sends extras for {str(sender)[:40]!r}, which is no part of the method"
    for part in method.parts:
        declared, name = get_declared_extras(part, net, job.plan), part.name()
        if declared is not None and (declared or name in message.beside):
            asked = job.message.beside.get(name, {})
            fault = find_fault(message.beside.get(name, {}), declared, asked, net, job.plan)
            if fault:
                return f"its extras for {name} are not as declared: {fault}"
    if TOLD not in message.beside:
        return ""
    fault = find_fault(message.beside[TOLD], declare_told_numbers(method), (), net, job.plan)
    return f"the numbers that it tells are not as declared: {fault}" if fault else ""


def declare_told_numbers(method: Method) -> Declaration:
    """What devices send where they are asked for the numbers that parts tell on them."""
    columns = {column: metric for column, metric in list_part_metrics(method).items() if metric.on_device}
    number = Extra(kind="float32", low=-FLOAT32_MAX, high=FLOAT32_MAX, optional=True)
    return {make_told_key(*column.rsplit(".", 1)): number for column in columns}


def find_card_fault(method: Method, card: Any, net: Net) -> str:
    """Why an enrolment card cannot be used, in one sentence; "" where it is as the parts of the method declare."""
    parts = method.parts_at("enrol")
    declarations = {part.name(): get_declared_card(part, net) for part in parts}
    known = {name for declared in declarations.values() if declared for name in declared}
    if None not in declarations.values():
        for name in card:
            if name not in known:
                return f"its card has {str(name)[:40]!r}, which no part of the method asks for"
    for name, declared in declarations.items():
        own = {entry: card[entry] for entry in declared or () if entry in card}
        fault = find_fault(own, declared or {}, (), net, WHOLE_MODEL)
        if fault:
            return f"its card is not as {name} declares: {fault}"
    return ""


def require_declarations(method: Method, net: Net) -> None:
    """Refuse a part that sends or adds what it does not declare: answers of real devices could not be checked."""
    for part in method.parts:
        for point, declares, declared in (
            ("measure", "declare_extras", get_declared_extras(part, net, WHOLE_MODEL)),
            ("enrol", "declare_card", get_declared_card(part, net)),
        ):
            if declared is None:
                why = "so that what real devices answer cannot be checked"
                problem = f"The part {part.name()} does not declare what it sends at {point}, {why}."
                raise ShoalError("bad-part", problem, f"Declare it in `{declares}`, or use it in simulations only.")

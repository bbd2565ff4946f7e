"""A guarded copy of a part, which is checked at every point, so that a fault is reported where it happens."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from inspect import signature
from typing import Any, get_origin

from torch import Tensor

from shoal.core.batch import Batch, BatchScore, GradientFunction, Scorer
from shoal.core.errors import ShoalError, describe_error
from shoal.core.extra_checks import get_declared_card, get_declared_extras
from shoal.core.extras import find_fault
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params
from shoal.core.part import POINTS, Part
from shoal.core.return_checks import broken_rule_error, check_params, check_two_values
from shoal.core.types import Device
from shoal.core.wire import pack_message
from shoal.engines.part_faults import describe_line

TREE_FIELDS = (
    "anchor got numbers covered plans devices weights replies delta report kept masks body beside index".split()
)
"""Fields that hold trees, in the arguments of points."""
WITH_STATE = tuple(p for p in POINTS if get_origin(signature(getattr(Part, p)).return_annotation) is tuple)
"""Points that return a value and a state."""


def guard_part(part: Part) -> Part:
    """A copy of a part that is checked at every point: it must not raise, change what it is given, or bend shapes."""
    cls = type(part)

    def make_point_guard(point: str) -> Callable:
        def call_point(self, *args):
            before = [tree.map_tensors(Tensor.clone, extract_trees(a)) for a in args]
            with blame_part(part, point):
                result = getattr(cls, point)(part, *args)
            if not tree.is_same_tree(before, [extract_trees(a) for a in args]):
                advice = "Return new values and leave the old ones alone."
                raise broken_rule_error(part, point, "changes what it is given", advice)
            check_returned_form(part, point, args, result)
            if point == "gradient":
                return guard_gradient(part, result)
            return guard_scorer(part, result) if point == "objective" else result

        return call_point

    points = [p for p in (*POINTS, "init_server", "init_device", "pad_extras", "outline", "taps") if part.acts_at(p)]
    body: dict[str, Any] = {point: make_point_guard(point) for point in points}
    body["name"] = classmethod(lambda _: cls.name())
    kind = type(cls.__name__, (cls,), body)
    return kind(**{f.name: getattr(part, f.name) for f in fields(part)})


def guard_scorer(part: Part, scorer: Scorer) -> Scorer:
    """The scorer that `objective` returned, with a check of what it returns."""

    def call_scorer(params: Params, batch: Batch) -> BatchScore:
        with blame_part(part, "objective"):
            score = scorer(params, batch)
        if not isinstance(score, BatchScore) or score.loss.shape != ():
            shape = (
                f"a loss of shape {tuple(score.loss.shape)}" if isinstance(score, BatchScore) else type(score).__name__
            )
            raise broken_rule_error(
                part, "objective", f"returns {shape}", "Return a BatchScore whose loss is one number."
            )
        if any(value.requires_grad for value in params.values()) and not score.loss.requires_grad:
            advice = "Compute it from `params` by torch operations, without `detach` or `item`."
            raise broken_rule_error(part, "objective", "returns a loss without a gradient", advice)
        return score

    return call_scorer


def guard_gradient(part: Part, compute_gradient: GradientFunction) -> GradientFunction:
    """The gradient function that `gradient` returned, with a check of what it returns."""

    def call_gradient(scorer: Scorer, params: Params, batch: Batch) -> tuple[Params, BatchScore]:
        with blame_part(part, "gradient"):
            returned = compute_gradient(scorer, params, batch)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], BatchScore)):
            advice = "Return the gradient and the score of the batch, as `inner` does."
            raise broken_rule_error(part, "gradient", "does not return a gradient and a score", advice)
        check_params(part, "gradient", params, returned[0])
        return returned

    return call_gradient


def check_returned_form(part: Part, point: str, args: tuple, result: Any) -> None:
    """Raise an error unless what a point returns has the form of what it was given."""
    if point in WITH_STATE:
        check_two_values(part, point, result)
    if point in ("step", "begin", "end"):  # what server points return is checked in every round anyway
        check_params(part, point, args[0], result[0])
    elif point in ("measure", "send"):
        if not all(isinstance(leaf, Tensor) for leaf in list_leaves(result if point == "measure" else result[0])):
            raise broken_rule_error(
                part, point, "sends what is not a tensor", "Only tensors travel, and dicts of them."
            )
        if point == "measure":
            check_declared_extras(part, args[2], result)
    elif point == "enrol":
        check_declared_card(part, args, result)
    if point == "step" and describe_structure(args[1]) != describe_structure(result[1]):
        why = "returns a state of another form than it was given"
        raise broken_rule_error(part, point, why, "Make the whole state in `begin`.")


def check_declared_extras(part: Part, device: Device, measured: Any) -> None:
    """Raise an error unless what a part measures is what it declares; None is no declaration, and nothing is asked."""
    net, plan = device.net, device.plan
    declared = get_declared_extras(part, net, plan)
    if declared is not None:
        sent = pack_message({}, {part.name(): measured}, plan, net.slicer, []).beside[part.name()]
        fault = find_fault(sent, declared, device.got, net, plan)
        if fault:
            why = f"returns something else than `declare_extras` says: {fault}"
            raise broken_rule_error(part, "measure", why, "Correct the declaration, or what is returned.")


def check_declared_card(part: Part, args: tuple, card: Mapping[str, Tensor]) -> None:
    """Raise an error unless what a part adds to an enrolment card is what it declares."""
    before, _, net = args
    declared = get_declared_card(part, net)
    if declared is not None:
        added = {name: entry for name, entry in card.items() if name in declared or name not in before}
        fault = find_fault(added, declared, (), net, WHOLE_MODEL)
        if fault:
            why = f"adds something else than `declare_card` says: {fault}"
            raise broken_rule_error(part, "enrol", why, "Correct the declaration, or what is added.")


@contextmanager
def blame_part(part: Part, point: str) -> Iterator[None]:
    """Inside, whatever is raised becomes an error of this part at this point."""
    try:
        yield
    except ShoalError:
        raise
    except Exception as error:
        why = f"raises {describe_error(error)}{describe_line(error, type(part))}"
        form = "" if describe_line(error, type(part)) else find_wanted_form(part, point)
        raise broken_rule_error(part, point, why, f"Define it as {form}." if form else "Correct it there.") from error


def find_wanted_form(part: Part, point: str) -> str:
    """The parameters of a point as they are called, where the part's own cannot be called so; "" where they can."""
    wanted = [name for name in signature(getattr(Part, point)).parameters]
    try:
        signature(getattr(type(part), point)).bind(*wanted)
    except TypeError:
        return f"{point}({', '.join(wanted)})"
    return ""


def list_leaves(node: Any) -> list:
    return [leaf for v in node.values() for leaf in list_leaves(v)] if isinstance(node, Mapping) else [node]


def describe_structure(node: Any) -> Any:
    if isinstance(node, Tensor):
        return tuple(node.shape), node.dtype
    if isinstance(node, Mapping):
        return {k: describe_structure(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [describe_structure(v) for v in node]
    return type(node)


def extract_trees(value: Any) -> Any:
    """The trees inside an argument of a point, for comparison."""
    if isinstance(value, Mapping):
        return {k: extract_trees(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [extract_trees(v) for v in value]
    if is_dataclass(value):
        return {k: extract_trees(getattr(value, k)) for k in TREE_FIELDS if hasattr(value, k)}
    return value if isinstance(value, (Tensor, bool, int, float, str)) else None

"""A part under watch: a copy that is checked at every point, so that a fault is told where it happens."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from shoal.core import tree
from shoal.core.errors import ShoalError
from shoal.core.part import POINTS, Part
from shoal.core.tree import Params
from shoal.core.types import Batch, Scored, Scorer

TREES = "anchor got numbers covered plans devices weights replies delta report kept masks body beside index".split()
"""The fields of what parts are given that hold trees."""
WITH_STATE = ("select", "plan", "send", "begin", "step", "end", "encode", "weigh", "combine", "serve", "prune")


def watched(part: Part) -> Part:
    """A copy of a part that is checked at every point: it must not raise, change what it is given, or bend shapes."""
    cls = type(part)

    def guard(point: str) -> Callable:
        def call(self, *args):
            before = [tree.map(Tensor.clone, contents(a)) for a in args]
            try:
                result = getattr(cls, point)(part, *args)
            except ShoalError:
                raise
            except Exception as error:
                why = f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
                raise refused(part, point, why, "Correct it there.") from error
            for old, new in zip(before, args):
                if not tree.same(old, contents(new)):
                    raise refused(
                        part, point, "changes what it is given", "Return new values and leave the old ones alone."
                    )
            check_shape(part, point, args, result)
            return result

        return call

    watched_points = [p for p in POINTS if part.acts_at(p) and p not in ("objective", "decode")]
    body: dict[str, Any] = {point: guard(point) for point in watched_points}
    if part.acts_at("objective"):
        body["objective"] = lambda self, inner, local: scoring(part, part.objective(inner, local))
    body["name"] = classmethod(lambda _: cls.name())
    kind = type(cls.__name__, (cls,), body)
    return kind(**{f.name: getattr(part, f.name) for f in fields(part)})


def scoring(part: Part, scorer: Scorer) -> Scorer:
    def call(params: Params, batch: Batch) -> Scored:
        try:
            scored = scorer(params, batch)
        except Exception as error:
            why = f"raises {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
            raise refused(part, "objective", why, "Correct it there.") from error
        if not isinstance(scored, Scored) or scored.loss.shape != ():
            found = (
                f"a loss of shape {tuple(scored.loss.shape)}" if isinstance(scored, Scored) else type(scored).__name__
            )
            raise refused(part, "objective", f"returns {found}", "Return a Scored whose loss is one number.")
        return scored

    return call


def check_shape(part: Part, point: str, args: tuple, result: Any) -> None:
    """What a point returns must have the form of what it was given."""
    if point in WITH_STATE:
        if not isinstance(result, tuple) or len(result) != 2:
            raise refused(part, point, "does not return two values", "Return the value and the state.")
    like: Any = {"step": 0, "begin": 0, "end": 0, "serve": 0}.get(point)
    if like is not None:
        given, made = args[like], result[0]
        for name, value in given.items():
            if name not in made or made[name].shape != value.shape:
                found = tuple(made[name].shape) if name in made else "nothing"
                raise refused(
                    part,
                    point,
                    f"returns {found} for {name}, which has shape {tuple(value.shape)}",
                    "Keep every name and shape.",
                )
    if point == "step" and structure(args[1]) != structure(result[1]):
        raise refused(
            part, point, "returns a state of another form than it was given", "Make the whole state in `begin`."
        )


def structure(node: Any) -> Any:
    if isinstance(node, Tensor):
        return tuple(node.shape), node.dtype
    if isinstance(node, Mapping):
        return {k: structure(v) for k, v in node.items()}
    if isinstance(node, (list, tuple)):
        return [structure(v) for v in node]
    return type(node)


def contents(value: Any) -> Any:
    """The trees inside an argument of a point, for comparison."""
    if isinstance(value, Mapping):
        return {k: contents(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [contents(v) for v in value]
    if is_dataclass(value):
        return {k: contents(getattr(value, k)) for k in TREES if hasattr(value, k)}
    return value if isinstance(value, (Tensor, bool, int, float, str)) else None


def refused(part: Part, point: str, why: str, advice: str) -> ShoalError:
    return ShoalError("bad-part", f"The part {part.name()} breaks a rule at {point}: it {why}.", advice)

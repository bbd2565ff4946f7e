"""A method is a list of parts: `compose` refuses parts that clash, and `Method` runs each point over its parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from shoal.core.clashes import refuse_clashes, refuse_task
from shoal.core.errors import ShoalError
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.part import Part
from shoal.core.return_checks import check_params, check_plan, check_replies, check_two_values, check_weights
from shoal.core.types import Reply, Round
from shoal.core.wire import STAGES


@dataclass(frozen=True)
class Method:
    """Parts in the order of listing. Values are piped through them in it; at `objective` the first is the outermost."""

    parts: tuple[Part, ...] = ()

    def parts_at(self, point: str) -> tuple[Part, ...]:
        """The parts that act at a point, in the order in which they act."""
        return self._parts_by_point[point]

    @cached_property
    def _parts_by_point(self) -> dict[str, tuple[Part, ...]]:
        from shoal.core.part import POINTS

        by_point = {point: tuple(p for p in self.parts if p.acts_at(point)) for point in POINTS}
        by_point["objective"] = tuple(sorted(by_point["objective"], key=lambda p: p.replaces_loss))
        by_point["gradient"] = tuple(sorted(by_point["gradient"], key=lambda p: p.replaces_gradient))
        # norms that stay on devices are not frozen, what is frozen was there before parts that add layers
        order = lambda p: (p.keeps_layers != "norms", not p.freezes_rest, not p.makes_features)  # noqa: E731
        by_point["model"] = tuple(sorted(by_point["model"], key=order))
        for point in ("select", "plan", "weigh"):
            by_point[point] = tuple(sorted(by_point[point], key=lambda p: point not in p.sets))
        for point in ("serve", "evaluate"):  # who sets the plan has the last word on what is left of the model
            by_point[point] = tuple(sorted(by_point[point], key=lambda p: "plan" in p.sets))
        return by_point

    @cached_property
    def stepping_parts(self) -> tuple[str, ...]:
        """The parts that act inside a local step, in the order of listing."""
        points = ("mask", "objective", "gradient", "step")
        return tuple(p.name() for p in self.parts if any(p.acts_at(point) for point in points))

    def codecs_for(self, direction: str) -> tuple[Part, ...]:
        """The codecs of one direction in the order of their stages."""
        return self._codecs_by_direction[direction]

    @cached_property
    def _codecs_by_direction(self) -> dict[str, tuple[Part, ...]]:
        codecs = sorted((p for p in self.parts if p.stage), key=lambda p: STAGES.index(p.stage))
        return {way: tuple(p for p in codecs if way in p.directions) for way in ("up", "down")}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in the order of listing."""
        return tuple(p.name() for p in self.parts)

    @cached_property
    def carries(self) -> str:
        """What replies carry: "delta" (to the anchor), or "values" where a part needs them."""
        return "values" if any(p.carries == "values" for p in self.parts) else "delta"

    @cached_property
    def keeps_slots(self) -> bool:
        """Whether the optimiser's state goes on from round to round."""
        return any(p.keeps_slots for p in self.parts)

    # the points ---------------------------------------------------------------------------------------------------
    def model(self, net: Net) -> Net:
        """The model as the parts make it, from a copy: a call may have left other tensors in its module."""
        refuse_task(self.parts, net.task)
        parts = self.parts_at("model")
        if parts:
            net = replace(net, module=copy_module(net))
        for part in parts:
            net = part.model(net)
            if not net.trainable:
                before = [other.name() for other in parts[: parts.index(part)]]
                problem = f"{' and '.join([*before, part.name()])} leave{'' if before else 's'} nothing to train."
                raise ShoalError("bad-part", problem, "Leave one of them out, or let another layer be trained.")
        return net

    def taps(self, net: Net) -> tuple[str, ...]:
        return tuple(dict.fromkeys(tap for p in self.parts for tap in p.taps(net)))

    def init_server(self, round: Round) -> dict[str, Tree]:
        return {p.name(): p.init_server(replace(round, part=p.name())) for p in self.parts}

    def select(self, devices: Sequence[int], states: dict, round: Round) -> tuple[Sequence[int], dict]:
        return self._pipe_through_parts("select", devices, states, round)

    def plan(self, plans: Mapping[int, Plan], states: dict, round: Round) -> tuple[Mapping[int, Plan], dict]:
        return self._pipe_through_parts("plan", plans, states, round)

    def send(self, states: dict, round: Round) -> tuple[dict[int, dict[str, dict[str, Any]]], dict]:
        """What travels beside the model, by device and then by part; and the new states."""
        beside: dict[int, dict[str, dict[str, Any]]] = {d: {} for d in round.devices}
        for part in self.parts_at("send"):
            name = part.name()
            returned = part.send(states[name], replace(round, part=name))
            check_two_values(part, "send", returned)
            by_device, state = returned
            states = states | {name: state}
            for device, sent in by_device.items():
                beside[device][name] = sent
        return beside, states

    def sift(self, replies: Sequence[Reply], states: dict, round: Round) -> tuple[Sequence[Reply], dict]:
        return self._pipe_through_parts(
            "sift", replies, states, round, lambda part, returned: check_replies(part, replies, returned)
        )

    def weigh(self, weights: Tensor, states: dict, round: Round) -> tuple[Tensor, dict]:
        return self._pipe_through_parts(
            "weigh", weights, states, round, lambda part, returned: check_weights(part, weights, returned)
        )

    def combine(self, default: Callable[[], Params], states: dict, round: Round) -> tuple[Params, dict]:
        for part in self.parts_at("combine"):
            returned = part.combine(round.replies, states[part.name()], replace(round, part=part.name()))
            check_two_values(part, "combine", returned)
            params, state = returned
            check_params(part, "combine", round.anchor, params)
            return params, states | {part.name(): state}
        return default(), states

    def serve(self, params: Params, states: dict, round: Round) -> tuple[Params, dict]:
        return self._pipe_through_parts(
            "serve", params, states, round, lambda part, returned: check_params(part, "serve", params, returned)
        )

    def prune(self, plan: Plan, states: dict, round: Round) -> tuple[Plan, dict]:
        return self._pipe_through_parts(
            "prune", plan, states, round, lambda part, returned: check_plan(part, returned, round.net.slicer)
        )

    def observe(self, params: Params, states: dict, round: Round) -> dict:
        """The states after a round; each part that observes is shown what the parts before it would have evaluated."""
        if not self.parts_at("observe"):
            return states
        judged = {"": params}
        for part in sorted(self.parts, key=lambda p: "plan" in p.sets):
            name = part.name()
            view = replace(round, part=name)
            if part.acts_at("observe"):
                states = states | {name: part.observe(judged[""], states[name], view)}
            if part.acts_at("evaluate"):
                judged = part.evaluate(judged, states[name], view)
        return states

    def evaluate(self, judged: dict[str, Params], states: dict, round: Round) -> dict[str, Params]:
        global_params = judged[""]
        for part in self.parts_at("evaluate"):
            judged = part.evaluate(judged, states[part.name()], replace(round, part=part.name()))
            for params in judged.values() if isinstance(judged, Mapping) and "" in judged else (None,):
                check_params(part, "evaluate", global_params, params)
        return judged

    def _pipe_through_parts(
        self, point: str, value: Any, states: dict, round: Round, check: Callable[[Part, Any], None] | None = None
    ) -> tuple[Any, dict]:
        """The value and the states after all parts of a point; each return is checked before the next part gets it."""
        for part in self.parts_at(point):
            name = part.name()
            returned = getattr(part, point)(value, states[name], replace(round, part=name))
            check_two_values(part, point, returned)
            value, state = returned
            if check:
                check(part, value)
            states = states | {name: state}
        return value, states

    def __str__(self) -> str:
        return "+".join(map(str, self.parts)) or "fedavg"


def compose(parts: Sequence[Part]) -> Method:
    """The method of these parts, unless some of them cannot be used together."""
    refuse_clashes(parts)
    return Method(tuple(parts))

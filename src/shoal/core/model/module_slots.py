"""Where a module holds its tensors: other tensors are put there for a call, and the first ones back."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from shoal.core.model.frozen import find_frozen_norms, iterate_slots
from shoal.core.model.tree import Params


class ModuleSlots:
    """The slots of a module, as (dict of a layer, key in it, name of the tensor), and those of frozen tensors."""

    def __init__(self, module: nn.Module, initial: Params, frozen: Params, ties: Mapping[str, str]):
        self.module, self.initial, self.frozen = module, initial, frozen
        # each slot once, also of layers that the module holds under two names
        slots = {(id(s.holder), s.key): (s.holder, s.key, ties.get(s.name, s.name)) for s in iterate_slots(module)}
        self.slots = [slot for slot in slots.values() if slot[2] in initial]
        self.frozen_slots = [slot for slot in slots.values() if slot[2] in frozen]
        self.updated_names = frozenset(name for name, _ in module.named_buffers())
        """The names of the tensors that a pass in training may change."""
        self.frozen_norms = find_frozen_norms(module, frozenset(frozen))
        """Norms with frozen statistics, by which they normalise in training, too."""
        self.frozen_now = frozen
        """The tensors that calls put into the frozen slots."""
        self.filled: Params | None = None
        """What the last call put into the module."""

    def fill(self, params: Params, training: bool) -> Params:
        """Put tensors into the module; buffers, which a pass in training changes, are copied first and returned."""
        buffers: Params = {}
        self.filled = params
        for holder, key, name in self.slots:
            value = params[name]
            if training and name in self.updated_names:
                if name not in buffers:
                    buffers[name] = value.clone()
                value = buffers[name]
            holder[key] = value
        for holder, key, name in self.frozen_slots:
            value = self.frozen_now[name]
            holder[key] = value.clone() if training and name in self.updated_names else value
        if self.module.training != training:
            self.module.train(training)
        for norm in self.frozen_norms:
            norm.training = False
        return buffers

    def read_buffers(self, buffers: Params) -> Params:
        """The buffers that `fill` returned, after the pass; where it put another tensor in place of one, that."""
        for holder, key, name in self.slots if buffers else ():
            if name in buffers and holder[key] is not buffers[name]:
                buffers[name] = self.take_assigned(holder[key], buffers[name])
        return buffers

    def take_assigned(self, assigned: Tensor | None, before: Tensor) -> Tensor:
        """What a pass put in place of a buffer; what has another form is no new value of it, but made for the pass."""
        if assigned is None or assigned.shape != before.shape or assigned.dtype != before.dtype:
            return before
        return assigned

    def reset(self) -> None:
        """Put the initial and the frozen tensors back into the module, in place of what the last call left there."""
        self.filled = None
        for holder, key, name in self.slots:
            holder[key] = self.initial[name]
        for holder, key, name in self.frozen_slots:
            holder[key] = self.frozen[name]

    @contextmanager
    def substitute_frozen(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, calls use these tensors in place of the frozen ones, in the order of `frozen`."""
        before, self.frozen_now = self.frozen_now, dict(zip(self.frozen, tensors, strict=True))
        try:
            yield
        finally:
            self.frozen_now = before

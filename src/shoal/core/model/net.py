"""A model as a function of its tensors: run it with any parameters, look at any layer, count what a pass costs."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shoal.core.model.feature_maps import INPUT_TAP_PREFIX, make_input_hook
from shoal.core.model.flops import count_macs
from shoal.core.model.half_norms import use_half_precision
from shoal.core.model.module_copy import copy_module, update_layer_sizes
from shoal.core.model.name_checks import check_net_names
from shoal.core.model.plan import Axis, Block, Plan, Slicer, count_row_units
from shoal.core.model.tree import Params


@dataclass(frozen=True, eq=False)
class Net:
    """A module used as a template: its own tensors are never trained, only replaced for the length of a call.

    Every tensor is *shared* (travels and is combined) unless `roles` calls it *personal* (stays on its device) or
    *server* (is sent and never combined).
    """

    module: nn.Module
    input_shape: tuple[int, ...]
    classes: int
    axes: tuple[Axis, ...] = ()
    blocks: tuple[Block, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    token_inputs: bool = False
    """Whether inputs are whole numbers (words) and not measurements."""
    half: bool = False
    """Whether layers compute in bfloat16; weights, logits and losses stay as they are."""
    rows: tuple[Axis, ...] = ()
    """Rows of matrices that can be left out of training and of messages, and count as 0 then; the model still has them.

    They are called LAYER:KIND, with the kinds embedding, output, recurrent (rows of gates), cells (the four gates of a
    unit together) and input.
    """
    head: str = ""
    """The layer whose inputs are the features; the last linear layer unless it is named."""

    def __post_init__(self):
        _ = self.initial, self.trainable, self._slots  # read before the first call borrows the slots
        layers = dict(self.module.named_modules())
        check_net_names(self.roles, (*self.axes, *self.rows), self.head, self.initial, layers)

    @cached_property
    def initial(self) -> Params:
        """Parameters and buffers as they were when the net was made."""
        return {k: v.detach().clone() for k, v in self.module.state_dict().items()}

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The parameters that devices train: all that want a gradient, but not those of the server."""
        wanted = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return tuple(name for name in wanted if self.roles.get(name) != "server")

    @cached_property
    def shared_trainable(self) -> tuple[str, ...]:
        """The parameters that devices train and the server combines; momenta and control variates are about these."""
        return tuple(name for name in self.trainable if self.roles.get(name, "shared") == "shared")

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The tensors that no gradient reaches: buffers, and parameters that are frozen."""
        return tuple(name for name in self.initial if name not in set(self.trainable))

    @cached_property
    def shapes(self) -> tuple:
        """The names, shapes and types of all tensors."""
        return tuple((k, v.shape, v.dtype) for k, v in self.initial.items())

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.initial)

    @cached_property
    def slicer(self) -> Slicer:
        return Slicer((*self.axes, *self.rows), self.initial)

    @cached_property
    def mixes_batch(self) -> bool:
        """Whether a sample's output depends on the rest of its batch in training."""
        return any(isinstance(m, _BatchNorm) for m in self.module.modules())

    @cached_property
    def has_dropout(self) -> bool:
        """Whether layers draw random numbers in training."""
        return any(isinstance(m, _DropoutNd) and 0 < m.p < 1 for m in self.module.modules())

    def names_with_role(self, *roles: str) -> tuple[str, ...]:
        """The tensors that have one of these roles."""
        if not self.roles:
            return self._names if "shared" in roles else ()
        return tuple(k for k in self._names if self.roles.get(k, "shared") in roles)

    @cached_property
    def names_by_block(self) -> tuple[tuple[str, ...], ...]:
        """The tensors that travel down, block by block."""
        sent = self.names_with_role("shared", "server")
        return tuple(tuple(name for name in sent if block.owns(name)) for block in self.blocks)

    def forward(self, params: Params, inputs: Tensor, taps: tuple[str, ...] = (), training: bool = False):
        """Run the model: logits, features, what was asked for by name, and the buffers as the pass left them.

        A tap is the name of a module whose output is wanted, or `into NAME`, what a module reads first.

        The tensors are put into the template's own slots, as `torch.func.functional_call` does, but without its 30 to
        45 us per call; a layer cannot tell the difference, `vmap` and `grad` go through it.
        """
        seen: dict[str, Tensor] = {}
        buffers = self._fill_slots(params, training)
        self._register_taps(seen, taps)
        if self.half:
            with use_half_precision(inputs.device.type):
                logits = self.module(inputs).float()
            seen = {k: v.float() for k, v in seen.items()}
        else:
            logits = self.module(inputs)
        self._hook_cell[0] = {}
        return logits, seen.get(".features", inputs), {k: seen[k] for k in taps}, buffers

    def forward_from_block(self, params: Params, x: Tensor, first: int, training: bool = False) -> Tensor:
        """The logits from what went into block number `first`: the blocks from there on, with these parameters."""
        self._fill_slots(params, training)
        self._register_taps({}, ())
        with use_half_precision(x.device.type) if self.half else nullcontext():
            for block in self.blocks[first:]:
                for child in block.children:
                    x = self.module.get_submodule(child)(x)
        return x.float() if self.half else x

    def _fill_slots(self, params: Params, training: bool) -> Params:
        """Put tensors into the template's slots; those that a pass changes are copies, and returned."""
        buffers: Params = {}
        for holder, key, name in self._slots:
            value = params[name]
            if training and name in self._updated_names:
                buffers[name] = value = value.clone()
            holder[key] = value
        if self.module.training != training:
            self.module.train(training)
        return buffers

    def cut(self, plan: Plan) -> "Net":
        """The smaller model that a plan leaves, as a net of its own; parameters are cut with `slicer.take`."""
        module, own = copy_module(self), {a.name for a in self.axes}
        plan = replace(plan, kept={name: units for name, units in plan.kept.items() if name in own})
        small = self.slicer.take(self.initial, plan)
        for name, value in small.items():
            owner, _, key = name.rpartition(".")
            holder = module.get_submodule(owner)
            if key in holder._parameters:
                holder._parameters[key] = nn.Parameter(value, name in self.trainable)
            else:
                holder._buffers[key] = value
        for layer in module.modules():
            update_layer_sizes(layer)
        sizes = {a.name: len(plan.kept[a.name]) if a.name in plan.kept else a.size for a in self.axes}
        axes = tuple(replace(a, size=sizes[a.name]) for a in self.axes)
        rows = tuple(replace(r, size=count_row_units(r, small)) for r in self.rows)
        return replace(self, module=module, axes=axes, rows=rows)

    @cached_property
    def macs_forward(self) -> int:
        """Multiply-accumulates of one sample through the model; see `counted`."""
        dtype = torch.long if self.token_inputs else self.dtype
        one = torch.zeros(1, *self.input_shape, dtype=dtype, device=self.place)
        return count_macs(lambda: self.forward(self.initial, one))

    @property
    def dtype(self) -> torch.dtype:
        return self.initial[self.trainable[0]].dtype

    @property
    def place(self) -> torch.device:
        return self.initial[self.trainable[0]].device

    @cached_property
    def _slots(self) -> list[tuple[dict, str, str]]:
        found = []
        for prefix, module in self.module.named_modules():
            for slots in (module._parameters, module._buffers):
                for key, value in slots.items():
                    name = f"{prefix}.{key}" if prefix else key
                    if value is not None and name in self.initial:
                        found.append((slots, key, name))
        return found

    @cached_property
    def _updated_names(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.module.named_buffers())

    @cached_property
    def head_name(self) -> str:
        """The layer that reads the features; none where no layer is linear."""
        layers = [name for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        return self.head or (layers[-1] if layers else "")

    @cached_property
    def _hook_cell(self) -> list[dict]:
        """The dict that hooks write into during a call; the first hook is the features' own."""
        cell: list[dict] = [{}]
        if self.head_name:
            note = lambda _, args: cell[0].__setitem__(".features", args[0])  # noqa: E731
            self.module.get_submodule(self.head_name).register_forward_pre_hook(note)
        return cell

    @cached_property
    def _tap_names(self) -> set[str]:
        return set()

    def _register_taps(self, seen: dict[str, Tensor], taps: tuple[str, ...]) -> None:
        cell = self._hook_cell
        cell[0] = seen
        for name in taps:
            if name not in self._tap_names:
                self._tap_names.add(name)
                layer = self.module.get_submodule(name.removeprefix(INPUT_TAP_PREFIX))
                if name.startswith(INPUT_TAP_PREFIX):
                    layer.register_forward_pre_hook(make_input_hook(cell, name), with_kwargs=True)
                else:
                    note = lambda _m, _i, out, name=name: cell[0].__setitem__(name, out)  # noqa: E731
                    layer.register_forward_hook(note)

"""A model as a function of its tensors: run it with any parameters, tap any layer, cut it smaller, count its cost."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.learning_task import LearningTask
from shoal.core.model.checkpointing import checkpoint_layers, find_repeated_layers
from shoal.core.model.flops import count_macs
from shoal.core.model.frozen import (
    drop_uncuttable_axes,
    find_frozen_names,
    find_tied_names,
)
from shoal.core.model.half_precision import use_half_precision
from shoal.core.model.inputs import Inputs, InputShape, repeat_example
from shoal.core.model.module_call import call_module, find_call_form
from shoal.core.model.module_constants import digest_constants
from shoal.core.model.module_copy import copy_module, set_module_tensors, update_layer_sizes
from shoal.core.model.module_in_use import note_first_tensors, restore_first_parameters
from shoal.core.model.module_slots import ModuleSlots
from shoal.core.model.module_taps import FEATURES_TAP, ModuleTaps
from shoal.core.model.name_checks import check_net_names
from shoal.core.model.outputs import read_logits
from shoal.core.model.plan import Axis, Block, Plan, Slicer, count_row_units
from shoal.core.model.prompted_module import drop_output_positions
from shoal.core.model.tensor_digest import compute_digest
from shoal.core.model.tree import Params, collect_tensors
from shoal.core.short_repr import cut_text

ADAPTER_KEYS = frozenset({"lora_A", "lora_B"})
"""What layers are called that the package peft puts beside others, and that are no head."""


@dataclass(frozen=True, eq=False)
class Net:
    """A model: an `nn.Module` whose tensors are replaced for each call, and what can be cut, shared and tapped of it.

    Every tensor is *shared* (travels and is combined) unless `roles` calls it *personal* (stays on its device),
    *server* (is sent and never combined) or *frozen* (never changes). Parameters without a role that need no gradient
    are frozen, too. A frozen tensor is in none of the trees of tensors that this class speaks of but `frozen`: it is
    neither sent, nor remembered, nor stored, and axes that would cut it are dropped.

    A tensor that several layers hold (tied weights) is one tensor under its first name, and is not cut either.

    Several nets may have one module: each begins with the parameters that it had before the first call of any of them.
    """

    module: nn.Module
    input_shape: InputShape
    classes: int
    axes: tuple[Axis, ...] = ()
    blocks: tuple[Block, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    token_inputs: bool = False
    """Whether inputs are token numbers and not real numbers."""
    half: bool = False
    """Whether layers compute in bfloat16; weights, logits and losses keep their type."""
    checkpointing: bool = False
    """Whether layers of a stack are computed again on the way back, in place of being kept (gradient checkpointing)."""
    rows: tuple[Axis, ...] = ()
    """Rows of matrices that a plan can leave out of training and of messages, where they count as 0.

    Unlike axes they stay in the model when it is cut. They are called LAYER:KIND, with the kinds embedding, output,
    recurrent (rows of gates), cells (the four gates of a unit together) and input.
    """
    head: str = ""
    """The layer whose inputs are the features; the last linear layer unless it is named."""
    example: Inputs | None = None
    """One sample, with a first dimension of 1, where inputs are a dict or tuple of tensors; None: they are one."""
    task: LearningTask = CLASSIFY
    """What it learns: the loss of a sample, and how its outputs are read and judged."""
    seed: int = 0
    """The seed of its first weights, by which parts draw the tensors that they add, the same wherever it is made."""

    def __repr__(self) -> str:
        numbers = sum(self.initial[name].numel() for name in self.trainable)
        frozen = f", {len(self.frozen)} frozen tensors" if self.frozen else ""
        shape = cut_text(str(self.input_shape))
        tensors = f"{numbers:,} trained parameters in {len(self.trainable)} tensors{frozen}"
        return f"Net({type(self.module).__name__}: {tensors}, inputs {shape}, {self.classes} classes)"

    def __post_init__(self):
        restore_first_parameters(self.module)  # another net may have it in use
        # read before the first call fills the slots with other tensors
        _ = self.ties, self.frozen, self.initial, self.trainable, self._slots
        note_first_tensors(self.module, self.frozen | self.initial, self.ties)
        layers = dict(self.module.named_modules())
        tensors = (*self.initial, *self.frozen, *self.ties)
        check_net_names(self.roles, (*self.axes, *self.rows), self.head, tensors, layers, self.ties)
        uncuttable = frozenset((*self.frozen, *self.ties, *self.ties.values()))
        object.__setattr__(self, "axes", drop_uncuttable_axes(self.axes, uncuttable))
        object.__setattr__(self, "rows", drop_uncuttable_axes(self.rows, uncuttable))

    @cached_property
    def ties(self) -> dict[str, str]:
        """For every further name of a tensor that several layers hold, its first name, which it has everywhere else."""
        return find_tied_names(self.module)

    @cached_property
    def frozen(self) -> Params:
        """The tensors that never change, as the module holds them; no copy is made of them."""
        names, tensors = find_frozen_names(self.module, self.roles), self.module.state_dict(keep_vars=True)
        return {
            name: nn.Parameter(value.detach(), False) if value.requires_grad else value
            for name, value in tensors.items()
            if name in names and name not in self.ties
        }

    @cached_property
    def digest(self) -> str:
        """A hash of the frozen tensors, by which two sides know that they have the same; "" without any."""
        return compute_digest(self.frozen)

    @cached_property
    def constants_digest(self) -> str:
        """A hash of what the module computes with beside tensors of this net; runs that share programs share it."""
        return digest_constants(self.module)

    @cached_property
    def initial(self) -> Params:
        """Parameters and buffers that are not frozen, as they were when the net was made."""
        return {
            name: value.detach().clone()
            for name, value in self.module.state_dict().items()
            if name not in self.frozen and name not in self.ties
        }

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """The names of the parameters that devices train: all with a gradient, but those of roles server and frozen."""
        with_gradient = [name for name, p in self.module.named_parameters() if p.requires_grad]
        return tuple(name for name in with_gradient if self.roles.get(name) not in ("server", "frozen"))

    @cached_property
    def shared_trainable(self) -> tuple[str, ...]:
        """The names of the parameters that devices train and the server aggregates; server momenta have these names."""
        return tuple(name for name in self.trainable if self.roles.get(name, "shared") == "shared")

    @cached_property
    def buffers(self) -> tuple[str, ...]:
        """The names of the tensors that may change but are not trained: buffers, and those with the role server."""
        return tuple(name for name in self.initial if name not in set(self.trainable))

    @cached_property
    def shapes(self) -> tuple:
        """(name, shape, type) of every tensor that is not frozen."""
        return tuple((k, v.shape, v.dtype) for k, v in self.initial.items())

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(self.initial)

    @cached_property
    def slicer(self) -> Slicer:
        """Cuts trees of tensors along the axes and rows of this model."""
        return Slicer((*self.axes, *self.rows), self.initial)

    @cached_property
    def mixes_batch(self) -> bool:
        """Whether a sample's output depends on the rest of its batch in training (batch norm that is not frozen)."""
        return any(isinstance(m, _BatchNorm) and m not in self._slots.frozen_norms for m in self.module.modules())

    @cached_property
    def has_dropout(self) -> bool:
        """Whether layers draw random numbers in training (dropout), or the module says so of what is no layer."""
        layers = any(isinstance(m, _DropoutNd) and 0 < m.p < 1 for m in self.module.modules())
        return layers or bool(getattr(self.module, "has_dropout", False))

    def names_with_role(self, *roles: str) -> tuple[str, ...]:
        """The names of the tensors with one of these roles (shared, personal, server)."""
        if not self.roles:
            return self._names if "shared" in roles else ()
        return tuple(k for k in self._names if self.roles.get(k, "shared") in roles)

    @cached_property
    def names_by_block(self) -> tuple[tuple[str, ...], ...]:
        """The names of the tensors that devices are sent, block by block."""
        sent = self.names_with_role("shared", "server")
        return tuple(tuple(name for name in sent if block.owns(name)) for block in self.blocks)

    def make_example_inputs(self, count: int) -> Inputs:
        """So many samples of zeros, or of the example where inputs are a dict or tuple of tensors."""
        if self.example is not None:
            return repeat_example(self.example, count, self.dtype, self.place)
        dtype = torch.long if self.token_inputs else self.dtype
        return torch.zeros(count, *self.input_shape, dtype=dtype, device=self.place)

    def forward(self, params: Params, inputs: Inputs, taps: tuple[str, ...] = (), training: bool = False):
        """Run the model: logits, features, taps by name, and the buffers that a pass in training has changed.

        A tap is the name of a module whose output is wanted, or `into NAME` for the first input of a module.

        The tensors are put into the template's own slots, as `torch.func.functional_call` does, but without its 30 to
        45 us per call; `vmap` and `grad` work through it.
        """
        tapped: dict[str, Tensor] = {}
        buffers = self._slots.fill(params, training)
        self._taps.record_into(tapped, taps)
        kind = collect_tensors(inputs)[0].device.type
        with self._keep_layer_inputs(params, kind) if training and self.checkpointing else nullcontext():
            if self.half:
                with use_half_precision(kind):
                    logits = read_logits(call_module(self.module, inputs, self.call_form)).float()
                tapped = {k: v.float() for k, v in tapped.items()}
            else:
                logits = read_logits(call_module(self.module, inputs, self.call_form))
        self._taps.record_into({})
        buffers = self._slots.read_buffers(buffers)
        features = tapped[FEATURES_TAP] if FEATURES_TAP in tapped else collect_tensors(inputs)[0]
        return logits, features, {k: tapped[k] for k in taps}, buffers

    def _keep_layer_inputs(self, params: Params, kind: str) -> AbstractContextManager[None]:
        """Inside, layers of a stack keep only their inputs; what they are computed again with is what they had."""
        frozen = list(self._slots.frozen_now.values())

        @contextmanager
        def repeat(drawn: AbstractContextManager) -> Iterator[None]:
            half = use_half_precision(kind) if self.half else nullcontext()
            with self.substitute_frozen(frozen), half, drawn:
                if self._slots.filled is not params:  # another pass has come in between
                    self._slots.fill(params, True)
                yield

        return checkpoint_layers(self._repeated_layers, repeat)

    def forward_from_block(self, params: Params, x: Tensor, first: int, training: bool = False) -> Tensor:
        """The logits from `x`, the input of block number `first`, through that block and the ones after it."""
        self._slots.fill(params, training)
        self._taps.record_into({})
        with use_half_precision(x.device.type) if self.half else nullcontext():
            for block in self.blocks[first:]:
                for child in block.children:
                    x = self.module.get_submodule(child)(x)
        x = drop_output_positions(self.module, x)
        return x.float() if self.half else x

    def reset_slots(self) -> None:
        """Put the initial and the frozen tensors back into the module, in place of what the last call left there."""
        self._slots.reset()

    def substitute_frozen(self, tensors: Iterable[Tensor]) -> AbstractContextManager[None]:
        """Inside, calls use these tensors in place of the frozen ones, in the order of `frozen`.

        A trace gets them so as inputs of the program, and not as constants.
        """
        return self._slots.substitute_frozen(tensors)

    def cut(self, plan: Plan) -> "Net":
        """The smaller model that a plan leaves, as a net of its own; cut its parameters with `slicer.take`."""
        module, axis_names = copy_module(self), {a.name for a in self.axes}
        plan = replace(plan, kept={name: units for name, units in plan.kept.items() if name in axis_names})
        small = self.slicer.take(self.initial, plan)
        set_module_tensors(module, small, frozenset(self.trainable), self.ties)
        for layer in module.modules():
            update_layer_sizes(layer)
        sizes = {a.name: len(plan.kept[a.name]) if a.name in plan.kept else a.size for a in self.axes}
        axes = tuple(replace(a, size=sizes[a.name]) for a in self.axes)
        rows = tuple(replace(r, size=count_row_units(r, small)) for r in self.rows)
        net = replace(self, module=module, axes=axes, rows=rows)
        if "digest" in self.__dict__:
            net.__dict__["digest"] = self.digest  # the same tensors, which need not be read again
        return net

    @cached_property
    def macs_forward(self) -> int:
        """Multiply-accumulates of one sample through the model, as `count_macs` counts them."""
        sample = self.make_example_inputs(1)
        return count_macs(lambda: self.forward(self.initial, sample))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the parameters."""
        return self.initial[self.trainable[0]].dtype

    @property
    def place(self) -> torch.device:
        """The compute device (CPU or GPU) of the parameters."""
        return self.initial[self.trainable[0]].device

    @cached_property
    def head_name(self) -> str:
        """The name of the layer whose inputs are the features; empty where there is no linear layer."""
        layers = [name for name, m in self.module.named_modules() if isinstance(m, nn.Linear)]
        layers = [name for name in layers if not ADAPTER_KEYS.intersection(name.split("."))]
        return self.head or (layers[-1] if layers else "")

    @cached_property
    def _repeated_layers(self) -> list[nn.Module]:
        return find_repeated_layers(self.module)

    @cached_property
    def _slots(self) -> ModuleSlots:
        return ModuleSlots(self.module, self.initial, self.frozen, self.ties)

    @cached_property
    def call_form(self) -> str:
        """How the module takes inputs that are several tensors; see `find_call_form`."""
        return find_call_form(self.module, self.example)

    @cached_property
    def _taps(self) -> ModuleTaps:
        return ModuleTaps(self.module, self.head_name)

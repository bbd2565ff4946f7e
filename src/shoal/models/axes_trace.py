"""Axes of any module, found with the dependency graph of torch_pruning (Fang et al., 2023), and each one tried out.

Left out are the widths that a GroupNorm or LayerNorm spans, since a mean over units changes when some are missing;
those that are joined with others in a concatenation or parted by a grouped convolution, for which there is no cut; and
the heads of attention: `nn.MultiheadAttention` refuses weights that are not as wide as its inputs, and in attention
written by hand nothing tells what a head is.
"""

import warnings
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from shoal.core.model.feature_maps import INPUT_TAP_PREFIX
from shoal.core.model.frozen import drop_uncuttable_axes, find_frozen_names, find_tied_names
from shoal.core.model.plan import Axis, Cut
from shoal.models.axes_check import AxisError, build_trial, draw_inputs, keep_lawful_axes, tap_feature_maps

MAKERS = (_ConvNd, nn.Linear, nn.Embedding)
GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}


def trace_axes(module: nn.Module, input_shape: tuple[int, ...], token_inputs: bool) -> tuple[Axis, ...]:
    """The axes of a module, its widths that can shrink; none without torch_pruning or where it cannot be traced.

    The tracer may be wrong about a user's forward, so an axis counts only if a copy of the module with random weights
    computes the same whether some of its units are cut out, masked, or made but not read.
    Axes that would cut a frozen tensor, or one that several layers hold, are left out.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(0)
        try:
            axes = AxisTracer(deepcopy(module), draw_inputs(module, input_shape, token_inputs)).find_axes()
            ties = find_tied_names(module)
            uncuttable = frozenset((*find_frozen_names(module, {}), *ties, *ties.values()))
            axes = list(drop_uncuttable_axes(tuple(axes), uncuttable))
            if not axes:
                return ()
            net, x = build_trial(module, input_shape, token_inputs)
            return tuple(tap_feature_maps(net, keep_lawful_axes(net, x, axes, []), x))
        except Exception:  # anything may go wrong in there, and a model without axes is still a model
            return ()


class RecurrentStandIn(nn.Linear):
    """A recurrent layer as the tracer sees it: a linear layer with the same inputs and outputs."""

    def __init__(self, layer: nn.RNNBase, ways: int):
        super().__init__(layer.input_size, (layer.proj_size or layer.hidden_size) * ways)
        self.of = (layer,)
        self.one = RecurrentStandIn(layer, 1) if ways == 2 else None
        """For the state of one direction of two: the tracer cannot follow outputs that are parted and joined again."""

    def run(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        """What the forward of the layer returns, in shape."""
        (layer,), out = self.of, self(x)
        last = (self.one(x) if self.one else out).select(int(layer.batch_first), -1)
        hidden = torch.stack([last] * layer.num_layers * (1 + layer.bidirectional))
        return out, (hidden, hidden) if isinstance(layer, nn.LSTM) else hidden


class AxisTracer:
    """Reads the groups of torch_pruning as axes. It changes the module, so it must be given a copy."""

    def __init__(self, module: nn.Module, inputs: Tensor):
        from torch_pruning import DependencyGraph

        self.shapes = {name: value.shape for name, value in module.state_dict().items()}
        self.names: dict[Any, str] = {layer: name for name, layer in module.named_modules()}
        self.order = {name: at for at, name in enumerate(self.names.values())}
        self.ran = list_run_layers(module.eval(), inputs)
        recurrent = [layer for layer in self.names if type(layer) in GATES]
        for layer in recurrent:
            layer.stand_in = RecurrentStandIn(layer, 1 + layer.bidirectional).to(layer.weight_ih_l0)
            layer.forward = layer.stand_in.run
            self.names |= {part: self.names[layer] for part in layer.stand_in.modules()}
        with torch.enable_grad():
            module.requires_grad_(True)
            self.graph = DependencyGraph().build_dependency(module, (inputs,), ignored_layers=recurrent, verbose=False)
        self.names |= self.graph._param_to_name

    def find_axes(self) -> list[Axis]:
        """The axes that the tracer proposes, in the order of the modules that make them."""
        axes: dict[str, Axis] = {}
        for layer in self.graph.module2node:
            if isinstance(layer, MAKERS) and not is_depthwise(layer):
                try:
                    axis = self.build_axis(layer)
                except Exception:  # the tracer has faults too, and what it says about others may be right
                    continue
                axes.setdefault(axis.name, axis)
        return sorted(axes.values(), key=lambda axis: self.order[axis.name])

    def build_axis(self, root: nn.Module) -> Axis:
        """The axis of a layer's outputs: the tensors that make them, are cut with them, and read them."""
        pruner: Any = self.graph.get_pruner_of_module(root)
        size = width = pruner.get_out_channels(root)
        if isinstance(root, RecurrentStandIn):
            size = root.of[0].hidden_size
        makers, cuts = [root], []
        for item in self.graph.get_pruning_group(root, pruner.prune_out_channels, list(range(width))):
            node, reads = item.dep.target, item.dep.handler.__name__ == "prune_in_channels"
            owners = dict(zip(item.idxs, (unit % size for unit in item.root_idxs)))
            cuts += [self.build_cut(*part, owners, size) for part in self.list_shrinking_tensors(node, reads)]
            if not reads and isinstance(node.module, MAKERS) and not is_depthwise(node.module):
                makers.append(node.module)
        if size < 2 or not any(cut.reads for cut in cuts):
            raise AxisError
        maker = min(makers, key=lambda layer: self.order[self.names[layer]])
        readers = {cut.tensor.rpartition(".")[0] for cut in cuts if cut.reads}
        first = next((name for name in map(self.names.get, self.ran) if name in readers), "")
        tap = INPUT_TAP_PREFIX + first if first and isinstance(maker, _ConvNd) else ""
        places = {tensor: at for at, tensor in enumerate(self.shapes)}
        cuts = sorted(dict.fromkeys(cuts), key=lambda cut: (cut.reads, places[cut.tensor], cut.dim))
        return Axis(self.names[maker], size, tuple(cuts), tap)

    def list_shrinking_tensors(self, node: Any, reads: bool) -> Iterator[tuple[str, int, int, bool]]:
        """The tensors of a layer that shrink: name, dimension, copies (0: to be found), and whether they read."""
        layer, name = node.module, self.names.get(node.module, "")
        own = [f"{name}.{key}".strip(".") for key in ("weight", "bias", "running_mean", "running_var")]
        match layer:
            case nn.LayerNorm() | nn.GroupNorm() | nn.MultiheadAttention() | _InstanceNorm(affine=False):
                raise AxisError
            case _ConvNd() if layer.groups > 1 and not is_depthwise(layer):
                raise AxisError
            case nn.Parameter():
                yield name, node.pruning_dim % layer.dim(), 0, False
            case RecurrentStandIn():
                yield from list_gate_tensors(name, layer.of[0], reads)
            case nn.Linear() | _ConvNd():
                rows = int(getattr(layer, "transposed", False) and not is_depthwise(layer))
                yield own[0], 1 - rows if reads else rows, 0, reads
                if layer.bias is not None and not reads:
                    yield own[1], 0, 0, False
            case nn.Embedding():
                yield own[0], 1, 0, False
            case _NormBase() | nn.PReLU():
                yield from ((key, 0, 0, False) for key in own if self.shapes.get(key, (1,)) != (1,))

    def build_cut(self, tensor: str, dim: int, copies: int, reads: bool, owners: dict[int, int], size: int) -> Cut:
        """The cut that gives each index along a dimension to the unit that owns it."""
        length, span = self.shapes[tensor][dim], 1
        if not copies:
            units = [owners[i] for i in range(len(owners))]
            span = length // size if len(units) == size else units.index(1)
            copies = length // (size * span)
            if units != [i // span % size for i in range(length)] and units != list(range(size)):
                raise AxisError
        if size * span * copies != length:
            raise AxisError
        return Cut(tensor, dim, span, copies, reads)


def list_gate_tensors(name: str, layer: nn.RNNBase, reads: bool) -> Iterator[tuple[str, int, int, bool]]:
    """A hidden unit has a row in each gate of each layer and direction, and is read by its own layer and the next."""
    if layer.proj_size and not reads:
        raise AxisError
    for key, value in layer.named_parameters(recurse=False):
        tensor, kind = f"{name}.{key}".strip("."), (key[:9], "_l0" in key)
        if reads and kind == ("weight_ih", True):
            yield tensor, 1, 0, True
        if not reads:
            yield tensor, 0, GATES[type(layer)], False
            if value.dim() == 2 and kind != ("weight_ih", True):
                yield tensor, 1, 1 + layer.bidirectional if key[:9] == "weight_ih" else 1, True


def is_depthwise(layer: nn.Module) -> bool:
    """Whether a convolution has a group for each channel."""
    return isinstance(layer, _ConvNd) and layer.groups == layer.in_channels == layer.out_channels > 1


@torch.no_grad()
def list_run_layers(module: nn.Module, inputs: Tensor) -> list[nn.Module]:
    """Every layer that a pass runs, in order."""
    ran: list[nn.Module] = []
    hooks = [layer.register_forward_hook(lambda layer, _given, _made: ran.append(layer)) for layer in module.modules()]
    module(inputs)
    for hook in hooks:
        hook.remove()
    return ran

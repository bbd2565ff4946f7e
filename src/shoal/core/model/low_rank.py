"""Low-rank adapters: linear layers that compute W x + s B A x, where they are in a module, and what they add to W."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model.module_copy import copy_module
from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Cut
from shoal.core.model.prompted_module import find_prompt_name
from shoal.core.model.tensor_digest import compute_digest
from shoal.core.model.tree import Params

RANK_AXIS = "rank"
"""The axis whose units are the ranks of all adapters together: row u of every A and column u of every B."""


class Adapter(NamedTuple):
    """One adapter of a module, by the names of its tensors."""

    weight: str
    """The weight that it is added to."""
    a: str
    b: str
    scale: float
    transposed: bool
    """Whether the weight has a row for each input, as transformers' Conv1D has."""


class LowRankLinear(nn.Linear):
    """A linear layer with two further tensors: (W + scale B A) x + bias."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor, scale: float):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = layer.in_features, layer.out_features, scale
        self.weight = layer.weight
        self.register_parameter("bias", layer.bias)
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + apply_factors(input, self.lora_A, self.lora_B, self.scale)


class LowRankConv1D(nn.Module):
    """The same for a Conv1D of transformers, whose weight has a row for each input."""

    def __init__(self, layer: Any, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.nx, self.nf, self.scale = *layer.weight.shape, scale
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return rows.view(*x.shape[:-1], -1) + apply_factors(x, self.lora_A, self.lora_B, self.scale)


def apply_factors(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale B A x."""
    return F.linear(F.linear(x, a) * scale, b)


def is_conv1d(layer: nn.Module) -> bool:
    """Whether a layer is a Conv1D of transformers, a linear layer with a transposed weight."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def list_adaptable_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The layers that can get an adapter, by name: plain linear layers, whatever else a class of their own may do."""
    return {name: m for name, m in module.named_modules() if type(m) is nn.Linear or is_conv1d(m)}


def list_called_layers(net: Net, names: Collection[str]) -> tuple[list[str], bool]:
    """Those of the named layers that one pass in evaluation calls, and whether its outputs have positions.

    Fused attention and the fast path of `nn.TransformerEncoderLayer` read the weights of layers that they do not call.
    """
    called: set[str] = set()

    def note_calls(name: str, forward: Callable) -> Callable:
        def call_layer(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return forward(*args, **kwargs)

        return call_layer

    layers: dict[str, Any] = {name: net.module.get_submodule(name) for name in names}
    own = {name: layer.__dict__["forward"] for name, layer in layers.items() if "forward" in layer.__dict__}
    try:
        for name, layer in layers.items():  # with hooks, which are simpler, torch does not take the fast path
            layer.forward = note_calls(name, layer.forward)
        with torch.no_grad():
            logits, *_ = net.forward(net.initial, net.make_example_inputs(1))
    finally:
        for name, layer in layers.items():
            del layer.forward
            layer.__dict__.update({"forward": own[name]} if name in own else {})
    return [name for name in names if name in called], logits.dim() == 3


def add_adapters(net: Net, layers: Collection[str], rank: int, alpha: float) -> Net:
    """The net whose layers of these names have adapters: LAYER.lora_A, the same wherever it is made, and B = 0.

    A ~ U(-1 / sqrt(inputs), 1 / sqrt(inputs)).
    """
    module = copy_module(net)
    places = [
        (parent, key, name)
        for name in layers
        for parent in list(module.modules())
        for key, child in parent._modules.items()
        if child is module.get_submodule(name)
    ]
    for name in layers:
        old: Any = module.get_submodule(name)
        rows, columns = old.weight.shape[:: -1 if is_conv1d(old) else 1]
        like = {"dtype": old.weight.dtype, "device": old.weight.device}
        a, b = draw_first_factor(name, old.weight, rank, columns).to(**like), torch.zeros(rows, rank, **like)
        new = (LowRankConv1D if is_conv1d(old) else LowRankLinear)(old, a, b, alpha / rank)
        for parent, key, own in places:
            if own == name:
                parent._modules[key] = new
    return replace(net, module=module)


def draw_first_factor(name: str, weight: Tensor, rank: int, inputs: int) -> Tensor:
    """A of a layer; its name and the first numbers of its weight are the seed."""
    seed = int(compute_digest({name: weight.detach().flatten()[:4096].float()})[:14], 16)
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(rank, inputs, generator=generator, dtype=torch.float64) - 1) / inputs**0.5


def find_adapters(module: nn.Module) -> list[Adapter]:
    """The adapters of a module: those that `add_adapters` put there, and linear ones of the package peft."""
    found = []
    for name, layer in module.named_modules():
        start = f"{name}." if name else ""
        if isinstance(layer, (LowRankLinear, LowRankConv1D)):
            transposed = isinstance(layer, LowRankConv1D)
            found.append(Adapter(f"{start}weight", f"{start}lora_A", f"{start}lora_B", float(layer.scale), transposed))
        else:
            found.extend(find_peft_adapters(start, layer))
    return found


def find_peft_adapters(start: str, layer: Any) -> Iterator[Adapter]:
    """The adapters of one layer of peft, each of which is a pair of linear layers under a name, beside the base's."""
    firsts, seconds = getattr(layer, "lora_A", None), getattr(layer, "lora_B", None)
    if not (isinstance(firsts, nn.ModuleDict) and isinstance(seconds, nn.ModuleDict)):
        return
    for key, first in firsts.items():
        if isinstance(first, nn.Linear) and isinstance(seconds[key], nn.Linear):
            a, b = (f"{start}{factor}.{key}.weight" for factor in ("lora_A", "lora_B"))
            transposed = bool(getattr(layer, "fan_in_fan_out", False))
            yield Adapter(f"{start}base_layer.weight", a, b, float(layer.scaling[key]), transposed)


def make_rank_axis(net: Net, adapters: Collection[Adapter]) -> Axis | None:
    """The one axis of all adapters; None where a factor is not shared, or where they have different ranks."""
    names = {name for adapter in adapters for name in (adapter.a, adapter.b)}
    if not names or not names.issubset(net.names_with_role("shared")):
        return None
    ranks = {len(net.initial[adapter.a]) for adapter in adapters}
    if len(ranks) > 1:
        return None
    cuts = (cut for adapter in adapters for cut in (Cut(adapter.a, 0), Cut(adapter.b, 1, reads=True)))
    return Axis(RANK_AXIS, ranks.pop(), tuple(cuts))


def merge_adapters(net: Net, params: Params) -> Params:
    """All tensors of a model with scale B A added to the weights, named as they are without adapters."""
    adapters, tied = find_adapters(net.module), {*net.ties, *net.ties.values()}
    merged, factors = {**net.frozen, **params}, {name for adapter in adapters for name in (adapter.a, adapter.b)}
    if find_prompt_name(net.module):
        problem = "The model's prompt vectors cannot be merged: they are further inputs, and no change of a weight."
        raise ShoalError("bad-value", problem, "Leave merged out: programs (.pt2, .onnx) compute with the vectors.")
    if not adapters:
        problem, advice = "The model has no adapters that could be merged.", "Leave merged out."
        raise ShoalError("bad-value", problem, advice)
    for adapter in adapters:
        if adapter.weight in tied:
            problem = f"{adapter.weight} cannot be merged with its adapter: it is one tensor with another layer's."
            raise ShoalError("bad-value", problem, "Export with the frozen tensors instead.")
        change = adapter.scale * (merged[adapter.b].double() @ merged[adapter.a].double())
        weight = merged[adapter.weight]
        merged[adapter.weight] = (weight.double() + (change.T if adapter.transposed else change)).to(weight.dtype)
    copied = {name.partition(".modules_to_save.")[0] for name in merged if ".modules_to_save." in name}
    kept = [name for name in merged if name not in factors and name.partition(".original_module.")[0] not in copied]
    other = next((name for name in kept if ".lora_" in name), None)
    if other:
        problem = f"The adapters cannot be merged: {other} is no factor of a linear layer."
        raise ShoalError("bad-value", problem, "Merge them with peft, from an export with the frozen tensors.")
    return {name_without_adapters(name): merged[name].detach() for name in kept}


def name_without_adapters(name: str) -> str:
    """The name that a tensor has in the model that peft was given."""
    before, wrapped, after = f".{name}".partition(".base_model.model.")
    name = f"{before}.{after}".removeprefix(".") if wrapped else name
    name = name.replace(".base_layer.", ".")
    layer, copied, rest = name.partition(".modules_to_save.")
    return f"{layer}.{rest.partition('.')[2]}" if copied else name

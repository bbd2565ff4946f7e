"""What layers of a module put out or take in during a call, recorded by hooks."""

from torch import Tensor, nn

from shoal.core.model.feature_maps import INPUT_TAP_PREFIX, make_input_hook
from shoal.core.model.prompted_module import make_feature_trimmer

FEATURES_TAP = ".features"
"""The tap of the input of the last layer; the dot keeps it apart from names of modules."""


class ModuleTaps:
    """The hooks of a module; each is registered when it is first asked for, and stays."""

    def __init__(self, module: nn.Module, head: str):
        self.module, self.hooked = module, set[str]()
        self.cell: list[dict[str, Tensor]] = [{}]
        """A list of one dict, which hooks write into during a call."""
        if head:
            cell, trim = self.cell, make_feature_trimmer(module)
            record = lambda _, args: cell[0].__setitem__(FEATURES_TAP, trim(args[0]))  # noqa: E731
            module.get_submodule(head).register_forward_pre_hook(record)

    def record_into(self, tapped: dict[str, Tensor], taps: tuple[str, ...] = ()) -> None:
        """Let hooks write into `tapped` from now on; taps that are new get a hook."""
        cell = self.cell
        cell[0] = tapped
        for name in taps:
            if name not in self.hooked:
                self.hooked.add(name)
                layer = self.module.get_submodule(name.removeprefix(INPUT_TAP_PREFIX))
                if name.startswith(INPUT_TAP_PREFIX):
                    layer.register_forward_pre_hook(make_input_hook(cell, name), with_kwargs=True)
                else:
                    record = lambda _m, _i, out, name=name: cell[0].__setitem__(name, out)  # noqa: E731
                    layer.register_forward_hook(record)

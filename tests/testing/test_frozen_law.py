"""The law about frozen tensors, over all parts."""

from dataclasses import dataclass, replace

import pytest

from shoal.core.part import Part
from shoal.parts import find_shipped_parts
from shoal.testing.frozen_law import check_frozen_tensors_stay

FEW = ("scaffold", "fedrod", "topk")
OTHER_NUMBERS = ("cutmix", "datasharing", "fedmp", "oort")
"""Two work on inputs as they are before any layer, the others go by costs, which the frozen layer has too."""
NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.whole) for name in find_shipped_parts()]


@pytest.mark.parametrize("name", NAMES)
def test_frozen_tensors_stay(name):
    check_frozen_tensors_stay(find_shipped_parts()[name](), name not in OTHER_NUMBERS)


@dataclass(frozen=True)
class Leaks(Part):
    """Remembers a frozen tensor."""

    def end(self, params, state, memory, device):
        return params, {"frozen": list(device.net.frozen.values())}


@dataclass(frozen=True)
class Unfreezes(Part):
    """Lets frozen tensors travel."""

    def model(self, net):
        return replace(net, roles=dict(net.roles) | dict.fromkeys(net.frozen, "shared"))


@pytest.mark.parametrize("part", [Leaks(), Unfreezes()], ids=str)
def test_the_law_bites(part):
    with pytest.raises(AssertionError, match="a frozen tensor is where none may be"):
        check_frozen_tensors_stay(part)

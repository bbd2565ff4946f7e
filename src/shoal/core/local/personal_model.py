"""The model that a device uses itself: shared tensors as they are now, what it remembers, and `personal` of parts."""

from shoal.core.compose import Method
from shoal.core.local.device import PERSONAL_KEY, TrainingSetup
from shoal.core.model.net import Net
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Params, Tree
from shoal.core.return_checks import check_params
from shoal.core.types import Device


def has_personal_models(method: Method, net: Net) -> bool:
    """Whether a device may use another model than the global one."""
    return bool(net.names_with_role("personal") or method.parts_at("personal") or method.parts_at("finetune"))


def build_personal_params(
    setup: TrainingSetup, params: Params, memory: dict[str, Tree], device: int, round: int
) -> Params:
    """The parameters of a device's own model, whose personal tensors are the initial ones before it has trained.

    Each part's `personal` is given what the one before it returned, and its own memory on the device.
    """
    remembered = memory.get(PERSONAL_KEY, {})
    personal = setup.net.names_with_role("personal")
    own = params | {k: remembered.get(k, params[k]) for k in personal} if personal else params
    for part in setup.method.parts_at("personal"):
        name = part.name()
        view = Device(
            device,
            round,
            setup.samples(device),
            setup.net,
            numbers={},
            anchor=params,
            covered={},
            got={},
            plan=WHOLE_MODEL,
            streams=setup.streams,
            part=name,
        )
        part_memory = memory[name] if name in memory else part.init_device(params)
        made = part.personal(own, part_memory, view)
        check_params(part, "personal", params, made)
        own = made
    return own

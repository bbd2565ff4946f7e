"""What does not go with an optimiser: refused when a run is built, before anything is computed."""

from fnmatch import fnmatchcase

from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.optimiser import Optimiser


def refuse_optimiser_clashes(method: Method, optimiser: Optimiser) -> None:
    """Refuse parts that are wrong beside this optimiser."""
    for part in method.parts:
        name = part.name()
        if part.assumes_sgd and optimiser.is_adaptive:
            raise ShoalError(
                "clash",
                f"{name} cannot be used with the optimiser {optimiser.kind}: it takes the way of a device for lr times "
                "its gradients, as with SGD.",
                f"Use the optimiser sgd, or leave {name} out.",
            )
        if part.assumes_sgd and optimiser.lr_groups:
            raise ShoalError(
                "clash",
                f"{name} cannot be used with lr_groups: it takes the way of a device for lr times its gradients, with "
                "the same lr for all parameters.",
                f"Leave out lr_groups or {name}.",
            )
        if part.assumes_constant_lr and optimiser.schedule:
            raise ShoalError(
                "clash",
                f"{name} cannot be used with a learning rate that changes over local steps: it takes all steps of a "
                "round for equally long.",
                "Leave out local_lr_schedule and local_lr_warmup; schedules over rounds can be used.",
            )
        if part.mixes_batch and optimiser.micro_batch:
            raise ShoalError(
                "clash",
                f"{name} cannot be used with accumulate: what it computes from a batch is no mean over samples, and "
                "micro-batches would make something else of it.",
                f"Leave out accumulate or {name}.",
            )


def refuse_accumulation(net: Net, optimiser: Optimiser) -> None:
    """Refuse micro-batches where the model or the task mixes the samples of a batch."""
    if net.mixes_batch and optimiser.micro_batch:
        raise ShoalError(
            "clash",
            "accumulate cannot be used with batch norm: it would normalise over micro-batches, not over the batch.",
            "Leave out accumulate, or use a model with another kind of norm.",
        )
    if net.task.mixes_batch and optimiser.micro_batch:
        raise ShoalError(
            "clash",
            f"accumulate cannot be used with the task {net.task.name}: its loss of a batch is no mean over samples.",
            "Leave out accumulate.",
        )


def refuse_unmatched_groups(net: Net, optimiser: Optimiser) -> None:
    """Refuse groups of learning rates in which no parameter is."""
    for pattern, _ in optimiser.lr_groups:
        if not any(fnmatchcase(name, pattern) for name in net.trainable):
            names = ", ".join(net.trainable[:6]) + (", ..." if len(net.trainable) > 6 else "")
            raise ShoalError(
                "bad-value",
                f"lr_groups names {pattern!r}, and no parameter that is trained has such a name.",
                f"They are called {names}; * stands for anything.",
            )

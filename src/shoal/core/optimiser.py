"""The optimiser of local training: SGD, Adam and AdamW as pure functions of tensors."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import log

import torch
from torch import Tensor

from shoal.core.errors import ShoalError, unknown_name_error
from shoal.core.lr_schedule import CONSTANT_LR, LrSchedule
from shoal.core.model import tree
from shoal.core.model.tree import Params, Tree

OPTIMISER_KINDS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Optimiser:
    """The local optimiser of the recipe, with the numbers of `torch.optim`; its state is 0 before every round.

    Weight decay is added to the gradient, except that of `adamw`, which shrinks the parameters themselves.
    """

    momentum: float = 0.0
    """Of `sgd`; the other kinds have `beta1` and `beta2`."""
    weight_decay: float = 0.0
    clip: float = 0.0
    """The largest 2-norm of the gradient of all shared parameters together, and of all personal ones; 0: no bound."""
    kind: str = "sgd"
    nesterov: bool = False
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: LrSchedule = CONSTANT_LR
    """The learning rate over the local steps of a round."""
    micro_batch: int = 0
    """Samples whose gradient is computed at once; gradients of larger batches are added up. 0: the whole batch."""
    lr_groups: tuple[tuple[str, float], ...] = ()
    """(pattern, factor): the learning rate of parameters whose name fits; the first pattern that does counts."""

    def __post_init__(self):
        if self.kind not in OPTIMISER_KINDS:
            raise unknown_name_error("optimiser", self.kind, OPTIMISER_KINDS)
        if self.is_adaptive and (self.momentum or self.nesterov):
            given = f"momentum {self.momentum:g}" if self.momentum else "nesterov"
            problem = f"{given} is given with the optimiser {self.kind}, which has momentum of its own, beta1."
            raise ShoalError("bad-value", problem, "Set beta1 instead, or use the optimiser sgd.")
        if self.nesterov and not self.momentum:
            problem = "nesterov is given without momentum, and there is nothing that it could look ahead along."
            raise ShoalError("bad-value", problem, "Give a momentum above 0.")

    @property
    def is_adaptive(self) -> bool:
        """Whether steps are scaled coordinate by coordinate, so that they say little of the size of gradients."""
        return self.kind != "sgd"

    def get_lr_factor(self, name: str) -> float:
        """The factor on the learning rate of a parameter: that of its group, or 1."""
        return next((factor for pattern, factor in self.lr_groups if fnmatchcase(name, pattern)), 1.0)

    def scale_groups(self, update: Params) -> Params:
        """The direction of a step with every parameter's part times the factor of its group."""
        factors = {name: self.get_lr_factor(name) for name in update}
        return {k: u if factors[k] == 1 else u * factors[k] for k, u in update.items()}

    def init_slots(self, params: Params) -> Tree:
        """The state before the first step, with the names that torch.optim has for it."""
        if self.is_adaptive:
            step = next(iter(params.values())).new_zeros(1)
            return {"step": step, "exp_avg": tree.make_zeros(params), "exp_avg_sq": tree.make_zeros(params)}
        return {"momentum_buffer": tree.make_zeros(params)} if self.momentum else {}

    def add_weight_decay(self, update: Params, params: Params) -> Params:
        """The gradient with weight decay as an L2 term; `adamw` has its own way."""
        if self.kind == "adamw" or not is_set(self.weight_decay):
            return update
        return {k: u + self.weight_decay * params[k] for k, u in update.items()}

    def step(self, update: Params, slots: Tree, params: Params) -> tuple[Params, Tree]:
        """The direction of a step, lr times which the parameters lose, and the state after it."""
        if self.is_adaptive:
            return self.step_adam(update, slots, params)
        if not slots:
            return update, slots
        buffer = {k: self.momentum * v + update[k] for k, v in slots["momentum_buffer"].items()}
        ahead = {k: u + self.momentum * buffer[k] for k, u in update.items()} if self.nesterov else buffer
        return ahead, {"momentum_buffer": buffer}

    def step_adam(self, update: Params, slots: Tree, params: Params) -> tuple[Params, Tree]:
        """Along the mean gradient over the root of the mean square, both without the bias of their start at 0."""
        step = slots["step"] + 1
        mean = {k: self.beta1 * m + (1 - self.beta1) * update[k] for k, m in slots["exp_avg"].items()}
        square = {k: self.beta2 * v + (1 - self.beta2) * update[k].square() for k, v in slots["exp_avg_sq"].items()}
        mean_bias, square_bias = (compute_bias_correction(beta, step) for beta in (self.beta1, self.beta2))
        direction = {k: m / mean_bias / ((square[k] / square_bias).sqrt() + self.eps) for k, m in mean.items()}
        if self.kind == "adamw" and is_set(self.weight_decay):
            direction = {k: d + self.weight_decay * params[k] for k, d in direction.items()}
        return direction, {"step": step, "exp_avg": mean, "exp_avg_sq": square}


def compute_bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    """1 - beta ** step, exact also where beta is near 1."""
    if not isinstance(beta, Tensor):
        return -torch.expm1(step * log(beta)).reshape(()) if beta else torch.ones_like(step).reshape(())
    return -torch.expm1(step * beta.log()).reshape(())


def is_set(number: float | Tensor) -> bool:
    """Whether an option of the optimiser is not 0; a tensor, with a value per batched device, counts as set."""
    return isinstance(number, Tensor) or number != 0


def clip_update(update: Params, bound: float | Tensor) -> Params:
    """The update scaled to a norm of at most `bound`; 0 is no bound, which one of several batched devices may have."""
    norm = torch.stack([u.square().sum() for u in update.values()]).sum().sqrt()
    factor = (bound / (norm + 1e-6)).clamp(max=1.0)
    if isinstance(bound, Tensor):
        factor = torch.where(bound > 0, factor, torch.ones_like(factor))
    return tree.scale_params(update, factor)


def clip_apart(update: Params, bound: float | Tensor, apart: Sequence[Collection[str]]) -> Params:
    """The update with each of some groups of tensors, and all others together, scaled to a norm of at most `bound`."""
    if not any(apart):
        return clip_update(update, bound)
    rest = [name for name in update if not any(name in group for group in apart)]
    groups = [tree.select_params(update, group) for group in (*apart, rest) if group]
    clipped = {k: u for group in groups for k, u in clip_update(group, bound).items()}
    return {k: clipped[k] for k in update}

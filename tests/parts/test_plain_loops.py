"""Methods against plain loops over devices, written from their formulas alone.

Devices are of unequal size, one has no samples, three are asked in a round and some of them fail, batches are ragged,
gradients are clipped and weights decay. That all engines train alike is a law of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.core.ledger import Deadlines
from shoal.core.local.schedule import make_schedule
from shoal.core.model.tree import Params
from shoal.core.session import Session, play_round
from shoal.core.types import Optimiser
from shoal.plugins.smoke_run import build_tiny_run, make_tiny_setup
from shoal.testing.toy import make_method

SIZES = (7, 0, 4, 5, 1, 6)
CLIP, DECAY, LR, ROUNDS = 0.4, 0.05, 0.1, 5
HOLDING = sum(size > 0 for size in SIZES)
SAMPLES = make_tiny_setup(sum(SIZES) + 4)
Slope = Callable[[Params, Tensor], Params]
"""(weights, rows) -> the gradient before clipping."""


def compute_slope(w: Params, rows: Tensor) -> Params:
    leaves = {k: v.detach().requires_grad_() for k, v in w.items()}
    hidden = torch.relu(SAMPLES.inputs[rows] @ leaves["a.weight"].T + leaves["a.bias"])  # type: ignore[index]
    logits = hidden @ leaves["b.weight"].T + leaves["b.bias"]
    return dict(zip(w, torch.autograd.grad(F.cross_entropy(logits, SAMPLES.targets[rows]), list(leaves.values()))))


def add(a: Params, b: Params, factor: float = 1.0) -> Params:
    return {k: v + factor * b[k] for k, v in a.items()}


def norm(a: Params) -> float:
    return float(torch.cat([v.flatten() for v in a.values()]).norm())


def mean(models: list[Params], weights: Sequence[float]) -> Params:
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return {k: torch.tensordot(shares, torch.stack([m[k] for m in models]), 1) for k in models[0]}


class PlainLoop:
    """The rounds of a method; `memory` is what devices remember, `state` what the server does."""

    def __init__(self, start: Params):
        self.w, self.memory, self.state = start, {}, {}
        self.zero = {k: torch.zeros_like(v) for k, v in start.items()}

    def train(
        self, batches: list[Tensor], slope: Slope = compute_slope, start: Params | None = None, step=None
    ) -> Params:
        w = start or self.w
        for rows in batches:
            g = slope(w, rows)
            g = {k: v * min(1.0, CLIP / (norm(g) + 1e-6)) for k, v in g.items()}
            g = add(g, w, DECAY)
            w = add(w, step(g) if step else g, -LR)
        return w

    def play(self, replies: dict[int, list[Tensor]]) -> None:
        models = [self.train(batches) for batches in replies.values()]
        self.w = mean(models, [SIZES[device] for device in replies])


class PlainFedLESAM(PlainLoop):
    def play(self, replies):
        models = []
        for device, batches in replies.items():
            back = add(self.memory.get(device, self.w), self.w, -1)
            uphill = {k: 0.1 * v / (norm(back) + 1e-7) for k, v in back.items()}
            models.append(self.train(batches, lambda w, rows, e=uphill: compute_slope(add(w, e), rows)))
            self.memory[device] = self.w
        self.w = mean(models, [SIZES[device] for device in replies])


class PlainFedSpeed(PlainLoop):
    def play(self, replies):
        models = []
        for device, batches in replies.items():
            h = self.memory.get(device, self.zero)

            def slope(w: Params, rows: Tensor, h: Params = h) -> Params:
                g = compute_slope(w, rows)
                above = compute_slope(add(w, g, 0.1 / (norm(g) + 1e-7)), rows)
                return add(above, add(add(w, self.w, -1), h), 0.1)

            models.append(self.train(batches, slope))
            self.memory[device] = add(h, add(models[-1], self.w, -1))
        sums = {k: torch.stack([h[k] for h in self.memory.values()]).sum(0) for k in self.w}
        self.w = add(mean(models, [1.0] * len(models)), sums, 1 / HOLDING)


class PlainFedCM(PlainLoop):
    def play(self, replies):
        m = self.state.get("m", self.zero)
        mix = lambda g: {k: 0.1 * v + 0.9 * m[k] for k, v in g.items()}  # noqa: E731
        models = [self.train(batches, step=mix) for batches in replies.values()]
        weights = [SIZES[device] for device in replies]
        steps = sum(w * len(batches) for w, batches in zip(weights, replies.values())) / sum(weights)
        before, self.w = self.w, mean(models, weights)
        self.state["m"] = {k: (before[k] - self.w[k]) / (LR * steps) for k in before}


class PlainScaffold(PlainLoop):
    def play(self, replies):
        c, models = self.state.get("c", self.zero), []
        after = c
        for device, batches in replies.items():
            old = self.memory.get(device, self.zero)
            correct = lambda g, old=old: add(add(g, old, -1), c)  # noqa: E731
            models.append(self.train(batches, step=correct))
            way = add(self.w, models[-1], -1)
            new = add(add(old, c, -1), way, 1 / (LR * len(batches)))
            after, self.memory[device] = add(after, add(new, old, -1), SIZES[device] / sum(SIZES)), new
        self.w, self.state["c"] = mean(models, [SIZES[device] for device in replies]), after


class PlainDitto(PlainLoop):
    """The shared model is FedAvg's; `memory` holds the own ones."""

    def play(self, replies):
        for device, batches in replies.items():
            pull = lambda v, rows: add(compute_slope(v, rows), add(v, self.w, -1))  # noqa: E731
            self.memory[device] = self.train(batches, pull, self.memory.get(device, self.state["start"]))
        super().play(replies)


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        ("fedavg", PlainLoop),
        ("fedlesam", PlainFedLESAM),
        ("fedspeed", PlainFedSpeed),
        ("fedcm", PlainFedCM),
        ("scaffold", PlainScaffold),
        ("ditto", PlainDitto),
    ],
)
def test_a_plain_loop_over_devices_comes_to_the_same_model(method: str, plain: type[PlainLoop]):
    optimiser = Optimiser(weight_decay=DECAY, clip=CLIP)
    loop, net = build_tiny_run(make_method(method), SIZES, setting=SAMPLES, optimiser=optimiser)
    session = Session(replace(loop, sample=3, deadlines=Deadlines(failures=0.25)), net)
    start = {k: v.clone() for k, v in net.initial.items() if not k.startswith("ditto.")}
    rounds, asked, failed = plain(start), set[int](), 0
    rounds.state["start"] = start
    for number in range(ROUNDS):
        session.open_round()
        pending = session.get_pending()
        replies = {}
        for job in pending.jobs_to_train:
            generator = loop.streams.make_torch_generator("batches", number, job.device)
            index = loop.host.setup.samples(job.device).index
            replies[job.device] = list(make_schedule(index, job.work, generator, False))
        asked, failed = asked | replies.keys(), failed + len(pending.failed)
        play_round(session)
        if replies:
            rounds.play(replies)
        assert session.server_state
        for name, value in rounds.w.items():
            torch.testing.assert_close(session.server_state.params[name], value, rtol=0, atol=1e-12)
        for device, own in rounds.memory.items() if method == "ditto" else ():
            made = loop.host.make_personal_model(device, session.server_state.params, number)
            assert all(torch.allclose(made[k], own[k], rtol=0, atol=1e-12) for k in own)
    assert failed and len(asked) > 3, "some devices fail, and some come back"

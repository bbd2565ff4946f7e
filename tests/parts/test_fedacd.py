"""FedACD and Mixup: losses, class matrix, weights, and the metrics of local models."""

import logging
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.core.batch import Batch, BatchScore
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.losses import compute_cross_entropy
from shoal.core.measures.confusion import compute_class_matrix, measure_class_divergence, sum_by_class
from shoal.core.measures.evaluate import Evaluator
from shoal.core.measures.local_models import LocalModelEvaluator, rebuild_local_model
from shoal.core.model import tree
from shoal.core.session import train_jobs
from shoal.core.types import Local
from shoal.models.lstm import lstm
from shoal.models.mlp import mlp
from shoal.parts.fedacd import FedACD, compute_adaptability, compute_evenness_loss, roll_class_matrix
from shoal.parts.mixup import Mixup, blend_batch
from shoal.plugins.smoke_run import build_tiny_run, prepare_local_trainings
from shoal.testing.rounds import play_rounds

DOUBLE = torch.float64


def logits_of(seed: int, rows: int = 5, classes: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    f = 2 * torch.randn(rows, classes, generator=generator, dtype=DOUBLE)
    return f, torch.randint(classes, (rows,), generator=generator)


def as_printed(f: torch.Tensor, y: torch.Tensor, detach: bool) -> torch.Tensor:
    """KL(p || q) summed over samples, literally."""
    p, classes = f.softmax(-1), f.shape[-1]
    hot = torch.nn.functional.one_hot(y, classes).bool()
    own = p.gather(1, y[:, None])
    q = torch.where(hot, own, (1 - own) / (classes - 1))
    return (p * (p / (q.detach() if detach else q)).log()).sum()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_l1_is_what_is_printed_and_its_gradient_needs_no_detaching(seed):
    f, y = logits_of(seed)
    grads = []
    for loss in (
        lambda x: compute_evenness_loss(x, y).sum(),
        lambda x: as_printed(x, y, False),
        lambda x: as_printed(x, y, True),
    ):
        x = f.clone().requires_grad_()
        value = loss(x)
        torch.testing.assert_close(value.detach(), as_printed(f, y, False))
        grads.append(torch.autograd.grad(value, x)[0])
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[1], grads[2])


def test_l1_is_zero_where_the_wrong_mass_is_even_and_for_two_classes():
    y = torch.tensor([0, 2])
    even = torch.tensor([[3.0, 1.0, 1.0, 1.0], [-2.0, -2.0, 5.0, -2.0]], dtype=DOUBLE)
    torch.testing.assert_close(compute_evenness_loss(even, y), torch.zeros(2, dtype=DOUBLE))
    assert compute_evenness_loss(even + torch.tensor([0.0, 0.1, 0.0, 0.0], dtype=DOUBLE), y).min() > 1e-6
    two, targets = logits_of(1, classes=2)
    torch.testing.assert_close(compute_evenness_loss(two, targets), torch.zeros(5, dtype=DOUBLE))


def test_l1_by_hand():
    """p = (1/2, 1/4, 1/8, 1/8), y = 0: q = 1/6 for the others."""
    f = torch.tensor([[log(4), log(2), 0.0, 0.0]], dtype=DOUBLE)
    expected = 0.25 * log(0.25 * 6) + 2 * 0.125 * log(0.125 * 6)
    assert float(compute_evenness_loss(f, torch.tensor([0]))) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("far", [50.0, 800.0])
def test_losses_are_finite_where_the_model_is_sure(far):
    f = torch.tensor([[far, 0.0, -far, 0.0], [0.0, far, 0.0, 0.0]], dtype=torch.float32, requires_grad=True)
    loss = compute_evenness_loss(f, torch.tensor([0, 0])).sum()
    grad = torch.autograd.grad(loss, f)[0]
    assert bool(loss.isfinite()) and bool(grad.isfinite().all())


def scored_by(
    part: FedACD, f: torch.Tensor, y: torch.Tensor, matrix: torch.Tensor, there=None, batch=None
) -> BatchScore:
    """The part's loss of given logits, the matrix being what it is."""
    classes = f.shape[-1]
    state = {
        "matrix": matrix,
        "there": torch.ones(classes, dtype=torch.bool) if there is None else there,
        "epoch": torch.zeros((), dtype=DOUBLE),
        "sums": torch.zeros_like(matrix),
        "counts": torch.zeros(classes, dtype=DOUBLE),
    }
    local = Local(mlp((2,), classes), {}, {}, {"epoch": torch.zeros((), dtype=DOUBLE)}, {}, state)
    batch = batch or Batch(f, ((y, None),))
    inner = lambda params, b: BatchScore(f.sum() * 0, params["f"], f, {}, {}, {})  # noqa: E731
    return part.objective(inner, local)({"f": f}, batch)


def matrix_of(seed: int, classes: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(classes, classes, generator=generator, dtype=DOUBLE).softmax(1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_the_gradient_of_both_losses_against_finite_differences(seed):
    f, y = logits_of(seed)
    part, matrix = FedACD(lam=0.7), matrix_of(seed)
    x = f.clone().requires_grad_()
    grad = torch.autograd.grad(scored_by(part, x, y, matrix).loss, x)[0]
    step = 1e-6
    for i in range(f.numel()):
        move = torch.zeros(f.numel(), dtype=DOUBLE).index_fill(0, torch.tensor([i]), step).view(f.shape)
        up, down = (scored_by(part, f + s * move, y, matrix).loss for s in (1, -1))
        assert float(grad.flatten()[i]) == pytest.approx(float(up - down) / (2 * step), abs=1e-6)


def test_a_symmetric_matrix_leaves_cross_entropy():
    f, y = logits_of(3)
    matrix = matrix_of(3)
    loss = scored_by(FedACD(), f, y, (matrix + matrix.T) / 2).loss
    torch.testing.assert_close(loss, (compute_evenness_loss(f, y) + compute_cross_entropy(f, y)).mean())


def test_margins_of_class_counts_are_the_balanced_softmax():
    """P_yi / P_iy = n_i / n_y for P_yi = n_i / n."""
    f, y = logits_of(4)
    counts = torch.tensor([5.0, 1.0, 3.0, 1.0], dtype=DOUBLE)
    loss = scored_by(FedACD(), f, y, (counts / counts.sum()).expand(4, 4)).loss - compute_evenness_loss(f, y).mean()
    torch.testing.assert_close(loss, compute_cross_entropy(f + counts.log(), y).mean())


def test_a_class_more_often_taken_for_another_is_held_to_a_larger_margin():
    matrix = torch.tensor([[0.6, 0.4], [0.1, 0.9]], dtype=DOUBLE)
    margins = FedACD().compute_margins(matrix, torch.ones(2, dtype=torch.bool))
    torch.testing.assert_close(margins, torch.tensor([[0.0, log(4)], [-log(4), 0.0]], dtype=DOUBLE))
    unknown = FedACD(missing=1e-3).compute_margins(matrix, torch.tensor([True, False]))
    assert float(unknown[0, 1]) == pytest.approx(log(1e-3)) and float(unknown[0, 0]) == 0


def test_one_class_and_missing_classes_give_finite_losses():
    f, _ = logits_of(5)
    y = torch.zeros(5, dtype=torch.long)
    there = torch.tensor([True, False, False, False])
    matrix = torch.full((4, 4), 0.25, dtype=DOUBLE)
    x = f.clone().requires_grad_()
    scored = scored_by(FedACD(), x, y, matrix, there)
    grad = torch.autograd.grad(scored.loss, x)[0]
    assert bool(scored.loss.isfinite()) and bool(grad.isfinite().all())
    expected = (compute_evenness_loss(f, y) + (1 + 1e-3 * (f[:, 1:] - f[:, :1]).exp().sum(1)).log()).mean()
    torch.testing.assert_close(scored.loss.detach(), expected)


# the class matrix ---------------------------------------------------------------------------------------------------
def test_the_matrix_is_the_mean_output_by_class():
    loop, net = build_tiny_run(Method())
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    samples = visit.device.samples
    matrix, counts = compute_class_matrix(net, net.initial, samples)
    p, y = net.forward(net.initial, samples.take_all().inputs)[0].softmax(-1), samples.take_all().targets[0][0]
    for c in range(2):
        assert int(counts[c]) == int((y == c).sum())
        expected = p[y == c].mean(0) if (y == c).any() else torch.full((2,), 0.5, dtype=DOUBLE)
        torch.testing.assert_close(matrix[c], expected)


def test_blended_samples_count_in_the_rows_of_both_labels():
    f, _ = logits_of(6, rows=2, classes=3)
    weights = torch.tensor([0.3, 0.3], dtype=DOUBLE)
    targets = ((torch.tensor([0, 1]), weights), (torch.tensor([1, 0]), 1 - weights))
    sums, counts = sum_by_class(f, Batch(f, targets))
    p = f.softmax(-1)
    torch.testing.assert_close(sums[0], 0.3 * p[0] + 0.7 * p[1])
    torch.testing.assert_close(sums[1], 0.7 * p[0] + 0.3 * p[1])
    assert counts.tolist() == pytest.approx([1.0, 1.0, 0.0])


def test_padding_counts_in_no_row():
    f, y = logits_of(7)
    weight = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], dtype=DOUBLE)
    padded, short = Batch(f, ((y, None),), weight), Batch(f[:3], ((y[:3], None),))
    for one, two in zip(sum_by_class(f, padded), sum_by_class(f[:3], short)):
        torch.testing.assert_close(one, two)


def test_the_matrix_of_an_epoch_is_used_in_the_next_one():
    matrix, sums = torch.eye(2, dtype=DOUBLE), torch.tensor([[1.0, 3.0], [0.0, 0.0]], dtype=DOUBLE)
    state = {"matrix": matrix, "sums": sums, "counts": torch.tensor([4.0, 0.0]), "epoch": torch.tensor(0.0)}
    net = mlp((2,), 2)
    same = roll_class_matrix(state, Local(net, {}, {}, {"epoch": torch.tensor(0.0)}, {}, state))
    assert torch.equal(same["matrix"], matrix) and torch.equal(same["sums"], sums)
    after = roll_class_matrix(state, Local(net, {}, {}, {"epoch": torch.tensor(1.0)}, {}, state))
    assert after["matrix"].tolist() == [[0.25, 0.75], [0.0, 1.0]]  # a class that was not seen keeps its row
    assert not after["sums"].any() and float(after["epoch"]) == 1


def test_cadences_train_differently():
    ends = []
    for cadence in ("epoch", "batch_ema", "round"):
        loop, net = build_tiny_run(Method((FedACD(cadence=cadence),)), (8, 6))
        ends.append(play_rounds(loop, loop.start(net), 0, 2)[0].params)
    assert tree.collect_tensors(ends[0])[0].tolist() != tree.collect_tensors(ends[1])[0].tolist()


# weights ------------------------------------------------------------------------------------------------------------
def test_v_by_hand():
    matrix = torch.tensor([[0.8, 0.2], [0.4, 0.6]], dtype=DOUBLE)
    tau = 0.9
    rows = [0.8 * log(0.8 / 0.9) + 0.2 * log(0.2 / 0.1), 0.4 * log(0.4 / 0.1) + 0.6 * log(0.6 / 0.9)]
    counts = torch.tensor([3.0, 5.0])
    assert float(measure_class_divergence(matrix, counts, tau)) == pytest.approx(sum(rows) / 2)
    assert float(measure_class_divergence(matrix, counts, tau, "sum")) == pytest.approx(sum(rows))
    assert float(measure_class_divergence(matrix, torch.tensor([3.0, 0.0]), tau)) == pytest.approx(rows[0])
    assert float(compute_adaptability(measure_class_divergence(matrix, counts, tau))) == pytest.approx(
        1 / (1 + exp(-2 / sum(rows)))
    )


@given(st.floats(0, 1e6))
def test_v_is_between_a_half_and_one(value):
    v = float(compute_adaptability(torch.tensor(value, dtype=DOUBLE)))
    assert 0.5 < v <= 1


def test_replies_weigh_what_they_report_and_the_base_weighs_them_alike():
    for part in (FedACD(), FedACD(weights="uniform")):
        loop, net = build_tiny_run(Method((part,)), (5, 3, 4))
        asked = loop.open_round(loop.start(net), 0)
        outcomes = train_jobs(loop.host, asked.jobs_to_train)
        replies, _ = loop.exchange.decode_replies(asked.jobs, outcomes, asked.round, set())
        round = replace(asked.round, replies=replies)
        weights, _ = part.weigh(torch.zeros(3, dtype=DOUBLE), {}, round)
        if part.weights == "uniform":
            assert weights.tolist() == [1, 1, 1] and not replies[0].report
            continue
        for reply, weight in zip(replies, weights):
            found = compute_class_matrix(
                net,
                rebuild_local_model(reply, round),
                prepare_local_trainings(loop, loop.start(net))[reply.device].device.samples,
            )
            assert float(weight) == pytest.approx(
                float(compute_adaptability(measure_class_divergence(*found, part.tau))), rel=1e-9
            )


def test_the_score_costs_four_bytes():
    one, two = (
        shoal.run(method=m, rounds=2, engine="serial", devices=4, sample=4).history.rows
        for m in ("fedacd", "fedacd(weights='uniform')")
    )
    assert [a["bytes_up"] - b["bytes_up"] for a, b in zip(one, two)] == [16, 16]


# mixup --------------------------------------------------------------------------------------------------------------
@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.integers(0, 4), st.floats(0, 1), st.floats(0, 0.999))
def test_a_blend_of_padded_rows_is_the_blend_of_the_others(rows, padding, share, shift):
    x = torch.randn(rows + padding, 3, dtype=DOUBLE)
    y = torch.arange(rows + padding)
    weight = (torch.arange(rows + padding) < rows).to(DOUBLE)
    lam, by = torch.tensor(share, dtype=DOUBLE), torch.tensor(shift, dtype=DOUBLE)
    padded, short = (
        blend_batch(Batch(x, ((y, None),), weight), lam, by),
        blend_batch(Batch(x[:rows], ((y[:rows], None),)), lam, by),
    )
    torch.testing.assert_close(padded.inputs[:rows], short.inputs)
    assert [t[:rows].tolist() for t, _ in padded.targets] == [t.tolist() for t, _ in short.targets]
    assert sorted(short.targets[1][0].tolist()) == list(range(rows))
    moved = int(shift * rows)
    torch.testing.assert_close(short.inputs, share * x[:rows] + (1 - share) * x[:rows].roll(-moved, 0))


def test_a_share_of_one_is_no_mixup():
    x, y = torch.randn(4, 3), torch.arange(4)
    one = blend_batch(Batch(x, ((y, None),)), torch.tensor(1.0), torch.tensor(0.6))
    weight = one.targets[1][1]
    assert torch.equal(one.inputs, x) and weight is not None and not weight.any()


def test_shares_follow_their_beta_distribution():
    loop, net = build_tiny_run(Method((Mixup(0.4),)))
    device, generator = prepare_local_trainings(loop, loop.start(net))[0].device, torch.Generator().manual_seed(0)
    drawn = [float(Mixup(0.4).draw(generator, device, 0)["share"]) for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(0.5, abs=0.03)
    assert np.var(drawn) == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)


def test_words_are_refused():
    with pytest.raises(ShoalError, match="words cannot be blended"):
        Mixup().model(lstm((6,), 20))
    with pytest.raises(ShoalError, match="every class with every other one"):
        FedACD().model(lstm((6,), 20))


# composition, engines, metrics --------------------------------------------------------------------------------------
@pytest.mark.whole
@pytest.mark.parametrize(
    "method", ["fedacd+mixup", "fedacd+fedad", "fedacd+fedbiad+dgc", "fedlc+fjord", "mixup+scaffold", "fedacd_base"]
)
def test_compositions_train_in_one_batch(method, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        result = shoal.run(method=method, rounds=3, engine="batched", devices=6, sample=6, eval_every=3)
    assert result.history.rows[-1]["accuracy"] > 0.2
    assert not [r.getMessage() for r in caplog.records if "vectorised" in r.getMessage()]


def test_the_risk_of_local_models_is_over_the_labels_of_all_devices():
    labels = np.array([[5, 1], [0, 4], [2, 2]])
    loop, net = build_tiny_run(Method(), (5, 3, 4))
    asked = loop.open_round(loop.start(net), 0)
    replies, _ = loop.exchange.decode_replies(
        asked.jobs, train_jobs(loop.host, asked.jobs_to_train), asked.round, set()
    )
    round = replace(asked.round, replies=replies)
    evaluator = loop.evaluate_model
    assert isinstance(evaluator, Evaluator)
    evaluator = Evaluator(evaluator.samples, 2, (), labels)
    found = LocalModelEvaluator(evaluator, lambda device: evaluator.samples, ("local",))(round)
    expected = []
    batch = evaluator.samples.take_all()
    for reply in replies:
        guess = net.forward(rebuild_local_model(reply, round), batch.inputs)[0].argmax(-1)
        y = batch.targets[0][0]
        errors = np.array([float((guess[y == c] != c).float().mean()) if (y == c).any() else np.nan for c in (0, 1)])
        for own in labels:
            there = ~np.isnan(errors)
            if own[there].sum():
                expected.append(float((errors[there] * own[there]).sum() / own[there].sum()))
    assert found["local_risk"] == pytest.approx(np.mean(expected))


def test_metrics_of_local_models_are_in_the_history():
    rows = shoal.run(method="fedavg", rounds=2, devices=4, sample=2, metrics=["local", "class_kl"]).history.rows
    assert 0 < rows[-1]["local_risk"] < 1 and rows[-1]["class_kl"] > 0

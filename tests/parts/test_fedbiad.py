"""FedBIAD: patterns of rows, the trend of the loss, what travels, and the paper's sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shoal
import shoal.models
from shoal.core import wire
from shoal.core.batch import BatchScore
from shoal.core.compose import Method
from shoal.core.expression import parse_method
from shoal.core.local.step import StepRule, advance, compute_autograd_gradient
from shoal.core.model.plan import WHOLE_MODEL, Plan
from shoal.core.session import train_jobs
from shoal.core.streams import RandomStreams
from shoal.core.types import Local, Optimiser, Work
from shoal.models import MODELS, build_model
from shoal.models.lstm import lstm
from shoal.parts import find_shipped_parts
from shoal.parts.fedbiad import FedBIAD
from shoal.parts.lib.posterior import compute_slab_deviation
from shoal.parts.lib.row_patterns import (
    compute_cut_shapes,
    count_kept_rows,
    cut_rows,
    list_droppable_rows,
    pick_row_pattern,
    plan_kept_rows,
    restore_rows,
)
from shoal.parts.lib.submodel_units import list_rows_of_kinds
from shoal.plugins.smoke_run import build_tiny_run, make_step_contexts, prepare_local_trainings
from shoal.testing.laws import check_part
from shoal.testing.rounds import assert_trees_close, play_rounds

WORDS: dict[str, Any] = {
    "devices": 4,
    "sample": 2,
    "rounds": 2,
    "batch": 4,
    "steps": "8",
    "lr": 0.5,
    "engine": "serial",
}


def run_with(method: str, engine: str, setting: dict[str, Any]):
    changed: dict[str, Any] = {**setting, "engine": engine}
    return shoal.run(method, **changed)


def some_text(words: int = 30) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, words, (60, 7), generator=torch.Generator().manual_seed(0))
    return text[:, :-1], text[:, 1:]


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.whole)])
@pytest.mark.parametrize(
    "part",
    [FedBIAD(0.3, combining="literal"), FedBIAD(combining="fill", early=0), FedBIAD(s_tilde=0.1)],
    ids=str,
)
def test_laws_at_other_settings(part, whole):
    check_part(part, whole)


# patterns -------------------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.floats(0, 0.99), st.lists(st.integers(0, 2), max_size=60), st.integers(0, 99))
def test_the_number_of_kept_rows_is_exact_however_they_score(size, rate, scores, seed):
    generator = torch.Generator().manual_seed(seed)
    scored = torch.tensor((scores + [0] * size)[:size], dtype=torch.float32)
    for given_scores in (None, scored):
        kept = pick_row_pattern(given_scores, size, rate, generator)
        assert int(kept.sum()) == count_kept_rows(size, rate) >= 1 and set(kept.tolist()) <= {0.0, 1.0}
    lowest = scored[kept > 0].min()
    assert bool((scored[kept == 0] <= lowest).all())


def test_halves_go_up():
    assert [count_kept_rows(n, 0.5) for n in (1, 2, 3, 5)] == [1, 1, 1, 2] and count_kept_rows(128, 0.2) == 102


def test_which_rows_can_go():
    words, images = lstm((6,), 50, width=8), build_model("lenet", (1, 28, 28), 10, 0)
    assert [g.name for g in list_droppable_rows(words, False, False)] == [
        "embed:embedding",
        "lstm1:recurrent",
        "lstm2:recurrent",
        "fc:output",
    ]
    assert [g.size for g in list_droppable_rows(words, True, False)] == [50, 8, 8, 50]
    assert [g.name for g in list_droppable_rows(images, False, False)] == ["conv1", "conv2", "fc1", "fc2"]
    assert list_droppable_rows(images, False, True)[-1].name == "fc3:output"


# the local run --------------------------------------------------------------------------------------------------------


def steps_of(part: FedBIAD, losses: list[float], late: bool = False) -> list[dict[str, Tensor]]:
    """The patterns before each step and at the end, when the losses are these; one that is drawn is always another."""
    loop, net = build_tiny_run(Method((part,)), (6,))
    visit = prepare_local_trainings(loop, loop.start(net), part.early if late else 0)[0]
    state, patterns = visit.state.states["fedbiad"], []
    own = visit.device_for_part("fedbiad")
    generator = own.generator("draw")
    update = {k: torch.zeros_like(v) for k, v in visit.state.params.items()}
    for step, loss in enumerate(losses):
        patterns.append(state["kept"])
        numbers = visit.context.numbers | {"step": torch.tensor(float(step)), "steps": torch.tensor(float(len(losses)))}
        drawn = part.draw(generator, own, step)
        draws = drawn | {k: 1 - kept for k, kept in state["kept"].items() if drawn[k].any()}
        local = Local(net, visit.context.anchor, {}, numbers, draws, state)
        scored = BatchScore(torch.tensor(loss), torch.zeros(0), torch.zeros(0), {}, {}, {})
        update, state = part.step(update, state, scored, local)
    assert all(kept.any() for pattern in (*patterns, state["kept"]) for kept in pattern.values())
    return [*patterns, state["kept"]]


def changes(patterns: list[dict[str, Tensor]]) -> list[int]:
    """After which steps, counted from 1, another pattern was taken."""
    return [
        v
        for v in range(1, len(patterns))
        if any(not torch.equal(patterns[v][k], patterns[v - 1][k]) for k in patterns[v])
    ]


def test_a_falling_loss_keeps_one_pattern():
    assert changes(steps_of(FedBIAD(rate=0.4, window=2), [9.0 - v for v in range(9)])) == []


def test_patterns_change_only_where_a_window_ends_and_the_loss_rose():
    """Windows of 2: looked at after iterations 4, 6, 8, ..., counted from 0, which are steps 5, 7, 9, ..., counted
    from 1; the loss rises throughout. None after the last step."""
    assert changes(steps_of(FedBIAD(rate=0.4, window=2), [float(v) for v in range(11)])) == [5, 7, 9]
    only_late = changes(steps_of(FedBIAD(rate=0.4, window=2), [6, 5, 4, 3, 2, 1, 1, 9, 9, 9.0]))
    assert only_late == [9]
    assert changes(steps_of(FedBIAD(rate=0.4, window=2), [float(v) for v in range(9)], late=True)) == []
    assert changes(steps_of(FedBIAD(rate=0.4, window=2), [1, 1, 1, 1, 1, 1, 1, 9, 9.0])) == []


@pytest.mark.parametrize("first", [0.0, 99.0])
def test_the_loss_of_the_first_iteration_is_never_used(first):
    """Windows of 3: iterations 4 to 6 against 1 to 3 after iteration 6, so a run of 7 steps is too short for a look."""
    part = FedBIAD(rate=0.4, window=3)
    assert changes(steps_of(part, [first, 1, 1, 1, 1, 1, 2, 1.0])) == [7]
    assert changes(steps_of(part, [first, 1, 1, 2, 1, 1, 2, 1.0])) == []
    assert changes(steps_of(part, [first, 1, 1, 1, 1, 1, 2.0])) == []


def test_a_loss_that_is_no_number_skips_the_step_and_counts_as_a_rise():
    part = FedBIAD(rate=0.4, window=2)
    loop, net = build_tiny_run(Method((part,)), (6,))
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    state, own = visit.state.states["fedbiad"], visit.device_for_part("fedbiad")
    local = Local(
        net,
        visit.context.anchor,
        {},
        visit.context.numbers | {"step": torch.tensor(0.0)},
        part.draw(own.generator(), own, 0),
        state,
    )
    scored = BatchScore(torch.tensor(torch.nan), torch.zeros(0), torch.zeros(0), {}, {}, {})
    update, _ = part.step({k: torch.ones_like(v) for k, v in visit.state.params.items()}, state, scored, local)
    assert all(not u.any() for u in update.values())


def test_rows_score_where_the_loss_fell_and_where_both_patterns_keep_them():
    part = FedBIAD(rate=0.4, window=1)
    loop, net = build_tiny_run(Method((part,)), (6,))
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    state, own = visit.state.states["fedbiad"], visit.device_for_part("fedbiad")
    generator, update = own.generator("draw"), {k: torch.zeros_like(v) for k, v in visit.state.params.items()}
    expected = torch.zeros(3, dtype=torch.float64)
    for step, loss in enumerate([3.0, 3.0, 2.0, 5.0, 4.0, 4.0, 9.0]):
        draws, before = part.draw(generator, own, step), state["kept"]["a"]
        numbers = visit.context.numbers | {"step": torch.tensor(float(step)), "steps": torch.tensor(7.0)}
        scored = BatchScore(torch.tensor(loss), torch.zeros(0), torch.zeros(0), {}, {}, {})
        update, state = part.step(update, state, scored, Local(net, visit.context.anchor, {}, numbers, draws, state))
        if step in (2, 4, 5):
            expected = expected + before
        elif step == 3:
            expected = expected + before * draws["a"]
    torch.testing.assert_close(state["scores"]["a"], expected)


def test_dropped_rows_have_no_gradient_and_do_not_move():
    """Not even by momentum and weight decay."""
    part = FedBIAD(rate=0.4)
    loop, net = build_tiny_run(Method((part,)), (5,))
    visit = prepare_local_trainings(loop, loop.start(net))[0]
    rule = StepRule(net, loop.method, Optimiser(momentum=0.9, weight_decay=0.1))
    course = rule.init_state(visit.state.params, visit.state.states)
    for rows, scene in zip(visit.rows, make_step_contexts(loop.method, visit)):
        course, _ = advance(rule, course, visit.device.samples.take_batch(rows), scene, compute_autograd_gradient)
    gone = visit.state.states["fedbiad"]["kept"]["a"] == 0
    assert int(gone.sum()) == 1
    for name, dim in (("a.weight", 0), ("a.bias", 0), ("b.weight", 1)):
        moved = (course.params[name] - net.initial[name]).movedim(dim, 0)
        assert not moved[gone].any() and moved[~gone].any()


def test_the_posterior_of_the_papers_nets_is_too_narrow_to_see():
    for model, shape, classes in (
        ("mlp-1024", (1, 28, 28), 10),
        ("mlp-1024-256", (1, 28, 28), 10),
        ("lstm", (35,), 10_000),
    ):
        with torch.device("meta"):
            net = MODELS[model](shape, classes)
        assert compute_slab_deviation(net, 0.5, 1) ** 2 < 1e-20
    run = shoal.run("fedbiad(s_tilde=0.5)", rounds=1, steps=4, batch=8, engine="serial")
    plain = shoal.run("fedbiad(s_tilde=0.0)", rounds=1, steps=4, batch=8, engine="serial")
    assert any(not torch.equal(run.params[k], plain.params[k]) for k in run.params)


# combining ------------------------------------------------------------------------------------------------------------


def ends(combining: str, rate: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The first model and the one after a round without learning."""
    loop, net = build_tiny_run(Method((FedBIAD(rate, combining=combining, s_tilde=0.0),)), (4, 4))
    loop = replace(loop, work=lambda round, device: replace(build_tiny_run(Method())[0].work(round, device), lr=0.0))
    standing, _ = play_rounds(loop, loop.start(net), 0, 1)
    return net.initial, standing.params


def test_the_printed_combination_shrinks_rows_and_the_others_do_not():
    for combining in ("holders", "fill"):
        before, after = ends(combining, 0.4)
        assert_trees_close(after, before, 1e-12, combining)
    before, after = ends("literal", 0.4)
    factors = {round(float(f), 6) for f in (after["a.weight"] / before["a.weight"]).flatten()}
    assert factors <= {0.0, 0.5, 1.0} and factors != {1.0}
    before, after = ends("literal", 0.0)
    assert_trees_close(after, before, 1e-12, "nothing dropped, nothing shrunk")


# on the wire ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "published"),
    [(10_000, (29.82, 23.80, 22.36, 16.36)), (28_914, (75.3, 57.9, 56.5, 39.1))],
    ids=["PTB", "WikiText-2"],
)
def test_uploads_of_the_language_model_are_those_of_table_1(words, published):
    net = lstm((35,), words)
    message = wire.pack_message(net.initial, {}, Plan(), net.slicer, list(net.initial))
    sizes = [message.nbytes]
    for kinds in (["output"], ["output", "input"], ["embedding", "output", "recurrent"]):
        plan = plan_kept_rows(
            {g.name: pick_row_pattern(None, g.size, 0.5, torch.Generator()) for g in list_rows_of_kinds(net, kinds)}
        )
        sizes.append(cut_rows(message, lambda name: net.slicer.find_kept_lines(name, net.initial[name], plan)).nbytes)
    assert [size / 1e6 for size in sizes] == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(("model", "rate", "published"), [("mlp-1024", 0.2, 424e3), ("mlp-1024-256", 0.5, 530e3)])
def test_uploads_of_the_perceptrons_are_those_of_table_1(model, rate, published):
    data = (torch.randn(80, 1, 28, 28), torch.arange(80) % 10)
    setting: dict[str, Any] = {
        "data": data,
        "model": model,
        "devices": 4,
        "sample": 2,
        "rounds": 1,
        "batch": 10,
        "steps": "3",
    }
    rows = shoal.run(f"fedbiad(rate={rate})", engine="serial", **setting).history.rows
    assert rows[0]["bytes_up"] / 2 == pytest.approx(published, rel=0.01)
    assert rows[0]["bytes_down"] / 2 == sum(v.nbytes for v in build_model(model, (1, 28, 28), 10, 0).initial.values())


def coded_rows(seed: int = 0):
    net = lstm((6,), 20, width=5)
    generator = torch.Generator().manual_seed(seed)
    kept = {g.name: pick_row_pattern(None, g.size, 0.5, generator) for g in list_droppable_rows(net, False, False)}
    message = wire.pack_message(net.initial, {}, Plan(), net.slicer, list(net.initial))
    shapes = {k: v.shape for k, v in net.initial.items()}
    lines = lambda name: net.slicer.find_kept_lines(name, net.initial[name], plan_kept_rows(kept))  # noqa: E731
    return net, kept, shapes, cut_rows(message, lines)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6))
def test_rows_come_back_where_they_were(seed):
    net, kept, shapes, coded = coded_rows(seed)
    back = restore_rows(coded, shapes, covers=True)
    for name, entry in back.body.items():
        mask = entry.get("covered", torch.ones(shapes[name], dtype=torch.bool))
        assert torch.equal(entry["value"], net.initial[name] * mask)
    assert compute_cut_shapes(shapes, coded)["fc.weight"] == (int(kept["fc:output"].sum()), 5)
    told = sum(v.numel() for e in coded.body.values() for k, v in e.items() if k.startswith("kept"))
    assert told == 3 + 3 + 3 + 3  # 20, 20, 20 and 20 rows; the bias of the output shares its pattern with the weight


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_message_that_does_not_fit_is_refused(data):
    _, _, shapes, coded = coded_rows()
    name = data.draw(st.sampled_from([k for k, e in coded.body.items() if "kept 0" in e]))
    entry = dict(coded.body[name])
    match data.draw(st.sampled_from(["short", "long", "flip", "kind", "values", "stranger", "nowhere"])):
        case "stranger":
            entry["kept 0 as 0 nobody"] = torch.empty(0).byte()
        case "nowhere":
            entry["kept 7"] = entry["kept 0"]
        case "short":
            entry["kept 0"] = entry["kept 0"][:-1]
        case "long":
            entry["kept 0"] = torch.cat((entry["kept 0"], entry["kept 0"]))
        case "flip":
            entry["kept 0"] = entry["kept 0"] ^ torch.tensor(
                [0, 0, 1 << data.draw(st.integers(0, 7))], dtype=torch.uint8
            )
        case "kind":
            entry["kept 0"] = entry["kept 0"].float()
        case "values":
            entry["value"] = entry["value"][:-1]
    with pytest.raises(shoal.ShoalError, match="does not fit"):
        restore_rows(replace(coded, body=coded.body | {name: entry}), shapes, covers=True)


# whole runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["fedbiad", "fedbiad(tie_gates=True)", "feddrop(rows='output')", "afd(rows='output,input')"]
)
def test_language_models_train_with_dropped_rows_alike_on_both_engines(method, monkeypatch):
    small = lambda shape, classes: lstm(shape, classes, width=6)  # noqa: E731
    monkeypatch.setitem(shoal.models.HANDED_OVER, "small-lstm", small)
    setting = WORDS | {"data": some_text(), "model": "small-lstm", "precision": "float64", "split": "iid"}
    serial, batched = (run_with(method, engine, setting) for engine in ("serial", "batched"))
    for name, value in serial.params.items():
        torch.testing.assert_close(value, batched.params[name], rtol=0, atol=1e-9)
    keys = ("bytes_up", "bytes_down", "macs_work")
    rows = [[[row[k] for k in keys] for row in run.history.rows] for run in (serial, batched)]
    assert rows[0] == rows[1] and rows[0][0][0] < 2 * sum(v.nbytes for v in serial.params.values())


def test_a_device_keeps_its_scores_and_late_patterns_follow_them():
    part = FedBIAD(0.4, early=2, window=1, s_tilde=0.0)
    loop, net = build_tiny_run(Method((part,)), (8, 8))
    loop = replace(loop, work=lambda round, device: Work(0.0, 6, 2, 0.1))
    play_rounds(loop, loop.start(net), 0, 3)
    for device in range(2):
        memory = loop.host.memory.get(device)["fedbiad"]
        scores, kept = memory["scores"]["a"], memory["kept"]["a"] > 0
        assert float(scores.sum()) > 0 and float(scores[kept].min()) >= float(scores[~kept].max())


def test_a_device_whose_message_cannot_be_read_is_left_out():
    """Removing it equals not having asked it; the history says why."""
    loop, net = build_tiny_run(Method((FedBIAD(0.4, s_tilde=0.0),)), (4, 4))
    asked = loop.open_round(loop.start(net), 0)
    good, bad = train_jobs(loop.host, asked.jobs_to_train)
    assert bad.message is not None
    name, entry = next((k, e) for k, e in bad.message.body.items() if "kept 0" in e)
    empty = replace(bad.message, body=bad.message.body | {name: {}})
    _, told = loop.close_round(asked, [good, replace(bad, message=empty)], 0.0)
    assert "no values for 'a.weight'" in told["dropped"][0]["why"]
    broken = replace(bad.message, body=bad.message.body | {name: entry | {"value": entry["value"][:-1]}})
    standing, row = loop.close_round(asked, [good, replace(bad, message=broken)], 0.0)
    alone, _ = loop.close_round(asked, [good, replace(bad, message=None, problem="it failed")], 0.0)
    assert row["dropped"][0]["device"] == 1 and "does not fit" in row["dropped"][0]["why"]
    assert_trees_close(standing.params, alone.params, 0.0, "a broken message left a trace")


SIZES = {
    10_000: {
        "fedpaq": 7.1 * 2**20,
        "signsgd": 908 * 2**10,
        "stc": 148e3,
        "dgc": 95e3,
        "afd+dgc": 71e3,
        "fedbiad+dgc": 53e3,
    },
    28_914: {"fedpaq": 18.8e6, "signsgd": 2.4e6, "stc": 374e3, "dgc": 215e3, "afd+dgc": 180e3, "fedbiad+dgc": 126e3},
}
"""Upload sizes of Table II, in the units that fit them."""


@pytest.mark.parametrize(("words", "method"), [(words, method) for words, own in SIZES.items() for method in own])
def test_uploads_of_codecs_are_those_of_table_2(words, method):
    net, generator = lstm((35,), words), torch.Generator().manual_seed(0)
    kinds = {"afd": ["output", "input"], "fedbiad": ["embedding", "output", "recurrent"]}.get(
        method.partition("+")[0], []
    )
    kept = {g.name: pick_row_pattern(None, g.size, 0.5, generator) for g in list_rows_of_kinds(net, kinds)}
    plan = plan_kept_rows(kept) if method.startswith("afd") else WHOLE_MODEL
    expression = method.removeprefix("afd+").replace("dgc", "dgc(warmup='')")
    parts = parse_method(expression, find_shipped_parts(), {}).codecs_for("up")
    values = {k: torch.randn(v.shape, generator=generator) for k, v in net.initial.items()}
    link = wire.CodecLink("up", 0, 0, plan, net.slicer, RandomStreams(0), net.initial)
    message = wire.pack_message(values, {}, plan, net.slicer, list(values))
    coded, _ = wire.encode_message(message, parts, {"fedbiad": {"kept": kept}}, link)
    assert coded.nbytes == pytest.approx(SIZES[words][method], rel=0.07)

"""The laws that every part keeps, for this package's own parts and for yours: `check_part(MyPart())`."""

import os
import sys
from dataclasses import fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from shoal.core import wire
from shoal.core.batch import Batch
from shoal.core.compose import Method, compose
from shoal.core.errors import ShoalError
from shoal.core.expression import parse_method
from shoal.core.ledger import Row
from shoal.core.local.device import LocalTraining, make_device_link
from shoal.core.local.step import (
    LocalState,
    StepContext,
    StepRule,
    advance,
    compute_autograd_gradient,
    gate_padded_step,
)
from shoal.core.metric import COLUMNS, METRICS, find_metric
from shoal.core.model import tree
from shoal.core.model.plan import WHOLE_MODEL
from shoal.core.model.tree import Tree
from shoal.core.part import Part
from shoal.core.round import Loop
from shoal.core.server_state import ServerState
from shoal.core.task import Engine
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import PoolEngine
from shoal.plugins.smoke_run import (
    SHARED,
    SmokeSetup,
    add_needed_parts,
    build_tiny_run,
    make_step_contexts,
    make_tiny_setup,
    prepare_local_trainings,
    smoke_test_part,
)
from shoal.runs.history import clear_nonfinite_values
from shoal.runs.recipe import Recipe
from shoal.runs.store import RunFolder
from shoal.testing.extra_laws import check_reads_are_declared, check_survives_wrong_cards, check_survives_wrong_extras
from shoal.testing.hosts import RecordingHost
from shoal.testing.rounds import ROUNDS, assert_trees_close, drop_wall_seconds, play_rounds, start_tiny_run


def check_part(part: Part, whole: bool = True) -> None:
    """Every law that one part can keep alone; the numbers are those of the list in the documentation.

    Unless `whole`, law 2 is asked of the fewest engines that show a fault, which takes less time.
    """
    check_is_value(part)
    smoke_test_part(part)
    check_engines_agree(part, whole)
    check_masked_equals_sliced(part)
    check_padding_leaves_no_trace(part)
    check_bytes_are_what_travels(part)
    check_decodes_what_it_encodes(part)
    check_neutral_setting(part)
    check_resumes_exactly(part)
    check_reads_are_declared(part)
    check_survives_wrong_extras(part)
    check_survives_wrong_cards(part)
    check_tells_what_it_declares(part)


def check_is_value(part: Part) -> None:
    """Law 1: a part prints, compares, is rebuilt from its expression, and can be sent to another process."""
    cls = type(part)
    assert parse_method(str(part), {cls.name(): cls}, {}).parts == (part,), f"{part} is not what its expression makes"
    assert cls.__qualname__ in vars(sys.modules[cls.__module__]), f"{cls.__name__} cannot be found by its name"
    again = cls(**{f.name: getattr(part, f.name) for f in fields(part)})
    assert again == part and hash(again) == hash(part) and repr(again) == repr(part)


def check_engines_agree(part: Part, whole: bool = True, setting: SmokeSetup | None = None, forks: bool = True) -> None:
    """Law 2: one by one, side by side with padding and idle devices, and in other processes: the same rounds.

    `setting` is another model with another task, whose samples suffice for all devices. Without `forks` there are no
    worker processes.
    """
    sizes, engines = list_engines() if whole else list_fewest_engines()
    engines = engines if forks else [engine for engine in engines if not isinstance(engine, PoolEngine)]
    setting = setting or replace(make_tiny_setup(sum(sizes) + SHARED, part), kind="tiny")
    try:
        results = [play_on(engine, part, sizes, setting) for engine in engines]
    finally:
        for engine in engines:
            engine.close()
    (expected, expected_rows), *others = results
    for actual, rows in others:
        assert_trees_close(actual, expected, 1e-9, f"{part} trains to other numbers on another engine")
        assert_rows_match(rows, expected_rows, part)


def list_engines() -> tuple[tuple[int, ...], list[Engine]]:
    """Samples of the devices, and every kind of engine; the first is the one that the others must agree with."""
    engines: list[Engine] = [SerialEngine(), BatchedEngine(1), BatchedEngine(3), BatchedEngine(4, budget=1)]
    return (5, 3, 1, 4), engines + ([PoolEngine(2, 2, lambda: BatchedEngine(2))] if hasattr(os, "fork") else [])


def list_fewest_engines() -> tuple[tuple[int, ...], list[Engine]]:
    """The same in the smallest form that shows a fault: side by side at once a padded batch, an idle device and a
    second chunk; and worker processes, which find all programs in what they were forked from."""
    batched = BatchedEngine(2)
    engines: list[Engine] = [SerialEngine(), batched]
    return (1, 1, 5), engines + ([PoolEngine(2, 2, lambda: batched)] if hasattr(os, "fork") else [])


def play_on(engine: Engine, part: Part, sizes: tuple[int, ...], setting: SmokeSetup) -> tuple[Tree, list[Row]]:
    """What the server and the devices know after a few rounds, and the rows."""
    loop, server_state = start_tiny_run(part, sizes, engine, setting)
    server_state, rows = play_rounds(loop, server_state, 0, ROUNDS)
    return [server_state.params, server_state.states, [loop.host.memory.get(d) for d in range(len(sizes))]], rows


def assert_rows_match(rows: list[Row], expected: list[Row], part: Part) -> None:
    """The same histories: what is counted to the bit, what is computed to 1e-9."""
    for row, other in zip(rows, expected, strict=True):
        for key in row.keys() | other.keys():
            a, b = row.get(key), other.get(key)
            near = isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-9 * max(1.0, abs(b))
            assert key == "wall_seconds" or a == b or near, f"{part}: {key} is {a} on one engine and {b} on another"


def check_masked_equals_sliced(part: Part) -> None:
    """Law 3: where a plan keeps units of axes, the masked model and the cut-out one train to the same numbers."""
    loop, net = build_tiny_run(Method((part,)))
    setup, first = loop.host.setup, loop.start(net)
    later, _ = play_rounds(loop, first, 0, ROUNDS - 1)
    for training in (*prepare_local_trainings(loop, first), *prepare_local_trainings(loop, later, ROUNDS - 1)):
        plan, slicer = training.job.plan, setup.net.slicer
        if not plan.kept or plan.masks:
            continue
        small = StepRule(setup.net.cut(plan), loop.method, setup.optimiser)
        masked, sliced = training.state, LocalState(*(slicer.cut_tree(field, plan) for field in training.state))
        for rows, context in zip(training.rows, make_step_contexts(loop.method, training)):
            batch = training.device.samples.take_batch(rows)
            masked, _ = advance(setup.rule, masked, batch, context, compute_autograd_gradient)
            cut = StepContext(*(slicer.cut_tree(field, plan) for field in context))._replace(mask={})
            sliced, _ = advance(small, sliced, batch, cut, compute_autograd_gradient)
        ends = slicer.take(masked.params, plan)
        assert_trees_close(ends, sliced.params, 1e-9, f"{part}: masked and sliced models part ways")


def check_padding_leaves_no_trace(part: Part, setting: SmokeSetup | None = None) -> None:
    """Law 4: samples of weight 0 and steps that are gated off change neither parameters nor any state."""
    loop, trainings, _ = prepare_first_round(part, (5, 3), setting)
    rule = loop.host.setup.rule
    for training in trainings:
        plain = padded = training.state
        for rows, context in zip(training.rows, make_step_contexts(loop.method, training)):
            batch = training.device.samples.take_batch(rows)
            plain, _ = advance(rule, plain, batch, context, compute_autograd_gradient)
            wide = pad_batch(batch)
            other = wide._replace(inputs=tree.map_tensors(lambda t: t * 3 if t.is_floating_point() else t, wide.inputs))
            idle, _ = advance(rule, padded, other, context, compute_autograd_gradient)
            padded = gate_padded_step(torch.tensor(False), idle, padded)
            new, _ = advance(rule, padded, wide, context, compute_autograd_gradient)
            padded = gate_padded_step(torch.tensor(True), new, padded)
        assert_trees_close(padded._asdict(), plain._asdict(), 1e-12, f"padding leaves a trace in {part}")


def check_bytes_are_what_travels(part: Part) -> None:
    """Law 5: the ledger's bytes are the length of what was encoded, both ways."""
    loop, net = build_tiny_run(Method((part,)))
    spy = RecordingHost(loop.host)
    loop = replace(loop, host=spy)
    _, rows = play_rounds(loop, loop.start(net), 0, ROUNDS)
    excess = 0
    for row, jobs, outcomes in zip(rows, spy.jobs, spy.outcomes):
        remote = [(j, o) for j, o in zip(jobs, outcomes) if j.device >= 0]
        down = sum(len(j.message.to_bytes()) for j, _ in remote)
        up = sum(len(o.message.to_bytes()) for _, o in remote if o.message)
        assert row["bytes_down"] == down, f"{part}: {row['bytes_down']} bytes down in the ledger, {down} travelled"
        excess += row["bytes_up"] - up
    assert excess == spy.enrolled, f"{part}: {excess} bytes too many up in the ledger, {spy.enrolled} for enrolment"


def check_decodes_what_it_encodes(part: Part) -> None:
    """Law 5: what a codec codes comes back as it was, or within the error that the codec states."""
    if not part.stage:
        return
    loop, trainings, _ = prepare_first_round(part, (5, 3))
    setup, training = loop.host.setup, trainings[0]
    for direction in part.directions:
        generator = torch.Generator().manual_seed(1)
        values = {k: torch.randn(v.shape, generator=generator, dtype=v.dtype) for k, v in setup.net.initial.items()}
        message = wire.pack_message(values, {}, training.job.plan, setup.net.slicer, list(values))
        link = make_device_link(setup, training.job, direction)
        coded, _ = wire.encode_message(message, [part], {}, link)
        back = wire.decode_message(coded, [part], link)
        actual, covered, _ = wire.unpack_message(back, values, training.job.plan, setup.net.slicer)
        for name, value in values.items():
            arrived = covered.get(name, torch.ones_like(value, dtype=torch.bool))
            off = ((actual[name] - value).abs() > part.error(value) + 1e-12) & arrived
            assert not off.any(), f"{part} brings {name} back further off than it says"


def check_neutral_setting(part: Part) -> None:
    """Law 6: at its neutral setting a part leaves the run as FedAvg's on the same model."""
    if part.neutral is None:
        return
    neutral = replace(part, **part.neutral.settings)
    sizes = (4, 4) if part.neutral.equal_devices else (5, 3)
    rounds = part.neutral.rounds or ROUNDS
    ends = []
    whole = add_needed_parts(Method((neutral,)))
    for method in (whole, Method(whole.parts[:-1])):
        loop, net = build_tiny_run(method, sizes)
        if method is not whole:
            net = neutral.model(net)
            loop.host.resize(net, WHOLE_MODEL)
        server_state, _ = play_rounds(loop, loop.start(net), 0, rounds)
        ends.append(loop.make_final_params(server_state, rounds))
    assert_trees_close(ends[0], ends[1], 1e-12, f"{neutral} is not neutral")


def check_resumes_exactly(part: Part) -> None:
    """Law 7: through a checkpoint on disk and on, the same history and the same weights, bit for bit."""
    with TemporaryDirectory() as name:
        straight, whole = run_through_folder(part, Path(name) / "straight", ROUNDS)
        resumed, halves = run_through_folder(part, Path(name) / "resumed", ROUNDS, stop_at=1)
    assert [drop_wall_seconds(r) for r in whole] == [drop_wall_seconds(r) for r in halves], (
        f"{part}: another history after a resume"
    )
    assert tree.is_same_tree(straight, resumed), f"{part}: other weights after a resume"


def check_tells_what_it_declares(part: Part) -> None:
    """Law 11: every number of a row is in the registry, every metric a part declares is told, and telling is all it is.

    A metric with a condition (`when`) may be missing; with telling switched off the run has the same bits.
    """
    ends, rows = [], []
    for tells in (False, True) if part.metrics else (True,):
        loop, net = build_tiny_run(Method((part,)))
        loop = replace(loop, tells=tells)
        server_state, rows = play_rounds(loop, loop.start(net), 0, ROUNDS)
        devices = [loop.host.memory.get(d) for d in range(len(loop.sizes))]
        ends.append([server_state.params, server_state.states, devices])
    assert tree.is_same_tree(ends[0], ends[-1]), f"{part} trains to other numbers when nobody listens to what it tells"
    registry = METRICS | loop.part_metrics
    for row in rows:
        for column, value in row.items():
            if column not in COLUMNS:
                is_number = value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))
                assert is_number and find_metric(column, registry), f"{part}: {column} is no metric that is known"
        silent = [
            column for column, metric in loop.part_metrics.items() if metric.is_in_every_row and row.get(column) is None
        ]
        assert row.get("void") or not silent, f"{part} declares {silent[0]} and does not tell it"


def check_pair(a: Part, b: Part) -> None:
    """Law 8: two parts compose and train, or are refused in a sentence that names both.

    Where what one makes of the model leaves nothing for the other, the sentence need only name the one that refuses.
    """
    try:
        method = compose([a, b])
    except ShoalError as error:
        assert a.name() in str(error) and b.name() in str(error) and error.advice, str(error)
        return
    try:
        loop, net = build_tiny_run(method)
        server_state = loop.start(net)
    except ShoalError as error:  # what one part makes of the model leaves nothing for the other
        assert (a.name() in str(error) or b.name() in str(error)) and error.advice, str(error)
        return
    server_state, rows = play_rounds(loop, server_state, 0, 2)
    assert tree.is_tree_finite(server_state.params) and not any(row.get("void") for row in rows)
    reasons = [gone["why"] for row in rows for gone in row.get("dropped", [])]
    assert not any("as declared" in why for why in reasons), f"{method}: of honest devices, {reasons[0]}"


def run_through_folder(part: Part, folder: Path, rounds: int, stop_at: int = 0) -> tuple[list[Tree], list[Row]]:
    """Everything the server knows after some rounds, and the rows; on the way once through a checkpoint if asked."""
    recipe = Recipe(out=str(folder))
    with RunFolder.create(recipe) as disk:
        return run_in_folder(disk, recipe, part, rounds, stop_at)


def run_in_folder(
    disk: RunFolder, recipe: Recipe, part: Part, rounds: int, stop_at: int
) -> tuple[list[Tree], list[Row]]:
    loop, net = build_tiny_run(Method((part,)), memory=disk.memory_folder)
    server_state, rows = play_rounds(loop, loop.start(net), 0, stop_at or rounds)
    if stop_at:
        for row in rows:
            disk.append_row(clear_nonfinite_values(row))
        disk.save_checkpoint(recipe, server_state, stop_at, loop.host.memory)
        loop, net = build_tiny_run(Method((part,)), memory=disk.memory_folder)
        actual = disk.read_checkpoint(recipe, net, loop.method.names)
        assert actual is not None
        if actual.server_state.cuts:
            loop.follow_pruning(ServerState(net, {}, {}), actual.server_state)
        loop.host.memory.restore(actual.memory, actual.cuts)
        server_state, more = play_rounds(loop, actual.server_state, stop_at, rounds)
        rows += more
    devices = [loop.host.memory.get(d) for d in range(len(loop.sizes))]
    return [server_state.params, server_state.states, server_state.cards, *devices], rows


def prepare_first_round(
    part: Part, sizes: tuple[int, ...], setting: SmokeSetup | None = None
) -> tuple[Loop, list[LocalTraining], list[Batch]]:
    """The devices of a first round about to train, and their first batches."""
    loop, net = build_tiny_run(Method((part,)), sizes, setting=setting)
    trainings = prepare_local_trainings(loop, loop.start(net))
    return loop, trainings, [v.device.samples.take_batch(v.rows[0]) for v in trainings]


def pad_batch(batch: Batch) -> Batch:
    """The same batch with two samples of weight 0 behind it."""

    def pad_samples(values: Tensor) -> Tensor:
        extra = torch.full_like(values[:1], 5.0) if values.is_floating_point() else values[:1]
        return torch.cat((values, extra, extra))

    ((targets, _),) = batch.targets
    dtype = next((t.dtype for t in tree.collect_tensors(batch.inputs) if t.is_floating_point()), torch.float64)
    weight = torch.cat((torch.ones(len(targets)), torch.zeros(2))).to(dtype)
    return Batch(tree.map_tensors(pad_samples, batch.inputs), ((pad_samples(targets), None),), weight)

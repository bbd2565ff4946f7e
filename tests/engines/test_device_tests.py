"""Devices tested on samples of their own: hand-counted, the same stacked and one by one, and on every engine."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tiny_parts import OwnModel
from torch import nn

import shoal
from shoal.core.batch import Samples
from shoal.core.builtin_tasks import TASKS
from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.measures.device_tests import (
    DeviceScores,
    judge_stack,
    list_device_test_metrics,
    make_scores,
    score_one_by_one,
    score_one_model,
    score_own_models,
)
from shoal.core.model.net import Net
from shoal.core.part import Part
from shoal.core.session import Session, play_round
from shoal.core.types import Work
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.device_tests import DeviceTester
from shoal.engines.serial import SerialEngine
from shoal.plugins.smoke_run import build_tiny_run
from shoal.report.write import write_report
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.start import run_recipe

SMALL = {"data": "digits", "devices": 6, "sample": 3, "rounds": 2, "local_test": 0.25, "engine": "serial"}


def make_tests(net: Net, sizes: tuple[int, ...] = (5, 1, 9)) -> dict[int, Samples]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(sum(sizes), *net.input_shape, generator=generator, dtype=net.dtype)
    y = torch.randint(0, net.classes, (sum(sizes),), generator=generator)
    ends = np.cumsum((0, *sizes))
    return {d: Samples(x, y, torch.arange(ends[d], ends[d + 1])) for d in range(len(sizes))}


def make_models(net: Net, count: int) -> list[dict]:
    generator = torch.Generator().manual_seed(2)
    draw = lambda v: torch.randn(v.shape, generator=generator).to(v) if v.is_floating_point() else v  # noqa: E731
    return [{k: draw(v).abs() if "var" in k else draw(v) for k, v in net.initial.items()} for _ in range(count)]


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))],
    ids=["linear", "batch norm"],
)
def test_models_judged_in_one_call_are_judged_as_by_themselves(module):
    net = Net(module.double(), (4,), 3)
    tests, models = make_tests(net), make_models(net, 3)
    alone = score_one_by_one(net, dict(enumerate(models)), tests)
    stacked = make_scores(net.task, tests, judge_stack(net, models, list(tests.values())))
    chosen = score_own_models(net, models.__getitem__, tests)
    for other in (stacked, chosen):
        assert np.array_equal(alone.sums, other.sums) and np.array_equal(alone.counts, other.counts)
        assert np.allclose(alone.losses, other.losses, rtol=1e-12)
    assert list(alone.counts) == [5, 1, 9]


def test_a_model_that_cannot_be_stacked_is_judged_one_by_one():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(x) if float(self.inner.weight.sum()) > 0 else -self.inner(x)

    net = Net(Branching().double(), (4,), 3)
    tests, models = make_tests(net), make_models(net, 3)
    alone = score_one_by_one(net, dict(enumerate(models)), tests)
    assert np.array_equal(score_own_models(net, models.__getitem__, tests).sums, alone.sums)


def test_scores_by_hand():
    """One weight per class and inputs that pick it: device 0 gets 1 of 2 right, device 1 3 of 3."""
    net = Net(nn.Linear(2, 2, bias=False).double(), (2,), 2)
    x = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [1, 0]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 1, 0])
    tests = {3: Samples(x, y, torch.tensor([0, 1])), 7: Samples(x, y, torch.tensor([2, 3, 4]))}
    scores = score_one_model(net, {"weight": torch.eye(2, dtype=torch.float64)}, tests)
    assert scores.devices == (3, 7) and scores.values.tolist() == [0.5, 1.0]
    found = scores.summarise()
    assert found["personal_mean"] == 0.75 and found["personal_pooled"] == 0.8
    assert found["personal_worst"] == 0.5 and found["personal_spread"] == 0.25


def test_errors_are_worst_where_they_are_largest():
    net = replace(Net(nn.Linear(1, 1, bias=False).double(), (1,), 1), task=TASKS["regress"])
    x = torch.ones(2, 1, dtype=torch.float64)
    y = torch.tensor([[1.0], [4.0]], dtype=torch.float64)
    tests = {d: Samples(x, y, torch.tensor([d])) for d in range(2)}
    found = score_one_model(net, {"weight": torch.zeros(1, 1, dtype=torch.float64)}, tests).summarise()
    assert found["personal_mean"] == 2.5 and found["personal_worst"] == 4.0
    assert list_device_test_metrics(TASKS["regress"])["personal_mean"].better == "down"
    assert list_device_test_metrics(TASKS["classify"])["personal_mean"].better == "up"


def test_a_device_whose_model_diverged_is_among_the_worst():
    """Its error is no number, and so is the mean of the worst tenth; that of the others is none of it."""
    sums, ones = np.array([1.0, np.nan, 3.0]), np.ones(3)
    found = DeviceScores((0, 1, 2), sums, ones, sums, ones, "down").summarise()
    assert np.isnan(found["personal_mean"]) and np.isnan(found["personal_worst"])


def test_a_method_without_own_models_gets_the_accuracy_of_the_global_model_on_all_tests():
    recipe = Recipe().with_values(**SMALL, local_test_of="all", split="dirichlet:0.3")
    row = run_recipe(recipe).history.rows[-1]
    assert row["personal_pooled"] == row["accuracy"] and row["personal_loss"] == pytest.approx(row["loss"])
    assembly = assemble_run(recipe)
    assert isinstance(assembly.device_tester, DeviceTester)
    tested = [assembly.device_tester.tests(d).index for d in assembly.device_tester.devices]
    trained = [assembly.loop.host.setup.samples(d).index for d in range(6)]
    together = torch.cat([*tested, *trained])
    assert len(together) == len(together.unique()) == 1797


def start_tested(part: Part, engine=None) -> tuple[Session, DeviceTester]:
    loop, net = build_tiny_run(compose([part]), (5, 3, 4), engine=engine)
    work = lambda round, device: Work(1.0, 0, 2, 0.1)  # noqa: E731
    tester = DeviceTester(loop.host, loop.host.setup.samples, [0, 1, 2], work)
    return Session(replace(loop, test_devices=tester), net), tester


@dataclass(frozen=True)
class TwoEpochs(Part):
    """finetune: two epochs at a tenth of the rate."""

    def finetune(self, work: Work) -> Work:
        return replace(work, epochs=2.0, steps=0, lr=work.lr / 10)


def test_the_models_of_a_round_are_judged_with_what_devices_remember_of_it():
    session, tester = start_tested(OwnModel())
    row = play_round(session)
    assert session.server_state
    loss = tester(session.server_state, session.server_state.params, 0)["personal_loss"]
    assert row["personal_loss"] == pytest.approx(loss, abs=1e-12)
    net, host = session.server_state.net, session.loop.host
    own = {d: host.make_personal_model(d, session.server_state.params, 0) for d in range(3)}
    alone = score_one_by_one(net, own, {d: host.setup.samples(d) for d in range(3)})
    assert loss == pytest.approx(alone.summarise()["personal_loss"], abs=1e-12)


@pytest.mark.parametrize("part", [OwnModel(), TwoEpochs()], ids=str)
def test_engines_judge_alike(part):
    rows = [play_round(start_tested(part, engine)[0]) for engine in (SerialEngine(), BatchedEngine(2))]
    for name in ("personal_mean", "personal_pooled", "personal_worst", "personal_loss"):
        assert rows[0][name] == pytest.approx(rows[1][name], abs=1e-9)


def test_fine_tuning_is_plain_training_from_the_global_model_of_which_nothing_is_kept():
    session, tester = start_tested(TwoEpochs())
    play_round(session)
    state = session.server_state
    assert state and not session.loop.host.memory.get(0)
    before = {k: v.clone() for k, v in state.params.items()}
    tuned = tester(state, state.params, 0)["personal_loss"]
    plain = score_one_model(state.net, state.params, {d: tester.tests(d) for d in range(3)}).summarise()
    assert tuned < plain["personal_loss"], "judged on what it was tuned on, it must be better"
    assert all(torch.equal(v, state.params[k]) for k, v in before.items())


def test_two_parts_that_fine_tune_are_refused():
    @dataclass(frozen=True)
    class OneEpoch(Part):
        def finetune(self, work: Work) -> Work:
            return work

    with pytest.raises(ShoalError, match="twoepochs and oneepoch"):
        compose([TwoEpochs(), OneEpoch()])


def test_own_models_are_judged_in_the_round_that_prunes():
    method = "fedap(at=1, rule='fixed', rate=0.5)+fedrod"
    result = shoal.run(
        method=method, server_data="share:0.05", model="lenet", devices=3, sample=2, rounds=3, steps="1",
        local_test=0.25, engine="serial",
    )  # fmt: skip
    assert all(row["personal_mean"] is not None for row in result.history.rows)


def test_the_folder_and_the_report_have_every_device(tmp_path):
    result = run_recipe(Recipe().with_values(**SMALL, out=str(tmp_path / "run")))
    note = json.loads((tmp_path / "run/devices.json").read_text())
    assert np.mean(note["own_tests"]) == pytest.approx(result.history.last("personal_mean"))
    assert len(note["tested"]) == len(note["own_test_samples"]) == len(note["own_tests"])
    assert result.history.headline == "personal_mean" and result.headline == result.history.last("personal_mean")
    write_report([tmp_path / "run"], tmp_path / "report")
    assert "Own tests, mean" in (tmp_path / "report/report.html").read_text()


def test_devices_test_on_what_the_data_say_is_theirs(tmp_path):
    """LEAF files have a training and a test half of every user; `guest` has no training samples, and is no device."""
    draw = np.random.default_rng(0)
    halves: dict[str, dict[str, int]] = {"train": {"ann": 8, "ben": 6}, "test": {"ben": 3, "guest": 2, "ann": 4}}
    for half, users in halves.items():
        data = {u: {"x": draw.random((n, 5)).tolist(), "y": draw.integers(0, 3, n).tolist()} for u, n in users.items()}
        content = {"users": list(users), "num_samples": list(users.values()), "user_data": data}
        (tmp_path / "set" / half).mkdir(parents=True)
        (tmp_path / "set" / half / "all.json").write_text(json.dumps(content))
    keys = {"data": f"leaf:{tmp_path / 'set'}", "split": "owner", "devices": 0, "sample": 2, "rounds": 2}
    recipe = Recipe().with_values(**keys, local_test_of="owner", engine="serial", data_dir=str(tmp_path))
    result = run_recipe(recipe.with_values(out=str(tmp_path / "run"), method="fedper"))
    note = json.loads((tmp_path / "run/devices.json").read_text())
    assert note["tested"] == [0, 1] and note["own_test_samples"] == [4, 3]
    assert result.history.headline == "personal_mean" and result.history.rows[-1]["personal_devices"] == 2
    assembly = assemble_run(recipe)
    assert isinstance(assembly.device_tester, DeviceTester) and assembly.loop.sizes.tolist() == [8, 6]
    own = assembly.device_tester.tests(1)
    assert own.targets is assembly.evaluator.samples.targets and own.index.tolist() == [0, 1, 2]
    for wrong, word in (({"local_test": 0.1}, "the data say it"), ({"split": "iid", "devices": 2}, "split other than")):
        with pytest.raises(ShoalError, match=word):
            assemble_run(recipe.with_values(**wrong))
    with pytest.raises(ShoalError, match="whose its test samples are"):
        frame = {"x": torch.ones(4, 2), "y": torch.tensor([0, 1, 0, 1]), "owners": np.array([0, 0, 1, 1])}
        shoal.run(data=frame, split="owner", devices=0, sample=2, local_test_of="owner", rounds=1)


def test_recipes_that_hold_samples_back_twice_are_refused():
    with pytest.raises(ShoalError, match="validation"):
        assemble_run(Recipe().with_values(local_test=0.2, validation=0.1))
    with pytest.raises(ShoalError, match="local_test_of"):
        assemble_run(Recipe().with_values(local_test_of="all"))

"""Plans: which cells are there, what the others cost, in which order they run, and that a ledger spares runs."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal import Recipe, ShoalError
from shoal.cli.commands import run_command_line
from shoal.cli.plan_table import make_plan_tables, summarise_plan
from shoal.compare import comparison
from shoal.compare.parallel import run_in_processes
from shoal.reproduce import cost as costs
from shoal.reproduce import plan as plans
from shoal.reproduce.cost import RoundCost, find_recorded_cost, measure_round
from shoal.reproduce.ledger import describe_machine, read_ledger, record_runs
from shoal.reproduce.plan import TimeLimit, order_plans, plan_table, reproduce_in_order
from shoal.reproduce.run import reproduce_table

FILE = """
paper = "FedDHAD"
table = "3"
title = "a small one"
[base]
data = "digits"
devices = 4
sample = 2
rounds = 3
steps = "1"
batch = 8
engine = "serial"
[[column]]
name = "LeNet on C10"
set = { target = 0.54, split = "iid" }
where = { dataset = "cifar10", model = "lenet5" }
[[column]]
name = "Long"
set = { rounds = 6 }
[[row]]
method = "FedAvg"
run = "fedavg"
[[row]]
method = "FedProx"
run = "fedprox(mu=0.1)"
[[row]]
method = "FedDH"
run = { "LeNet on C10" = "feddh" }
[[row]]
method = "MOON"
missing = "not there."
"""
LEDGER = Path(__file__).parents[2] / "results"
CLAIMS = """
[[claim]]
id = "dear"
paper = "FedDHAD"
where = "Table 3"
says = "FedProx is better."
table = "small"
columns = ["LeNet on C10"]
row = "FedProx"
than = ["FedAvg"]
measure = "accuracy"
test = "higher"
[[claim]]
id = "cheap"
paper = "FedDHAD"
where = "Table 3"
says = "FedDH computes little."
table = "small"
columns = ["LeNet on C10"]
row = "FedDH"
measure = "MACs"
test = "near"
"""


@pytest.fixture(name="here", autouse=True)
def _here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/small.toml").write_text(FILE)
    return tmp_path


def command(monkeypatch, capsys, *words: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["shoal", "reproduce", *words])
    try:
        run_command_line()
    except SystemExit as end:
        return int(end.code or 0), *capsys.readouterr()
    return 0, *capsys.readouterr()


def tell(plan: plans.TablePlan) -> list[tuple[str, str, str, int]]:
    return [(p.cell.column.name[0], p.cell.row.method, p.place, p.rounds_left) for p in plan.cells]


def fail_to_play(*row: Any) -> None:
    pytest.fail("a round was played")


def test_a_plan_says_what_is_there_and_what_is_missing(here):
    first = plan_table("small", seeds=2, with_trials=False)
    assert tell(first) == [
        ("L", "FedAvg", "", 6),
        ("L", "FedProx", "", 6),
        ("L", "FedDH", "", 6),
        ("L", "FedAvg", "", 12),
        ("L", "FedProx", "", 12),
    ]
    assert first.seconds is None and "not known" in summarise_plan(first) and not (here / "runs").exists()
    reproduce_table("small", seeds=2, only=["FedAvg"])
    after = plan_table("small", seeds=2, with_trials=False)
    assert [(method, place) for _, method, place, _ in tell(after)[:2]] == [("FedAvg", "folder")] * 2
    assert len(after.missing) == 3
    assert [p.cost for p in after.missing] == [None] * 3  # a folder of another cell is no record


def test_seconds_are_those_of_a_trial_or_of_recorded_runs(here):
    tried = plan_table("small", seeds=2)
    assert {p.cost.source for p in tried.missing if p.cost} == {"a trial of 3 rounds of FedAvg"}
    for p in tried.missing:
        assert p.cost and p.cost.seconds > 0 and p.seconds == pytest.approx(p.cost.seconds * p.rounds_left)
    (here / "results").mkdir()
    reproduce_in_order("small", seeds=2, only=["FedAvg"], results="results", record=True)
    recorded = plan_table("small", seeds=2, out="elsewhere", with_trials=False)
    by_cell = {(p.cell.column.name, p.cell.row.method): p for p in recorded.cells}
    assert by_cell["Long", "FedAvg"].place == "results"
    cost = by_cell["Long", "FedProx"].cost
    assert cost and cost.source == "runs of other methods here" and cost.is_of_this_machine
    assert "on this machine" in summarise_plan(recorded)


def test_a_trial_of_long_rounds_ends_with_the_first(here, monkeypatch, caplog):
    caplog.set_level("INFO", logger="shoal")
    monkeypatch.setattr(costs, "TRIAL_SECONDS", 0.0)
    tried = plan_table("small", seeds=3, columns=["Long"])
    assert {p.cost.source for p in tried.missing if p.cost} == {"a trial of 1 round of FedAvg"}
    assert all(p.cost and p.cost.seconds > 0 for p in tried.missing)
    assert caplog.text.count("trial: up to 3 rounds") == 1  # one cell of the column stands for the others


def test_seconds_of_another_machine_are_told_as_such(here):
    recipe = Recipe(rounds=3)
    rows = [{"round": n, "wall_seconds": float(s)} for n, s in enumerate((9, 2, 4, 3))]
    run = plans.make_ledger_run(recipe, rows)
    assert run.machine == describe_machine("cpu")
    found = find_recorded_cost(recipe, [run], here=True)
    assert found and (found.seconds, found.source) == (3.0, "runs of fedavg here")  # without the first, which warms up
    other = plans.replace(run, machine="a GPU")
    assert find_recorded_cost(recipe, [other], here=True) is None
    found = find_recorded_cost(recipe, [other], here=False)
    assert found and not found.is_of_this_machine and "a GPU" in found.source
    assert find_recorded_cost(recipe.with_values(batch=4), [run], here=True) is None


def test_a_trial_is_told_before_it_begins(caplog):
    caplog.set_level("INFO", "shoal")
    measure_round([Recipe(devices=4, sample=2, steps="1")], "FedAvg")
    assert caplog.records[0].getMessage() == "trial: up to 3 rounds of FedAvg, mlp on digits, to learn what one takes"


@pytest.mark.parametrize("every, wanted", [(1, [True] * 3), (2, [False, True, True]), (10, [False, False, True])])
def test_a_trial_evaluates_as_often_as_the_run(every, wanted, monkeypatch):
    """Else half of the evaluations of a run that looks at every round would be missing from its plan."""
    seen: list[Any] = []
    play = costs.play_all_runs
    monkeypatch.setattr(costs, "play_all_runs", lambda *given: seen.append(play(*given)) or seen[0])
    measure_round([Recipe(devices=4, sample=2, steps="1", eval_every=every, rounds=50)], "FedAvg")
    assert [a is not None for a in seen[0].results["FedAvg"][0].history["accuracy"]] == wanted


def test_a_trial_without_data_costs_nothing_but_a_warning(caplog):
    assert measure_round([Recipe(data="cifar10", data_dir="/nowhere")], "FedAvg") is None
    assert "No trial could be played" in caplog.text


def test_what_decides_a_claim_at_least_cost_runs_first(here):
    (here / "results").mkdir()
    (here / "results/claims.toml").write_text(CLAIMS)
    plan = plan_table("small", seeds=3, results="results", with_trials=False)
    told = [(p.cell.column.name, p.cell.row.method, p.decides) for p in plan.cells]
    assert told[:3] == [
        ("LeNet on C10", "FedDH", ("cheap",)),
        ("LeNet on C10", "FedProx", ("dear",)),
        ("LeNet on C10", "FedAvg", ("dear",)),
    ]
    assert all(p.decides == () for p in plan.cells[3:])
    reproduce_in_order("small", seeds=3, only=["FedDH"], results="results", record=True)
    assert [p.decides for p in plan_table("small", 3, results="results", with_trials=False).cells][0] == ()
    assert order_plans((), "small", None) == []


def test_runs_under_authors_decide_only_what_does_not_hold_under_fair(here, monkeypatch):
    """The verdict goes by `fair`: whatever the authors' runs say, a claim without runs under it stays open."""
    (here / "recipes/small.toml").write_text(FILE + "[authors]\nseeds = 3\n")
    (here / "results").mkdir()
    (here / "results/claims.toml").write_text(CLAIMS)

    def list_decided() -> set[str]:
        plan = plan_table("small", seeds=3, results="results", with_trials=False, protocol="authors")
        return {claim_id for p in plan.cells for claim_id in p.decides}

    assert list_decided() == set()
    judge = plans.judge_claims

    def judge_as_failed(*given: Any) -> list[Any]:
        return [plans.replace(v, fair=plans.replace(v.fair, verdict="does not hold", seeds=3)) for v in judge(*given)]

    monkeypatch.setattr(plans, "judge_claims", judge_as_failed)
    assert list_decided() == {"cheap", "dear"}


def test_cells_of_which_no_seconds_are_known_come_last(here):
    (here / "results").mkdir()
    (here / "results/claims.toml").write_text(CLAIMS)
    plan = plan_table("small", seeds=3, results="results", with_trials=False)
    slow = RoundCost(1000.0, "its own rounds so far")
    known = [plans.replace(p, cost=slow) if p.cell.row.method != "FedDH" else p for p in plan.cells]
    told = [(p.cell.column.name, p.cell.row.method) for p in order_plans(known, "small", here / "results")]
    assert told[:3] == [("LeNet on C10", "FedProx"), ("LeNet on C10", "FedAvg"), ("LeNet on C10", "FedDH")]


def print_plan(plan: plans.TablePlan, width: int) -> list[str]:
    console = Console(width=width)
    with console.capture() as printed:
        console.print(make_plan_tables(plan))
    return [line.rstrip() for line in printed.get().splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["feddumap-12", "fedbiad-1", "feddhad-fig5"])
def test_a_plan_has_one_line_for_each_cell(name, width):
    plan = plan_table(name, with_trials=False, results=str(LEDGER))
    lines = print_plan(plan, width)
    assert max(map(len, lines)) <= width
    titles = [n for n, line in enumerate(lines) if " missing, " in line or line.endswith("all there")]
    assert len(titles) == len({p.cell.column.name for p in plan.cells})
    shown = []
    for title in titles:
        block = lines[title + 1 : lines.index("", title)]
        setting = next(
            name for name in {p.cell.column.name for p in plan.cells} if lines[title].startswith(f"{name}  ")
        )
        methods = [p.cell.row.method for p in plan.cells if p.cell.column.name == setting]
        shown += [(setting, method) for method in methods]
        assert len(block) == len(methods) and all(m in line for m, line in zip(methods, block))
    assert sorted(shown) == sorted((p.cell.column.name, p.cell.row.method) for p in plan.cells)
    assert sum("another machine" in line for line in lines) <= 1  # once for all cells


def test_a_plan_shows_order_sums_and_what_decides(here):
    (here / "results").mkdir()
    (here / "results/claims.toml").write_text(CLAIMS)
    reproduce_in_order("small", 3, ["FedAvg"], results="results", record=True, columns=["Long"])
    plan = plan_table("small", 3, results="results", with_trials=False)
    cost = RoundCost(2.0, "runs of other methods on another machine (a GPU)", "other methods", "a GPU")
    known = [
        plans.replace(p, cost=cost) if p.cell.row.method == "FedProx" else plans.replace(p, cost=None)
        for p in plan.cells
    ]
    lines = print_plan(plans.replace(plan, cells=tuple(known)), 80)
    assert [line.split() for line in lines if line.lstrip()[:1].isdigit() and " Fed" in line][:4] == [
        ["1", "FedDH", "9", "?", "1"],
        ["2", "FedProx", "9", "18", "s", "other", "methods*", "2"],
        ["3", "FedAvg", "9", "?", "2"],
        ["4", "FedProx", "18", "36", "s", "other", "methods*"],
    ]
    text = "\n".join(lines)
    assert "LeNet on C10  3 of 3 missing, 27 rounds, 18 s + ?" in text
    assert "Long  1 of 2 missing, 18 rounds, 36 s" in text
    assert ["FedAvg", "in", "the", "ledger"] in [line.split() for line in lines]
    assert "1  FedDH computes little. (cheap)" in text and "2  FedProx is better. (dear)" in text
    assert "*              on another machine: a GPU" in text
    assert text.endswith(
        "1 of 5 cells are there. 2 of the 4 others take about 54 s by what runs took\nelsewhere; of 2 nothing is known."
    )
    assert plan.to_dict()["claims"] == {"cheap": "FedDH computes little.", "dear": "FedProx is better."}


def test_columns_can_be_run_alone(here, monkeypatch, capsys):
    (here / "results").mkdir()
    plan = plan_table("small", seeds=1, columns=["long"], with_trials=False)
    assert tell(plan) == [("L", "FedAvg", "", 6), ("L", "FedProx", "", 6)]
    sheet = reproduce_in_order("small", 1, ["FedAvg"], results="results", record=True, columns=["Long"])
    assert {(f.column, f.method) for f in sheet.figures} == {("Long", "FedAvg")}
    assert [len(run.rows) for run in read_ledger(here / "results")] == [6]
    folders = sorted(file.parent.parent.parent.name for file in (here / "runs").rglob("recipe.toml"))
    assert folders == ["long"]
    code, out, err = command(monkeypatch, capsys, "small", "--column", "LONG", "--seeds", "1", "--plan")
    assert code == 0 and "1 of 2 cells are there." in out
    code, out, err = command(monkeypatch, capsys, "small", "--column", "Short")
    assert code == 10 and "no column called 'Short'" in err and "LeNet on C10; Long" in err


def test_cells_of_the_ledger_are_read_and_not_run_again(here):
    (here / "results").mkdir()
    before = reproduce_in_order("small", seeds=2, results="results", record=True)
    runs = read_ledger(here / "results")
    assert len(runs) == 2 * 5 and {run.protocol for run in runs} == {"fair"}
    after = reproduce_table("small", seeds=2, out="elsewhere", watch=fail_to_play)
    assert [f for f in after.figures if f.metric == "acc"] == [f for f in before.figures if f.metric == "acc"]
    assert not list((here / "elsewhere").rglob("recipe.toml"))
    longer = plan_table("small", seeds=2, changes={"rounds": 7}, out="other", with_trials=False)
    assert all(not p.place for p in longer.cells)
    shorter = reproduce_table("small", seeds=1, changes={"rounds": 2}, out="short", watch=fail_to_play)
    assert {f.seeds for f in shorter.figures if f.measured is not None} == {1}
    more = plan_table("small", seeds=3, out="third", with_trials=False)
    assert all(not p.place for p in more.cells)  # two of three seeds are not the cell


def test_runs_of_another_protocol_are_not_those_of_a_cell(here):
    (here / "results").mkdir()
    reproduce_in_order("small", 1, only=["FedAvg"], results="results", record=True)
    file = here / "results/small.jsonl.gz"
    runs = [plans.replace(run, protocol="authors") for run in read_ledger(here / "results")]
    file.unlink()
    record_runs(file, runs)
    assert all(not p.place for p in plan_table("small", 1, out="x", with_trials=False).cells)
    with pytest.raises(ShoalError, match="no protocol of its authors"):
        plan_table("small", out="x", with_trials=False, protocol="authors")


def test_a_limit_stops_between_two_rounds_and_the_same_call_goes_on(here, monkeypatch, caplog):
    clock = iter(range(10**6))
    monkeypatch.setattr(plans, "perf_counter", lambda: next(clock))
    (here / "results").mkdir()
    sheet = reproduce_in_order("small", seeds=2, results="results", until_minutes=0.13, record=True)
    assert "minutes are over" in caplog.text
    plan = plan_table("small", seeds=2, with_trials=False)
    assert tell(plan)[:2] == [("L", "FedAvg", "results", 0), ("L", "FedProx", "", 4)]  # eight rounds, then it was over
    assert {f.note for f in sheet.figures if f.measured is None} >= {"not run"}
    lengths = Counter((run.method, len(run.rows)) for run in read_ledger(here / "results"))
    assert lengths == {("fedavg", 3): 2, ("fedprox(mu=0.1)", 2): 1}  # what was broken off is kept
    monkeypatch.undo()
    monkeypatch.chdir(here)
    whole = reproduce_in_order("small", seeds=2, results="results", record=True)
    straight = reproduce_table("small", seeds=2, out="straight", results="")
    assert [f.measured for f in whole.figures if f.metric == "acc"] == [
        f.measured for f in straight.figures if f.metric == "acc"
    ]
    assert len(read_ledger(here / "results")) == 10


def test_runs_are_divided_among_processes(here, monkeypatch, capsys):
    divided = []

    def run_and_note(recipes, workers, watch):
        divided.append((len(recipes), workers))
        return run_in_processes(recipes, workers, watch)

    monkeypatch.setattr(comparison, "run_in_processes", run_and_note)
    (here / "results").mkdir()
    words = ["small", "--seeds", "1", "--column", "LeNet on C10"]
    assert command(monkeypatch, capsys, *words, "--out", "one", "--workers", "1")[0] == 0 and divided == []
    assert command(monkeypatch, capsys, *words, "--out", "two", "--workers", "2")[0] == 0 and divided == [(3, 2)]
    in_order = [*words, "--until-minutes", "9", "--results", "results", "--workers", "2"]
    assert command(monkeypatch, capsys, *in_order, "--out", "three")[0] == 0 and divided == [(3, 2)] * 2
    one, two, three = (json.loads(Path(out, "table.json").read_text()) for out in ("one", "two", "three"))
    assert one == two == three
    column = ["LeNet on C10"]
    stopped = reproduce_in_order("small", 1, out="four", until_minutes=0, columns=column, workers=2)
    assert "not run" in {f.note for f in stopped.figures}
    assert reproduce_in_order("small", 1, out="four", columns=column, workers=2).to_dict() == one


def test_a_limit_passes_rows_on_and_raises_when_it_is_over(monkeypatch):
    seen: list[Any] = []
    limit = TimeLimit(10.0, lambda *row: seen.append(row))
    limit(1, 2, 3)
    limit.end = 0
    with pytest.raises(ShoalError, match="The time is up"):
        limit(4, 5, 6)
    assert seen == [(1, 2, 3), (4, 5, 6)] and limit.is_over


def test_recording_needs_a_ledger(here):
    with pytest.raises(ShoalError, match="no ledger"):
        reproduce_in_order("small", record=True)
    assert not (here / "runs").exists()


def test_the_commands(here, monkeypatch, capsys):
    code, out, err = command(monkeypatch, capsys, "small", "--plan", "--seeds", "2", "--json")
    told = json.loads(out)
    assert code == 0 and told["missing"] == 5 and told["cells"][0]["rounds_left"] == 6 and told["seconds"] > 0
    code, out, err = command(monkeypatch, capsys, "small", "--plan", "--seeds", "1")
    assert code == 0 and "0 of 5 cells are there." in out and "a trial  up to 3 rounds of" in out
    (here / "results").mkdir()
    words = ["small", "--only", "FedAvg", "--results", "results", "--record", "--until-minutes", "5"]
    code, out, err = command(monkeypatch, capsys, *words)
    assert (
        code == 0 and "0 of 2 cells are there." in err and len(read_ledger(here / "results")) == 2 * 3
    )  # as many seeds as `fair` asks for
    code, out, err = command(monkeypatch, capsys, "small", "--only", "FedAvg", "--out", "again")
    assert code == 0 and "2 of 2 cells are there." in err
    assert command(monkeypatch, capsys, "small", "--scale", "smoke", "--plan")[0] == 11
    assert command(monkeypatch, capsys, "small", "--results", "nowhere")[0] == 16

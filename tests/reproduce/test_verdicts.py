"""Claims and verdicts: the list can be read, and its rules give hand-worked verdicts from runs of a ledger."""

import gzip
import tomllib
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import Recipe, ShoalError
from shoal.reproduce.claims import MEASURES, Claim, EarlierRuns, read_claims, read_earlier_runs
from shoal.reproduce.intervals import compute_interval
from shoal.reproduce.ledger import (
    LedgerRun,
    find_commit,
    find_ledger_folder,
    make_ledger_run,
    make_run_key,
    read_ledger,
    read_ledger_file,
    record_runs,
)
from shoal.reproduce.measures import LastRoundsReading, MeasuredValue
from shoal.reproduce.run import attach_recorded_runs, make_cell_figures, make_cells, read_complete_histories
from shoal.reproduce.table_file import read_table
from shoal.reproduce.verdicts import (
    FAILS,
    HOLDS,
    ONLY_AUTHORS,
    OPEN,
    Judgement,
    Verdict,
    format_advantage,
    judge_claim,
    judge_values,
)

RESULTS = Path(__file__).parents[2] / "results"
CLAIM = Claim(
    "c", "FedDHAD", "Table 3", "It is so.", "feddhad-3", "CIFAR-10, LeNet", "FedDH", ("FedAvg",), "accuracy", "higher"
)
PUBLISHED = {"FedDH": 62.1, "FedAvg": 56.5}


def seeds(*values: float, complete: bool = True) -> dict[int, MeasuredValue]:
    return {seed: MeasuredValue(value, complete) for seed, value in enumerate(values)}


def judge(
    own: dict[int, MeasuredValue], other: dict[int, MeasuredValue], claim: Claim = CLAIM, **published: float
) -> Judgement:
    return judge_values(claim, {"FedDH": own, "FedAvg": other}, published or PUBLISHED)


# the rules ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "own, verdict",
    [
        ((62.0, 62.5, 62.2), HOLDS),  # +5, +5.5, +5.2
        ((57.0, 57.1, 56.9), FAILS),  # 0, 0.1, -0.1: chance, and far below +5.6
        ((55.0, 55.1, 54.9), FAILS),
        ((57.4, 57.5, 57.6), HOLDS),  # small, and beyond chance: the direction is what is claimed
        ((55.0, 60.0, 65.0), OPEN),  # -2, +3, +8: holds 0 and +5.6
        ((62.0, 62.5), OPEN),
        ((62.0,), OPEN),
    ],
)
def test_more_accurate(own, verdict):
    judged = judge(seeds(*own), seeds(57.0, 57.0, 57.0))
    assert (judged.verdict, judged.seeds) == (verdict, len(own))
    assert bool(judged.why) == (verdict == OPEN)


def test_the_interval_is_of_paired_differences():
    """Seeds far apart do not matter where methods go with them: +1, +2, +3, half of the interval 4.303 / sqrt(3)."""
    judged = judge(seeds(51.0, 62.0, 73.0), seeds(50.0, 60.0, 70.0))
    assert judged.estimate == pytest.approx(2.0) and judged.interval == pytest.approx(4.303 / 3**0.5)
    assert format_advantage(CLAIM, 2.0, judged.interval) == "+2.00 ± 2.48"


def test_only_seeds_that_both_have_are_compared():
    judged = judge({1: MeasuredValue(60.0), 2: MeasuredValue(60.0), 7: MeasuredValue(99.0)}, seeds(50.0, 50.0, 50.0))
    assert (judged.seeds, judged.verdict, judged.estimate) == (2, OPEN, 10.0)


def test_less_of_a_risk():
    claim = replace(CLAIM, measure_name="local risk", test="lower")
    published = {"FedDH": 0.31, "FedAvg": 0.57}
    assert judge(seeds(0.30, 0.31, 0.32), seeds(0.5, 0.5, 0.5), claim, **published).verdict == HOLDS
    worse = judge(seeds(0.5, 0.51, 0.52), seeds(0.5, 0.5, 0.5), claim, **published)
    assert worse.verdict == FAILS and worse.estimate == pytest.approx(-0.01)
    assert format_advantage(claim, -0.01, 0.02) == "+0.01 ± 0.02"


def test_sooner_goes_by_ratios():
    claim = replace(CLAIM, measure_name="time to target", test="lower")
    published = {"FedDH": 1426.0, "FedAvg": 2366.0}
    judged = judge(seeds(50.0, 100.0, 60.0), seeds(100.0, 200.0, 120.0), claim, **published)
    assert judged.verdict == HOLDS and judged.estimate == pytest.approx(log(2))
    assert format_advantage(claim, log(2), log(1.5)) == "x 0.50 (0.33 to 0.75)"
    assert judge(seeds(99.0, 101.0, 100.0), seeds(100.0, 100.0, 100.0), claim, **published).verdict == FAILS


def test_a_target_that_was_never_reached_counts_with_what_was_spent():
    claim = replace(CLAIM, measure_name="time to target", test="lower")
    published = {"FedDH": 1426.0, "FedAvg": 2366.0}
    never = seeds(500.0, 500.0, 500.0, complete=False)
    assert judge(seeds(100.0, 110.0, 120.0), never, claim, **published).verdict == HOLDS
    assert judge(never, seeds(100.0, 110.0, 120.0), claim, **published).verdict == FAILS
    neither = judge(never, never, claim, **published)
    assert (neither.verdict, neither.why) == (OPEN, "no run reached the target")


def test_a_run_that_never_reached_the_target_was_not_sooner():
    """Pruned, its 500 rounds cost less than 480 of the other, which got there."""
    claim = replace(CLAIM, measure_name="time to target", test="lower")
    published = {"FedDH": 1426.0, "FedAvg": 2366.0}
    never = seeds(300.0, 310.0, 320.0, complete=False)
    judged = judge(never, seeds(480.0, 490.0, 500.0), claim, **published)
    assert (judged.verdict, judged.estimate) == (FAILS, 0.0)
    near = judge_values(replace(claim, test="near", than=()), {"FedDH": never}, {"FedDH": 310.0})
    assert near.verdict == OPEN


def test_no_worse_allows_a_point():
    claim = replace(CLAIM, test="no worse")
    base = seeds(60.0, 60.0, 60.0)
    assert judge(seeds(59.5, 59.6, 59.7), base, claim).verdict == HOLDS
    assert judge(seeds(58.0, 58.1, 57.9), base, claim).verdict == FAILS
    assert judge(seeds(58.0, 59.0, 60.0), base, claim).verdict == OPEN


@pytest.mark.parametrize(
    "values, verdict", [((0.6, 0.65, 0.66), HOLDS), ((0.5, 0.52, 0.54), FAILS), ((0.6, 0.6), OPEN)]
)
def test_near_is_within_a_tenth(values, verdict):
    claim = replace(CLAIM, measure_name="MACs", test="near", than=())
    assert judge_values(claim, {"FedDH": seeds(*values)}, {"FedDH": 0.615}).verdict == verdict


def test_the_best_of_all_must_beat_each():
    claim = replace(CLAIM, than=("FedAvg", "FedProx"))
    own, low, high = seeds(60.0, 60.1, 60.2), seeds(50.0, 50.1, 50.2), seeds(61.0, 61.1, 61.2)
    published = {"FedDH": 62.1, "FedAvg": 56.5, "FedProx": 58.8}
    beaten = judge_values(claim, {"FedDH": own, "FedAvg": low, "FedProx": high}, published)
    assert (beaten.verdict, beaten.against) == (FAILS, "FedProx")
    best = judge_values(claim, {"FedDH": own, "FedAvg": low, "FedProx": seeds(55.0, 55.1, 55.2)}, published)
    assert (best.verdict, best.against) == (HOLDS, "FedProx")


@given(st.lists(st.floats(-20, 20), min_size=1, max_size=8), st.floats(0.1, 20))
def test_a_verdict_never_contradicts_its_interval(gains, gap):
    judged = judge(seeds(*(50 + g for g in gains)), seeds(*[50.0] * len(gains)), FedDH=50 + gap, FedAvg=50.0)
    if len(gains) < 3:
        assert judged.verdict == OPEN
        return
    assert judged.estimate is not None and judged.interval is not None
    low, high = judged.estimate - judged.interval, judged.estimate + judged.interval
    assert (judged.verdict == HOLDS) == (low > 0)
    assert (judged.verdict == OPEN) == (low <= 0 and high >= 50 + gap - 50)


def test_the_protocols_together():
    def told(fair: str, authors: str, earlier: str = OPEN) -> tuple[str, bool]:
        found = [Judgement(v, seeds=3) if v != "none" else Judgement() for v in (fair, authors, earlier)]
        verdict = Verdict(CLAIM, PUBLISHED, found[0], found[1], found[2])
        return verdict.text, verdict.is_by_earlier_runs

    assert told(HOLDS, FAILS) == (HOLDS, False)
    assert told(FAILS, HOLDS) == (ONLY_AUTHORS, False)
    assert told(FAILS, OPEN, HOLDS) == (FAILS, False)
    assert told(OPEN, HOLDS, HOLDS) == (OPEN, False)
    assert told("none", HOLDS, HOLDS) == (OPEN, False)
    assert told("none", "none", FAILS) == (FAILS, True)


# runs -----------------------------------------------------------------------------------------------------------------
def make_run(
    method: str, seed: int, level: float, protocol: str, rounds: int = 500, choice: int = 0, **changes: Any
) -> LedgerRun:
    table = read_table("feddhad-3").apply_protocol(protocol or "fair")
    row = next(row for row in table.rows if row.method == method)
    recipe = table.make_recipe(table.columns[0], row, "full", {}, choice).with_values(seed=seed, **changes)
    costs = {"bytes_down": 10, "bytes_up": 10, "macs_forward": 615000, "macs_work": 1, "sim_seconds": 2.0}
    rows = [{"round": n, "accuracy": level, "loss": 1.0, "wall_seconds": 0.5, **costs} for n in range(rounds)]
    return make_ledger_run(recipe, rows, protocol)


def make_files(*levels: tuple[str, float], protocol: str = "fair", **changes: Any) -> dict[str, list[LedgerRun]]:
    runs = [make_run(m, s, level + 0.001 * s, protocol, **changes) for m, level in levels for s in range(3)]
    return {"feddhad-3": runs}


def test_runs_of_a_cell_are_found_by_their_recipe():
    files = make_files(("FedDH", 0.62), ("FedAvg", 0.56), compute="cuda", engine="batched", width=5, eval_every=1)
    verdict = judge_claim(CLAIM, files)
    assert (verdict.text, verdict.fair.seeds, verdict.fair.files) == (HOLDS, 3, ("feddhad-3",))
    assert verdict.fair.estimate == pytest.approx(6.0) and verdict.authors.seeds == 0
    assert judge_claim(CLAIM, make_files(("FedDH", 0.62), ("FedAvg", 0.56), lr=0.2)).text == OPEN
    assert judge_claim(CLAIM, make_files(("FedDH", 0.62), ("FedAvg", 0.56), rounds=499)).text == OPEN
    assert judge_claim(CLAIM, make_files(("FedDH", 0.62), ("FedAvg", 0.56), protocol="")).text == OPEN


def test_further_metrics_of_a_run_do_not_change_what_is_compared():
    """A run that also looked at the three likeliest classes has its accuracy compared, as the table's recipe says."""
    plain, asked = (
        make_files((name, 0.56), metrics=more)["feddhad-3"] for name, more in (("FedAvg", ()), ("FedDH", ("top3",)))
    )
    asked = [replace(run, rows=[row | {"top3": 0.9} for row in run.rows]) for run in asked]
    verdict = judge_claim(CLAIM, {"feddhad-3": plain + asked})
    assert (verdict.text, verdict.fair.estimate) == (FAILS, pytest.approx(0.0))
    table = read_table("feddhad-3").apply_protocol("fair")
    cells = attach_recorded_runs(make_cells(table, "full", 3, {}, Path()), asked, "fair")
    (own,) = (cell for cell in cells if cell.recorded)
    figures = make_cell_figures(table, own.column, own.row, own, read_complete_histories(own))
    assert {f.metric: f.measured for f in figures}["acc"] == pytest.approx(0.561)
    assert not any("top3" in f.metric for f in figures)


def test_of_a_list_of_settings_the_authors_take_the_best():
    """All settings must have been run; of FedDH the last is the best here."""
    table = read_table("feddhad-3").apply_protocol("authors")
    row = next(row for row in table.rows if row.method == "FedDH")
    number = len(row.list_choices(table.columns[0]))
    fair = make_files(("FedDH", 0.62), ("FedAvg", 0.62))
    base = make_files(("FedAvg", 0.56), protocol="authors")["feddhad-3"]
    levels = [0.5 + 0.12 * (choice + 1) / number for choice in range(number)]
    own = [make_run("FedDH", s, levels[c], "authors", choice=c) for c in range(number) for s in range(3)]
    verdict = judge_claim(CLAIM, fair | {"a": base + own})
    assert verdict.text == ONLY_AUTHORS and verdict.authors.estimate == pytest.approx(6.0, abs=0.2)
    if number > 1:
        assert judge_claim(CLAIM, fair | {"a": base + own[:-3]}).authors.why == "no runs of FedDH"


def test_earlier_runs_decide_where_nothing_else_does_and_were_not_broken_off():
    entry = EarlierRuns(
        ("feddhad-3",), "CIFAR-10, LeNet", "another rate", "feddhad.md", {"FedDH": ("old", "a"), "FedAvg": ("old", "b")}
    )

    def make_old(rounds: int) -> dict[str, list[LedgerRun]]:
        runs = make_files(("FedDH", 0.62), ("FedAvg", 0.56), protocol="", lr=0.2, rounds=rounds)["feddhad-3"]
        return {"old": [replace(run, method="a" if "feddh" in run.method else "b") for run in runs]}

    whole = judge_claim(CLAIM, make_old(500), [entry])
    assert (whole.text, whole.is_by_earlier_runs, whole.differs) == (HOLDS, True, "another rate")
    cut = judge_claim(CLAIM, make_old(180), [entry])
    assert (cut.text, cut.why, cut.earlier.seeds) == (OPEN, "180 of 500 rounds", 3)
    newer = judge_claim(CLAIM, make_old(500) | make_files(("FedDH", 0.62), ("FedAvg", 0.62)), [entry])
    assert (newer.text, newer.is_by_earlier_runs) == (FAILS, False)


def test_runs_that_were_broken_off_show_what_needs_no_whole_run():
    """30 of 500 rounds: what a device uploads is known, a mean over all rounds is not; whole runs go first."""
    files = make_files(("FedDH", 0.62), ("FedAvg", 0.56), rounds=30)
    upload = judge_claim(replace(CLAIM, measure_name="upload", test="lower"), files).fair
    assert (upload.seeds, upload.estimate, upload.why) == (3, 0.0, "the interval holds 0")
    for waiting in (CLAIM, replace(CLAIM, test="near", than=(), measure_name="MACs")):
        waits = judge_claim(waiting, files).fair
        assert (waits.verdict, waits.why) == (OPEN, "30 of 500 rounds")
    longer = {"whole": make_files(("FedDH", 0.62), ("FedAvg", 0.56))["feddhad-3"]}
    assert judge_claim(CLAIM, files | longer).text == HOLDS


def test_a_run_that_was_broken_off_before_its_model_was_pruned_does_not_show_its_final_size():
    claim = replace(CLAIM, test="near", than=(), measure_name="final MACs")

    def judge_pruned(macs: int, rounds: int) -> Judgement:
        runs = [make_run("FedDH", seed, 0.5, "fair", rounds=rounds) for seed in range(3)]
        runs = [replace(run, rows=[*run.rows[:-1], run.rows[-1] | {"macs_forward": macs}]) for run in runs]
        return judge_claim(claim, {"feddhad-3": runs}).fair

    assert (judge_pruned(400000, 30).estimate, judge_pruned(400000, 30).seeds) == (0.4, 3)
    assert (judge_pruned(615000, 30).verdict, judge_pruned(615000, 30).why) == (OPEN, "30 of 500 rounds")
    assert judge_pruned(615000, 500).estimate == 0.615


def test_a_method_that_was_not_run_cannot_have_been_beaten():
    claim = replace(CLAIM, than=("FedAvg", "FedProx"))
    verdict = judge_claim(claim, make_files(("FedDH", 0.62), ("FedAvg", 0.56)))
    assert (verdict.text, verdict.why) == (OPEN, "no runs of FedProx")
    assert judge_claim(claim, make_files(("FedDH", 0.50), ("FedAvg", 0.56))).text == FAILS


def test_a_method_whose_runs_lack_the_figure_cannot_have_been_beaten():
    claim = replace(CLAIM, than=("FedAvg", "FedProx"), measure_name="time to target", test="lower")
    sooner, later, untimed = (
        [
            replace(run, rows=[row | {"sim_seconds": seconds} for row in run.rows])
            for run in make_files(which)["feddhad-3"]
        ]
        for which, seconds in ((("FedDH", 0.62), 1.0), (("FedAvg", 0.62), 2.0), (("FedProx", 0.62), 0.0))
    )
    verdict = judge_claim(claim, {"feddhad-3": sooner + later + untimed})
    assert (verdict.text, verdict.why) == (OPEN, "the runs of FedProx do not have this figure")
    assert judge_claim(replace(claim, than=("FedAvg",)), {"feddhad-3": sooner + later}).text == HOLDS


def test_measures_of_a_hand_made_run():
    run = make_run("FedDH", 0, 0.5, "", rounds=40)
    rows = [row | {"accuracy": 0.125 if n < 20 else 0.75, "local_risk": 0.25} for n, row in enumerate(run.rows)]
    run, reading = replace(run, rows=rows), LastRoundsReading()
    read = {name: measure.read(run, 0.55, reading) for name, measure in MEASURES.items()}
    assert read["accuracy"] == MeasuredValue(75.0) and read["local risk"] == MeasuredValue(0.25)
    assert read["time to target"] == MeasuredValue(42.0) and read["GB to target"] == MeasuredValue(21 * 20 / 2**30)
    assert MEASURES["time to target"].read(run, 0.8, reading) == MeasuredValue(80.0, False)
    assert read["MACs"] == read["final MACs"] == MeasuredValue(0.615) and read["upload"] == MeasuredValue(1.0)
    assert read["device accuracy"] is None
    top3 = replace(run, rows=[row | {"top3": 0.875} for row in rows])
    assert MEASURES["accuracy"].read(top3, 0, reading) == MeasuredValue(87.5)


def test_traffic_of_a_recorded_run_that_counts_blocks_alike():
    run = make_run("FedDH", 0, 0.5, "fair", rounds=4)
    run = replace(run, rows=[row | {"fedbr.bytes_down_by_blocks": 2**29 - 10} for row in run.rows])
    reading = LastRoundsReading()
    assert MEASURES["traffic"].read(run, 0.0, reading) == MeasuredValue(2.0)
    assert MEASURES["GB to target"].read(run, 0.5, reading) == MeasuredValue(0.5)


# the list -------------------------------------------------------------------------------------------------------------
def test_every_claim_names_cells_that_can_be_run_and_figures_that_were_published():
    claims = read_claims(RESULTS)
    assert len(claims) == 125 and {claim.paper for claim in claims} == {
        "FedDHAD",
        "FedBIAD",
        "FedACD",
        "FedDUMAP",
        "FedBR",
    }
    for claim in claims:
        table = read_table(claim.table)
        assert table.paper == claim.paper and claim.says.endswith(".")
        column = next(c for c in table.columns if c.name == claim.column)
        for row in claim.rows:
            assert next(r for r in table.rows if r.method == row).find_expression(column), (claim.id, row)
        verdict = judge_claim(claim, {})
        assert verdict.published.keys() == set(claim.rows), claim.id
        assert verdict.text == OPEN and verdict.why.startswith("no runs")


def test_what_was_published_would_hold_if_it_were_measured():
    """Else the rule, or the claim, would be wrong: the papers' own figures must pass."""
    for claim in read_claims(RESULTS):
        published = judge_claim(claim, {}).published
        values = {row: seeds(*[value] * 3) for row, value in published.items()}
        assert judge_values(claim, values, published).verdict == HOLDS, (claim.id, claim.column)


def test_earlier_runs_are_in_the_ledger_and_explained_on_a_page():
    for entry in read_earlier_runs(RESULTS):
        assert (RESULTS.parent / "docs/results" / entry.page).is_file() and entry.differs
        for name in entry.tables:
            table = read_table(name)
            assert entry.column in {c.name for c in table.columns}
            if len(entry.tables) == 1:
                assert entry.runs.keys() <= {r.method for r in table.rows}
        for file, method in entry.runs.values():
            assert method in {run.method for run in read_ledger_file(RESULTS / f"{file}.jsonl.gz")}


@pytest.mark.parametrize(
    "change, kind",
    [
        ({"table": "feddhad-33"}, "unknown-name"),
        ({"columns": ["CIFAR-11"]}, "unknown-name"),
        ({"row": "FedAvgg"}, "unknown-name"),
        ({"than": ["FedAvgg"]}, "unknown-name"),
        ({"measure": "beauty"}, "unknown-name"),
        ({"test": "nicer"}, "unknown-name"),
        ({"test": "near"}, "bad-recipe"),
        ({"than": []}, "bad-recipe"),
        ({"extra": 1}, "bad-recipe"),
        ({"says": None}, "bad-recipe"),
        ({"columns": ["CIFAR-10, LeNet", "CIFAR-10, LeNet"]}, "bad-recipe"),
    ],
)
def test_a_claim_that_cannot_be_decided_is_refused(change, kind, tmp_path):
    entry = tomllib.loads((RESULTS / "claims.toml").read_text())["claim"][0] | change
    lines = [f"{key} = {value!r}" for key, value in entry.items() if value is not None]
    (tmp_path / "claims.toml").write_text("[[claim]]\n" + "\n".join(lines).replace("'", '"'))
    with pytest.raises(ShoalError) as refused:
        read_claims(tmp_path)
    assert refused.value.kind.name == kind


# the ledger -----------------------------------------------------------------------------------------------------------
def test_a_ledger_keeps_what_was_recorded(tmp_path):
    file = tmp_path / "feddhad-3.jsonl.gz"
    first, second = make_run("FedDH", 0, 0.5, "fair", rounds=3), make_run("FedDH", 1, 0.5, "fair", rounds=3)
    assert record_runs(file, [first]) == 1 and record_runs(file, [first, second]) == 1
    before = file.read_bytes()
    assert record_runs(file, [first, second]) == 0 and file.read_bytes() == before
    longer = make_run("FedDH", 0, 0.6, "fair", rounds=5)
    assert record_runs(file, [longer]) == 1
    assert read_ledger(tmp_path) == (longer, second)
    assert make_run("FedDH", 0, 0.5, "authors", rounds=3).protocol == "authors"
    assert tomllib.loads(first.recipe)["out"] == "" and first.machine and first.commit


def test_of_two_records_of_a_run_the_one_that_says_more_is_kept(tmp_path):
    """The longer one; of equal length the one with more metrics, without which the cell would stay missing."""
    file = tmp_path / "feddhad-3.jsonl.gz"
    short, long = (make_run("FedDH", 0, 0.5, "fair", rounds=n) for n in (3, 5))
    assert record_runs(file, [long, short]) == 1 and read_ledger_file(file) == (long,)
    judged = make_run("FedDH", 0, 0.5, "fair", rounds=5, metrics=("devices",))
    assert record_runs(file, [judged]) == 1 and read_ledger_file(file) == (judged,)
    assert record_runs(file, [long, short]) == 0 and read_ledger_file(file) == (judged,)


def test_a_ledger_with_bits_that_fell_over_is_told(tmp_path):
    file, runs = tmp_path / "x.jsonl.gz", [make_run("FedDH", seed, 0.5 + seed / 7, "fair", rounds=9) for seed in (0, 1)]
    record_runs(file, runs)
    whole = file.read_bytes()
    for place in range(20, len(whole) - 20, 3):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with pytest.raises(ShoalError) as refused:
            read_ledger_file(file)
        assert refused.value.kind.name == "damaged"


def test_a_ledger_line_has_no_paths_and_none_of_the_large_columns(tmp_path):
    recipe = Recipe(out=str(tmp_path), data_dir=str(tmp_path), seed=3, method="fedprox(mu=1)")
    run = make_ledger_run(recipe, [{"round": 0, "devices": [1], "bytes_by": {}, "seconds_by": {}, "accuracy": 0.1}])
    assert run.rows == [{"round": 0, "accuracy": 0.1}] and str(tmp_path) not in run.recipe
    assert run.parsed_recipe.rounds == 1 and run.seed == 3


def test_what_a_run_computes_decides_its_key():
    recipe = Recipe(method="feddum", metrics=("local",), engine="batched", compute="cpu")
    written_out = "feddu+devicem+fedavgm(beta=0.5, ema=True, start='first')"
    assert make_run_key(recipe) == make_run_key(Recipe(method=written_out, eval_every=7))
    others = (Recipe(method="feddum", lr=0.2), Recipe(method="feddum", seed=1), Recipe(method="feddu"))
    assert len({make_run_key(r) for r in (recipe, *others)}) == 4


def test_a_damaged_ledger_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_ledger_folder("") is None and read_ledger(None) == ()
    with pytest.raises(ShoalError, match="no folder"):
        find_ledger_folder("nowhere")
    (tmp_path / "results").mkdir()
    assert find_ledger_folder("") is None  # a folder of that name that is no ledger
    (tmp_path / "results/x.jsonl.gz").write_bytes(gzip.compress(b'{"method": 1}\n'))
    assert find_ledger_folder("") == Path("results")
    for content in (gzip.compress(b'{"method": 1}\n'), gzip.compress(b"[]\n"), gzip.compress(b"{\n"), b"no gzip"):
        (tmp_path / "results/x.jsonl.gz").write_bytes(content)
        with pytest.raises(ShoalError) as refused:
            read_ledger(tmp_path / "results")
        assert refused.value.kind.name == "damaged"


def test_the_commit_is_that_of_the_source():
    assert find_commit()[:40].isalnum() or find_commit().startswith("shoal ")


def test_intervals_beside_a_table_of_students_t():
    assert compute_interval([1.0]) is None
    assert compute_interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)

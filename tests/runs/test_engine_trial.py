"""`auto`: what is tried, what is believed of it, and for how long."""

import json
import logging
import time
from typing import Any

import pytest

import shoal
from shoal.runs import engine_trial
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import EngineChoice, choose_engine
from shoal.runs.engine_trial import find_quickest_engine, list_candidates, pick_winner
from shoal.runs.engine_trial_cache import CHANGED, OLD, TrialCache, measure_load
from shoal.runs.recipe import Recipe

SERIAL, BATCHED, POOL = EngineChoice("serial"), EngineChoice("batched", 10), EngineChoice("pool", 1, 2)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "shoal" / "engines.json"


def test_a_short_run_is_trained_serially_and_says_so(cache, caplog):
    with caplog.at_level(logging.INFO, logger="shoal"):
        result = shoal.run(rounds=2)
    assert result.engine and result.engine.engine == "serial" and "s of work" in result.engine.why
    assert any("engine: serial" in r.getMessage() for r in caplog.records)
    assert not cache.exists()


def test_a_trial_is_made_and_remembered(cache, monkeypatch):
    monkeypatch.setattr(engine_trial, "SHORT", 0.0)
    monkeypatch.setattr(engine_trial, "TURN", 0.02)
    assembly = assemble_run(Recipe().with_values(sample=2, devices=4))
    found = find_quickest_engine(assembly, 2)
    assert found.engine in ("serial", "batched", "pool") and "in a trial of " in found.why
    [entry] = json.loads(cache.read_text()).values()
    assert entry["pick"] == found.to_dict()
    assert TrialCache(assembly, 2).read(entry["load"]) == found
    cache.write_text(json.dumps({key: entry | {"load": 1e9} for key in json.loads(cache.read_text())}))
    find_quickest_engine(assembly, 2)
    assert next(iter(json.loads(cache.read_text()).values()))["load"] < 1e9, "the load had changed, nothing was tried"


def test_what_is_tried_depends_on_the_model():
    wide = assemble_run(Recipe().with_values(sample=80, devices=100)).net
    assert {p.width for p in list_candidates(wide, 2, 80)} == {1, 5, 10, 20}
    assert {p.width for p in list_candidates(assemble_run(Recipe().with_values(model="lenet")).net, 2, 80)} == {1}
    assert {p.engine for p in list_candidates(wide, 1, 80)} == {"batched"}


def test_threads_that_were_asked_for_are_in_every_trial():
    net = assemble_run(Recipe()).net
    assert {(p.engine, p.threads) for p in list_candidates(net, 4, 80, threads=3)} == {("batched", 3)}
    assert {(p.engine, p.threads) for p in list_candidates(net, 4, 80, threads=1)} == {("batched", 1), ("pool", 1)}
    assert choose_engine(assemble_run(Recipe().with_values(threads=3, rounds=1))).threads == 3


# what is believed -----------------------------------------------------------------------------------------------------
def test_what_is_faster_every_time_is_taken_and_told_without_boasting():
    found = pick_winner({SERIAL: [10, 11, 10.5, 12, 10], POOL: [5, 6, 5.5, 5.2, 5]}, 9)
    assert found.engine == "pool" and found.why == "at least 1.8 times as fast as serial in a trial of 9"


@pytest.mark.parametrize("turn", range(5))
def test_one_turn_that_something_got_in_the_way_of_decides_nothing(turn):
    slow = [330.0 if i == turn else 10.0 for i in range(5)]
    assert pick_winner({SERIAL: slow, BATCHED: [10.0] * 5}, 2).engine == "serial"
    found = pick_winner({SERIAL: [20.0] * 5, BATCHED: slow}, 2)
    assert found.engine == "batched" and "at least 2 times as fast" in found.why


def test_a_spread_that_is_larger_than_the_difference_is_a_tie_and_the_plain_one_is_taken():
    noisy = {SERIAL: [8, 12, 9, 14, 11], BATCHED: [7, 11, 8, 13, 10], POOL: [7, 12, 9, 9, 12]}
    assert pick_winner(noisy, 3) == EngineChoice("serial", why="nothing was clearly faster in a trial of 3")


def test_on_a_busy_machine_the_best_turn_of_each_decides():
    found = pick_winner({SERIAL: [30, 95, 60, 41, 33], BATCHED: [10, 44, 12, 80, 31]}, 3)
    assert (found.engine, found.why) == ("batched", "3 times as fast as serial in the best turns of a trial of 3")
    assert pick_winner({SERIAL: [14, 95, 60, 41, 33], BATCHED: [10, 44, 12, 80, 31]}, 3).engine == "serial"


def test_of_two_that_are_alike_the_plainer_is_taken():
    assert pick_winner({SERIAL: [10] * 5, BATCHED: [5.1] * 5, POOL: [5] * 5}, 3).engine == "batched"
    assert pick_winner({SERIAL: [10] * 5, BATCHED: [5.1] * 5, POOL: [4] * 5}, 3).engine == "pool"


def test_further_threads_must_be_worth_more():
    two = EngineChoice("serial", threads=2)
    assert pick_winner({SERIAL: [12] * 5, two: [10] * 5}, 2).threads == 1
    assert pick_winner({SERIAL: [14] * 5, two: [10] * 5}, 2).threads == 2


# for how long ---------------------------------------------------------------------------------------------------------
def past(**recipe: Any) -> TrialCache:
    return TrialCache(assemble_run(Recipe().with_values(**recipe)), 2)


def test_a_trial_grows_old(cache):
    past().write(POOL, 1.0)
    assert past().read(1.0) == POOL
    [(key, entry)] = json.loads(cache.read_text()).items()
    for when in (time.time() - OLD - 1, time.time() + 100):
        cache.write_text(json.dumps({key: entry | {"when": when}}))
        assert past().read(1.0) is None
    past(batch=3).write(BATCHED, 1.0)
    assert key not in json.loads(cache.read_text()), "what is old goes with the next that is written"


def test_a_trial_under_another_load_is_not_believed(cache):
    past().write(POOL, 1.0)
    assert past().read(1.2) == past().read(0.9) == POOL
    assert past().read(1.01 * CHANGED) is past().read(0.99 / CHANGED) is None


@pytest.mark.parametrize("other", [{"batch": 3}, {"method": "fedprox"}, {"model": "lenet"}, {"threads": 2}])
def test_a_trial_of_something_else_is_not_believed(cache, other):
    past().write(POOL, 1.0)
    assert past(**other).read(1.0) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 9999, '{"KEY": 3}', '{"KEY": {"engine": "pool"}}'])
def test_a_file_that_makes_no_sense_costs_a_trial(cache, text):
    cache.parent.mkdir(parents=True)
    cache.write_text(text.replace("KEY", past().key))
    assert past().read(1.0) is None
    past().write(POOL, 1.0)
    assert past().read(1.0) == POOL


def test_the_load_is_measured():
    assert 0 < measure_load(2) < 60

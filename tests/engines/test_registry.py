"""The registry of engines: an entry is all that recipes, results, notes and runs need to know of an engine."""

from dataclasses import fields, replace

import pytest

from shoal.core.errors import ShoalError
from shoal.engines.registry import ENGINES, EngineChoice, EngineKind
from shoal.engines.serial import SerialEngine
from shoal.runs.build import assemble_run
from shoal.runs.engine_choice import build_engine, choose_engine, parse_engine_choice
from shoal.runs.recipe import Recipe


class BackwardEngine(SerialEngine):
    """Trains the last task first."""

    def train(self, tasks):
        return super().train(tasks[::-1])[::-1]


@pytest.fixture
def backward(monkeypatch):
    monkeypatch.setitem(ENGINES, "backward", EngineKind(lambda pick, runs: BackwardEngine()))


def choose_for(engine: str, **settings) -> EngineChoice:
    """The choice for a recipe that names an engine, whose name recipes of this process need not know."""
    assembly = assemble_run(Recipe(devices=2, sample=2, rounds=1, **settings))
    object.__setattr__(assembly.recipe, "engine", engine)
    return choose_engine(assembly)


def test_an_entry_is_enough_to_choose_store_say_and_build_an_engine(backward):
    pick = choose_for("backward", threads=2)
    assert pick == EngineChoice("backward", threads=2) and str(pick) == "backward, 2 threads"
    assert parse_engine_choice(pick.to_dict()) == pick
    assert isinstance(build_engine(pick), BackwardEngine)


def test_an_engine_without_width_refuses_one(backward):
    with pytest.raises(ShoalError, match="engine is backward, which trains one device at a time"):
        choose_for("backward", width=3)


def test_recipes_and_their_help_know_every_engine():
    rule = next(f for f in fields(Recipe) if f.name == "engine").metadata
    assert rule["among"] == ("auto", *ENGINES)
    assert all(name in rule["help"] and kind.about in rule["help"] for name, kind in ENGINES.items())


@pytest.mark.parametrize("settings", [{}, {"width": 3}, {"address": "auto"}])
def test_real_devices_come_to_a_server_whatever_else_is_set(settings):
    with pytest.raises(ShoalError, match="real devices come to a server"):
        choose_for("flower", **settings)


@pytest.mark.parametrize(
    "pick, text",
    [
        (EngineChoice("serial", why="short"), "serial (short)"),
        (EngineChoice("batched", 10, compiled=True), "batched, 10 devices in a call, compiled"),
        (EngineChoice("pool", 1, 4), "pool, 4 processes with one device in a call"),
        (EngineChoice("ray", 2, address="a:1"), "ray, the cluster at a:1, 2 devices in a call"),
        (EngineChoice("ray", deterministic=True), "ray, on this machine, one device in a call, deterministic"),
        (EngineChoice("flower"), "flower, real devices"),
    ],
)
def test_what_results_say_of_a_choice(pick, text):
    assert str(pick) == text and parse_engine_choice(pick.to_dict()) == pick
    assert parse_engine_choice(replace(pick, engine="steam").to_dict()) is None

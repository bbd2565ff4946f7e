"""How many processes a comparison takes where nobody says."""

import logging

import pytest

from shoal.compare.comparison import count_runs_in_a_call
from shoal.compare.worker_choice import choose_workers, is_mostly_python, limit_workers
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe

TINY = {"model": "mlp", "devices": 4, "sample": 2, "compute": "cpu"}


def make_recipe(**values) -> Recipe:
    return Recipe().with_values(**(TINY | values))


@pytest.mark.parametrize(
    "devices, steps, expected",
    [(10, 250, False), (100, 6, True), (50, 250, False)],
    ids=["LeNet of the benchmark", "its MLP", "its CNN"],
)
def test_a_gpu_waits_for_python_where_many_devices_take_few_steps(devices, steps, expected):
    assert is_mostly_python(devices, steps) == expected


@pytest.mark.parametrize("engine, expected", [("serial", 3), ("batched", 3), ("auto", 1), ("pool", 1)])
def test_on_a_processor_every_core_has_a_process_unless_the_engine_uses_them_all(engine, expected):
    assembly = assemble_run(make_recipe(engine=engine))
    assert limit_workers(assembly, runs=5, cores=3)[0] == expected
    assert limit_workers(assembly, runs=1, cores=3)[0] == 1


def test_threads_are_cores_that_are_taken():
    assert limit_workers(assemble_run(make_recipe(engine="serial", threads=2)), runs=5, cores=3)[0] == 1


def test_short_comparisons_and_single_runs_take_one_process():
    short, long = make_recipe(engine="serial", rounds=3), make_recipe(engine="serial", rounds=10**6)
    assert choose_workers([short, short]) == 1 and choose_workers([long]) == 1


def test_runs_that_have_begun_do_not_count(tmp_path):
    recipes = [make_recipe(engine="serial", rounds=10**6, out=str(tmp_path / str(i))) for i in range(3)]
    assert choose_workers(recipes, cores=4) == 3
    for recipe in recipes[:2]:
        (tmp_path / recipe.out).mkdir()
        (tmp_path / recipe.out / "checkpoint.safetensors").touch()
    assert choose_workers(recipes, cores=4) == 1 == choose_workers(recipes[:2], cores=4) == choose_workers([])


def test_the_choice_is_said(caplog):
    with caplog.at_level(logging.INFO, "shoal"):
        assert choose_workers([make_recipe(engine="serial", rounds=10**6)] * 3, cores=2) == 2
    assert "3 runs in 2 processes" in caplog.text


def test_calls_on_a_processor_do_not_grow_with_the_runs():
    assert count_runs_in_a_call(10, width=100, on_gpu=True) == 10
    assert count_runs_in_a_call(10, width=10, on_gpu=False) == 2
    assert count_runs_in_a_call(10, width=1, on_gpu=False) == 1 == count_runs_in_a_call(10, width=50, on_gpu=False)

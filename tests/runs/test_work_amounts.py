"""Epochs and steps of each device: by list, by size, by speed."""

import numpy as np
import pytest

from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.core.types import SERVER
from shoal.fleet.fleets import TierFleet, UniformFleet
from shoal.runs.build import assemble_run, make_work_schedule
from shoal.runs.recipe import Recipe
from shoal.runs.work_amounts import make_amount_rule, parse_amount

SIZES = np.array([10, 20, 30, 0])


def make_rule(text: str, name: str = "steps", fleet=None, sizes=SIZES):
    amount = parse_amount(name, text)
    assert amount is not None
    return make_amount_rule(name, amount, RandomStreams(0), fleet or UniformFleet(), sizes)


def test_a_list_is_dealt_out_by_device_and_begins_anew():
    rule = make_rule("1,2,6")
    assert [rule(9, device) for device in range(4)] == [1, 2, 6, 1]
    assert rule(0, SERVER) == 3


def test_steps_by_size_have_the_given_mean_over_devices_with_data():
    rule = make_rule("size:10")
    assert [rule(0, device) for device in range(3)] == [5, 10, 15]
    assert rule(0, SERVER) == 10


def test_steps_that_are_shared_out_are_rounded_and_not_cut_off():
    sizes = np.random.default_rng(0).integers(50, 500, 200)
    make_work = make_work_schedule(Recipe().with_values(steps="size:10", devices=200), RandomStreams(0), sizes=sizes)
    steps = np.array([make_work(0, device).steps for device in range(200)])
    assert abs(steps - 10 * sizes / sizes.mean()).max() <= 0.5
    assert steps.mean() == pytest.approx(10, abs=0.1)


def test_steps_by_speed_are_in_proportion_to_it():
    fleet = TierFleet(RandomStreams(3), (4.0, 1.0))
    rule = make_rule("speed:10", fleet=fleet, sizes=np.full(50, 5))
    speeds = np.array([fleet.get_profile(device, 0).macs for device in range(50)])
    amounts = np.array([rule(0, device) for device in range(50)])
    np.testing.assert_allclose(amounts, 10 * speeds / speeds.mean())
    assert make_rule("speed:10")(0, 2) == 10


def test_a_range_is_drawn_for_each_device_and_round():
    rule = make_rule("1-5", "epochs")
    drawn = [rule(round, device) for round in range(5) for device in range(4)]
    assert set(drawn) <= {1, 2, 3, 4, 5} and len(set(drawn)) > 2 and drawn[3] == rule(0, 3)


@pytest.mark.parametrize(
    "text", ["0", "5-1", "1,", "1,0", "list:1,2", "size:", "size:0", "speed:1-5", "x", "-1", "1e9"]
)
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ShoalError, match="epochs is"):
        parse_amount("epochs", text)


def test_half_a_step_is_refused_and_half_a_mean_is_not():
    with pytest.raises(ShoalError, match="steps is '1,2.5'"):
        parse_amount("steps", "1,2.5")
    assert parse_amount("steps", "size:2.5") is not None


def test_a_list_for_more_devices_than_there_are_is_refused():
    with pytest.raises(ShoalError, match="epochs has 5 values, and there are 4 devices"):
        make_rule("1,2,3,4,5", "epochs")


def test_sizes_that_nobody_knows_are_refused():
    with pytest.raises(ShoalError, match="how many samples real devices have"):
        make_rule("size:3", sizes=np.zeros(3, int))


def test_lists_of_python_and_toml_mean_the_same_as_text():
    recipe = Recipe().with_values(epochs=[1, 2.5], devices=4, sample=2)
    assert recipe.epochs == "1,2.5" and recipe == Recipe().with_values(epochs="1,2.5", devices=4, sample=2)
    work = assemble_run(recipe).loop.work
    assert [work(0, device).epochs for device in range(4)] == [1, 2.5, 1, 2.5]

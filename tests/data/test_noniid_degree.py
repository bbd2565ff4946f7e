"""Non-IID degree: known values, laws, splits of a wanted degree, and the summary of a split."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from shoal.core.measures.divergence import jensen_shannon_divergence, measure_label_degrees
from shoal.core.streams import RandomStreams
from shoal.data.dataset import read_digits
from shoal.data.noniid_degree import TOLERANCE, compute_mean_degree, count_labels_by_device, summarise_population
from shoal.data.server_data import draw_server_samples
from shoal.data.splits import parse_split

DIGITS = read_digits().targets.numpy()
BALANCED = np.repeat(np.arange(10), 180)

tables = arrays(np.int64, array_shapes(min_dims=2, max_dims=2, max_side=8), elements=st.integers(0, 1000))


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def few(count: int, classes: int = 10) -> np.ndarray:
    return np.where(np.arange(classes) < count, 1 / count, 0.0)


@pytest.mark.parametrize("count, value", [(1, 0.7583), (2, 0.6100), (5, 0.3113), (10, 0.0)])
def test_some_of_ten_classes(count, value):
    assert jensen_shannon_divergence(few(count), few(10)) == pytest.approx(value, abs=5e-5)


def test_a_value_worked_by_hand():
    # p = (1, 0), q = (1/2, 1/2), m = (3/4, 1/4): (log2(4/3) + (log2(2/3) + log2(2)) / 2) / 2
    by_hand = (np.log2(4 / 3) + (np.log2(2 / 3) + 1) / 2) / 2
    assert jensen_shannon_divergence(np.array([1.0, 0.0]), np.array([0.5, 0.5])) == pytest.approx(by_hand, abs=1e-15)


def test_the_ends_are_exact():
    assert jensen_shannon_divergence(few(3), few(3)) == 0.0
    assert jensen_shannon_divergence(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0


@pytest.mark.parametrize("text, value", [("labels:2", 0.6100), ("labels:5", 0.3113), ("labels:10", 0.0)])
def test_a_split_with_some_of_ten_classes(text, value):
    found = count_labels_by_device(BALANCED, parse_split(text)(BALANCED, 20, rng()), 10)
    assert compute_mean_degree(found) == pytest.approx(value, abs=5e-5)
    assert measure_label_degrees(found) == pytest.approx(np.full(20, value), abs=5e-5)


@pytest.mark.parametrize("classes, value", [(2, 0.6100), (5, 0.3113), (10, 0.0)])
def test_the_servers_degree_against_even_devices(classes, value):
    kept = draw_server_samples(f"share:0.05:{classes}", BALANCED, rng())
    mix = np.bincount(BALANCED[kept], minlength=10) / len(kept)
    assert jensen_shannon_divergence(mix, few(10)) == pytest.approx(value, abs=5e-5)


@settings(deadline=None, max_examples=300)
@given(tables, st.randoms(use_true_random=False))
def test_degrees_lie_between_0_and_1_whatever_labels_are_called(table, random):
    found = measure_label_degrees(table)
    assert found.shape == (len(table),) and ((found >= 0) & (found <= 1)).all() and 0 <= compute_mean_degree(table) <= 1
    names = list(range(table.shape[1]))
    random.shuffle(names)
    assert measure_label_degrees(table[:, names]) == pytest.approx(found, abs=1e-12)
    turns = list(range(len(table)))
    random.shuffle(turns)
    assert measure_label_degrees(table[turns]) == pytest.approx(found[turns], abs=1e-12)


@settings(deadline=None)
@given(arrays(np.float64, (2, 5), elements=st.floats(0, 1) | st.just(5e-324)))
def test_divergence_is_symmetric_and_never_nan(pair):
    p, q = pair
    assert 0 <= jensen_shannon_divergence(p, q) <= 1 and jensen_shannon_divergence(p, q) == pytest.approx(
        jensen_shannon_divergence(q, p), abs=1e-12
    )


def test_devices_weigh_by_size_in_the_pool_and_not_in_the_mean():
    table = np.array([[30, 0], [0, 10]])
    each = [jensen_shannon_divergence(np.array(p), np.array([0.75, 0.25])) for p in ([1.0, 0.0], [0.0, 1.0])]
    assert measure_label_degrees(table) == pytest.approx(each) and compute_mean_degree(table) == pytest.approx(
        sum(each) / 2
    )


def test_a_device_without_data_has_0_and_is_left_out_of_the_mean():
    table = np.array([[4, 0], [0, 0], [0, 4]])
    assert measure_label_degrees(table)[1] == 0 and compute_mean_degree(table) == pytest.approx(
        compute_mean_degree(table[[0, 2]])
    )
    assert compute_mean_degree(np.zeros((3, 4))) == 0 and compute_mean_degree(np.zeros((0, 4))) == 0


@pytest.mark.parametrize("text", ["dirichlet:0.1", "virtual:9"])
def test_histograms_count_what_devices_hold(text):
    split = parse_split(text)(DIGITS, 12, rng())
    by_hand = np.stack([np.bincount(DIGITS[rows], minlength=11) for rows in split])
    assert np.array_equal(count_labels_by_device(DIGITS, split, 11), by_hand)
    assert np.array_equal(count_labels_by_device(DIGITS, split, 11, devices=5), by_hand[:5])
    assert np.array_equal(count_labels_by_device(DIGITS, split, 11, devices=99), by_hand)


def test_every_position_of_a_text_counts():
    text = np.array([[0, 1], [1, 1], [2, -1]])
    found = count_labels_by_device(text, parse_split("owner")(text, 2, rng(), np.array([0, 0, 1])), 4)
    assert found.tolist() == [[1, 3, 0, 0], [0, 0, 1, 0]]


# splits of a wanted degree --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("devices", [5, 20, 100])
@pytest.mark.parametrize("target", [0.1, 0.2, 0.3, 0.45, 0.6])
def test_a_split_has_the_degree_asked_for(target, devices):
    for seed in range(3):
        split = parse_split(f"degree:{target}")(DIGITS, devices, rng(seed))
        assert abs(compute_mean_degree(count_labels_by_device(DIGITS, split, 10)) - target) <= TOLERANCE
        assert sorted(np.concatenate(split).tolist()) == list(range(len(DIGITS)))


def test_the_table_in_the_documentation():
    lines = (Path(__file__).parents[2] / "docs/how-to/splits.md").read_text().split("| degree |\n")[1].splitlines()[1:]
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines[: lines.index("")]]
    assert len(rows) > 15
    for text, smallest, largest, told in rows:
        split = parse_split(text)(DIGITS, 20, RandomStreams(0).make_numpy_generator("split"))
        assert [str(split.sizes.min()), str(split.sizes.max())] == [smallest, largest]
        assert f"{compute_mean_degree(count_labels_by_device(DIGITS, split, 10)):.3f}" == told


# summary --------------------------------------------------------------------------------------------------------------
KEYS = {"sizes", "labels", "degrees", "degree", "server"}


def test_a_summary_is_ready_for_json():
    kept = draw_server_samples("per-class:3", DIGITS, rng())
    left = np.setdiff1d(np.arange(len(DIGITS)), kept)
    split = parse_split("dirichlet:0.1")(DIGITS[left], 30, rng()).renumber(left)
    told = json.loads(json.dumps(summarise_population(DIGITS, split, kept, 10), allow_nan=False))
    assert set(told) == KEYS and told["server"] == [3] * 10
    assert told["sizes"] == [sum(row) for row in told["labels"]] and sum(told["sizes"]) == len(left)
    assert told["degree"] == pytest.approx(np.mean([d for d, n in zip(told["degrees"], told["sizes"]) if n]))


def test_a_summary_shows_the_first_devices_and_the_degree_of_all():
    split = parse_split("dirichlet:0.1")(DIGITS, 300, rng())
    told = summarise_population(DIGITS, split, np.zeros(0, dtype=np.int64), 10, most=20)
    assert [len(told[key]) for key in ("sizes", "labels", "degrees")] == [20, 20, 20]
    assert (
        told["degree"] == compute_mean_degree(count_labels_by_device(DIGITS, split, 10)) and told["server"] == [0] * 10
    )


def test_a_summary_of_a_million_devices_looks_at_the_first():
    split = parse_split("virtual:60")(DIGITS, 10**6, rng())
    told = summarise_population(DIGITS, split, np.zeros(0, dtype=np.int64), 10)
    assert told["sizes"] == [60] * 200 and told["degree"] == pytest.approx(np.mean(told["degrees"]))


def test_a_summary_of_text_has_no_lists_of_words():
    text = rng().integers(0, 50, (40, 5))
    told = json.loads(json.dumps(summarise_population(text, parse_split("iid")(text, 4, rng()), np.arange(3), 50)))
    assert set(told) == KEYS and told["labels"] == told["server"] == [] and len(told["degrees"]) == 4

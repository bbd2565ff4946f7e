"""Every kind of split: each sample on one device, exact amounts where they are promised, one sentence where not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.data.dataset import read_digits
from shoal.data.noniid_degree import count_labels_by_device
from shoal.data.population import Population, StoredPopulation, VirtualPopulation
from shoal.data.server_data import draw_server_samples, draw_withheld_samples
from shoal.data.splits import SPLITS, parse_split

DIGITS = read_digits().targets.numpy()
BALANCED = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 180))
TEXT = np.arange(60).reshape(20, 3)

KINDS = (
    "iid dirichlet:0.3 dirichlet:1:1 shards:1 shards:3 dominant:0 dominant:1.3 dominant:5 dominant:10 missing:0 "
    "missing:4 missing:9 labels:1 labels:2 quantity:0.3 quantity:1:1 owner domains time degree:0.2 "
    "dirichlet-capped:0.1 dirichlet-capped:1:1 pathological:1 pathological:2"
).split()

labels = st.lists(st.sampled_from([0, 1, 2, 5, 9, 40]), min_size=1, max_size=60).map(np.array)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def counts(text: str, labels: np.ndarray, devices: int, seed: int = 0) -> np.ndarray:
    return count_labels_by_device(labels, parse_split(text)(labels, devices, rng(seed)), int(labels.max()) + 1)


def refused(text: str, labels: np.ndarray, devices: int, owners: np.ndarray | None = None) -> str:
    with pytest.raises(shoal.ShoalError) as error:
        parse_split(text)(labels, devices, rng(), owners)
    assert error.value.kind.name == "bad-value" and error.value.problem.endswith(".")
    return error.value.problem


# laws -----------------------------------------------------------------------------------------------------------------
@settings(deadline=None, max_examples=600)
@given(st.sampled_from(KINDS), labels, st.integers(1, 40), st.integers(0, 2**32))
def test_every_sample_is_on_exactly_one_device(text, labels, devices, seed):
    owners = rng(seed).integers(0, devices, len(labels))
    try:
        split = parse_split(text)(labels, devices, rng(seed), owners, rng(seed).random(len(labels)))
    except shoal.ShoalError as error:
        assert error.kind.name == "bad-value" and text.split(":")[0] not in ("iid", "owner", "time")
        return
    assert len(split) == len(split.sizes) == devices
    assert split.sizes.tolist() == [len(rows) for rows in split]
    assert sorted(np.concatenate(split).tolist()) == list(range(len(labels)))


@pytest.mark.parametrize("text", [*KINDS, "virtual:7"])
def test_a_split_follows_from_its_generator(text):
    owners = rng().integers(0, 30, len(BALANCED))
    one, again, other = (parse_split(text)(BALANCED, 30, rng(seed), owners, owners[::-1]) for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(one, again))
    assert text in ("owner", "time", "domains") or not all(np.array_equal(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("text", ["iid", "virtual:5"])
def test_a_population_is_a_sequence_and_may_be_renamed(text):
    split = parse_split(text)(np.zeros(20), 6, rng())
    names = 100 + np.arange(20)
    assert isinstance(split, Population) and len(list(split)) == 6
    assert np.array_equal(split[-1], split[5])
    assert all(np.array_equal(names[a], b) for a, b in zip(split, split.renumber(names)))
    for device in (6, -7):
        with pytest.raises(IndexError):
            split[device]


# amounts --------------------------------------------------------------------------------------------------------------
def test_dirichlet_with_a_smallest_size():
    free = parse_split("dirichlet:0.1")(DIGITS, 20, rng()).sizes
    least = parse_split("dirichlet:0.1:15")(DIGITS, 20, rng()).sizes
    assert free.min() < 15 <= least.min()


def test_a_smallest_size_that_is_met_at_once_changes_nothing():
    free, least = (parse_split(text)(DIGITS, 5, rng()) for text in ("dirichlet:10", "dirichlet:10:2"))
    assert all(np.array_equal(a, b) for a, b in zip(free, least))


def test_a_device_that_has_its_even_share_gets_nothing_of_later_classes():
    """Of classes a, b and c in equal numbers over two devices, whoever passes a half is left out from then on."""
    even = np.repeat(np.arange(3), 100)
    for seed in range(20):
        found = counts("dirichlet-capped:0.1", even, 2, seed)
        assert found.sum() == 300
        for device in range(2):
            full = np.flatnonzero(np.cumsum(found[device]) >= 150)
            assert not len(full) or found[device, full[0] + 1 :].sum() == 0
    capped = [parse_split("dirichlet-capped:0.1")(BALANCED, 20, rng(seed)).sizes.max() for seed in range(10)]
    free = [parse_split("dirichlet:0.1")(BALANCED, 20, rng(seed)).sizes.max() for seed in range(10)]
    assert np.mean(capped) < np.mean(free)
    assert parse_split("dirichlet-capped:0.1:5")(BALANCED, 20, rng()).sizes.min() >= 5


def test_pathological_devices_share_their_classes_in_groups_and_uneven_parts():
    """20 devices with 2 of 10 classes: devices 0 to 3 hold classes 0 and 1, and so on, the last of a group most."""
    found = counts("pathological:2", BALANCED, 20)
    assert found.sum() == 1800
    for group in range(5):
        own = found[4 * group : 4 * group + 4, 2 * group : 2 * group + 2]
        assert own.sum() == 360 and (own[:3] >= 4).all() and (own[:3] < 45).all() and (own[3] > 45).all()
    assert ((found > 0).sum(1) == 2).all()
    refused("pathological:11", BALANCED, 20)
    refused("pathological:1", BALANCED, 9)


def test_shards_are_cut_from_sorted_samples():
    found = counts("shards:2", BALANCED, 30)
    assert (found.sum(1) == 60).all() and set(found.ravel()) <= {0, 30, 60}
    assert ((found > 0).sum(1) <= 2).all()


@pytest.mark.parametrize("level, own, other", [(0, 6, 6), (1, 6, 6), (4, 24, 4), (7, 42, 2), (10, 60, 0)])
def test_dominant_on_a_balanced_set(level, own, other):
    found = counts(f"dominant:{level}", BALANCED, 30)
    assert (np.sort(found, axis=1) == [other] * 9 + [own]).all()
    if own > other:
        assert np.bincount(found.argmax(1)).tolist() == [3] * 10


@pytest.mark.parametrize("devices", [10, 15, 20, 37])
@pytest.mark.parametrize("level", [3, 5, 9])
def test_dominant_shares_hold_on_a_set_that_is_not_balanced(level, devices):
    found = counts(f"dominant:{level}", DIGITS, devices)
    assert np.abs(found.max(1) / found.sum(1) - level / 10).max() < 0.05


def test_a_rare_class_dominates_less_and_the_others_as_they_should():
    uneven = np.repeat(np.arange(10), [6] + [120] * 9)
    found = counts("dominant:5", uneven, 10)
    shares = np.sort(found.max(1) / found.sum(1))
    assert (found.sum(1) > 0).all() and shares[0] < 0.3 and np.abs(shares[1:] - 0.5).max() < 0.05


@pytest.mark.parametrize("level, seen", [(0, 10), (1, 9), (5, 5), (8, 2), (9, 1)])
def test_missing_on_a_balanced_set(level, seen):
    found = counts(f"missing:{level}", BALANCED, 20)
    assert (np.sort(found, axis=1) == [0] * (10 - seen) + [90 // seen] * seen).all()


@pytest.mark.parametrize("seen", [1, 2, 3, 5, 6, 9, 10])
def test_labels_on_a_balanced_set(seen):
    found = counts(f"labels:{seen}", BALANCED, 20)
    assert (np.sort(found, axis=1) == [0] * (10 - seen) + [90 // seen] * seen).all()


def test_devices_see_many_pairs_of_classes():
    found = counts("labels:2", BALANCED, 100)
    assert len({tuple(np.flatnonzero(row)) for row in found}) > 25


@settings(deadline=None)
@given(st.integers(1, 10), st.integers(1, 60))
def test_labels_are_seen_by_as_many_devices_each(seen, devices):
    if seen * devices >= 10:
        found = counts(f"labels:{seen}", BALANCED, devices) > 0
        assert (found.sum(1) == seen).all() and np.ptp(found.sum(0)) <= 1


def test_odd_samples_do_not_all_go_to_the_same_devices():
    sizes = parse_split("missing:0")(np.repeat(np.arange(10), 13), 20, rng()).sizes
    assert sizes.min() == 6 and sizes.max() == 7


def test_quantity_changes_sizes_and_leaves_labels():
    even, uneven = (parse_split(f"quantity:{beta}")(BALANCED, 10, rng()) for beta in (1e6, 0.2))
    assert np.ptp(even.sizes) <= 4 and uneven.sizes.max() > 4 * np.median(uneven.sizes)
    largest = BALANCED[uneven[int(uneven.sizes.argmax())]]
    assert np.bincount(largest).max() < 0.15 * len(largest)


def test_owners_keep_what_is_theirs():
    owners = np.array([2, 0, 2, 2, 0])
    split = parse_split("owner")(np.zeros((5, 3)), 4, rng(), owners)
    assert [rows.tolist() for rows in split] == [[1, 4], [], [0, 2, 3], []]


def test_labels_that_do_not_occur_are_no_classes():
    gaps = np.repeat([3, 70], 30)
    assert (counts("labels:1", gaps, 2).max(1) == 30).all()
    assert counts("missing:5", gaps, 6).sum(1).tolist() == [10] * 6


# bad input ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, labels, devices, told",
    [
        ("dirichlet:1:3", BALANCED, 601, "601 devices cannot have 3 samples each: there are 1800"),
        ("dirichlet:0.001:50", BALANCED, 30, "In 1000 draws of dirichlet:0.001"),
        ("shards:4", np.zeros(20), 6, "4 shards for each of 6 devices cannot be cut from 20"),
        ("dominant:2", BALANCED, 9, "Each of 10 classes must dominate a device, and there are 9 devices"),
        ("missing:9", BALANCED, 9, "9 devices with 1 classes each cannot hold all 10"),
        ("labels:11", BALANCED, 20, "cannot see 11 classes: the data has 10"),
        ("labels:2", np.zeros(9, int), 3, "cannot see 2 classes: the data has 1"),
        ("labels:2", BALANCED, 4, "4 devices with 2 classes each cannot hold all 10"),
        ("owner", BALANCED, 4, "does not say whose"),
        ("virtual:21", np.zeros(20), 4, "wants 21 samples, and there are 20"),
        ("degree:0.9", BALANCED, 20, "mean degree of 0.9; the nearest has 0.7"),
        ("degree:0", np.repeat(np.arange(10), 2), 20, "mean degree of 0; the nearest has 0."),
        ("degree:0.5", np.zeros(50, int), 20, "the nearest has 0.000"),
        ("iid", np.zeros(0), 3, "0 samples cannot be split over 3 devices"),
        ("iid", np.zeros(3), 0, "3 samples cannot be split over 0 devices"),
    ],
)
def test_what_cannot_be_split_so(text, labels, devices, told):
    assert told in refused(text, labels, devices)


def test_more_owners_than_devices():
    assert "12 owners for 4 devices" in refused("owner", np.zeros(3), 4, np.array([0, 11, 2]))


@pytest.mark.parametrize("text", "iid quantity:0.5 owner domains time virtual:4".split())
def test_text_may_be_split_without_a_look_at_its_labels(text):
    assert parse_split(text)(TEXT, 4, rng(), np.arange(20) % 4, np.arange(20)).sizes.sum() >= 16


@pytest.mark.parametrize("text", "dirichlet:1 shards:2 dominant:5 missing:5 labels:2 degree:0.2".split())
def test_text_has_no_classes(text):
    assert "several labels each" in refused(text, TEXT, 4)


@pytest.mark.parametrize("text", KINDS)
def test_one_class_or_one_device_or_one_sample(text):
    for labels, devices in ((np.full(30, 4), 6), (np.array([3]), 1), (BALANCED, 1)):
        try:
            split = parse_split(text)(labels, devices, rng(), np.zeros(len(labels), dtype=int), labels)
        except shoal.ShoalError:
            assert text.split(":")[0] in ("labels", "missing", "shards", "degree", "dominant", "pathological")
        else:
            assert split.sizes.sum() == len(labels)


@pytest.mark.parametrize(
    "text",
    "shards shards:0 shards:-1 shards:2.5 shards:1e3 dominant dominant:11 dominant:-1 dominant:nan missing:10 "
    "missing:x labels:0 labels: quantity quantity:0 quantity:1:0 owner:1 domains:2 time:3 virtual virtual:0 "
    "virtual:5:5 degree degree:1.1 degree:-0.1 degree:nan".split(),
)
def test_a_text_that_cannot_be_read(text):
    with pytest.raises(shoal.ShoalError, match="cannot be read") as error:
        parse_split(text)
    assert error.value.advice == f"Write {SPLITS[text.split(':')[0]][2]}."


def test_every_kind_has_a_line_to_be_listed_with_and_a_form_that_names_it():
    for name, (function, readers, form) in SPLITS.items():
        assert (function.__doc__ or "").strip().splitlines()[0].endswith(".")
        assert form.startswith(name) and form.split(" ")[0].count(":") <= len(readers)
        assert parse_split(form.rpartition("example ")[2].split(",")[0])


# virtual --------------------------------------------------------------------------------------------------------------
def test_a_virtual_population_stores_nothing_per_device():
    split = parse_split("virtual:60")(BALANCED, 10**6, rng())
    assert isinstance(split, VirtualPopulation) and len(split) == 10**6
    stored = [value for value in vars(split).values() if isinstance(value, np.ndarray)]
    assert sum(array.size for array in stored) == len(BALANCED)
    assert split.sizes.shape == (10**6,) and split.sizes.strides == (0,) and split.sizes[-1] == 60


def test_a_virtual_device_depends_on_the_seed_and_its_number_alone():
    few, many = (parse_split("virtual:60")(BALANCED, devices, rng(5)) for devices in (10, 10**6))
    late = many[999_999]
    assert np.array_equal(few[7], many[7]) and np.array_equal(many[7], many[7])
    assert np.array_equal(late, many[999_999]) and not np.array_equal(late, many[999_998])
    assert not np.array_equal(few[7], parse_split("virtual:60")(BALANCED, 10, rng(6))[7])


def test_virtual_devices_hold_different_samples_and_share_them():
    split = parse_split("virtual:60")(BALANCED, 200, rng())
    assert all(len(set(rows.tolist())) == 60 for rows in split)
    held = np.bincount(np.concatenate(split), minlength=len(BALANCED))
    assert (held > 0).mean() > 0.99 and held.max() < 25
    assert len({tuple(rows) for rows in split}) == 200


def test_a_virtual_device_may_hold_all():
    assert sorted(parse_split("virtual:20")(np.zeros(20), 3, rng())[2].tolist()) == list(range(20))


# server data ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("classes, each", [(1, 90), (2, 45), (5, 18), (10, 9)])
def test_the_server_has_equal_amounts_of_some_classes(classes, each):
    kept = draw_server_samples(f"share:0.05:{classes}", BALANCED, rng())
    found = np.bincount(BALANCED[kept], minlength=10)
    assert sorted(found) == [0] * (10 - classes) + [each] * classes
    assert len(set(kept.tolist())) == 90 and (np.diff(kept) > 0).all()


def test_an_odd_share_is_as_even_as_can_be():
    found = np.bincount(BALANCED[draw_server_samples("share:0.05:4", BALANCED, rng())])
    assert sorted(found[found > 0]) == [22, 22, 23, 23]


def test_the_classes_of_the_server_are_drawn():
    chosen = {
        tuple(np.unique(BALANCED[draw_server_samples("share:0.01:2", BALANCED, rng(seed))])) for seed in range(20)
    }
    assert len(chosen) > 10


def test_only_classes_that_are_large_enough_are_chosen():
    uneven = np.repeat([0, 1, 2], [2, 49, 49])
    assert set(uneven[draw_server_samples("share:0.2:2", uneven, rng())]) == {1, 2}


def test_the_server_has_some_of_each_class():
    kept = draw_server_samples("per-class:7", DIGITS, rng())
    assert np.bincount(DIGITS[kept]).tolist() == [7] * 10
    assert np.array_equal(kept, draw_server_samples("per-class:7", DIGITS, rng()))
    assert not np.array_equal(kept, draw_server_samples("per-class:7", DIGITS, rng(1)))


def test_what_is_set_aside_holds_the_servers_samples_and_no_device_gets_it():
    kept, away = (f("share:0.08:5:0.2", BALANCED, rng()) for f in (draw_server_samples, draw_withheld_samples))
    assert len(kept) == 144 and len(away) == 360 and set(kept) <= set(away)
    assert sorted(np.bincount(BALANCED[kept], minlength=10)) == [0] * 5 + [28] + [29] * 4
    assert np.array_equal(
        draw_withheld_samples("share:0.1", BALANCED, rng()), draw_server_samples("share:0.1", BALANCED, rng())
    )
    assert len(draw_server_samples("share:0.1:all:0.5", BALANCED, rng())) == 180
    with pytest.raises(shoal.ShoalError, match="cannot be taken from the 180 that are set aside"):
        draw_server_samples("share:0.2:5:0.1", BALANCED, rng())


@pytest.mark.parametrize(
    "text, told",
    [
        ("share:0.5:2", "900 samples cannot be taken in equal amounts from 2 of 10 classes; 0 have 450"),
        ("share:0.05:11", "from 11 of 10 classes"),
        ("share:0.001:5", "2 samples cannot be taken in equal amounts from 5"),
        ("per-class:181", "wants 181 samples of each class, and one class has 180"),
        ("share:0.1:", "cannot be read"),
        ("share:0.1:0", "cannot be read"),
        ("share:0.1:2:3", "cannot be read"),
        ("per-class", "cannot be read"),
        ("per-class:0", "cannot be read"),
        ("per-class:2.5", "cannot be read"),
        ("", "cannot be read"),
    ],
)
def test_server_data_that_cannot_be(text, told):
    with pytest.raises(shoal.ShoalError, match=told) as error:
        draw_server_samples(text, BALANCED, rng())
    assert error.value.kind.name == "bad-value"


def test_text_on_the_server_is_a_share():
    assert len(draw_server_samples("share:0.1", TEXT, rng())) == 2
    with pytest.raises(shoal.ShoalError, match="several labels"):
        draw_server_samples("per-class:1", TEXT, rng())


def test_a_stored_population_is_compact():
    split = parse_split("iid")(BALANCED, 10**5, rng())
    assert isinstance(split, StoredPopulation) and split.order.size == 1800 and split.sizes.sum() == 1800

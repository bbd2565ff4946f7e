"""The rules for splitting samples over devices (IID, Dirichlet, shards, ...), each reproducible from a generator."""

import numpy as np

from shoal.core.errors import ShoalError
from shoal.data.noniid_degree import group_by_class, search_degree
from shoal.data.population import StoredPopulation

TRIES = 1000
"""How often `dirichlet:BETA:MIN` draws before it gives up."""


def split_iid(labels: np.ndarray, devices: int, generator: np.random.Generator) -> StoredPopulation:
    """Samples are shuffled and dealt out evenly."""
    sizes = len(labels) // devices + (np.arange(devices) < len(labels) % devices)
    return StoredPopulation(generator.permutation(len(labels)), np.cumsum(sizes))


def split_dirichlet(
    labels: np.ndarray, devices: int, generator: np.random.Generator, beta: float, least: int = 0
) -> StoredPopulation:
    """Each class is spread over the devices in proportions drawn from Dirichlet(beta); small beta, uneven devices.

    All proportions are drawn again until every device has at least `least` samples.
    """
    refuse_too_few_samples(labels, devices, least)
    rows, counts = [], []
    for held in group_by_class(labels):
        rows.append(generator.permutation(held))
        counts.append(draw_portions(len(held), devices, beta, generator))
    for _ in range(TRIES):
        if least == 0 or np.sum(counts, axis=0).min() >= least:
            return hand_out_samples(rows, counts)
        counts = [draw_portions(len(held), devices, beta, generator) for held in rows]
    raise too_many_draws_error(f"dirichlet:{beta:g}", devices, least)


def split_dirichlet_capped(
    labels: np.ndarray, devices: int, generator: np.random.Generator, beta: float, least: int = 0
) -> StoredPopulation:
    """As `dirichlet`, but a device that has an even share of all samples gets none of the classes that follow.

    So do the codes of NIID-Bench and PFLlib: sizes are less uneven, and fewer classes meet on a device. All
    proportions are drawn again until every device has at least `least` samples.
    """
    refuse_too_few_samples(labels, devices, least)
    rows = [generator.permutation(held) for held in group_by_class(labels)]
    for _ in range(TRIES):
        sizes, counts = np.zeros(devices, dtype=np.int64), []
        for held in rows:
            is_open = sizes * devices < len(labels)
            shares = generator.dirichlet(np.full(devices, beta)) * is_open
            shares = shares if shares.sum() > 0 else is_open.astype(float)
            ends = np.floor(np.cumsum(shares / shares.sum())[:-1] * len(held) + 1e-9).astype(np.int64)
            counts.append(np.diff(ends, prepend=0, append=len(held)))
            sizes = sizes + counts[-1]
        if sizes.min() >= least:
            return hand_out_samples(rows, counts)
    raise too_many_draws_error(f"dirichlet-capped:{beta:g}", devices, least)


def split_shards(labels: np.ndarray, devices: int, generator: np.random.Generator, each: int) -> StoredPopulation:
    """Samples are sorted by label and cut into equal shards, of which each device gets a number."""
    if each * devices > len(labels):
        raise ShoalError(
            "bad-value",
            f"{each} shards for each of {devices} devices cannot be cut from {len(labels)} samples.",
            "Give fewer shards or fewer devices.",
        )
    rows = np.concatenate([generator.permutation(held) for held in group_by_class(labels)])
    owner = np.empty(len(rows), dtype=np.int64)
    shard = np.arange(len(rows)) * (each * devices) // len(rows)
    owner[rows] = generator.permutation(np.repeat(np.arange(devices), each))[shard]
    return group_by_owner(owner, devices)


def split_dominant(labels: np.ndarray, devices: int, generator: np.random.Generator, level: float) -> StoredPopulation:
    """A share of level x 10 % of a device's samples are of one class, the others even over the other classes.

    That share is never below an even one, so level 0 is even. Devices of a rarer class hold fewer samples, so that
    the shares hold while all samples have a place; only a class too rare for that dominates its devices less.
    """
    rows = group_by_class(labels)
    sizes = np.array([len(held) for held in rows])
    top = max(level / 10, 1 / len(rows))
    other = (1 - top) / max(len(rows) - 1, 1)
    own = assign_classes(devices, len(rows), 1, generator)
    weights = np.where(own, top, other)
    if top > other + 1e-9:
        if devices < len(rows):
            raise ShoalError(
                "bad-value",
                f"Each of {len(rows)} classes must dominate a device, and there are {devices} devices.",
                f"Give {len(rows)} devices or more.",
            )
        # Of x[c] samples on the devices of class c, top * x[c] + other * (n - x[c]) = sizes[c] are of that class.
        each = (sizes - other * len(labels)) / (top - other) / own.sum(0)
        mean = len(labels) / devices
        weights = weights * np.clip(each, mean / 2, mean * 2)[own.argmax(1)][:, None]
    return deal_out_classes(rows, weights, generator)


def split_missing(labels: np.ndarray, devices: int, generator: np.random.Generator, level: float) -> StoredPopulation:
    """A share of level x 10 % of the classes is missing on each device, the others are even; one is always there."""
    classes = len(group_by_class(labels))
    return split_labels(labels, devices, generator, max(1, classes - int(level * classes / 10 + 0.5)))


def split_labels(labels: np.ndarray, devices: int, generator: np.random.Generator, seen: int) -> StoredPopulation:
    """Each device sees this many of the classes; each class is even over the devices that see it."""
    rows = group_by_class(labels)
    refuse_class_counts(len(rows), devices, seen)
    return deal_out_classes(rows, assign_classes(devices, len(rows), seen, generator).astype(float), generator)


def split_pathological(labels: np.ndarray, devices: int, generator: np.random.Generator, seen: int) -> StoredPopulation:
    """Each device sees this many of the classes, and devices that follow each other the same ones, in uneven parts.

    So does the code of PFLlib: each class goes to the first devices that have room for it, all but the last of which
    get between a tenth and the whole of an even part. Where the numbers do not divide, a device may see fewer classes.
    """
    rows = group_by_class(labels)
    refuse_class_counts(len(rows), devices, seen)
    room, counts = np.full(devices, seen), []
    takers = np.diff(np.arange(len(rows) + 1) * (devices * seen) // len(rows))
    for held, number in zip(rows, takers):
        chosen = np.flatnonzero(room > 0)[:number]
        even, count = len(held) / len(chosen), np.zeros(devices, dtype=np.int64)
        count[chosen[:-1]] = np.floor(generator.uniform(even / 10, even, len(chosen) - 1))
        count[chosen[-1]] = len(held) - count.sum()
        room[chosen] -= 1
        counts.append(count)
    return hand_out_samples([generator.permutation(held) for held in rows], counts)


def split_quantity(
    labels: np.ndarray, devices: int, generator: np.random.Generator, beta: float, least: int = 0
) -> StoredPopulation:
    """Samples are dealt out at random, sizes in proportions drawn from Dirichlet(beta); small beta, uneven sizes.

    Sizes are drawn again until every device has at least `least` samples.
    """
    refuse_too_few_samples(labels, devices, least)
    order = generator.permutation(len(labels))
    for _ in range(TRIES):
        sizes = draw_portions(len(labels), devices, beta, generator)
        if sizes.min() >= least:
            return StoredPopulation(order, np.cumsum(sizes))
    raise too_many_draws_error(f"quantity:{beta:g}", devices, least)


def split_by_time(order: np.ndarray | None, devices: int, generator: np.random.Generator) -> StoredPopulation:
    """Samples are cut into even periods in the order of their times; the first device holds the oldest."""
    if order is None:
        problem = "This data does not say when samples were taken."
        raise ShoalError("bad-value", problem, "Name the column of a table with order = COLUMN, or use another split.")
    sizes = len(order) // devices + (np.arange(devices) < len(order) % devices)
    return StoredPopulation(np.argsort(order, kind="stable"), np.cumsum(sizes))


def split_domains(owners: np.ndarray | None, devices: int, generator: np.random.Generator) -> StoredPopulation:
    """Each device holds samples of one owner, which several devices share evenly; larger owners have more devices."""
    if owners is None:
        return split_by_owner(owners, devices, generator)
    rows = group_by_class(owners)
    if devices < len(rows):
        problem = f"The data has {len(rows)} domains for {devices} devices."
        raise ShoalError("bad-value", problem, f"Give {len(rows)} devices or more.")
    shares = np.ones(len(rows), dtype=np.int64)
    for _ in range(devices - len(rows)):  # the next device goes where a device has most samples
        shares[np.argmax([len(held) / count for held, count in zip(rows, shares)])] += 1
    owner = np.empty(len(owners), dtype=np.int64)
    for held, first, count in zip(rows, np.cumsum(shares) - shares, shares):
        owner[generator.permutation(held)] = first + np.arange(len(held)) % count
    return group_by_owner(owner, devices)


def split_by_owner(owners: np.ndarray | None, devices: int, generator: np.random.Generator) -> StoredPopulation:
    """Each sample is on the device that the data names as its owner."""
    if owners is None:
        problem = "This data does not say whose samples are whose."
        raise ShoalError("bad-value", problem, "Name the column of a table with owner = COLUMN, or use another split.")
    if int(owners.max()) >= devices:
        count = int(owners.max()) + 1
        raise ShoalError(
            "bad-value",
            f"The data has {count} owners for {devices} devices.",
            f"Give {count} devices, or 0 to find their number.",
        )
    return group_by_owner(owners, devices)


def split_to_degree(
    labels: np.ndarray, devices: int, generator: np.random.Generator, target: float
) -> StoredPopulation:
    """A Dirichlet split whose mean non-IID degree is the one given, within 0.01."""
    rows = [generator.permutation(held) for held in group_by_class(labels)]

    def draw_counts(beta: float, generator: np.random.Generator) -> np.ndarray:
        return np.stack([draw_portions(len(held), devices, beta, generator) for held in rows], axis=1)

    return hand_out_samples(rows, list(search_degree(target, draw_counts, generator).T))


# what the kinds share -------------------------------------------------------------------------------------------------
def refuse_class_counts(classes: int, devices: int, seen: int) -> None:
    """Refuse devices that are to see more classes than there are, or that cannot hold all of them together."""
    if seen > classes:
        problem = f"A device cannot see {seen} classes: the data has {classes}."
        raise ShoalError("bad-value", problem, f"Give {classes} or fewer.")
    if seen * devices < classes:
        problem = f"{devices} devices with {seen} classes each cannot hold all {classes} classes."
        raise ShoalError("bad-value", problem, "Give more devices, or more classes to each.")


def refuse_too_few_samples(labels: np.ndarray, devices: int, least: int) -> None:
    if least * devices > len(labels):
        raise ShoalError(
            "bad-value",
            f"{devices} devices cannot have {least} samples each: there are {len(labels)} samples.",
            "Give a smaller MIN or fewer devices.",
        )


def too_many_draws_error(text: str, devices: int, least: int) -> ShoalError:
    problem = f"In {TRIES} draws of {text} not every one of {devices} devices had {least} samples."
    return ShoalError("bad-value", problem, "Give a smaller MIN, a larger BETA or fewer devices.")


def draw_portions(total: int, devices: int, beta: float, generator: np.random.Generator) -> np.ndarray:
    """How many of `total` samples each device has, in proportions drawn from Dirichlet(beta)."""
    shares = generator.dirichlet(np.full(devices, beta))
    ends = np.floor(np.cumsum(shares)[:-1] * total + 0.5).astype(np.int64)
    return np.diff(ends, prepend=0, append=total)


def assign_classes(devices: int, classes: int, each: int, generator: np.random.Generator) -> np.ndarray:
    """Which classes each device has (devices x classes): `each` per device, the least given first, ties random."""
    seen = np.zeros((devices, classes), dtype=bool)
    count = np.zeros(classes)
    for row, ties in zip(seen, generator.random((devices, classes))):
        row[np.argsort(count + ties)[:each]] = True
        count += row
    return seen


def deal_out_classes(rows: list[np.ndarray], weights: np.ndarray, generator: np.random.Generator) -> StoredPopulation:
    """Each class over the devices in proportion to its column; odd samples go to the devices owed most so far."""
    owed = generator.random(len(weights)) * 1e-6
    counts = []
    for held, column in zip(rows, weights.T):
        quota = column / column.sum() * len(held)
        count = np.floor(quota + 1e-9).astype(np.int64)
        owed = owed + quota - count
        odd = np.argsort(np.where(column > 0, -owed, np.inf))[: len(held) - count.sum()]
        count[odd] += 1
        owed[odd] -= 1
        counts.append(count)
    return hand_out_samples([generator.permutation(held) for held in rows], counts)


def hand_out_samples(rows: list[np.ndarray], counts: list[np.ndarray]) -> StoredPopulation:
    """The first samples of each class to the first device, and so on: counts[class][device] of them."""
    owner = np.empty(sum(map(len, rows)), dtype=np.int64)
    for held, count in zip(rows, counts):
        owner[held] = np.repeat(np.arange(len(count)), count)
    return group_by_owner(owner, len(counts[0]))


def group_by_owner(owner: np.ndarray, devices: int) -> StoredPopulation:
    """The population in which sample i is on device `owner[i]`."""
    return StoredPopulation(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=devices)))

"""Data that come with their devices: LEAF json files (S. Caldas and others, 2018, arXiv:1812.01097) and Shakespeare."""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.download import find_data_file, read_bytes
from shoal.data.word_corpora import cut_sequences
from shoal.storage.files import damaged_file_error
from shoal.storage.strict_json import parse_json

LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF's Shakespeare, in its order."""

WORDS = 10_000
"""The most words that a vocabulary made from LEAF files has."""

CLASSES = 1_000_000


class LeafSamples(NamedTuple):
    """The samples of the training or the test set, and the name of the user of each."""

    x: list[Any]
    y: list[Any]
    users: list[str]


def read_leaf(folder: Path, name: str = "leaf") -> Dataset:
    """All json files in `train` and `test`; each user is a device.

    Samples are lists of numbers with a label (784 of them become an image of 28 x 28), strings with the character that
    follows (the targets are the next character at each position, LEAF's own the last of them), or lists of words with
    lists of the words that follow, also nested as LEAF's Reddit has them.
    """
    halves = []
    for half in ("train", "test"):
        paths = sorted((folder / half).glob("*.json"))
        if not paths:
            raise ShoalError(
                "no-data",
                f"There are no json files in {folder / half}.",
                "Make them with LEAF (https://github.com/TalwalkarLab/leaf) and put them there.",
            )
        halves.append(merge_leaf_samples([decode_leaf_json(read_bytes(path), path) for path in paths]))
    return assemble_leaf(halves[0], halves[1], folder, name)


def merge_leaf_samples(halves: list[LeafSamples]) -> LeafSamples:
    """The samples of several files as one list."""
    return LeafSamples(*(sum(lists, []) for lists in zip(*halves, strict=True)))


def decode_leaf_json(content: bytes, path: Path) -> LeafSamples:
    """The samples of one file, user by user."""
    try:
        table = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise damaged_file_error(path, error) from error
    users, sizes, data = (table.get(key) if isinstance(table, dict) else None for key in KEYS)
    if not isinstance(users, list) or not isinstance(sizes, list) or not isinstance(data, dict):
        raise damaged_file_error(path, f"it has not got {', '.join(KEYS)}")
    if len(users) != len(sizes) or not all(isinstance(user, str) and user in data for user in users):
        raise damaged_file_error(path, "its users, their sizes and their data do not fit each other")
    twice = [user for user, times in Counter(users).items() if times > 1]
    if twice:
        raise damaged_file_error(path, f"user {twice[0][:40]!r} is there twice")
    if len(data) > len(users):
        lost = next(user for user in data if user not in set(users))
        raise damaged_file_error(path, f"user {lost[:40]!r} has data and is not among the users")
    half = LeafSamples([], [], [])
    for user, size in zip(users, sizes, strict=True):
        own = data[user]
        x, y = (own.get(key) if isinstance(own, dict) else None for key in ("x", "y"))
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or size != len(x):
            raise damaged_file_error(
                path, f"user {user[:40]!r} has not got {str(size)[:20]} samples with a target each"
            )
        for one, target in zip(x, y, strict=True):
            for row, goal in flatten_leaf_sample(one, target, path):
                half.x.append(row)
                half.y.append(goal)
                half.users.append(user)
    return half


KEYS = ("users", "num_samples", "user_data")


def flatten_leaf_sample(x: Any, y: Any, path: Path) -> list[tuple[Any, Any]]:
    """A sample of LEAF's Reddit is a list of sequences, its targets are in a table; others are what they are."""
    if not isinstance(y, dict):
        return [(x, y)]
    y = y.get("target_tokens")
    if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
        raise damaged_file_error(path, "a list of sequences does not fit its target_tokens")
    return list(zip(x, y, strict=True))


def assemble_leaf(train: LeafSamples, test: LeafSamples, path: Path, name: str) -> Dataset:
    """Training and test samples as a data set, by the kind of their first sample."""
    if not train.x or not test.x:
        raise damaged_file_error(path, "one half has no samples")
    first = train.x[0]
    if isinstance(first, str):
        arrays = encode_text(train, test, path)
    elif isinstance(first, list) and first and isinstance(first[0], str):
        arrays = encode_word_lists(train, test, path)
    else:
        arrays = convert_numbers(train, test, path)
    order = {user: i for i, user in enumerate(dict.fromkeys(train.users))}
    owners, test_owners = (np.array([order.get(user, -1) for user in half.users]) for half in (train, test))
    return Dataset(name, *arrays[:-1], classes=arrays[-1], owners=owners, test_owners=test_owners)


EncodedHalves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def encode_text(train: LeafSamples, test: LeafSamples, path: Path) -> EncodedHalves:
    """Strings of one length, and the character after each."""
    length = len(train.x[0])
    for half in (train, test):
        for x, y in zip(half.x, half.y, strict=True):
            if not isinstance(x, str) or not isinstance(y, str) or len(x) != length or not x or not y:
                raise damaged_file_error(
                    path, f"not every sample is a text of {length} characters and the one after them"
                )
    used = set().union(*(set(x) | {y[0]} for half in (train, test) for x, y in zip(half.x, half.y, strict=True)))
    letters = {c: i for i, c in enumerate(LETTERS if used <= set(LETTERS) else sorted(used))}
    halves: list[torch.Tensor] = []
    for half in (train, test):
        rows = [[letters[c] for c in x + y[0]] for x, y in zip(half.x, half.y, strict=True)]
        whole = torch.tensor(rows)
        halves += [whole[:, :-1].contiguous(), whole[:, 1:].contiguous()]
    return halves[0], halves[1], halves[2], halves[3], len(letters)


def encode_word_lists(train: LeafSamples, test: LeafSamples, path: Path) -> EncodedHalves:
    """Lists of words of one length, and the word after each; the vocabulary is the most frequent of the training."""
    length = len(train.x[0])
    for row in (row for half in (train, test) for rows in (half.x, half.y) for row in rows):
        if not isinstance(row, list) or len(row) != length or not all(isinstance(word, str) for word in row):
            raise damaged_file_error(path, f"not every sample is {length} words and the {length} after them")
    counts = Counter(word for rows in (train.x, train.y) for row in rows for word in row)
    counts["<UNK>"] = 2**62
    kept = sorted(counts, key=lambda word: (-counts[word], word))[:WORDS]
    order = {word: i for i, word in enumerate(kept)}
    x, y, test_x, test_y = (
        torch.tensor([[order.get(word, order["<UNK>"]) for word in row] for row in rows])
        for half in (train, test)
        for rows in (half.x, half.y)
    )
    return x, y, test_x, test_y, len(kept)


def convert_numbers(train: LeafSamples, test: LeafSamples, path: Path) -> EncodedHalves:
    """Measurements with a label each, or word numbers with the numbers that follow."""
    arrays: list[np.ndarray] = []
    for rows in (train.x, train.y, test.x, test.y):
        try:
            array = np.asarray(rows)
        except (ValueError, TypeError, OverflowError) as error:
            raise damaged_file_error(path, error) from error
        if array.dtype.kind not in "if" or not array.size or not np.isfinite(array).all():
            raise damaged_file_error(path, "not every sample has the same number of numbers")
        arrays.append(array)
    x, y, test_x, test_y = arrays
    if x.shape[1:] != test_x.shape[1:] or y.shape[1:] != test_y.shape[1:] or x.ndim < 2:
        raise damaged_file_error(path, "the samples of both halves differ in size")
    marks = [y, test_y]
    if y.ndim > 1:
        if y.shape != x.shape or test_y.shape != test_x.shape or x.ndim != 2:
            raise damaged_file_error(path, "sequences and their targets differ in length")
        marks = [x, y, test_x, test_y]
    if any(a.dtype.kind != "i" or a.min() < 0 or a.max() >= CLASSES for a in marks):
        raise damaged_file_error(path, f"not every label is a whole number from 0 to {CLASSES - 1}")
    if y.ndim == 1:
        if max(abs(x).max(), abs(test_x).max()) > np.finfo(np.float32).max:
            raise damaged_file_error(path, "it holds numbers that are too large")
        shape = (-1, 1, 28, 28) if x.shape[1:] == (784,) else (-1, *x.shape[1:])
        x, test_x = (a.astype(np.float32).reshape(shape) for a in (x, test_x))
    halves = [torch.from_numpy(a) for a in (x, y, test_x, test_y)]
    return halves[0], halves[1], halves[2], halves[3], int(max(a.max() for a in marks)) + 1


def read_shakespeare(folder: Path, length: int = 80) -> Dataset:
    """The plays by speaking role: each role with enough to say is a device."""
    path = find_data_file(folder, ["tinyshakespeare.txt", "input.txt"])
    return split_by_role(read_bytes(path), path, length)


def split_by_role(content: bytes, path: Path, length: int = 80) -> Dataset:
    """What each role says, cut into `length` characters, and for each character the one that follows it.

    The first nine tenths of a role are for training, the last for testing, to the nearest sequence. A role that says
    no more than `length` characters is left out.
    """
    try:
        play = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged_file_error(path, error) from error
    lines: dict[str, list[str]] = {}
    role = ""
    for block in play.replace("\r\n", "\n").split("\n\n"):
        head, _, speech = block.strip("\n").partition("\n")
        if head.endswith(":") and len(head) <= 60:
            role, block = head[:-1], speech
        if role and block:
            lines.setdefault(role, []).append(block + "\n")
    letters = {c: i for i, c in enumerate(sorted(set(play)))}
    train: list[torch.Tensor] = []
    test: list[torch.Tensor] = []
    owners: list[int] = []
    test_owners: list[int] = []
    devices = 0
    for speeches in lines.values():
        said = np.array([letters[c] for c in "".join(speeches)], np.int64)
        if len(said) <= length:
            continue
        both = torch.stack(cut_sequences(said, length, path))
        last = (both.shape[1] + 5) // 10
        train.append(both[:, : both.shape[1] - last])
        test.append(both[:, both.shape[1] - last :])
        owners += [devices] * train[-1].shape[1]
        test_owners += [devices] * test[-1].shape[1]
        devices += 1
    if not any(part.shape[1] for part in test):
        raise damaged_file_error(path, f"it has no roles that say enough for sequences of {length} characters")
    (x, y), (test_x, test_y) = torch.cat(train, 1), torch.cat(test, 1)
    halves = x, y, test_x, test_y
    return Dataset("shakespeare", *halves, len(letters), np.array(owners), test_owners=np.array(test_owners))

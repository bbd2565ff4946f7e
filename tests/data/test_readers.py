"""Readers of official files: the data or one sentence about what is wrong; never a crash, a hang or foreign code."""

import gzip
import io
import json
import os
import pickle
import random
import struct
import sys
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.data import cache, cifar, csv_table, download, leaf, mnist, sources, svhn, tiny_imagenet, word_corpora
from shoal.data.dataset import Dataset
from shoal.data.download import SourceFile
from shoal.data.table import ColumnRoles
from shoal.data.table_dataset import build_table_dataset

scipy_io = pytest.importorskip("scipy.io", reason="scipy writes the MATLAB files of these tests")
Image = pytest.importorskip("PIL.Image", reason="images are read with Pillow")

MUTANTS = 10_000
"""Mutated files per reader."""

HERE = Path("somewhere")


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    """No test looks into the user's own data folder."""
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))


class Refused:
    """One error of one kind."""

    def __init__(self, kind: str):
        self.kind = kind

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert isinstance(error, ShoalError), f"{error!r} instead of a {self.kind} error"
        assert error.kind.name == self.kind, error
        return True


# Small files in the official formats


def idx_file(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def grey(count: int, side: int = 3) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, side, side), np.uint8)


def mnist_folder(folder: Path, pack: Callable[[bytes], bytes] = bytes, end: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for half, count in (("train", 7), ("t10k", 4)):
        labels = np.arange(count, dtype=np.uint8)
        (folder / f"{half}-images-idx3-ubyte{end}").write_bytes(pack(idx_file(grey(count))))
        (folder / f"{half}-labels-idx1-ubyte{end}").write_bytes(pack(idx_file(labels)))
    return folder


def colours(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 256, (count, 3072), np.uint8)


def batch(count: int, key: bytes = b"labels", protocol: int = 2) -> bytes:
    table = {b"batch_label": b"one", key: list(range(count)), b"data": colours(count), b"filenames": [b"a.png"] * count}
    return pickle.dumps(table, protocol)


def old_batch(count: int) -> bytes:
    """As Python 2 wrote it: byte strings without encoding, numpy's old name."""
    data = colours(count).tobytes()
    return b"".join(
        (
            b"\x80\x02}q\x01(U\x06labelsq\x02]q\x03(" + bytes(b for i in range(count) for b in (0x4B, i)) + b"e",
            b"U\x04datacnumpy.core.multiarray\n_reconstruct\nq\x04cnumpy\nndarray\nq\x05K\x00\x85U\x01b\x87Rq\x06(K\x01",
            b"K" + bytes([count]) + b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN",
            b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tbI00\nT" + struct.pack("<i", len(data)) + data + b"tbu.",
        )
    )


CIFAR10 = {f"data_batch_{i}": 2 for i in range(1, 6)} | {"test_batch": 3}


def tar_of(files: dict[str, bytes], mode: Any = "w:gz") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def mat_file(count: int, compress: bool = True, **others: Any) -> bytes:
    out = io.BytesIO()
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, count), np.uint8)
    y = (np.arange(count, dtype=np.uint8) % 10 + 1)[:, None]
    scipy_io.savemat(out, {"X": x, "y": y} | others, do_compression=compress)
    return out.getvalue()


def jpeg(side: int = 64, colour: int = 100, kind: str = "JPEG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (side, side), (colour, 50, 200)).save(out, kind)
    return out.getvalue()


def tiny_files() -> dict[str, bytes]:
    files = {"wnids.txt": b"n02\nn01\n", "val/val_annotations.txt": b"val_0.JPEG\tn01\t0\t0\t63\t63\n"}
    files |= {f"train/{word}/images/{word}_{i}.JPEG": jpeg(colour=40 * i) for word in ("n01", "n02") for i in (0, 1)}
    return files | {"val/images/val_0.JPEG": jpeg()}


def put(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


TEXT = b"the cat sat on the mat\n\n the dog <unk> on the Cat\n" * 4


def leaf_file(samples: dict[str, tuple[list, list]]) -> bytes:
    data = {user: {"x": x, "y": y} for user, (x, y) in samples.items()}
    return json.dumps(
        {"users": list(samples), "num_samples": [len(x) for x, _ in samples.values()], "user_data": data}
    ).encode()


PLAY = "First Lord:\n" + "Speak, speak! " * 30 + "\n\nALL:\nAy.\n\nFool:\n" + "Nuncle, hear me now.\n" * 20


# What they hold


@pytest.mark.parametrize("pack, end", [(bytes, ""), (gzip.compress, ".gz"), (gzip.compress, "")])
def test_idx(tmp_path, pack, end):
    data = mnist.read_mnist(mnist_folder(tmp_path, pack, end))
    assert data.inputs.shape == (7, 1, 3, 3) and data.test_inputs.shape == (4, 1, 3, 3)
    assert data.inputs.dtype == torch.uint8 and data.targets.dtype == torch.int64
    assert np.array_equal(data.inputs[:, 0].numpy(), grey(7)) and data.targets.tolist() == list(range(7))


def test_idx_cut_short_at_every_byte():
    whole = idx_file(grey(2))
    for content in (whole, gzip.compress(whole)):
        for end in range(len(content)):
            with Refused("damaged"):
                mnist.decode_idx(content[:end], HERE, 3)


@pytest.mark.parametrize(
    "content, what",
    [
        (b"\0\0\x09\x03" + idx_file(grey(2))[4:], "magic number"),
        (idx_file(np.zeros(3, np.uint8)), "magic number|cut short"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "announced"),
        (idx_file(grey(2)) + b"\0", "announced"),
        (gzip.compress(idx_file(grey(2)), mtime=0)[:-4], "cut short"),
    ],
)
def test_idx_that_is_wrong(content, what):
    with pytest.raises(ShoalError, match=what) as caught:
        mnist.decode_idx(content, HERE, 3)
    assert caught.value.kind.name == "damaged" and "somewhere" in str(caught.value)


def test_labels_that_do_not_fit(tmp_path):
    mnist_folder(tmp_path)
    for labels in (np.full(7, 10, np.uint8), np.zeros(6, np.uint8)):
        (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_file(labels))
        with Refused("damaged"):
            mnist.read_mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte").write_bytes(idx_file(grey(7, 4)))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_file(np.zeros(7, np.uint8)))
    with pytest.raises(ShoalError, match="differ in size"):
        mnist.read_mnist(tmp_path)


def test_a_gzip_bomb_is_not_unpacked(monkeypatch):
    with pytest.raises(ShoalError, match="more than 1000 bytes"):
        mnist.gunzip_limited(gzip.compress(bytes(100_000)), HERE, 1000)


@pytest.mark.parametrize("packed", [False, True])
def test_cifar10(tmp_path, packed):
    files = {f"cifar-10-batches-py/{name}": old_batch(count) for name, count in CIFAR10.items()}
    put(tmp_path, {"cifar-10-python.tar.gz": tar_of(files)} if packed else files)
    data = cifar.read_cifar10(tmp_path)
    assert data.inputs.shape == (10, 3, 32, 32) and data.inputs.dtype == torch.uint8
    assert data.targets.tolist() == [0, 1] * 5 and data.test_targets.tolist() == [0, 1, 2]
    assert np.array_equal(data.inputs[:2].flatten(1).numpy(), colours(2))


@pytest.mark.parametrize("protocol", range(6))
def test_cifar100_by_any_protocol(tmp_path, protocol):
    files = {"train": batch(5, b"fine_labels", protocol), "test": batch(2, b"fine_labels", protocol)}
    data = cifar.read_cifar100(put(tmp_path / "cifar-100-python", files).parent)
    assert data.classes == 100 and data.targets.tolist() == list(range(5))
    assert np.array_equal(data.inputs.flatten(1).numpy(), colours(5))


@pytest.mark.parametrize("order", "CF")
def test_batches_with_names_as_text_and_labels_as_an_array(order):
    table = {"data": np.asarray(colours(3), order=order), "labels": np.arange(3)}
    x, y = cifar.decode_cifar_batch(pickle.dumps(table), HERE, "labels", 10)
    assert np.array_equal(x.reshape(3, -1), colours(3)) and y.tolist() == [0, 1, 2]


def test_a_batch_cut_short_at_every_point():
    content = old_batch(1)
    for end in [*range(120), *range(len(content) - 20, len(content))]:
        with Refused("damaged"):
            cifar.decode_cifar_batch(content[:end], HERE, "labels", 10)


@pytest.mark.parametrize(
    "table",
    [
        [],
        {},
        {"data": 1, "labels": [1]},
        {"data": colours(2), "labels": [0]},
        {"data": colours(2), "labels": [0, 10]},
        {"data": colours(2), "labels": [0, -1]},
        {"data": colours(2), "labels": [0, 1.0]},
        {"data": colours(2), "labels": [0, True]},
        {"data": colours(2)[:, 1:], "labels": [0, 1]},
        {"data": colours(2).astype(np.int16), "labels": [0, 1]},
        {"data": colours(0), "labels": []},
        {"data": colours(2), "labels": np.array([0, object()])},
        {"data": np.array([{}, {}]), "labels": [0, 1]},
    ],
)
def test_batches_that_are_wrong(table):
    with Refused("damaged"):
        cifar.decode_cifar_batch(pickle.dumps(table), HERE, "labels", 10)


class Call:
    """Pickles as a call of a function."""

    def __init__(self, *what: Any):
        self.what = what

    def __reduce__(self):
        return self.what[0], self.what[1:]


RAN: list[str] = []


def trap(*_: Any) -> Any:
    RAN.append("code ran")
    return {}


DEEP = b")" + b"q\x00h\x00\x86" * 60
"""A tuple of itself, twice, and so on: cheap to write, and it takes for ever to hash."""

HOSTILE = {
    "os.system": pickle.dumps(Call(os.system, "touch owned")),
    "nested": pickle.dumps({"data": [Call(os.system, "touch owned")], "labels": [0]}),
    "a function of this file": pickle.dumps(Call(trap)),
    "eval": b'cbuiltins\neval\n(S\'__import__("os").system("touch owned")\'\ntR.',
    "python 2's name for it": b"c__builtin__\neval\n(S'1'\ntR.",
    "by two names": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x0btouch owned\x85R.",
    "inst": b"(S'touch owned'\nios\nsystem\n.",
    "obj": b"(cos\nsystem\nS'touch owned'\no.",
    "a dotted name": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93.",
    "numpy's loader": pickle.dumps(Call(np.load, "x.npy")),
    "numpy's function compiler": b"cnumpy.testing._private.utils\nruncode\n.",
    "a persistent id": b"\x80\x02X\x01\x00\x00\x00aQ.",
    "an extension": b"\x80\x02\x82\x01.",
    "build on a name": b"cnumpy\ndtype\n}S'make'\nS'x'\nsb.",
    "slots of a name": b"cnumpy\ndtype\nN}S'make'\nS'x'\ns\x86b.",
    "new object": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "a huge array": b"\x80\x02cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85\x85R.",
    "huge bytes": b"\x80\x05\x8e" + struct.pack("<Q", 2**40) + b"abc.",
    "a huge bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"abc.",
    "a huge memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a huge frame": b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"}.",
    "a huge number": b"\x80\x02\x8b\xff\xff\xff\x7f1.",
    "many digits": b"I" + b"9" * 100_000 + b"\n.",
    "a key that is never hashed": b"\x80\x02}" + DEEP + b"K\x01s.",
    "a set of them": b"\x80\x04\x8f(" + DEEP + b"\x90.",
    "bytes from one text again and again": pickle.dumps(["a" * 4000, [Call(trap)]])[:-10]
    + b"c_codecs\nencode\nh\x00h\x00\x86R" * 99,
    "a shape that is too large": pickle.dumps({"data": colours(1), "labels": [0]}).replace(
        b"M\x00\x0c", b"J\xff\xff\xff\x7f"
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_runs_nothing(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracemalloc.start()
    try:
        with Refused("damaged"):
            cifar.decode_cifar_batch(HOSTILE[name], HERE, "labels", 10)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
    assert not list(tmp_path.iterdir()) and not RAN


def test_archives_with_tricks(tmp_path):
    good = {f"cifar-10-batches-py/{name}": old_batch(count) for name, count in CIFAR10.items()}
    place = tmp_path / "in" / "cifar-10-python.tar.gz"
    place.parent.mkdir()
    place.write_bytes(tar_of({"../../owned": b"x", "/owned": b"x", "cifar-10-batches-py/../../owned": b"x"} | good))
    assert len(cifar.read_cifar10(place.parent).inputs) == 10
    assert [path.name for path in tmp_path.rglob("*")] == ["in", place.name]

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        link = tarfile.TarInfo("cifar-10-batches-py/data_batch_1")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    for content in (out.getvalue(), tar_of({}), b"", b"no archive", tar_of(good)[:-3000], gzip.compress(b"abc")):
        place.write_bytes(content)
        with Refused("damaged"):
            cifar.read_cifar10(place.parent)


def test_an_archive_that_never_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "LIMIT", 100_000)
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(tar_of({"a": bytes(1_000_000)}))
    with pytest.raises(ShoalError, match="more than 100000 bytes"):
        cifar.read_cifar10(tmp_path)


def test_svhn(tmp_path):
    data = svhn.read_svhn(put(tmp_path, {"train_32x32.mat": mat_file(12), "test_32x32.mat": mat_file(3, False)}))
    assert data.inputs.shape == (12, 3, 32, 32) and data.inputs.dtype == torch.uint8
    assert data.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2]
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 12), np.uint8)
    assert data.inputs[5, 2, 7, 9] == x[7, 9, 2, 5]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"MATLAB 5.0 MAT-file",
        mat_file(2)[:-9],
        mat_file(2, X=np.zeros((32, 32, 3, 3), np.uint8)),
        mat_file(2, X=np.full((32, 32, 3, 2), 0.5)),
        mat_file(2, X=np.zeros((32, 32), np.uint8)),
        mat_file(2, X=np.array([["a"], [{}]], object)),
        mat_file(2, y=np.array([[1], [11]])),
        mat_file(2, y=np.array([[1.0], [2.5]])),
        mat_file(2, y=np.array([[1, 2]])),
        mat_file(2, y=[["a"], ["b"]]),
    ],
)
def test_svhn_that_is_wrong(content):
    with Refused("damaged"):
        svhn.decode_svhn(content, HERE)


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet(tmp_path, packed):
    files = {f"tiny-imagenet-200/{name}": content for name, content in tiny_files().items()}
    put(tmp_path, {"tiny-imagenet-200.zip": zip_of(files | {"../owned": b"x"})} if packed else files)
    data = tiny_imagenet.read_tiny_imagenet(tmp_path)
    assert data.inputs.shape == (4, 3, 64, 64) and data.test_inputs.shape == (1, 3, 64, 64)
    assert data.classes == 2 and data.targets.tolist() == [1, 1, 0, 0] and data.test_targets.tolist() == [1]
    small = tiny_imagenet.read_tiny_imagenet(tmp_path, side=32)
    mean = data.inputs.float().unflatten(-1, (32, 2)).mean(-1).unflatten(-2, (32, 2)).mean(-2)
    assert small.inputs.shape == (4, 3, 32, 32) and (small.inputs - mean).abs().max() <= 1


@pytest.mark.parametrize(
    "name, content",
    [
        ("wnids.txt", b"n01\n"),
        ("wnids.txt", b"\xff"),
        ("val/val_annotations.txt", b""),
        ("val/val_annotations.txt", b"val_0.JPEG\tn09\n"),
        ("val/val_annotations.txt", b"../images/val_0.JPEG\tn01\n"),
        ("val/val_annotations.txt", b"../../../../x.JPEG\tn01\n"),
        ("val/images/val_0.JPEG", jpeg()[:-300]),
        ("val/images/val_0.JPEG", jpeg(63)),
        ("val/images/val_0.JPEG", b""),
        ("val/images/val_0.JPEG", jpeg(kind="TIFF")),
    ],
)
def test_tiny_imagenet_that_is_wrong(name, content):
    files = tiny_files() | {name: content}
    with Refused("damaged"):
        tiny_imagenet.assemble_tiny_imagenet(list(files), files.__getitem__, HERE, "tiny", 64)


def test_images_without_pillow(monkeypatch):
    content = jpeg()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with Refused("missing-extra"):
        tiny_imagenet.decode_square_image(content, HERE, 64, 64)


def test_words(tmp_path):
    files = {"ptb.train.txt": TEXT, "ptb.valid.txt": TEXT, "ptb.test.txt": b"the zebra sat\n" * 20}
    data = word_corpora.read_ptb(put(tmp_path, files), length=5)
    vocabulary = sorted({*TEXT.decode().split(), "<eos>"})
    stream = [vocabulary.index(word) for word in word_corpora.split_tokens(TEXT, HERE)]
    assert data.classes == len(vocabulary) and data.inputs[0].tolist() == stream[:5]
    assert data.targets[0].tolist() == stream[1:6] and len(data.inputs) == (len(stream) - 1) // 5
    assert data.test_inputs[0, 1] == vocabulary.index("<unk>")


@pytest.mark.parametrize("how", ["plain", "official", "zip"])
def test_wikitext(tmp_path, how):
    halves = {"train": TEXT, "test": TEXT}
    if how == "zip":
        files = {"wikitext-2-v1.zip": zip_of({f"wikitext-2/wiki.{half}.tokens": t for half, t in halves.items()})}
    else:
        files = {f"{half}.txt" if how == "plain" else f"wiki.{half}.tokens": t for half, t in halves.items()}
    data = word_corpora.read_wikitext2(put(tmp_path, files), length=7)
    assert data.classes == len({*TEXT.decode().lower().split(), "<eos>"}) + 2 and data.inputs.min() >= 2
    assert word_corpora.read_wikitext2(tmp_path).inputs.shape[1] == 35


def test_texts_that_are_wrong():
    for content in (b"", b"too short\n", b"\xff\xfe" * 100):
        with Refused("damaged"):
            word_corpora.assemble_corpus("ptb", content, HERE, TEXT, HERE)
    with Refused("damaged"):
        word_corpora.assemble_corpus("ptb", TEXT, HERE, b"short", HERE)


def leaf_folder(folder: Path, train: bytes, test: bytes) -> Path:
    return put(folder, {"train/a.json": train, "test/a.json": test})


def test_leaf_images(tmp_path):
    pixels = [[i / 1000] * 784 for i in range(5)]
    train = leaf_file({"f1": (pixels[:3], [4, 0, 61]), "f0": (pixels[3:], [2, 2])})
    leaf_folder(tmp_path, train, leaf_file({"f1": (pixels[:1], [4])}))
    put(tmp_path, {"train/b.json": leaf_file({"f1": (pixels[:1], [1])})})
    data = leaf.read_leaf(tmp_path)
    assert data.inputs.shape == (6, 1, 28, 28) and data.inputs.dtype == torch.float32 and data.classes == 62
    assert data.owners is not None and data.owners.tolist() == [0, 0, 0, 1, 1, 0]
    assert data.test_owners is not None and data.test_owners.tolist() == [0]


def test_leaf_text(tmp_path):
    x, y = ["ab cd", "b cde"], ["e", "f"]
    data = leaf.read_leaf(leaf_folder(tmp_path, leaf_file({"r": (x, y)}), leaf_file({"r": (x, y)})))
    assert data.classes == 80 == len(leaf.LETTERS) and data.inputs.shape == data.targets.shape == (2, 5)
    assert "".join(leaf.LETTERS[i] for i in data.targets[0].tolist()) == "b cde"
    odd = leaf_file({"r": (["aé", "bb"], ["c", "d"])})
    assert leaf.read_leaf(leaf_folder(tmp_path / "odd", odd, odd)).classes == 5


def test_leaf_word_lists(tmp_path):
    flat = leaf_file({"u": ([["a", "b"], ["c", "a"]], [["b", "c"], ["a", "a"]])})
    data = leaf.read_leaf(leaf_folder(tmp_path, flat, leaf_file({"v": ([["z", "a"]], [["a", "b"]])})))
    assert data.classes == 4 and data.inputs.tolist() == [[1, 2], [3, 1]]  # <UNK>, then by number of uses
    assert data.test_inputs.tolist() == [[0, 1]]
    goals = {"target_tokens": [["b", "c"], ["a", "a"]], "count_tokens": [[1, 1], [1, 0]]}
    nested = leaf_file({"u": ([[["a", "b"], ["c", "a"]]], [goals])})
    again = leaf.read_leaf(leaf_folder(tmp_path / "nested", nested, nested))
    assert again.inputs.tolist() == [[1, 2], [3, 1]] and again.targets.tolist() == data.targets.tolist()
    ids = leaf_file({"u": ([[1, 2], [3, 4]], [[2, 3], [4, 9]])})
    data = leaf.read_leaf(leaf_folder(tmp_path / "ids", ids, ids))
    assert data.classes == 10 and data.inputs.dtype == torch.int64 and data.targets.shape == (2, 2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"users": ["a"], "num_samples": [1], "user_data": {}}',
        b'{"users": ["a"], "num_samples": [1], "user_data": {"a": []}}',
        b'{"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": [[1]], "y": [1]}}}',
        b'{"users": [], "num_samples": [], "user_data": {}}',
        b'{"users": ["a", "a"], "num_samples": [1, 1], "user_data": {"a": {"x": [[1]], "y": [1]}}}',
        b'{"users": ["a"], "num_samples": [1], "user_data": {"a": 0, "a": {"x": [[2]], "y": [0]}}}',
        b'{"users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [1], "y": [0]}}}',
        b'{"users": ["b"], "users": ["a"], "num_samples": [1], "user_data": {"a": {"x": [[1]], "y": [1]}}}',
        b'{"users": ["a"], "num_samples": [1], "user_data": {"b": 0, "a": {"x": [[1]], "y": [1]}}}',
        leaf_file({"a": ([[1.0], [1.0, 2.0]], [0, 1])}),
        leaf_file({"a": ([[1.0], [float("nan")]], [0, 1])}),
        leaf_file({"a": ([[1.0], [None]], [0, 1])}),
        leaf_file({"a": ([[1.0], [1e300]], [0, 1])}),
        leaf_file({"a": ([[1.0], [2.0]], [0, -1])}),
        leaf_file({"a": ([[1.0], [2.0]], [0, 0.5])}),
        leaf_file({"a": ([[1.0], [2.0]], [0, 10**30])}),
        leaf_file({"a": (["ab", "abc"], ["c", "d"])}),
        leaf_file({"a": (["ab", 1], ["c", "d"])}),
        leaf_file({"a": (["", ""], ["c", "d"])}),
        leaf_file({"a": ([["a"], ["b", "c"]], [["a"], ["b"]])}),
        leaf_file({"a": ([[1, 2]], [[1, 2, 3]])}),
        leaf_file({"a": ([1, 2], [1, 2])}),
    ],
)
def test_leaf_that_is_wrong(content, tmp_path):
    with Refused("damaged"):
        leaf.read_leaf(leaf_folder(tmp_path, content, content))


def test_shakespeare_by_role(tmp_path):
    data = leaf.read_shakespeare(put(tmp_path, {"input.txt": PLAY.encode()}), length=20)
    letters = sorted(set(PLAY))
    assert data.classes == len(letters) and data.owners is not None and set(data.owners) == {0, 1}
    assert "".join(letters[i] for i in data.inputs[0].tolist()) == "Speak, speak! Speak,"
    assert torch.equal(data.inputs[0, 1:], data.targets[0, :-1])
    sizes = np.bincount(data.owners)
    assert data.test_owners is not None and data.test_owners.tolist() == [0, 0, 1, 1]
    assert sizes.tolist() == [19, 18] and len(data.test_inputs) == 4  # 21 and 20 sequences, a tenth of each held back


def test_plays_that_are_wrong():
    for content in (b"", b"\xff", b"no roles at all", b"A:\nshort\n\nB:\nshorter"):
        with Refused("damaged"):
            leaf.split_by_role(content, HERE, 20)


# Mutations


def mutated(content: bytes, draw: random.Random) -> bytes:
    """One to four bytes or runs of bytes flipped, put in, taken out or cut off; some of it where heads are."""
    out = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(min(len(out), draw.choice((64, 10**9))) or 1)
        run = draw.choice((1, 1, 2, 4, 9))
        kind = draw.randrange(6)
        if kind == 0 and out:
            out[min(at, len(out) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            out[at : at + run] = draw.randbytes(run)
        elif kind == 2:
            out[at:at] = draw.randbytes(run)
        elif kind == 3:
            del out[at : at + run]
        elif kind == 4:
            out[at : at + run] = draw.choice((b"\xff", b"\x00", b"\x7f", b"9", b"-", b"\n")) * run
        elif draw.randrange(4) == 0:
            del out[at:]
    return bytes(out)


def survives(read: Callable[[bytes], object], seeds: list[bytes]) -> None:
    """Every mutated file gives the data or one ShoalError, and it happens that both do."""
    draw = random.Random(1)
    read_well = refused = 0
    for i in range(MUTANTS):
        content = mutated(seeds[i % len(seeds)], draw)
        try:
            read(content)
            read_well += 1
        except ShoalError as error:
            assert error.kind.name in ("damaged", "bad-value", "no-data", "disk"), error
            assert "\n" not in error.problem and len(error.problem) < 400
            refused += 1
    assert read_well and refused and read_well + refused == MUTANTS


def test_mutated_idx():
    labels = np.zeros(2, np.uint8)

    def read(content: bytes) -> None:
        mnist.pair_images_labels(mnist.decode_idx(content, HERE, 3), labels, HERE, HERE, 10)

    survives(read, [idx_file(grey(2)), gzip.compress(idx_file(grey(2)))])


def test_mutated_batches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(np, "load", trap)
    good = [old_batch(2), *(batch(2, protocol=protocol) for protocol in (0, 2, 4, 5))]
    for seeds in (good, [good[0], *HOSTILE.values()]):
        survives(lambda content: cifar.decode_cifar_batch(content, HERE, "labels", 10), seeds)
    assert not list(tmp_path.iterdir()) and not RAN


def test_mutated_archives(tmp_path):
    place = tmp_path / "cifar-100-python.tar.gz"
    files = {"cifar-100-python/train": b"a" * 700, "cifar-100-python/test": b"b" * 700}

    def read(content: bytes) -> None:
        place.write_bytes(content)
        cifar.read_tar_members(place, "cifar-100-python", ["train", "test"])

    survives(read, [tar_of(files), tar_of(files, "w")])
    assert list(tmp_path.iterdir()) == [place]


def test_mutated_mat():
    survives(lambda content: svhn.decode_svhn(content, HERE), [mat_file(1), mat_file(1, False)])


def test_mutated_tiny_imagenet():
    files = {"wnids.txt": b"n01\n", "val/val_annotations.txt": b"v.JPEG\tn01\t0\t0\t63\t63\n"}
    files |= {"train/n01/images/a.JPEG": jpeg(), "val/images/v.JPEG": jpeg()}
    names = list(files)
    seeds = [bytes([i]) + content for i, content in enumerate(files.values())]
    seeds += [bytes([3]) + jpeg(kind=kind) for kind in ("JPEG", "PNG", "WEBP")]

    def read(content: bytes) -> None:
        name = names[content[0] % 4] if content else names[0]
        changed = files | {name: content[1:]}
        tiny_imagenet.assemble_tiny_imagenet(names, lambda file: changed.get(file, b""), HERE, "tiny", 32)

    survives(read, seeds)


def test_mutated_texts():
    survives(lambda content: word_corpora.assemble_corpus("ptb", content, HERE, TEXT, HERE, 5), [TEXT])


def test_mutated_leaf():
    test = leaf.decode_leaf_json(leaf_file({"u": ([[0.5, 1.0]], [1])}), HERE)
    lists = leaf.decode_leaf_json(leaf_file({"u": ([["a", "b"]], [["b", "c"]])}), HERE)

    def read(content: bytes) -> None:
        half = leaf.decode_leaf_json(content, HERE)
        leaf.assemble_leaf(half, lists if b'"b"' in content else test, HERE, "leaf")

    survives(
        read,
        [
            leaf_file({"a": ([[0.5, 1.0], [2.0, 3.5]], [0, 1]), "b": ([[1, 2]], [3])}),
            leaf_file({"a": ([["a", "b"], ["c", "d"]], [["b", "c"], ["d", "e"]])}),
        ],
    )


def test_mutated_plays():
    survives(lambda content: leaf.split_by_role(content, HERE, 20), [PLAY.encode()[:600]])


def build_from_csv(content: bytes) -> Dataset:
    table = csv_table.read_csv_table(content, HERE, "mean")
    return build_table_dataset(table, None, ColumnRoles(missing="flag"), 0.34, 0, 0, "own")


def test_mutated_tables():
    content = b'a,"b",label,device\r\n1.5,2,cat,x\r\n-3e2,4,dog,y\r\n5,6,"cat",x\r\n'
    survives(build_from_csv, [content, b"1,2,0\n3,4,1\n5,6,1\n"])


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_at_all(content):
    for read in (
        lambda: mnist.decode_idx(content, HERE, 1),
        lambda: cifar.decode_cifar_batch(content, HERE, "labels", 10),
        lambda: svhn.decode_svhn(content, HERE),
        lambda: tiny_imagenet.decode_square_image(content, HERE, 64, 64),
        lambda: word_corpora.assemble_corpus("ptb", content, HERE, content, HERE, 5),
        lambda: leaf.decode_leaf_json(content, HERE),
        lambda: leaf.split_by_role(content, HERE, 5),
        lambda: build_from_csv(content),
    ):
        try:
            read()
        except ShoalError:
            pass


# Finding, fetching and keeping


def test_the_places_that_are_looked_into(tmp_path, monkeypatch):
    for place in ("MNIST/raw", "mnist", "MNIST"):
        mnist_folder(tmp_path / place / "x" / place, gzip.compress, ".gz")
        assert sources.load_dataset("mnist", str(tmp_path / place / "x")).name == "mnist"
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "mnist" / "x"))
    assert (
        len(sources.load_dataset("mnist").inputs) == 7
        and sources.has_all_files("mnist")
        and not sources.has_all_files("cifar10")
    )
    monkeypatch.delenv("SHOAL_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.find_data_folder() == tmp_path / ".cache" / "shoal" / "data"


def test_every_source_says_what_it_is():
    for name, source in sources.SOURCES.items():
        assert source.name == name and source.doc and callable(source.read)
        assert all(file.url.startswith("http") and len(file.md5) in (0, 32) for file in source.files)


def test_leaf_by_folder(tmp_path):
    content = leaf_file({"a": ([[1.0, 2.0]], [0])})
    leaf_folder(tmp_path / "reviews", content, content)
    assert sources.load_dataset("leaf:reviews", str(tmp_path)).inputs.shape == (1, 2)
    assert sources.load_dataset(f"leaf:{tmp_path / 'reviews'}", str(tmp_path / "elsewhere")).inputs.shape == (1, 2)
    with Refused("no-data"):
        sources.load_dataset("leaf", str(tmp_path))
    with Refused("unknown-name"):
        sources.load_dataset("mnits")


class Server:
    """A web server that answers with what it is told."""

    def __enter__(self):
        answers = self.answers = {}

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                content, size = answers.get(self.path, (None, 0))
                self.send_response(200 if content is not None else 404)
                self.send_header("Content-Length", str(size))
                self.end_headers()
                self.wfile.write(content or b"")

            def log_message(self, *_):  # type: ignore[override]
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def test_download(tmp_path):
    right = "900150983cd24fb0d6963f7d28e17f72"  # the md5 of "abc"
    with Server() as server:
        server.answers["/good"] = (b"abc", 3)
        server.answers["/short"] = (b"ab", 3)
        assert (
            download.download_file(SourceFile("a", f"{server.address}/good", right), tmp_path / "new").read_bytes()
            == b"abc"
        )
        for file in (
            SourceFile("b", f"{server.address}/good", "0" * 32),
            SourceFile("b", f"{server.address}/short"),
            SourceFile("b", f"{server.address}/missing"),
            SourceFile("b", "http://127.0.0.1:9/offline"),
            SourceFile("b", "file:///etc/passwd"),
            SourceFile("b"),
        ):
            with pytest.raises(ShoalError) as caught:
                download.download_file(file, tmp_path)
            assert caught.value.kind.name == "no-data"
            assert all(word in str(caught.value) for word in ("b", str(tmp_path), file.url))
    assert [path.name for path in tmp_path.iterdir()] == ["new"] and len(list((tmp_path / "new").iterdir())) == 1


def test_a_missing_set_is_fetched_and_then_kept(tmp_path, monkeypatch):
    with Server() as server:
        server.answers["/input.txt"] = (PLAY.encode() * 9, len(PLAY) * 9)
        file = SourceFile("tinyshakespeare.txt", f"{server.address}/input.txt")
        source = sources.Source("shakespeare", "plays", leaf.read_shakespeare, (file,), "shakespeare")
        monkeypatch.setitem(sources.SOURCES, "shakespeare", source)
        first = sources.load_dataset("shakespeare", str(tmp_path))
    again = sources.load_dataset("shakespeare", str(tmp_path))
    assert torch.equal(first.inputs, again.inputs)


def small() -> Dataset:
    x, y = torch.arange(24, dtype=torch.uint8).reshape(6, 1, 2, 2), torch.arange(6)
    return Dataset("small", x, y, x[:2], y[:2], 6, np.arange(6) // 2, test_owners=np.array([1, 0]))


def test_the_cache(tmp_path):
    reads: list[int] = []

    def read() -> Dataset:
        reads.append(1)
        return small()

    file = put(tmp_path, {"file": b"1"}) / "file"
    for _ in range(3):
        data = cache.load_cached_dataset(tmp_path, "small", [file], read)
        assert torch.equal(data.inputs, small().inputs) and np.array_equal(data.owners, small().owners)  # type: ignore[arg-type]
        assert np.array_equal(data.test_owners, small().test_owners)  # type: ignore[arg-type]
        data.inputs.add_(1)  # stays in memory
    assert len(reads) == 1
    file.write_bytes(b"22")
    cache.load_cached_dataset(tmp_path, "small", [file], read)
    assert len(reads) == 2


def test_a_damaged_cache_is_made_again(tmp_path):
    file = put(tmp_path, {"file": b"1"}) / "file"
    cache.load_cached_dataset(tmp_path, "small", [file], small)
    (folder,) = (tmp_path / ".arrays").iterdir()
    for name in sorted(path.name for path in folder.iterdir()):
        whole = (folder / name).read_bytes()
        for content in (b"", whole[: len(whole) // 2], whole[:-1], b"x" * len(whole), b"\x93NUMPY" + whole[3:]):
            (folder / name).write_bytes(content)
            assert torch.equal(cache.load_cached_dataset(tmp_path, "small", [file], small).targets, small().targets)
            assert (folder / name).read_bytes() == whole
        (folder / name).unlink()
        assert torch.equal(cache.load_cached_dataset(tmp_path, "small", [file], small).targets, small().targets)


def test_no_cache_where_nothing_can_be_written(tmp_path):
    (tmp_path / ".arrays").write_text("a file is in the way")
    assert len(cache.load_cached_dataset(tmp_path, "small", [], small).inputs) == 6

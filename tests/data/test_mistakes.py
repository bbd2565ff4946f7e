"""Typical mistakes of users with data, each with the sentence that it gets: refusals, and warnings before a run."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import shoal

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=1, steps="1", batch=4, split="iid", engine="serial")
X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
NAN = X.clone()
NAN[7, 2] = float("nan")


def csv(text: str, **keys: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "t.csv").write_text(text)
        return {"data": str(folder / "t.csv"), **keys}

    return write


def frame(columns: Callable[[], dict[str, Any]], **keys: Any) -> Callable[[Path], dict[str, Any]]:
    def make(folder: Path) -> dict[str, Any]:
        return {"data": pytest.importorskip("pandas").DataFrame(columns()), **keys}

    return make


def npz(**arrays: Any) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        np.savez(folder / "t.npz", **arrays)
        return {"data": str(folder / "t.npz")}

    return write


def file(name: str, content: bytes) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / name).write_bytes(content)
        return {"data": str(folder / name)}

    return write


def given(data: Any, **keys: Any) -> Callable[[Path], dict[str, Any]]:
    return lambda folder: {"data": data, **keys}


def npy_folder(folder: Path) -> dict[str, Any]:
    np.save(folder / "x.npy", np.array([[1, 2], [3]], dtype=object), allow_pickle=True)
    np.save(folder / "y.npy", np.arange(2))
    return {"data": str(folder)}


def parquet(folder: Path) -> dict[str, Any]:
    (folder / "t.parquet").write_bytes(b"PAR1 and no more")
    pytest.importorskip("pyarrow")
    return {"data": str(folder / "t.parquet")}


def safetensors_without_y(folder: Path) -> dict[str, Any]:
    save_file({"x": X}, folder / "t.safetensors")
    return {"data": str(folder / "t.safetensors")}


def two_sizes(folder: Path) -> dict[str, Any]:
    image = pytest.importorskip("PIL.Image")
    for name, side in (("cat", 4), ("dog", 5)):
        (folder / name).mkdir()
        image.new("L", (side, side)).save(folder / name / "1.png")
    return {"data": str(folder)}


def python_file(text: str, name: str) -> Callable[[Path], dict[str, Any]]:
    def write(folder: Path) -> dict[str, Any]:
        (folder / "mine.py").write_text(text)
        return {"data": f"{folder / 'mine.py'}:{name}"}

    return write


class Unlike(TorchDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return torch.zeros(2 + i % 2), i


GOOD = "age,city,hospital,sick\n" + "".join(f"{i},{'rome' if i % 2 else 'oslo'},h{i % 3},{i % 2}\n" for i in range(30))
ROWS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": lambda: {"a": np.arange(30.0), "label": np.arange(30) % 3},
    "gaps": lambda: {"a": [1.0, None] * 15, "label": np.arange(30) % 3},
    "empty": lambda: {"a": [None] * 30, "b": np.arange(30.0), "label": np.arange(30) % 3},
    "mixed": lambda: {"a": [1, "x"] * 15, "label": np.arange(30) % 3},
    "free text": lambda: {"a": [f"sentence {i}" for i in range(120)], "label": np.arange(120) % 3},
    "infinite": lambda: {"a": [np.inf] + [1.0] * 29, "label": np.arange(30) % 3},
    "many names": lambda: {"a": np.arange(60.0), "label": [f"name {i}" for i in range(60)]},
    "dates": lambda: {"a": np.arange(30.0), "label": np.arange("2024-01-01", "2024-01-31", dtype="M8[D]")},
    "no label": lambda: {"a": np.arange(30.0), "label": [0.0, None] * 15},
    "images": lambda: {"image": [np.zeros((2 + i % 2, 3, 3)) for i in range(30)], "label": np.arange(30) % 3},
    "words": lambda: {"words": [["a", "b"]] * 30, "label": np.arange(30) % 3},
}
REFUSED: list[tuple[str, Callable[[Path], dict[str, Any]], str, str]] = [
    # tensors and arrays
    ("fewer targets than inputs", given((X, Y[:9])), "bad-value", "60 inputs but 9 targets"),
    ("a value that is no number", given((NAN, Y)), "bad-value", "Input 7 holds a value that is not a number"),
    ("negative labels", given((X, Y - 1)), "bad-value", "label -1, outside 0 to .*Number the classes from 0 up"),
    ("labels that are codes", given((X, Y + 10**9)), "bad-value", "label 1000000002, outside"),
    ("a target that is no number", given((X, [float("nan")] * 60)), "bad-value", "Target 0 is not a number"),
    ("one-hot targets", given((X, torch.eye(3, dtype=torch.int64)[Y])), "bad-value", r"single 1 in each row.*argmax"),
    ("several whole numbers each", given((X, torch.randint(0, 9, (60, 3)))), "bad-value", r"targets are \(60, 3\)"),
    ("labels of mixed kinds", given((X, ["a"] + [1] * 59)), "bad-value", "1 of 60 are texts"),
    ("one number per sample", given((X[:, 0], Y)), "bad-value", "Each input is a single number"),
    ("no samples", given((X[:0], Y[:0])), "no-data", "no samples"),
    ("one sample", given((X[:1], Y[:1])), "no-data", "leaves one half empty"),
    ("halves of other shapes", given((X, Y, X[:, :2], Y)), "bad-value", "Training samples are"),
    ("halves of other targets", given((X, Y, X, Y.float())), "bad-value", "Training targets are torch.int64"),
    ("texts as inputs", given((["a", "b"], [0, 1])), "bad-value", "x holds <U1, not numbers"),
    ("words in sequences", given(([["a"], ["b", "c"]], [0, 1])), "bad-value", "Turn words into numbers first"),
    ("an empty sequence", given(([[1, 2], []], [0, 1])), "no-data", "Sequence 1 of x is empty"),
    ("a dict of other keys", given({"images": X, "labels": Y}), "bad-value", "keys images, labels.*needs x and y"),
    ("an iterator", given(iter([1])), "bad-value", "list_iterator is no data set"),
    ("samples of other sizes", given(Unlike()), "bad-value", "x of sample 1 differs in shape"),
    ("devices of other forms", given([(X, Y), (X[:, :2], Y)]), "bad-value", "devices differ in shape or type"),
    ("fewer owners than samples", given({"x": X, "y": Y, "owners": [0, 1]}), "bad-value", "60 inputs but 2 owners"),
    ("a column of tensors", given((X, Y), owner="hospital"), "bad-value", "owner names the column 'hospital'"),
    # tables
    ("a target that is not there", csv(GOOD, label="sik"), "unknown-name", "'sik'. Did you mean 'sick'?"),
    ("an owner that is not there", csv(GOOD, owner="hopsital"), "unknown-name", "Did you mean 'hospital'?"),
    ("a time that is not there", csv(GOOD, order="when"), "unknown-name", "no column for `order` called 'when'"),
    ("a time that is text", csv(GOOD, order="city"), "bad-value", "'city' holds neither numbers nor dates"),
    ("one column for two", csv(GOOD, label="sick", owner="sick"), "bad-value", "two of the roles"),
    ("an unknown rule", csv(GOOD, missing="average"), "unknown-name", "no missing called 'average'"),
    ("text among numbers", csv("a,label\n1,0\n2,1\nx,0\n"), "bad-value", "line 4, column 'a': 'x' is not"),
    ("an empty cell", csv("a,b,label\n1,2,0\n3,,1\n"), "bad-value", "line 3, column 'b': the cell is empty.*missing ="),
    (
        "a target that is missing",
        csv("a,label\n1,0\n3,\n"),
        "bad-value",
        "'label': the cell is empty.*needs its target",
    ),
    ("a decimal comma", csv('a,label\n"1,5",0\n"2,5",1\n2,1\n3,0\n'), "bad-value", "'1,5' is not a usable number"),
    ("semicolons", csv("a;b;label\n1;2;0\n3;4;1\n"), "bad-value", "semicolons between its cells"),
    ("a short line", csv("a,b,label\n1,2,0\n3,4\n"), "bad-value", "line 3: 2 cells instead of 3"),
    ("a name twice", csv("a,a,label\n1,2,0\n3,4,1\n"), "bad-value", "two columns of one name, 'a'"),
    ("a head alone", csv("a,b,label\n"), "no-data", "has no rows"),
    ("an empty file", csv(""), "no-data", "has no rows"),
    ("targets alone", csv("label\n0\n1\n"), "bad-value", "has the columns 'label'"),
    ("gaps in a frame", frame(ROWS["gaps"]), "bad-value", "row 1, column 'a': the cell is empty, and 14 more"),
    ("a column of nothing", frame(ROWS["empty"], missing="mean"), "bad-value", "'a' has no value in the training half"),
    ("numbers and texts", frame(ROWS["mixed"]), "bad-value", "'a' holds int and str"),
    ("free text", frame(ROWS["free text"]), "bad-value", "different texts in 96 training rows: it is no category"),
    ("an infinite number", frame(ROWS["infinite"]), "bad-value", "row 0, column 'a': inf is not a usable number"),
    ("names as classes", frame(ROWS["many names"]), "bad-value", "60 different texts in 48 rows: these are no classes"),
    ("dates as classes", frame(ROWS["dates"]), "bad-value", "holds dates, which cannot be learnt"),
    ("gaps in the target", frame(ROWS["no label"]), "bad-value", "every sample needs its target"),
    ("images of two sizes", frame(ROWS["images"]), "bad-value", "Row 1 of column 'image'|differ in more"),
    ("lists of words", frame(ROWS["words"]), "bad-value", "Turn texts into numbers first"),
    # files and folders
    (
        "a loader in place of its data set",
        given(DataLoader(TensorDataset(X, Y))),
        "bad-value",
        "Give its data set, loader.dataset",
    ),
    ("a file that is not there", given("nowhere.csv"), "no-data", "There is no file or folder nowhere.csv"),
    ("a name that is not there", given("cifar"), "unknown-name", "Did you mean 'cifar10"),
    ("no table", file("t.csv", b"\xff\xfe\x00"), "bad-value", "is not a CSV table.*UTF-8"),
    ("no parquet file", parquet, "damaged", "t.parquet"),
    ("no npz file", file("t.npz", b"PK and no more"), "damaged", "t.npz"),
    ("arrays of other names", npz(images=np.eye(9), y=np.arange(9)), "bad-value", "array 'images'. Name the arrays x"),
    ("an array alone", npz(x=np.eye(9)), "bad-value", "no array 'y', only x"),
    ("objects in arrays", npz(x=np.array([{}, 1]), y=np.arange(2)), "bad-value", "Python objects, which may run"),
    ("objects in a folder", npy_folder, "bad-value", "Python objects, which may run"),
    ("tensors without targets", safetensors_without_y, "bad-value", "no array 'y'"),
    ("a single array", file("x.npy", b""), "bad-value", "holds a single array. Give the folder"),
    ("a folder without images", lambda folder: {"data": str(folder)}, "no-data", "no images in"),
    ("images of two sizes in a folder", two_sizes, "bad-value", "is 5 x 5, the first image 4 x 4"),
    ("a function that fails", python_file("def load(): return 1 / 0", "load"), "bad-value", "ZeroDivisionError"),
    ("a function that is not there", python_file("def load(): pass", "lod"), "bad-part|unknown-name", "lod"),
    ("a function without data", python_file("def load(): pass", "load"), "bad-value", "NoneType is no data set"),
    # devices
    ("fewer devices than owners", csv(GOOD, owner="hospital", split="owner", devices=2), "bad-value", "3 owners for 2"),
    ("owners of nobody", given((X, Y), split="owner", devices=0), "bad-value", "does not say whose samples are whose"),
    ("too many shards", given((X, Y), split="shards:20"), "bad-value", "cannot be cut from 48 samples"),
    ("too few samples each", given((X, Y), split="dirichlet:1:20"), "bad-value", "cannot have 20 samples each"),
    ("no number of devices", given((X, Y), devices=0), "bad-value", "only owner finds their number"),
]


@pytest.mark.parametrize("give, kind, words", [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_a_mistake_is_refused_in_one_sentence(give, kind, words, tmp_path):
    with pytest.raises(shoal.ShoalError, match=words) as caught:
        shoal.run(**{**TINY, **give(tmp_path)})
    error = caught.value
    assert error.kind.name in kind.split("|") and error.advice and "\n" not in str(error) and len(str(error)) < 400
    assert error.problem.endswith((".", "?")) and error.advice.endswith((".", "?", "'"))


def test_there_are_at_least_forty():
    assert len(REFUSED) >= 40 and len({row[0] for row in REFUSED}) == len(REFUSED)


INDEX = "Unnamed: 0,a,label\n" + "".join(f"{i},{i % 7},{i % 2}\n" for i in range(30))
NEW = "a,city,label\n" + "".join(f"{i},{'rome' if i < 19 else 'new'},{i % 2}\n" for i in range(20))
DOUBTED: list[tuple[str, Callable[[Path], dict[str, Any]], str]] = [
    ("labels from 1", given((X, Y + 1)), "subtract 1 from every label"),
    ("labels with gaps", given((X, Y * 7)), "12 of 15 classes have no sample"),
    ("labels from 1 in a table", csv("a,label\n" + "1,1\n2,2\n" * 20), "subtract 1 from every label"),
    ("one class only", given((X, Y * 0)), "All 48 training samples are of class 0"),
    ("a class that is only tested", given((X, Y * 0, X[:3], Y[:3])), "2 of 3 classes are tested"),
    ("channels last", given((torch.rand(60, 8, 8, 3), Y)), "permute(0, 3, 1, 2)"),
    ("pixels up to 255", given((torch.randint(0, 256, (60, 5)).float().clamp(max=255), Y)), "divide them by 255"),
    ("large numbers", given((X * 1e4, Y)), "use normalise"),
    ("large targets", given((X, 1e5 * X[:, 0])), "divide them by a number such as 100000"),
    ("more devices than samples", given((X, Y), devices=90), "90 devices for 48 samples"),
    ("row numbers", csv(INDEX), "'Unnamed: 0' numbers the rows"),
    ("a text that training lacks", csv(NEW, order="a"), "have a text that training lacks ('new')"),
]


@pytest.mark.parametrize("give, words", [row[1:] for row in DOUBTED], ids=[row[0] for row in DOUBTED])
def test_what_is_probably_a_mistake_is_told_before_the_run(give, words, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.run(**{**TINY, **give(tmp_path)})
    lines = [record.getMessage() for record in caplog.records]
    assert any(words in line for line in lines), lines
    assert all("\n" not in line for line in lines)


def test_data_without_a_mistake_get_no_warning(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.run(data=(X, Y), **TINY)
        shoal.run(**{**TINY, **csv(GOOD, owner="hospital", normalise=True)(tmp_path)})
    assert not caplog.records

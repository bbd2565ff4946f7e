"""A user's own data in every form that is taken, and one sentence for each thing that is wrong with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import shoal
from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.data.dataset import Dataset, read_digits
from shoal.data.user_data import build_user_dataset, hold_out_validation
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_data import load_recipe_dataset

X = torch.arange(40.0).reshape(10, 4)
Y = torch.arange(10) % 3


def refused(kind: str, words: str, *args, **keywords) -> None:
    with pytest.raises(ShoalError, match=words) as caught:
        build_user_dataset(*args, **keywords)
    assert caught.value.kind.name == kind and caught.value.advice


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        (X.double().numpy(), Y.numpy().astype(np.uint8)),
        (X.tolist(), Y.tolist()),
        (X, Y[:, None]),
        {"x": X, "y": Y},
        {"inputs": X.numpy(), "targets": Y},
        TensorDataset(X, Y),
    ],
)
def test_one_half_is_divided(data):
    own = build_user_dataset(data, test_share=0.3, seed=4)
    assert own.inputs.shape == (7, 4) and own.test_inputs.shape == (3, 4) and own.classes == 3 and own.owners is None
    assert own.inputs.dtype == torch.float32 and own.targets.dtype == torch.int64
    whole = torch.cat([own.inputs, own.test_inputs])
    assert torch.equal(whole[whole[:, 0].argsort()], X)
    held = np.random.default_rng(4).permutation(10)[7:]
    assert own.test_inputs[:, 0].tolist() == sorted((4.0 * held).tolist())


@pytest.mark.parametrize(
    "data, test",
    [
        ((X, Y, X[:2], Y[:2]), None),
        (((X, Y), (X[:2], Y[:2])), None),
        ({"x": X, "y": Y, "test_x": X[:2], "test_y": Y[:2]}, None),
        ((TensorDataset(X, Y), TensorDataset(X[:2], Y[:2])), None),
        ((X, Y), (X[:2], Y[:2])),
        (TensorDataset(X, Y), (X[:2].numpy(), [0, 1])),
        ([(X[:4], Y[:4]), (X[4:], Y[4:])], (X[:2], Y[:2])),
    ],
)
def test_two_halves_stay_as_they_are(data, test):
    own = build_user_dataset(data, test=test, classes=5, name="mine")
    assert torch.equal(own.inputs, X) and torch.equal(own.test_targets, Y[:2])
    assert own.classes == 5 and own.name == "mine"


def test_a_list_per_device_sets_the_owners():
    parts = [(X[:3], Y[:3]), (X[3:3], Y[3:3]), (X[3:].numpy(), Y[3:].numpy())]
    own = build_user_dataset(parts, test=(X, Y))
    assert own.owners is not None and own.owners.tolist() == [0] * 3 + [2] * 7
    divided = build_user_dataset(parts, test_share=0.5)
    assert divided.owners is not None and len(divided.owners) == len(divided.inputs) == 5
    assert [int(row[0] >= 12) * 2 for row in divided.inputs] == divided.owners.tolist()
    named = build_user_dataset({"x": X, "y": Y, "owners": ["b", "a"] * 5}, test=(X, Y))
    assert named.owners is not None and named.owners.tolist() == [1, 0] * 5


def test_sequences():
    x = torch.arange(20).reshape(4, 5)
    assert build_user_dataset((x, x + 1), test_share=0.25).classes == 21
    refused("bad-value", "targets are", (x.float(), x))


def test_a_data_set_is_left_alone():
    assert build_user_dataset(data := read_digits()) is data


class Odd(TorchDataset):
    def __init__(self, *samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(X[0], 0)])


NAN = X.clone()
NAN[3, 1] = float("nan")


@pytest.mark.parametrize(
    "kind, words, data",
    [
        ("bad-value", "10 inputs but 9 targets", (X, Y[:9])),
        ("bad-value", "10 inputs but 3 owners", {"x": X, "y": Y, "owners": [0, 1, 2]}),
        ("bad-value", "Input 3 ", (NAN, Y)),
        ("bad-value", "label -1", (X, Y - 1)),
        ("bad-value", "label 1000000002", (X, Y + 1_000_000_000)),
        ("bad-value", "Target 2 is not a number or not finite", (X, Y.float() / (Y != 2))),
        ("bad-value", "targets are", (X, Y[:, None] + torch.arange(2))),
        ("bad-value", "targets are", (X, torch.zeros(10, 2, 2, dtype=torch.int64))),
        ("bad-value", "single number", (X[:, 0], Y)),
        ("bad-value", "1 of 10 are texts", (X, ["a"] + [1] * 9)),
        ("bad-value", "not plain", (X.to(torch.complex64), Y)),
        ("bad-value", "differ in more than their length", ([[1], [[1], [2]]], [0, 1])),
        ("no-data", "no samples", (X[:0], Y[:0])),
        ("no-data", "no samples|0 inputs", (X[:, :0], Y)),
        ("no-data", "list of devices is empty", []),
        ("no-data", "empty", Odd()),
        ("no-data", "There is no file", "nowhere.csv"),
        ("no-data", "one half empty", (X[:1], Y[:1])),
        ("bad-value", "Device 1", [(X, Y), X]),
        ("bad-value", "of device 1", [(X, Y), (X, Y[:3])]),
        ("bad-value", "differ in shape", [(X, Y), (X[:, :2], Y)]),
        ("bad-value", "no length", Stream()),
        ("bad-value", "not a pair", Odd(X[0])),
        ("bad-value", "sample 1 differs", Odd((X[0], 0), (X[0, :2], 0))),
        ("bad-value", "keys", {"a": X}),
        ("bad-value", "no data set", 3),
        ("bad-value", "Training samples are", (X, Y, X[:, :2], Y)),
    ],
)
def test_what_is_wrong_is_told(kind, words, data):
    refused(kind, words, data)


def test_shares_and_classes_out_of_range():
    for share in (0, 1, -0.5, float("nan")):
        refused("bad-value", "test share", (X, Y), test_share=share)
    refused("bad-value", "label 2, outside 0 to 1", (X, Y), classes=2)
    refused("bad-value", "two test halves", (X, Y, X, Y), test=(X, Y))
    for share in (0, 1, 1e-9, float("nan")):
        with pytest.raises(ShoalError, match="one half empty"):
            hold_out_validation(read_digits(), share)


@settings(deadline=None, max_examples=50)
@given(st.floats(0.01, 0.99), st.integers(0, 2**32))
def test_a_validation_share_is_taken_from_the_training_half(share, seed):
    data = read_digits()
    held = hold_out_validation(data, share, seed)
    assert len(held.test_inputs) == round(share * 1437) and len(held.inputs) + len(held.test_inputs) == 1437
    assert torch.equal(
        held.targets.bincount(minlength=10) + held.test_targets.bincount(minlength=10), data.targets.bincount()
    )
    assert torch.equal(hold_out_validation(data, share, seed).test_targets, held.test_targets)


# Folders of images


def draw(path, shade: int, mode: str = "L", size=(5, 4)) -> None:
    image = pytest.importorskip("PIL.Image", reason="images are read with Pillow")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new(mode, size, shade if mode == "L" else (shade, 0, 0)).save(path)


def test_a_folder_of_classes(tmp_path):
    for shade, name in enumerate(("dog/1.png", "cat/1.png", "cat/2.png", "dog/2.png")):
        draw(tmp_path / name, shade)
    own = build_user_dataset(tmp_path, test=tmp_path)
    assert own.inputs.shape == (4, 1, 4, 5) and own.inputs.dtype == torch.uint8 and own.classes == 2
    assert own.inputs[:, 0, 0, 0].tolist() == [1, 2, 0, 3] and own.targets.tolist() == [0, 0, 1, 1]
    draw(tmp_path / "dog" / "3.png", 9, "RGB")
    assert build_user_dataset(str(tmp_path), test=tmp_path).inputs.shape == (5, 3, 4, 5)


def test_a_folder_of_devices(tmp_path):
    for name in ("anna/cat/1.png", "ben/cat/1.png", "ben/dog/1.png"):
        draw(tmp_path / name, 1)
    own = build_user_dataset(tmp_path, test=tmp_path)
    assert own.owners is not None and own.owners.tolist() == [0, 1, 1] and own.targets.tolist() == [0, 0, 1]


def test_a_folder_with_two_halves(tmp_path):
    for name in ("train/cat/1.png", "train/dog/1.png", "test/dog/1.png"):
        draw(tmp_path / name, 1)
    own = build_user_dataset(tmp_path)
    assert own.owners is None and own.targets.tolist() == [0, 1] and own.test_targets.tolist() == [1]


def test_folders_that_are_wrong(tmp_path):
    refused("no-data", "no images", tmp_path)
    draw(tmp_path / "cat" / "1.png", 1)
    draw(tmp_path / "dog" / "1.png", 1, size=(6, 6))
    refused("bad-value", "6 x 6", tmp_path)
    (tmp_path / "dog" / "1.png").write_bytes(b"no image")
    refused("damaged", "1.png", tmp_path)
    (tmp_path / "dog" / "1.png").unlink()
    draw(tmp_path / "ann" / "cat" / "1.png", 1)
    refused("bad-value", "two depths", tmp_path)


# CSV tables


def table(tmp_path, text: str):
    path = tmp_path / "table.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_table(tmp_path):
    path = table(tmp_path, "label,age,owner,height\ncat,1,z,2.5\ndog,-3,a,4e1\ncat,5,z,6\n")
    own = build_user_dataset(path, test=path)
    assert own.inputs.tolist() == [[1.0, 2.5], [-3.0, 40.0], [5.0, 6.0]] and own.targets.tolist() == [0, 1, 0]
    assert own.owners is not None and own.owners.tolist() == [1, 0, 1]
    own = build_user_dataset(path, test=path, test_share=0.5)
    assert own.classes == 2


def test_tables_with_numbers_for_labels(tmp_path):
    own = build_user_dataset(table(tmp_path, "1,2,0\n3,4,7\n5,6,1\n"), test_share=0.34)
    assert own.classes == 8 and own.inputs.shape == (2, 2)
    path = table(tmp_path, "\ufeffa,b\r\n1,0\r\n2,1\r\n")
    assert build_user_dataset(path, test=path).targets.tolist() == [0, 1]


@pytest.mark.parametrize(
    "kind, words, text",
    [
        ("bad-value", "line 3, column 'b': the cell is empty", "a,b,label\n1,2,0\n3,,1\n"),
        ("bad-value", "line 3, column 'label': the cell is empty", "a,b,label\n1,2,0\n3,4,\n"),
        ("bad-value", "line 2, column 'a': 'x' is not", "a,b,label\nx,2,0\n3,4,1\n"),
        ("bad-value", "line 2, column 'a': 'nan' is not", "a,b,label\nnan,2,0\n3,4,1\n"),
        ("bad-value", "line 2, column 'a': '1e60' is not", "a,b,label\n1e60,2,0\n3,4,1\n"),
        ("bad-value", "line 3: 2 cells instead of 3", "a,b,label\n1,2,0\n3,4\n"),
        ("bad-value", "line 2: 4 cells instead of 3", "a,b,label\n1,2,0,9\n3,4,1\n"),
        ("bad-value", "two columns of one name", "a,a,label\n1,2,0\n"),
        ("bad-value", "has the columns", "label,device\n0,1\n"),
        ("bad-value", "has the columns", "a,label,target\n0,1,2\n"),
        ("bad-value", "not a CSV table", 'a,b\n"1"x,2\n'),
        ("no-data", "no rows", "a,b,label\n"),
        ("no-data", "no rows", ""),
    ],
)
def test_tables_that_are_wrong(tmp_path, kind, words, text):
    refused(kind, words, table(tmp_path, text))


def test_a_table_that_is_no_text(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"\xff\xfe\x00")
    refused("bad-value", "not a CSV table", tmp_path / "table.csv")


FUNCTIONS = """
import torch
x, y = torch.arange(40.0).reshape(10, 4), torch.arange(10) % 3
both = (x, y)
def load(): return x, y
def load_two(): return {"left": x[:, :1], "right": x[:, 1:]}, y
def fail(): raise OSError("no such luck")
def leave(): raise SystemExit(3)
def take(path): return x, y
"""


def load_by_recipe(name: str, folder: Path) -> Dataset:
    (folder / "mine.py").write_text(FUNCTIONS)
    recipe = Recipe().with_values(data=f"{folder / 'mine.py'}:{name}")
    return load_recipe_dataset(recipe, RandomStreams(0))


def test_a_recipe_may_name_a_function(tmp_path):
    own = load_by_recipe("load", tmp_path)
    assert own.inputs.shape == (8, 4) and own.test_inputs.shape == (2, 4) and own.classes == 3
    two = load_by_recipe("load_two", tmp_path)
    assert torch.equal(load_by_recipe("both", tmp_path).inputs, own.inputs)
    assert torch.equal(torch.cat([two.inputs["left"], two.inputs["right"]], 1), own.inputs)


@pytest.mark.parametrize(
    "name, words",
    [
        ("fail", "no such luck"),
        ("leave", "SystemExit"),
        ("take", "path"),
        ("x", "A Tensor is no data set"),
        ("z", "called 'z'"),
    ],
)
def test_a_function_that_gives_no_data_is_told_in_one_sentence(name, words, tmp_path):
    with pytest.raises(ShoalError, match=words) as caught:
        load_by_recipe(name, tmp_path)
    assert "\n" not in str(caught.value) and caught.value.advice


# several labels, several numbers --------------------------------------------------------------------------------------
def test_rows_of_0_and_1_are_several_labels():
    rows = np.array([[0, 1, 1], [1, 0, 1], [0, 0, 0], [1, 1, 0]] * 5)
    for y in (rows, rows.tolist(), torch.from_numpy(rows), rows.astype(bool)):
        own = build_user_dataset((np.eye(20, dtype=np.float32), y))
        assert own.targets.dtype == torch.bool and own.classes == 3
    with pytest.raises(ShoalError, match="with a single 1 in each row") as caught:
        build_user_dataset((np.eye(20, dtype=np.float32), np.eye(3, dtype=int)[np.arange(20) % 3]))
    assert "y.argmax(1)" in caught.value.advice and "y == 1" in caught.value.advice


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_several_columns_are_learnt(package, tmp_path):
    frames = pytest.importorskip(package)
    columns = {"a": np.arange(20.0), "p": np.arange(20) / 7, "q": np.arange(20) / 3, "r": np.arange(20) % 2}
    columns |= {"s": (np.arange(20) + 1) // 2 % 2, "t": ["x", "y"] * 10}
    frame = frames.DataFrame(columns)
    numbers = build_user_dataset(frame, label="p,q", test_share=0.2)
    assert numbers.targets.shape == (16, 2) and numbers.classes == 2 and numbers.inputs.shape == (16, 5)
    assert torch.allclose(numbers.targets[:, 1] * 3, numbers.targets[:, 0] * 7)
    labels = build_user_dataset(frame, label=["r", "s"])
    assert labels.targets.dtype == torch.bool
    result = shoal.run(data=frame, label=["p", "q"], devices=2, sample=2, rounds=1, split="iid")
    assert result.net.task.name == "regress" and result.net.classes == 2
    path = tmp_path / "t.csv"
    frame.to_csv(path, index=False) if package == "pandas" else frame.write_csv(path)
    assert torch.allclose(build_user_dataset(path, label="p, q").targets, numbers.targets)
    with pytest.raises(ShoalError, match="'t' holds a category, and several columns"):
        build_user_dataset(frame, label="p,t")
    with pytest.raises(ShoalError, match="no column for `label` called 'z'"):
        build_user_dataset(frame, label="p,z")


def test_a_bunch_may_have_several_targets():
    pandas = pytest.importorskip("pandas")
    bunch = {"data": pandas.DataFrame({"a": np.arange(20.0), "b": np.arange(20) % 3}), "target_names": ["p", "q"]}
    bunch["target"] = pandas.DataFrame({"p": np.arange(20.0), "q": np.arange(20) / 2})
    assert build_user_dataset(bunch).targets.shape == (16, 2)


@pytest.mark.parametrize("order", [np.arange(7), np.full(20, np.nan), np.zeros((20, 2))])
def test_an_order_that_is_not_one_number_per_sample_is_refused(order):
    """One of 7 numbers made 7 of 20 samples the training half, and none the test half."""
    with pytest.raises(ShoalError, match="order has the shape"):
        build_user_dataset({"x": np.random.rand(20, 3), "y": np.arange(20) % 2, "order": order})

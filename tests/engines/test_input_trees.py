"""A sample may have several tensors: a dict or tuple of inputs trains to the numbers of the one tensor they make up."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.data.user_data import build_user_dataset
from shoal.engines.batched.engine import BatchedEngine
from shoal.testing.rounds import drop_wall_seconds

COUNT, SIDE, NUMBERS, CLASSES = 90, 4, 3, 5
RECIPE: dict[str, Any] = dict(devices=5, sample=4, rounds=2, epochs="1", batch=7, lr=0.1, precision="float64")


def make_samples() -> tuple[Tensor, Tensor, Tensor]:
    """Images, numbers and labels."""
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(COUNT, 1, SIDE, SIDE, generator=generator)
    numbers = torch.randn(COUNT, NUMBERS, generator=generator)
    return images, numbers, torch.randint(0, CLASSES, (COUNT,), generator=generator)


class Joined(nn.Module):
    """One hidden layer over image and numbers together, whatever form they come in."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.hidden, self.head = nn.Linear(SIDE * SIDE + NUMBERS, 6), nn.Linear(6, CLASSES)
        self.drop = nn.Dropout(dropout)

    def forward(self, inputs: Any) -> Tensor:
        if isinstance(inputs, Tensor):
            return self.head(self.drop(self.hidden(inputs)).relu())
        image, numbers = (inputs["image"], inputs["numbers"]) if isinstance(inputs, dict) else inputs
        return self.forward(torch.cat((image.flatten(1), numbers), 1))


def make_model(dropout: float = 0.0) -> Joined:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Joined(dropout)


def make_data(form: str) -> tuple[Any, Tensor]:
    images, numbers, labels = make_samples()
    forms = {"dict": {"image": images, "numbers": numbers}, "tuple": (images, numbers)}
    return forms.get(form, torch.cat((images.flatten(1), numbers), 1)), labels


def run_form(form: str, dropout: float = 0.0, **recipe: Any) -> shoal.Result:
    return shoal.run(data=make_data(form), model=make_model(dropout), **RECIPE | recipe)


def assert_same_run(one: shoal.Result, other: shoal.Result, near: float = 0.0) -> None:
    apart = tree.map_tensor_pairs(lambda a, b: (a - b).abs().max(), one.params, other.params)
    assert max(map(float, apart.values())) <= near
    if not near:
        assert [drop_wall_seconds(row) for row in one.history.rows] == [
            drop_wall_seconds(row) for row in other.history.rows
        ]


@pytest.mark.parametrize("method", ["fedavg", "scaffold+fedavgm", "creff", "fednh", "feddecorr"])
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_a_tree_of_inputs_trains_like_the_tensor_it_makes_up(form, method):
    assert_same_run(run_form(form, method=method, engine="serial"), run_form("tensor", method=method, engine="serial"))


class TwoArguments(Joined):
    """As one writes it in PyTorch: an argument for each tensor."""

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        return super().forward(torch.cat((image.flatten(1), numbers), 1))


def make_two_arguments() -> TwoArguments:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return TwoArguments()


@pytest.mark.parametrize("form", ["dict", "tuple"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_an_argument_for_each_tensor_is_the_same(form, engine, tmp_path):
    images, numbers, labels = make_samples()
    data = ({"numbers": numbers, "image": images} if form == "dict" else (images, numbers), labels)
    out = str(tmp_path / "run")
    own = shoal.run(data=data, model=make_two_arguments(), **RECIPE | {"engine": engine, "out": out})
    assert_same_run(own, run_form(form, engine="serial"), 1e-6)
    module = own.module()
    assert isinstance(module, TwoArguments) and module(images[:3].double(), numbers[:3].double()).shape == (3, CLASSES)
    made = shoal.export(own, tmp_path / "model.pt2")
    program = torch.export.load(made.path).module()
    assert program(tree.map_tensors(lambda t: t.double(), data[0])).shape == (COUNT, CLASSES)


@pytest.mark.parametrize("engine, more", [("batched", {"width": 3}), ("batched", {"width": 1}), ("pool", {})])
@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_every_engine_takes_trees(form, engine, more, caplog):
    """Devices of unlike sizes, so batches and steps are padded."""
    unequal: dict[str, Any] = {"split": "dirichlet:0.4", "dropout": 0.3}
    found = run_form(form, engine=engine, **unequal | more)
    assert_same_run(found, run_form("tensor", engine="serial", **unequal), 1e-9)
    assert "one after the other" not in caplog.text


def test_devices_with_trees_share_a_call(monkeypatch):
    widths, honest = [], BatchedEngine.train_stack

    def train_stack(self, sharing_key, slots, hyperparams):
        widths.append(len(slots))
        return honest(self, sharing_key, slots, hyperparams)

    monkeypatch.setattr(BatchedEngine, "train_stack", train_stack)
    run_form("dict", engine="batched", width=4)
    assert widths == [4, 4]


@pytest.mark.parametrize("method", ["feddf", "fedkt", "feddu", "feddh"])
def test_the_server_learns_from_trees(method):
    more: dict[str, Any] = {"method": method, "engine": "serial", "server_data": "share:0.2"}
    assert_same_run(run_form("dict", **more), run_form("tensor", **more))


def test_metrics_and_validation_take_trees():
    more: dict[str, Any] = {"metrics": "top3,per_class,devices,class_kl", "validation": 0.2, "engine": "serial"}
    assert_same_run(run_form("tuple", **more), run_form("tensor", **more))


@pytest.mark.parametrize("half", ["bf16", "float32"])
def test_half_precision_takes_trees(half):
    assert_same_run(run_form("dict", precision=half, engine="serial"), run_form("tensor", precision=half), 1e-5)


@pytest.mark.parametrize(
    "more, words",
    [
        ({"method": "mixup"}, ["mixup blends one tensor", "a dict (image"]),
        ({"method": "datasharing", "server_data": "share:0.2"}, ["datasharing sends devices one tensor"]),
        ({"augment": "flip"}, ["augment is for inputs of one tensor"]),
        ({"normalise": True}, ["normalise is for inputs of one tensor", "before you give them"]),
        ({"model": "lenet"}, ["lenet takes one tensor", "numbers: (3,)"]),
    ],
)
def test_what_works_on_one_tensor_says_so_before_it_begins(more, words):
    with pytest.raises(ShoalError) as caught:
        shoal.run(**{"data": make_data("dict"), "model": make_model()} | RECIPE | more)
    assert all(word in f"{caught.value} {caught.value.advice}" for word in words)


def test_a_model_that_cannot_take_the_tree_is_told_what_it_was_given():
    with pytest.raises(ShoalError, match="image"):
        shoal.run(data=make_data("dict"), model=nn.Linear(3, CLASSES), **RECIPE)


def test_a_file_makes_its_model_from_a_dict_of_shapes(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self, input_shape, classes):\n"
        "        super().__init__()\n"
        "        self.head = torch.nn.Linear(input_shape['image'][1] ** 2 + input_shape['numbers'][0], classes)\n"
        "    def forward(self, inputs):\n"
        "        return self.head(torch.cat((inputs['image'].flatten(1), inputs['numbers']), 1))\n"
    )
    assert len(shoal.run(data=make_data("dict"), model=f"{path}:Net", **RECIPE).history) == 2


def test_a_run_with_trees_is_taken_up_again_and_knows_its_data(tmp_path):
    whole = run_form("dict", engine="serial")
    run_form("dict", engine="serial", rounds=1, out=str(tmp_path / "run"))
    (x, y), model = make_data("dict"), make_model()
    other = {"image": x["image"], "numbers": x["numbers"] + 1}
    with pytest.raises(ShoalError, match="data are not those"):
        shoal.resume(tmp_path / "run", data=(other, y), model=model, rounds=2)
    assert_same_run(shoal.resume(tmp_path / "run", data=(x, y), model=model, rounds=2), whole)


@pytest.mark.parametrize("form", ["dict", "tuple"])
@pytest.mark.parametrize("ending", ["pt2", "onnx", "safetensors"])
def test_a_model_of_trees_is_exported(form, ending, tmp_path):
    if ending == "onnx":
        pytest.importorskip("onnxscript")
    run_form(form, engine="serial", precision="float32", rounds=1, out=str(tmp_path / "run"))
    exported = shoal.export(tmp_path / "run", tmp_path / f"model.{ending}")
    assert "float32 (batch, 1, 4, 4)" in str(exported) and "float32 (batch, 3)" in str(exported)


class Pairs(torch.utils.data.Dataset):
    """A torch data set whose samples are dicts, with yes and no for a mask and a number for each sample."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        return {"ids": torch.arange(3) + i, "mask": torch.arange(3) > i % 3, "age": float(i)}, i % 2


def test_a_torch_data_set_may_give_dicts():
    data = build_user_dataset(Pairs(), test_share=0.25)
    assert isinstance(data.inputs, dict) and isinstance(data.test_inputs, dict)
    assert data.input_shape == {"ids": (3,), "mask": (3,), "age": ()}
    assert data.inputs["mask"].dtype == torch.int64 and int(data.inputs["mask"].max()) == 1
    moved = data.to(torch.float64, torch.device("cpu"))
    assert isinstance(moved.inputs, dict) and moved.inputs["age"].dtype == torch.float64
    assert len(data.targets) == 9 and len(data.test_inputs["age"]) == 3


def test_devices_and_halves_may_give_dicts_in_any_order():
    x, y = make_data("dict")
    swapped = {"numbers": x["numbers"], "image": x["image"]}
    data = build_user_dataset([(x, y), (x, y)], test=(swapped, y))
    assert isinstance(data.inputs, dict) and len(data.inputs["image"]) == 2 * COUNT
    assert isinstance(data.test_inputs, dict) and list(data.test_inputs) == ["image", "numbers"]


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda x, y: {"x": {**x, "numbers": x["numbers"][:5]}, "y": y}, "90, 5 rows"),
        (lambda x, y: {"x": {**x, "numbers": x["numbers"] / 0}, "y": y}, "not finite"),
        (lambda x, y: {"x": x, "y": y, "test_x": {"image": x["image"]}, "test_y": y}, "test samples a dict"),
        (lambda x, y: {"x": {}, "y": y}, "without names"),
        (lambda x, y: [(x, y), ((x["image"], x["numbers"]), y)], "differ in shape or type"),
    ],
)
def test_trees_that_do_not_fit_are_refused(change, words):
    with pytest.raises(ShoalError, match=words):
        build_user_dataset(change(*make_data("dict")))


def test_a_perceptron_takes_whole_numbers():
    images, numbers, labels = make_samples()
    whole = {"table": (3 * numbers).round().long(), "more": (3 * numbers).round().long()}
    real = {name: value.double() for name, value in whole.items()}
    recipe: dict[str, Any] = RECIPE | {"engine": "serial", "model": "mlp"}
    assert_same_run(shoal.run(data=(whole, labels), **recipe), shoal.run(data=(real, labels), **recipe))

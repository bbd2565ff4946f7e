"""Typical mistakes of users outside of data, each with the sentence and the advice that it gets.

Those with data are in tests/data/test_mistakes.py.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ShoalError
from shoal.runs.recipe import Recipe
from shoal.runs.recipe_files import parse_recipe_pairs, read_recipe_file

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=1, steps="1", batch=4, split="iid", engine="serial")
TABLE = (torch.randn(60, 5, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)
WORDS = (torch.arange(30).repeat(2)[:, None].expand(60, 4).contiguous(), torch.arange(60) % 3)
MODELS = """
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        return self.fc(x.flatten(1))


class SevenClasses(Plain):
    def __init__(self):
        super().__init__(7)


class Answers(Plain):
    def forward(self, x):
        return super().forward(x).argmax(1)


class Probabilities(Plain):
    def forward(self, x):
        return super().forward(x).softmax(1)


class ForMnist(nn.Sequential):
    def __init__(self, classes):
        super().__init__(nn.Flatten(), nn.Linear(784, classes))


class Pair(Plain):
    def forward(self, x):
        return super().forward(x), x


class Nothing(nn.Module):
    def forward(self, x):
        return x.flatten(1)[:, :10]


class Frozen(Plain):
    def __init__(self, classes):
        super().__init__(classes)
        self.requires_grad_(False)


class NoFile(nn.Module):
    def __init__(self, classes):
        raise FileNotFoundError("weights.pt")


class NotFinite(Plain):
    def __init__(self, classes):
        super().__init__(classes)
        nn.init.constant_(self.fc.weight, float("inf"))


class WantsThree(nn.Module):
    def __init__(self, depth, heads, width):
        super().__init__()


class InPlace(Plain):
    def forward(self, x):
        hidden = super().forward(x).exp()
        hidden += 1
        return hidden.sigmoid().add_(1)


class DoubleInTraining(Plain):
    def forward(self, x):
        return super().forward(x.double() if self.training else x)


class FewWords(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.head(self.embed(x).mean(1))


def half(classes):
    return Halved(classes).half()


class Halved(Plain):
    def forward(self, x):
        return self.fc(x.flatten(1).half())


def forgot_to_return(classes):
    Plain(classes)


SIZE = 3


def mean_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)


def detached_loss(outputs, targets):
    return (outputs.argmax(1) != targets).float()
"""

MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    # methods
    ({"method": "fedpox"}, "no method called 'fedpox'", "'fedprox'"),
    ({"method": "FedProx(0.1)"}, "cannot be read: values of", "mu=0.1"),
    ({"method": "fedprox(mu=-1)"}, "fedprox needs mu >= 0, got mu=-1.0", "Give another value"),
    ({"method": "fedprox(nu=1)"}, "no value of fedprox called 'nu'", "'mu'"),
    ({"method": "fedprox("}, "its brackets, commas or plus signs", "+ between them"),
    ({"method": ["fedavg", "fedprox"]}, "method lists the texts 'fedavg', 'fedprox'", 'Write "fedavg+fedprox"'),
    ({"method": "fedprox+fedprox"}, "it is listed twice", "once"),
    ({"method": "median+trimmedmean"}, "both decide how replies are combined", "Keep one"),
    ({"method": "scaffold", "optimiser": "adam"}, "scaffold cannot be used with the optimiser adam", "sgd"),
    ({"method": "scaffold", "lr_groups": "fc2.*=10"}, "scaffold cannot be used with lr_groups", "Leave out"),
    ({"method": "feddu"}, "feddu trains on samples of the server, and there are none", "--server-data"),
    ({"method": "mixup", "accumulate": 2}, "mixup cannot be used with accumulate", "Leave out"),
    ({"method": "cutmix", "data": (torch.zeros(9, 2, 5), torch.arange(9))}, "boxes out of images", "Leave cutmix"),
    ({"parts": ("missing.py",)}, "no file missing.py", "path"),
    # numbers
    ({"lr": -0.1}, "lr is -0.1", "at least 0"),
    ({"lr": "0.1"}, "lr is the text '0.1', and must be a number", "without quotes"),
    ({"lr": float("nan")}, "lr is nan", "finite"),
    ({"momentum": 1.0}, "momentum is 1.0", "0.9999"),
    ({"momentum": 0.9, "optimiser": "adam"}, "which has momentum of its own", "beta1"),
    ({"nesterov": True}, "nesterov is given without momentum", "above 0"),
    ({"rounds": 0}, "rounds is 0", "from 1"),
    ({"rounds": 2.5}, "rounds is 2.5, and must be a whole number", "rounds = 30"),
    ({"sample": 50}, "sample is 50", "at most devices, which is 4"),
    ({"batch": 0}, "batch is 0", "from 1"),
    ({"steps": "2.5"}, "steps is '2.5'", "whole number of steps"),
    ({"steps": "", "epochs": "5-1"}, "epochs is '5-1'", "like 1-5"),
    ({"steps": [1, 2, 3, 4, 5]}, "steps has 5 values, and there are 4 devices", "at most one"),
    ({"until_accuracy": 90}, "until_accuracy is 90.0", "from 0 to 1"),
    ({"validation": 1.0}, "validation is 1.0", "0.9"),
    ({"label_smoothing": 1.5}, "label_smoothing is 1.5", "0.99"),
    ({"class_weights": "1,2"}, "class_weights is '1,2'", "10 numbers"),
    ({"batch": 1, "model": "resnet18"}, "batch is 1, and batch norm needs several samples", "2 or more"),
    # names
    ({"learning_rate": 0.1}, "no recipe key called 'learning_rate'", "called lr here"),
    ({"num_clients": 10}, "no recipe key called 'num_clients'", "called devices here"),
    ({"roundz": 3}, "no recipe key called 'roundz'", "'rounds'"),
    ({"optimiser": "rmsprop"}, "no optimiser called 'rmsprop'", "adam, adamw, sgd"),
    ({"metrics": ("accuracy",)}, "accuracy need not be asked for", "Leave it out"),
    ({"metrics": ("f1",)}, "no metric called 'f1'", "f1_macro"),
    ({"metrics": ("rmse",)}, "rmse means nothing for the task classify", "It knows"),
    ({"headline": "acc"}, "no headline called 'acc'", "'accuracy'"),
    ({"task": "classification"}, "no task called 'classification'", "'classify'"),
    ({"loss": "mse"}, "the task classify has one loss", "FILE.py:NAME"),
    ({"split": "noniid"}, "no split called 'noniid'", "'iid'"),
    ({"fleet": "fast"}, "no fleet called 'fast'", "tiers"),
    ({"engine": "gpu"}, "no engine called 'gpu'", "serial"),
    ({"compute": "tpu"}, "compute is 'tpu'", "cuda"),
    ({"precision": "tf32"}, "precision is tf32, and only a GPU has it", "float32"),
    # settings that contradict each other or the data
    ({"width": 4}, "width is 4, and engine is serial", "batched"),
    ({"lr_schedule": "cosine"}, "lr_schedule is 'cosine'", "cosine:ROUNDS"),
    ({"lr_groups": {"head.*": 10.0}}, "lr_groups names 'head.*', and no parameter", "fc1.weight"),
    ({"lr_groups": "fc2"}, "lr_groups is 'fc2'", "NAME=FACTOR"),
    ({"augment": "blur"}, "augmentation 'blur' cannot be read", "rotate:DEGREES"),
    ({"augment": "rotate:400"}, "augmentation 'rotate:400' cannot be read", "from 0 to 180"),
    ({"augment": "flip", "data": TABLE}, "augment is for images, and the data has samples of shape (5,)", "Leave"),
    ({"init": "missing.safetensors"}, "no file missing.safetensors", "first weights"),
    # models
    ({"model": "resnet"}, "no model called 'resnet'", "'resnet18'"),
    ({"model": "lstm"}, "needs sequences of words", "lenet"),
    ({"model": nn.Linear}, "model is the class Linear", "Linear(...)"),
    ({"model": "models.py"}, "is a file, and says not which class", "models.py:NAME"),
    ({"model": "models.py:Plane"}, "has nothing called 'Plane'", "Plain"),
    ({"model": "models.py:SIZE"}, "it is no class and no function", "makes the model"),
    ({"model": "models.py:SevenClasses"}, "it returns (2, 7) for 2 samples and 10 classes", "(batch, 10)"),
    ({"model": "models.py:Answers"}, "it returns whole numbers", "a logit for each class"),
    ({"model": "models.py:ForMnist"}, "shapes cannot be multiplied (2x64 and 784x10)", "data of another shape"),
    ({"model": "models.py:Pair"}, "it returns a tuple and no tensor", "under `logits`"),
    ({"model": "models.py:Nothing"}, "it has no parameters to train", "a layer with weights"),
    ({"model": "models.py:Frozen"}, "it has no parameters to train", "a layer with weights"),
    ({"model": "models.py:NoFile"}, "raises FileNotFoundError: weights.pt when it is made", "Correct it"),
    ({"model": "models.py:NotFinite"}, "first weights that are not finite (fc.weight)", "finite ones"),
    (
        {"model": "models.py:InPlace"},
        "a step with it raises RuntimeError: one of the variables needed",
        "operations in place",
    ),
    ({"model": "models.py:DoubleInTraining"}, "a step with it raises RuntimeError: mat1 and mat2", "types"),
    ({"model": "models.py:half"}, "it raises RuntimeError: mat1 and mat2", "types"),
    (
        {"model": "models.py:FewWords", "data": WORDS},
        "its embedding with 20 rows is too small for the tokens, of which the largest in the data is 29",
        "Give its embedding 30 rows or more",
    ),
    ({"model": "models.py:WantsThree"}, "it wants 3 values (depth, heads, width)", "(input_shape, classes)"),
    ({"model": "models.py:forgot_to_return"}, "it is nothing and no torch.nn.Module", "Give a module"),
    ({"loss": "models.py:mean_loss"}, "it gives shape () for 2 samples, and not one number for each", "reduction"),
    ({"loss": "models.py:detached_loss"}, "it has no gradient", "torch operations"),
]

WARNINGS: list[tuple[dict[str, Any], str]] = [
    ({"lr": 0}, "lr is 0, so that no device learns anything"),
    ({"epochs": 3}, "epochs is 3 and steps is 1: steps count"),
    ({"accumulate": 9}, "accumulate is 9, and a batch has 4 samples"),
    ({"model": "models.py:Probabilities"}, "returns probabilities, and the loss expects logits"),
]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)


def name_row(row: tuple) -> str:
    return ",".join(f"{key}={str(value)[:30]}" for key, value in row[0].items() if key != "data")


@pytest.mark.parametrize("row", MISTAKES, ids=name_row)
def test_a_mistake_gets_one_sentence_and_an_advice(row, in_folder):
    changes, sentence, advice = row
    with pytest.raises(ShoalError) as caught:
        shoal.run(**TINY | changes)
    problem = caught.value.problem
    assert sentence in problem and advice in caught.value.advice
    assert problem.endswith(".") and "\n" not in problem and "Traceback" not in problem


@pytest.mark.parametrize("row", WARNINGS, ids=name_row)
def test_what_is_probably_a_mistake_is_said(row, in_folder, caplog):
    changes, sentence = row
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.run(**TINY | changes)
    assert sentence in caplog.text


def test_nothing_is_said_where_nothing_is_wrong(in_folder, caplog):
    with caplog.at_level(logging.WARNING, "shoal"):
        shoal.run(**TINY | {"model": "models.py:Plain", "accumulate": 2})
    assert not caplog.records


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("rounds = 5\n[model]\nname = 'mlp'\n", "has a table [model]"),
        ("rounds 5\n", "is not a TOML file"),
        ("rounds = '5'\n", "rounds is the text '5', and must be a whole number"),
        ("batch_size = 5\n", "no recipe key called 'batch_size'"),
        ("lr_groups = {fc = 'fast'}\n", "lr_groups is 'fc=fast'"),
    ],
)
def test_a_mistake_in_a_recipe_file(text, sentence, tmp_path):
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(ShoalError) as caught:
        Recipe().with_values(**read_recipe_file(tmp_path / "recipe.toml"))
    assert sentence in caught.value.problem


def test_a_method_in_the_place_of_a_recipe_is_told_where_it_belongs():
    with pytest.raises(ShoalError) as caught:
        read_recipe_file(Path("fedprox"))
    assert "--method fedprox" in caught.value.advice


@pytest.mark.parametrize(
    "pair, sentence",
    [("rounds", "not of the form key=value"), ("rounds=ten", "rounds is 'ten'"), ("nesterov=1", "is '1'")],
)
def test_a_mistake_behind_s(pair, sentence):
    with pytest.raises(ShoalError) as caught:
        parse_recipe_pairs([pair])
    assert sentence in caught.value.problem

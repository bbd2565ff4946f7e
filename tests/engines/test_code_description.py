"""Descriptions of code and settings: alike in every process, others for other code, none where nothing is certain."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from shoal.core.optimiser import Optimiser
from shoal.engines.batched.code_description import Indescribable, describe_values
from shoal.parts.fedprox import FedProx

SOURCE = """
import math
from dataclasses import dataclass
import torch
from shoal import Part

SCALE = 3.0

def helper(x):
    return x.{call}() * SCALE

@dataclass(frozen=True)
class Own(Part):
    mu: float = 0.1
    def objective(self, inner, local):
        return lambda params, batch: inner(params, batch)._replace(loss=helper(inner(params, batch).loss) * {factor})
"""


def describe_source(**words: object) -> str:
    """The description of a part that is defined by a text."""
    names: dict = {"__name__": "elsewhere"}
    exec(compile(SOURCE.format(**{"call": "exp", "factor": 2} | words), "part.py", "exec"), names)
    names["SCALE"] = words.get("scale", 3.0)
    return describe_values(names["Own"](mu=words.get("mu", 0.1)))


def test_code_from_elsewhere_counts_with_all_that_it_refers_to():
    same = describe_source()
    assert describe_source() == same
    others = [describe_source(factor=3), describe_source(call="log"), describe_source(scale=4.0), describe_source(mu=1)]
    assert len({same, *others}) == 5
    assert describe_source(factor=2.0) != same, "2 and 2.0 make other operations"


def test_code_of_shoal_and_torch_counts_by_name_and_settings():
    one, other = describe_values(FedProx(0.1), Optimiser()), describe_values(FedProx(0.2), Optimiser())
    assert one == describe_values(FedProx(0.1), Optimiser()) != other
    assert describe_values(Optimiser(momentum=0.9)) != describe_values(Optimiser(momentum=0.5))


def test_layers_count_with_settings_and_shapes_and_not_with_values():
    def make(kernel: int, activation: nn.Module, seed: int) -> str:
        torch.manual_seed(seed)
        return describe_values(nn.Sequential(nn.Conv2d(1, 2, kernel), activation, nn.Linear(3, 2)))

    assert make(3, nn.ReLU(), 0) == make(3, nn.ReLU(), 1)
    assert (
        len({make(3, nn.ReLU(), 0), make(5, nn.ReLU(), 0), make(3, nn.GELU(), 0), make(3, nn.LeakyReLU(0.5), 0)}) == 4
    )


HEADER = """
from dataclasses import dataclass
from functools import wraps
import torch.nn.functional as F
from torch import nn
"""
HIDDEN = {
    "a wrapper with the name of a function of torch": """
@wraps(F.relu)
def act(x):
    return F.relu(x) * FACTOR
class Own(nn.Module):
    def forward(self, x):
        return act(x)
made = Own()""",
    "a class that torch made of another": """
class Twice(nn.Module):
    def forward(self, weight):
        return weight * 2
class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x) * FACTOR
made = nn.utils.parametrize.register_parametrization(Own(2, 2), "weight", Twice())""",
    "an attribute of a function": """
def act(x):
    return x * act.factor
act.factor = FACTOR
class Own(nn.Module):
    def forward(self, x):
        return act(x)
made = Own()""",
    "a method that dataclass would have made": """
@dataclass
class Setting:
    number: int = 1
    def __eq__(self, other):
        return FACTOR
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.setting = Setting()
    def forward(self, x):
        return x * (self.setting == 1)
made = Own()""",
    "a metaclass": """
class Meta(type):
    def scale(cls, x):
        return x * FACTOR
class Scale(metaclass=Meta):
    pass
class Own(nn.Module):
    def forward(self, x):
        return Scale.scale(x)
made = Own()""",
    "a list with methods": """
def make():
    class Scales(list):
        def scale(self, x):
            return x * FACTOR
    return Scales()
class Own(nn.Module):
    def __init__(self, scales):
        super().__init__()
        self.scales = scales
    def forward(self, x):
        return self.scales.scale(x)
made = Own(make())""",
}


@pytest.mark.parametrize("source", HIDDEN.values(), ids=HIDDEN)
def test_code_counts_wherever_it_is(source):
    def describe(factor: int) -> str:
        names: dict = {"__name__": "elsewhere"}
        exec(compile(HEADER + source.replace("FACTOR", str(factor)), "model.py", "exec"), names)
        return describe_values(names["made"])

    assert describe(2) == describe(2) != describe(3)


class Reader(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * len(open("/etc/hostname").read())


class Importer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        import random as chance

        return x * chance.choice([1, 2])


class Environment(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * float(os.sep == "/")


class Holder(nn.Module):
    def __init__(self, thing: object):
        super().__init__()
        self.thing = thing


@dataclass(frozen=True)
class Box:
    content: object


def make_hooked_layer() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda *_: print(open))
    return layer


@pytest.mark.parametrize(
    "value",
    [
        Reader(),
        Importer(),
        Environment(),
        Holder(torch.ones(2)),
        Holder(object()),
        Holder(iter(())),
        Box(object()),
        make_hooked_layer(),
        object(),
        os,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_certain_is_not_described(value):
    with pytest.raises(Indescribable):
        describe_values(value)


def test_a_description_is_the_same_in_another_process():
    program = """
from shoal.engines.batched.code_description import describe_values
from shoal.models import build_model
from shoal.parts.moon import MOON
import hashlib
net = build_model("resnet18", (3, 32, 32), 10, 0)
print(hashlib.sha256(describe_values(net.module, MOON(), {"a", "b", "c", "d"}).encode()).hexdigest())
"""
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]

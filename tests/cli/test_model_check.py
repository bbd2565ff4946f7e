"""The command `check`: facts, methods by reason, JSON, exit codes."""

import json
from pathlib import Path

import pytest

from shoal.runs.method_trials import list_method_names
from tests.cli.test_cli import _shoal  # noqa: F401  (the fixture shoal_)

FILE = """
from torch import nn


class Branches(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc = nn.Linear(64, classes)

    def forward(self, x):
        return self.fc(x.flatten(1) * 2 if x.sum() > 0 else x.flatten(1))


class Wrong(Branches):
    def forward(self, x):
        return super().forward(x)[:, :3]
"""


@pytest.fixture
def file(shoal_) -> str:
    Path("net.py").write_text(FILE)
    return "net.py"


def test_a_model_of_the_zoo_is_trained_by_every_method_that_needs_no_positions(shoal_):
    said = shoal_("check", "mlp", "--json")
    found = json.loads(said.out)
    assert said.code == 0 and found["vectorised"] and found["axes"] == {"fc1": 128} and found["parameters"] == 9610
    assert {trial["method"] for trial in found["methods"]} == set(list_method_names())
    others = [trial for trial in found["methods"] if not (trial["trains"] and trial["vectorised"])]
    assert [trial["method"] for trial in others] == ["prompt"] and "puts vectors among positions" in others[0]["reason"]
    assert found["step_seconds"].keys() == {"serial", "batched"}


def test_reasons_are_told_once_for_all_methods_that_have_them(shoal_, file):
    said = shoal_("check", "net.py:Branches")
    text = " ".join(said.out.replace("│", " ").split())
    assert said.code == 0 and "it branches on the value of a tensor; devices train one after the other" in text
    assert text.count("leaves out units") == 1 and "fjord" in text
    found = json.loads(shoal_("check", "net.py:Branches", "--json").out)
    causes = {trial["cause"] for trial in found["methods"] if not trial["trains"]}
    assert causes == {
        "it leaves out units, and this model has none that it could leave out.",
        "it works on blocks of a model, and this one has fewer than two.",
        "it keeps every layer of this model on the devices, and nothing is left to share.",
        "it finds no linear layer to add to, but the last one, and the model calls no other.",
        "it trains biases, and this model has none but its last layer's.",
        "it puts vectors among positions, and this model calls no nn.Embedding with tokens, nor cuts images.",
    }


def test_one_method_alone_decides_the_exit_code(shoal_, file):
    assert shoal_("check", "net.py:Branches", "--method", "scaffold").code == 0
    said = shoal_("check", "net.py:Branches", "--method", "fjord", "--json")
    assert said.code == 14 and "fjord leaves out units" in said.err
    assert [trial["method"] for trial in json.loads(said.out)["methods"]] == ["fjord"]


@pytest.mark.parametrize(
    "words, code, sentence",
    [
        (["net.py:Wrong"], 14, "it returns (2, 3) for 2 samples and 10 classes"),
        (["net.py:Missing"], 14, "has nothing called 'Missing'"),
        (["lenett"], 10, "no model called 'lenett'"),
        (["vit", "--model", "mlp"], 11, "check has no --model"),
        (["mlp", "--method", "fedpox"], 10, "no method called 'fedpox'"),
    ],
)
def test_what_cannot_be_tried_is_refused(shoal_, file, words, code, sentence):
    said = shoal_("check", *words)
    assert said.code == code and sentence in said.err and not said.out

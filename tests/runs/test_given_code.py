"""Methods, parts, metrics and fleets that a program hands over as objects: they run, and only the same ones go on."""

import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import shoal
from shoal.core.errors import ShoalError
from shoal.fleet.user_fleet import HANDED_OVER_FLEETS
from shoal.parts import FedProx, Median, Scaffold
from shoal.plugins.load import HANDED_OVER_PARTS
from shoal.plugins.metrics import HANDED_OVER_METRICS
from shoal.runs.code_fingerprint import fingerprint_code
from shoal.storage.python_file import load_python_file

TINY: dict[str, Any] = dict(devices=4, sample=2, rounds=4, split="iid", engine="serial", checkpoint_every=1)


@dataclass(frozen=True)
class Damp(shoal.Part):
    """Takes a share of every step of the server: x <- a + f (x - a)."""

    factor: float = 0.5

    def serve(self, params, state, round):
        return {k: round.anchor[k] + self.factor * (v - round.anchor[k]) for k, v in params.items()}, state


@dataclass(frozen=True)
class Weighted2(shoal.Part):
    """Has a value that no expression can hold: the weights themselves."""

    values: tuple = ()
    made: Any = field(default=None)


def share_of_zeros(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == 0).float().mean()


class Count:
    """A metric that is given the test set piece by piece."""

    def __init__(self):
        self.seen = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.seen += len(targets)

    def compute(self) -> int:
        return self.seen


def end_of_program() -> None:
    for registry in (HANDED_OVER_PARTS, HANDED_OVER_METRICS, HANDED_OVER_FLEETS):
        registry.clear()


def stop_after_two(recipe, row, history):
    if len(history) == 2:
        raise KeyboardInterrupt


def refused(kind: str, words: str, call, *given: Any, **more: Any) -> None:
    with pytest.raises(ShoalError, match=words) as error:
        call(*given, **more)
    assert error.value.kind.name == kind, error.value


# Methods


@pytest.mark.parametrize(
    ("method", "expression"),
    [
        ([FedProx(0.1), Scaffold()], "fedprox(mu=0.1)+scaffold"),
        (FedProx(0.1), "fedprox(mu=0.1)"),
        (Median, "median"),
        ([FedProx(0.1), "scaffold"], "fedprox(mu=0.1)+scaffold"),
        (shoal.compose([FedProx(0.1)]), "fedprox(mu=0.1)"),
        ([], "fedavg"),
        ([Damp(0.25), FedProx(0.1)], "damp(factor=0.25)+fedprox(mu=0.1)"),
    ],
    ids=str,
)
def test_a_method_is_a_text_a_part_or_a_list_of_parts(method, expression):
    given = shoal.run(method, **TINY)
    files = dict(parts=[Damp]) if "damp" in expression else {}
    assert given.recipe.method == expression
    assert given.history.equals_except_wall_time(shoal.run(expression, **files, **TINY).history)


def test_shipped_parts_have_public_names():
    assert shoal.parts.FedProx is FedProx and "Scaffold" in dir(shoal.parts)
    with pytest.raises(ImportError):
        from shoal.parts import FedPox  # noqa: F401
    with pytest.raises(AttributeError, match="there is FedProx"):
        shoal.parts.FedPrx  # noqa: B018


def test_what_is_no_method_is_refused():
    refused("bad-value", "A int is no method", shoal.run, 3, **TINY)
    refused("bad-value", "lists a float", shoal.run, [FedProx(), 0.5], **TINY)
    refused("bad-value", "a value that a recipe cannot hold", shoal.run, [Weighted2((1, 2))], **TINY)
    refused("bad-part", "not a frozen dataclass", shoal.run, [type("Bare", (shoal.Part,), {})()], **TINY)
    refused("bad-value", "parts is .3., and must be a list of texts", shoal.run, "fedavg", parts=[3], **TINY)
    refused("bad-value", "object is no part", shoal.run, "fedavg", parts=[object()], **TINY)
    refused("bad-value", "method lists the texts", shoal.run, ["fedavg", "scaffold"], **TINY)
    same_name = dataclass(frozen=True)(type("FedProx", (shoal.Part,), {"__module__": __name__}))
    refused("clash", "already the name", shoal.run, [same_name()], **TINY)


def test_a_part_that_raises_is_blamed_though_it_is_in_no_file():
    names: dict[str, Any] = {"shoal": shoal, "dataclass": dataclass, "__name__": "__main__"}
    code = "@dataclass(frozen=True)\nclass Fails(shoal.Part):\n    def serve(self, params, state, round):\n"
    code += "        if round.number == 3:\n            raise KeyError('no')\n        return params, state\n"
    exec(compile(code, "<cell 3>", "exec"), names)
    refused("bad-part", "fails cannot be used: it raises KeyError.*line 5", shoal.run, names["Fails"](), **TINY)


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="pool forks")
def test_workers_that_are_forked_have_the_objects():
    pooled, serial = (
        shoal.run(Damp(0.1), metrics=[share_of_zeros], **{**TINY, "engine": e}) for e in ("pool", "serial")
    )
    assert pooled.engine is not None and pooled.engine.engine == "pool"
    assert pooled.history["loss"] == pytest.approx(serial.history["loss"], rel=1e-4)


# Metrics and fleets


def test_metrics_are_functions_and_objects():
    result = shoal.run(metrics=[share_of_zeros, Count(), "top3"], headline="share_of_zeros", **TINY)
    row = result.history.rows[-1]
    assert row["Count"] == 360 and 0 <= row["share_of_zeros"] <= 1 and row["top3"] > 0
    assert result.history.headline == "share_of_zeros"
    named = shoal.run(metrics={"zeros": share_of_zeros, "half": lambda logits, targets: 0.5}, **TINY)
    assert named.history["zeros"] == result.history["share_of_zeros"] and named.history["half"] == [0.5] * 4
    assert shoal.run(metrics=share_of_zeros, **TINY).history["share_of_zeros"] == named.history["zeros"]


def test_what_is_no_metric_is_refused():
    refused("bad-value", "called '<lambda>'", shoal.run, metrics=[lambda logits, targets: 1.0], **TINY)
    refused("bad-value", "A int is no metric", shoal.run, metrics={"three": 3}, **TINY)
    refused("bad-part", "accuracy cannot be used: the history has", shoal.run, metrics={"accuracy": Count}, **TINY)
    refused("bad-part", "broken cannot be used: it raises", shoal.run, metrics={"broken": lambda a, b: 1 / 0}, **TINY)


def test_a_fleet_is_a_list_of_speeds_or_an_object():
    def seconds(fleet: Any) -> float:
        return shoal.run(fleet=fleet, **{**TINY, "sample": 4}).history.total("sim_seconds")

    even = seconds("uniform")
    assert seconds([1, 1, 1, 1]) == even and seconds([1, 1, 1, 0.5]) > even > seconds(torch.full((4,), 2.0).tolist())
    profiles = [shoal.DeviceProfile(seconds=s) for s in (1.0, 2.0, 3.0, 4.0)]
    own = SimpleNamespace(get_profile=lambda device, round: profiles[device])
    assert seconds(profiles) == seconds(own) > 16
    refused("bad-value", "lists 3 devices, and there are 4", shoal.run, fleet=[1, 2, 3], **TINY)
    refused("bad-value", "speed of device 1 is -1", shoal.run, fleet=[1, -1, 3, 1], **TINY)
    refused("bad-value", "A int is no fleet", shoal.run, fleet=3, **TINY)
    refused("bad-value", "has 'fast' for device 0", shoal.run, fleet=["fast"] * 4, **TINY)
    wrong = SimpleNamespace(get_profile=lambda device, round: device)
    refused("bad-part", "gives a int", shoal.run, fleet=wrong, **TINY)


# Resume


def begin(out: Path, **more: Any) -> shoal.Result:
    """A run with objects that was stopped by a program which then ended; the same one that was never stopped."""
    recipe: dict[str, Any] = dict(metrics=[share_of_zeros], fleet=[1.0, 2.0, 3.0, 4.0], **TINY) | more
    whole = shoal.run([Damp(0.25), Scaffold()], **recipe)
    with pytest.raises(ShoalError, match=r"parts=\.\.\., metrics=\.\.\., fleet=\.\.\.\) in the program goes on"):
        shoal.run([Damp(0.25), Scaffold()], out=str(out), watch=stop_after_two, **recipe)
    end_of_program()
    return whole


def test_a_run_goes_on_with_the_same_objects(tmp_path):
    whole = begin(tmp_path / "a")
    given: dict[str, Any] = dict(metrics=[share_of_zeros], fleet=[1.0, 2.0, 3.0, 4.0])
    missing = r"used parts and metrics and a fleet that a Python program had made"
    refused("no-data", missing, shoal.resume, tmp_path / "a")
    refused("no-data", "used parts that a Python program", shoal.resume, tmp_path / "a", **given)
    result = shoal.resume(tmp_path / "a", method=[Damp(0.25), Scaffold()], **given)
    assert result.history.equals_except_wall_time(whole.history)
    end_of_program()
    assert len(shoal.resume(tmp_path / "a", parts=[Damp], rounds=5, **given).history) == 5


def test_other_objects_are_refused(tmp_path):
    begin(tmp_path / "a")

    @dataclass(frozen=True)
    class Damp(shoal.Part):
        factor: float = 0.5

        def serve(self, params, state, round):
            return params, state

    def share_of_zeros(logits, targets):
        return (logits.argmax(-1) == 1).float().mean()

    begun = "was begun with: its code or its settings differ"
    refused("other-recipe", f"part damp is not the one.*{begun}", shoal.resume, tmp_path / "a", parts=[Damp])
    refused(
        "other-recipe", f"metric share_of_zeros is .*{begun}", shoal.resume, tmp_path / "a", metrics=[share_of_zeros]
    )
    refused("other-recipe", f"fleet is not .*{begun}", shoal.resume, tmp_path / "a", fleet=[1, 1, 1, 1])
    refused("other-recipe", "begun without a part weighted2", shoal.resume, tmp_path / "a", parts=[Weighted2])
    refused("bad-value", "a method cannot be changed", shoal.resume, tmp_path / "a", method=[FedProx(0.1)])


def test_comparisons_and_tunings_take_objects_and_go_on_with_them(tmp_path):
    out = str(tmp_path / "c")
    comparison = shoal.compare(["fedavg", [Damp(0.25), FedProx(0.1)]], metrics=[share_of_zeros], out=out, **TINY)
    assert list(comparison.results) == ["fedavg", "damp(factor=0.25)+fedprox(mu=0.1)"]
    end_of_program()
    refused("no-data", "parts=..., metrics=...", lambda: shoal.resume(out, rounds=5))
    objects: dict[str, Any] = dict(method=["fedavg", [Damp(0.25), FedProx(0.1)]], metrics=[share_of_zeros])
    assert all(len(r.history) == 5 for rs in shoal.resume(out, rounds=5, **objects).results.values() for r in rs)
    tuning = shoal.tune([Damp()], ["damp.factor=0.5,1.0"], out=str(tmp_path / "t"), **TINY)
    best = tuning.find_best("damp")
    assert best is not None and best.settings["damp.factor"] == 1.0
    assert "parts=parts" in tuning.format_command("damp")
    end_of_program()
    refused("no-data", r"names a part \(damp\)", shoal.resume, tmp_path / "t")
    assert len(shoal.resume(tmp_path / "t", parts=[Damp]).table()) == 2


def test_processes_of_a_comparison_get_what_can_be_imported():
    @dataclass(frozen=True)
    class Local(shoal.Part):
        """A part that only this function knows, which no other process can import."""

    refused(
        "bad-value", "parts cannot be given to other processes", shoal.compare, ["fedavg", Local], workers=2, **TINY
    )


def test_a_model_trained_with_objects_is_exported(tmp_path):
    begin(tmp_path / "a")
    given: dict[str, Any] = dict(parts=Damp, metrics=[share_of_zeros], fleet=[1.0, 2.0, 3.0, 4.0])
    assert shoal.export(tmp_path / "a", tmp_path / "m.safetensors", **given).path.is_file()


# Fingerprints


def test_code_is_known_by_its_source_and_by_what_it_calls(tmp_path):
    text = "from dataclasses import dataclass\nimport shoal\nSCALE = 2\ndef double(x):\n    return SCALE * x\n"
    text += "@dataclass(frozen=True)\nclass Twice(shoal.Part):\n    '''Says nothing.'''\n    by: float = 1.0\n"
    text += (
        "    def serve(self, params, state, round):\n        return {k: double(v) for k, v in params.items()}, state\n"
    )

    def fingerprint(source: str, name: str) -> str:
        (tmp_path / name).write_text(source)
        return fingerprint_code(load_python_file(tmp_path / name).Twice)

    changes: dict[str, Any] = {
        "a.py": ("x", "x"),
        "b.py": ("SCALE", "# a remark\nSCALE", 1),
        "c.py": ("SCALE = 2", "SCALE = 3"),
    }
    changes |= {"d.py": ("SCALE * x", "x + x"), "e.py": ("by: float = 1.0", "by: float = 2.0")}
    found = {name: fingerprint(text.replace(*change), name) for name, change in changes.items()}
    assert found["a.py"] == found["b.py"] and len(set(found.values())) == 4
    program = "import runpy, sys; from shoal.runs.code_fingerprint import fingerprint_code as f\n"
    program += "print(f(runpy.run_path(sys.argv[1])['Twice']))"
    command = [sys.executable, "-c", program, str(tmp_path / "a.py")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == found["a.py"]


def test_functions_objects_and_what_is_bound_to_them_have_fingerprints():
    def scaled(by: float):
        return lambda logits, targets: by

    things = [share_of_zeros, Count(), Count, scaled(1.0), scaled(2.0), partial(share_of_zeros, targets=torch.ones(1))]
    things += [partial(share_of_zeros, targets=torch.zeros(1)), torch.nn.ReLU(), torch.nn.Tanh()]
    assert len({fingerprint_code(thing) for thing in things}) == len(things)
    assert fingerprint_code(scaled(1.0)) == fingerprint_code(scaled(1.0))
    before = fingerprint_code(Damp)
    shoal.run(Damp(), **TINY)
    assert fingerprint_code(Damp) == before

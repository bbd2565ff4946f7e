"""What notebooks and terminals show of public objects: short, and never the numbers of tensors."""

import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass
from html.parser import HTMLParser
from typing import Any

import pytest
import torch

import shoal
from shoal.core.builtin_tasks import CLASSIFY
from shoal.core.errors import ShoalError
from shoal.data.dataset import read_digits
from shoal.display.html import draw_sparkline, render_html_table
from shoal.display.quantities import format_count, format_number, format_size
from shoal.runs.history import History

SMALL: dict[str, Any] = dict(devices=4, sample=2, rounds=6, split="iid", engine="serial")


@pytest.fixture(scope="module")
def result() -> shoal.Result:
    return shoal.run("scaffold", **SMALL)


@pytest.fixture(scope="module")
def comparison() -> shoal.Comparison:
    return shoal.compare(["fedavg", "fedprox(mu=0.1)"], seeds=2, target=0.7, **SMALL)


@pytest.fixture(scope="module")
def tuning() -> shoal.Tuning:
    return shoal.tune(["fedprox"], ["lr=0.01,0.1", "fedprox.mu=0.1,1.0"], **SMALL)


class TagCounter(HTMLParser):
    """Counts opened tags, and fails on one that is closed without being open."""

    def __init__(self, text: str):
        super().__init__()
        self.opened: list[str] = []
        self.counts: dict[str, int] = {}
        self.feed(text)
        assert not self.opened, self.opened

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.opened.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def make_public_objects(result: shoal.Result, comparison: shoal.Comparison, tuning: shoal.Tuning) -> dict[str, Any]:
    """One object of every public class."""
    net, data = result.net, read_digits()
    samples = shoal.Samples(data.inputs, data.targets, torch.arange(100))
    batch = samples.take_batch(torch.arange(8))
    return {
        "Batch": batch,
        "BatchScore": shoal.BatchScore(torch.ones(()), torch.ones(8, 10), torch.ones(8, 64), {}, {}, {}),
        "Comparison": comparison,
        "DeviceProfile": shoal.DeviceProfile(),
        "Extra": shoal.Extra(),
        "History": result.history,
        "LearningTask": CLASSIFY,
        "Method": shoal.compose([shoal.parts.FedProx(0.1), shoal.parts.Scaffold()]),
        "Metric": result.history.metrics["accuracy"],
        "Net": net,
        "Dataset": data,
        "Neutral": shoal.Neutral({"mu": 0.0}),
        "Part": shoal.parts.FedProx(0.1),
        "Plan": shoal.Plan({"a": torch.arange(900)}, {"b": torch.ones(1000)}),
        "Recipe": result.recipe,
        "Result": result,
        "Samples": samples,
        "ShoalError": ShoalError("bad-value", "It is wrong.", "Make it right."),
        "Stop": shoal.Stop("it is good enough"),
        "Tuning": tuning,
        "WatchedRound": shoal.WatchedRound(result.recipe, result.history.rows[-1], result.history),
    }


def test_every_public_object_is_told_in_twenty_lines(result, comparison, tuning):
    objects = make_public_objects(result, comparison, tuning)
    seen = collect_inside_a_round()
    assert {*objects, *seen} >= {n for n in shoal.__all__ if isinstance(getattr(shoal, n), type)} - {"Watcher"}
    for name, thing in (objects | seen).items():
        text = repr(thing)
        assert len(text.splitlines()) <= 20 and "tensor(" not in text and len(text) < 2500, (name, text)
        html = thing._repr_html_() if hasattr(thing, "_repr_html_") else ""
        assert len(html.splitlines()) <= 20, name
        assert TagCounter(html).counts.get("tr", 0) <= 20, name


def test_what_public_objects_hold_is_short_too(result, comparison, tuning, tmp_path):
    """A result's best model, its profile, a try of a tuning, an exported file."""
    folder = tmp_path / "run"
    kept = shoal.run("scaffold", out=folder, validation=0.2, keep_best=True, profile=tmp_path / "trace.json", **SMALL)
    held = {"exported": shoal.export(folder, tmp_path / "model.safetensors"), "try": tuning.find_best("fedprox")}
    for thing in (kept, result, comparison, tuning, kept.history):
        for name in (name for name in dir(thing) if not name.startswith("_")):
            value = getattr(thing, name)
            if type(value).__module__.startswith("shoal"):
                held[f"{type(thing).__name__}.{name}"] = value
    assert {"Result.best", "Result.profile", "Result.engine", "Tuning.spec"} <= held.keys()
    for name, value in held.items():
        text = repr(value)
        assert len(text.splitlines()) <= 20 and "tensor(" not in text and len(text) < 1000, (name, text)


def test_one_is_told_as_one():
    one = shoal.compare(["fedavg"], **{**SMALL, "rounds": 1})
    assert repr(one).splitlines()[0] == "Comparison of 1 method, 1 round"
    assert repr(shoal.tune(["fedavg"], ["lr=0.1"], **{**SMALL, "rounds": 1})).startswith(
        "Tuning of 1 method, 1 try over"
    )


def collect_inside_a_round() -> dict[str, Any]:
    """What parts are given during a round: a round, a device, a reply, and what a local step knows."""
    seen: dict[str, Any] = {}

    class Spy(shoal.Part):
        def begin(self, params, memory, device):
            seen.setdefault("Device", device)
            return params, {}

        def step(self, update, state, scored, local):
            seen.setdefault("Local", local)
            seen["BatchScore"] = scored
            return update, state

        def serve(self, params, state, round):
            seen.setdefault("Round", round)
            seen.setdefault("Reply", round.replies[0])
            return params, state

    shoal.run(dataclass(frozen=True)(Spy)(), **{**SMALL, "rounds": 1})
    return seen


def test_reprs_say_what_matters(result, comparison, tuning):
    assert repr(result).startswith("Result(scaffold on digits with mlp: 6 rounds, accuracy 0.")
    assert repr(History()) == "History(0 rounds, 0 B sent, 0 s simulated)"
    assert repr(shoal.Recipe().with_values(method="fedprox", rounds=3)) == "Recipe(method='fedprox', rounds=3)"
    assert eval(repr(result.recipe), {"Recipe": shoal.Recipe}) == result.recipe
    assert repr(read_digits()).startswith("Dataset(digits: 1,437 training and 360 test samples")
    assert repr(result.net).startswith("Net(Chain: 4,810 trained parameters in 4 tensors") or "parameters in" in repr(
        result.net
    )
    lines = repr(comparison).splitlines()
    assert lines[0] == "Comparison of 2 methods, 6 rounds" and lines[2].startswith("fedavg") and "±" in lines[2]
    assert "best" in repr(tuning) and "fedprox.mu" in repr(tuning)


def test_long_tables_are_cut(comparison):
    many = shoal.Comparison({f"fedprox(mu={i})": comparison.results["fedavg"] for i in range(40)})
    assert len(repr(many).splitlines()) == 18 and "and 25 more" in repr(many)
    assert "and 28 more" in many._repr_html_() and TagCounter(many._repr_html_()).counts["tr"] == 13


def test_html_is_escaped_and_says_what_the_text_says(result, comparison):
    assert "&lt;b&gt;" in render_html_table(["a"], [["<b>"]]) and "<b>" not in render_html_table(["a"], [["<b>"]])
    html = comparison._repr_html_()
    counts = TagCounter(html).counts
    assert counts["svg"] == 2 and counts["img"] == 1 and "fedprox(mu=0.1)" in html
    assert TagCounter(result._repr_html_()).counts["img"] == 1


def test_sparklines_pass_over_rounds_without_a_value():
    assert draw_sparkline([1.0, None, float("nan")]) == ""
    assert draw_sparkline([None, 0.0, None, 1.0]).count(",") == 2 and "from 0 to 1" in draw_sparkline([0.0, 1.0])
    assert len(draw_sparkline(list(range(100_000)))) < 4000
    assert draw_sparkline([2.0, 2.0])


# Pictures and frames


def test_plots_are_axes_of_matplotlib(result, comparison):
    from matplotlib import pyplot

    before = pyplot.get_backend()
    try:
        axes = result.plot()
        (line,) = axes.get_lines()
        assert list(line.get_ydata()) == result.history["accuracy"] and axes.get_xlabel() == "rounds"
        assert result.plot("train_loss", x="seconds", ax=axes) is axes
        sent = comparison.plot(x="bytes")
        assert [t.get_text() for t in sent.get_legend().get_texts()] == ["fedavg", "fedprox(mu=0.1)"]
        total = comparison.results["fedavg"][0].history.total("bytes_down", "bytes_up") / 1e6
        assert sent.get_lines()[0].get_xdata()[-1] == pytest.approx(total, rel=0.01)
        assert len(sent.get_lines()) == 3, "two methods and the target"
        for cost in ("rounds", "seconds", "macs"):
            axes = comparison.plot(cost)
            assert axes.get_ylabel() == "test accuracy"
            assert axes.get_legend().get_title().get_text() == "mean and range of 2 seeds"
        assert result.history.plot().get_ylabel() == "test accuracy"
        with pytest.raises(ShoalError, match="no cost to plot against called 'byte'.*bytes"):
            comparison.plot("byte")
        with pytest.raises(ShoalError, match="no column called 'acuracy'.*accuracy"):
            result.plot("acuracy")
        assert pyplot.get_backend() == before
    finally:
        pyplot.close("all")


def test_html_and_reports_leave_no_figure_open_and_the_backend_alone(result, comparison, tmp_path):
    from matplotlib import pyplot

    pyplot.close("all")
    before = pyplot.get_backend()
    assert result._repr_html_() and comparison._repr_html_()
    shoal.report.draw_comparison(comparison, tmp_path / "picture.png")
    assert not pyplot.get_fignums() and pyplot.get_backend() == before


def test_tables_are_data_frames(result, comparison, tuning):
    frame = comparison.to_pandas()
    assert list(frame["method"]) == ["fedavg", "fedprox(mu=0.1)"] and frame["accuracy"].between(0, 1).all()
    rounds = comparison.to_pandas(rounds=True)
    assert len(rounds) == 24 and set(rounds["seed"]) == {0, 1}
    assert len(result.history.to_pandas()) == 6
    assert set(tuning.to_pandas()["fedprox.mu"]) == {0.1, 1.0}


def test_nothing_of_this_needs_matplotlib_rich_or_ipython():
    program = f"""
import sys
for name in ("matplotlib", "rich", "IPython", "pandas", "typer", "click"):
    sys.modules[name] = None
import shoal
result = shoal.run(progress=True, **{SMALL | {"rounds": 2}!r})
assert "<svg" in result._repr_html_() and "<img" not in result._repr_html_() and "Result(" in repr(result)
comparison = shoal.compare(["fedavg"], **{SMALL | {"rounds": 2}!r})
assert "<svg" in comparison._repr_html_()
for call in (result.plot, comparison.plot, comparison.to_pandas, result.history.to_pandas):
    try:
        call()
    except shoal.ShoalError as error:
        assert error.kind.name == "missing-extra", error
    else:
        raise SystemExit("nothing was missing")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "rich is not installed" in ended.stderr


def test_dataclasses_whose_fields_are_shortened_keep_all_of_them():
    plan = shoal.Plan()
    assert is_dataclass(plan) and all(f"{f.name}=" in repr(plan) for f in fields(plan))


@pytest.mark.parametrize("value, size, count", [
    (999.4, "999 B", "999"), (999.6, "1 kB", "1k"), (999_600, "1 MB", "1M"), (0, "0 B", "0"), (1e15, "1000 TB", "1P"),
])  # fmt: skip
def test_sizes_that_are_rounded_up_have_the_next_unit(value, size, count):
    """1e+03 kB is no size."""
    assert (format_size(value), format_count(value)) == (size, count)


def test_a_number_that_is_rounded_to_zero_has_no_sign():
    assert format_number(-0.00001, 4) == "0.0000" and format_number(-0.5, 1) == "-0.5"

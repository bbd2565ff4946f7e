"""Traces that are kept on disk: served where nothing has changed, never where anything has, and never when damaged."""

import os
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.core.model import tree
from shoal.engines.batched import trace_cache
from shoal.engines.batched.compile_cache import keep_compiled_code
from shoal.engines.batched.engine import BatchedEngine
from shoal.runs.session import play_runs
from shoal.runs.start import prepare_new_run

SMALL: dict[str, Any] = dict(
    data="digits", model="mlp", devices=6, sample=4, rounds=2, steps="2", batch=8, engine="batched", width=2
)
PART = """
from dataclasses import dataclass
from shoal import Part


@dataclass(frozen=True)
class Scaled(Part):
    \"\"\"Scales the loss.\"\"\"

    def objective(self, inner, local):
        def score(params, batch):
            scored = inner(params, batch)
            return scored._replace(loss=scored.loss * {factor})

        return score
"""


@pytest.fixture
def traced(monkeypatch, tmp_path) -> list[Any]:
    """What is traced from now on, with a cache of the test's own."""
    calls: list[Any] = []
    honest = trace_cache.trace_function

    def trace_and_note(function, example, fake):
        calls.append(function)
        return honest(function, example, fake)

    monkeypatch.setattr(trace_cache, "trace_function", trace_and_note)
    monkeypatch.setattr(trace_cache, "digest_shoal_sources", lambda: "these sources")
    monkeypatch.delenv("SHOAL_PROGRAM_CACHE")
    monkeypatch.setattr(trace_cache, "find_cache_folder", lambda: tmp_path / "cache" / "shoal")
    return calls


def run(**values: Any) -> shoal.Result:
    return shoal.run(**dict(SMALL, **values))


def list_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "shoal" / "programs").glob("*.json"))


@pytest.mark.parametrize(
    "values",
    [
        dict(),
        dict(method="scaffold", split="dirichlet:0.1", momentum=0.9),
        dict(method="moon"),
        dict(method="fedbr", model="lenet", width=1),
        dict(model="lenet", width=1, augment="flip"),
    ],
    ids=str,
)
def test_what_was_traced_is_found_again_and_computes_the_same_bits(values, traced, tmp_path):
    first = run(**values)
    count = len(traced)
    assert count and len(list_files(tmp_path)) == count
    second = run(**values)
    assert len(traced) == count, "nothing was traced again"
    assert tree.is_same_tree(first.params, second.params)
    assert first.history["loss"] == second.history["loss"]


def test_passes_make_the_same_of_a_trace_that_was_found(traced, monkeypatch):
    """Those that choose kernels by the forms of tensors, too, wherever such kernels can be built."""

    def list_operations() -> list[list[str]]:
        engine = BatchedEngine(1, native=True)
        monkeypatch.setattr(engine, "close", lambda: None)  # the programs are looked at
        play_runs(
            [prepare_new_run(shoal.Recipe().with_values(**dict(SMALL, model="lenet", rounds=1, sample=1)))], engine
        )
        graphs: list[Any] = [program.module.graph for program in engine.programs.values()]
        return [[str(node.target) for node in graph.nodes] for graph in graphs]

    first = list_operations()
    assert first == list_operations() and len(traced) == len(first)


def test_a_part_that_was_edited_is_traced_again(traced, tmp_path):
    file = tmp_path / "own.py"

    def run_part(factor: float, cached: bool = True) -> shoal.Result:
        file.write_text(PART.format(factor=factor))
        with pytest.MonkeyPatch.context() as patch:
            if not cached:
                patch.setenv("SHOAL_PROGRAM_CACHE", "off")
            return run(method="scaled", parts=[str(file)])

    wanted = {factor: run_part(factor, cached=False).params for factor in (2.0, 3.0)}
    assert not tree.is_same_tree(wanted[2.0], wanted[3.0]) and not list_files(tmp_path)
    traced.clear()
    for factor, count in ((2.0, 1), (3.0, 2), (2.0, 2), (3.0, 2)):
        assert tree.is_same_tree(run_part(factor).params, wanted[factor])
        assert len(traced) == count


@pytest.mark.parametrize(
    "change",
    [
        dict(momentum=0.5),
        dict(clip=0.1),
        dict(batch=9),
        dict(width=3),
        dict(method="fedprox"),
        dict(precision="float64"),
        dict(model="lenet"),
        dict(local_lr_schedule="cosine"),
    ],
    ids=str,
)
def test_another_setting_has_a_trace_of_its_own(change, traced):
    run()
    count = len(traced)
    run(**change)
    assert len(traced) > count


def test_numbers_of_parts_that_are_in_the_step_have_traces_of_their_own(traced):
    for count, mu in enumerate((0.1, 0.2, 0.1), 1):
        run(method=f"fedprox(mu={mu})")
        assert len(traced) == min(count, 2)


def test_other_sources_and_machines_have_traces_of_their_own(traced, monkeypatch):
    run()
    monkeypatch.setattr(trace_cache, "digest_shoal_sources", lambda: "other sources")
    run()
    monkeypatch.setattr(trace_cache.torch, "__version__", "2.99")
    run()
    assert len(traced) == 3


@pytest.mark.parametrize("damage", ["empty", "truncated", "changed", "swapped", "binary", "folder"])
def test_a_damaged_file_is_ignored_and_replaced(damage, traced, tmp_path):
    wanted = run()
    [file] = list_files(tmp_path)
    content = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    elif damage == "swapped":
        run(clip=0.1)
        [other] = {*list_files(tmp_path)} - {file}
        file.write_bytes(other.read_bytes())
    else:
        damaged = {"empty": b"", "truncated": content[:-20], "binary": os.urandom(500)}
        file.write_bytes(damaged.get(damage, content.replace(b"aten.mul.Tensor", b"aten.add.Tensor", 1)))
    assert file.is_dir() or file.read_bytes() != content
    traced.clear()
    assert tree.is_same_tree(run().params, wanted.params) and len(traced) == 1
    if damage != "folder":
        assert file.read_bytes() == content


def test_what_is_not_certain_is_traced_every_time(traced, tmp_path):
    file = tmp_path / "own.py"
    text = PART.format(factor="float(open(__file__).read().count('factor') + 1)")
    file.write_text(text)
    for _ in range(2):
        run(method="scaled", parts=[str(file)])
    assert len(traced) == 2 and not list_files(tmp_path)


def test_it_can_be_turned_off(traced, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_PROGRAM_CACHE", "off")
    run()
    run()
    assert len(traced) == 2 and not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_trace(traced, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setattr(trace_cache, "find_cache_folder", lambda: tmp_path / "file")
    wanted = run()
    assert tree.is_same_tree(run().params, wanted.params) and len(traced) == 2


def test_the_oldest_traces_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_cache, "MOST_FILES", 7)
    for number in range(8):
        file = tmp_path / f"{number}.json"
        file.touch()
        os.utime(file, (number, number))
    trace_cache.remove_oldest_traces(tmp_path)
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["2", "3", "4", "5", "6", "7"]


def test_sources_that_changed_after_the_process_began_have_no_hash(tmp_path):
    (tmp_path / "room").mkdir()
    file = tmp_path / "room" / "one.py"
    file.write_text("a = 1")
    changed = file.stat().st_ctime
    first = trace_cache.digest_sources(tmp_path, changed + 1)
    assert first and trace_cache.digest_sources(tmp_path, changed - 1) == ""
    file.write_text("a = 2")
    assert trace_cache.digest_sources(tmp_path, file.stat().st_ctime + 1) not in ("", first)
    file.rename(tmp_path / "room" / "two.py")
    assert len({trace_cache.digest_sources(tmp_path, changed + 3600), first, ""}) == 3


def test_compiled_code_is_kept_in_the_cache_folder_unless_torch_was_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "shoal" / "compiled")

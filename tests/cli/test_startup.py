"""What a fresh process imports: neither a compiler nor the extras, before something asks for them."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "sympy", "matplotlib", "scipy", "pandas")
"""Modules that cost a tenth of a second or more."""
TERMINAL = ("rich", "typer", "click")
OPTIONAL = ("cryptography", "flwr", "ray", "transformers", "torchvision", "onnx", "PIL")
SMALL = "data='digits', model='mlp', devices=4, sample=2, rounds=1, steps='1'"


def list_imported(program: str, modules: tuple[str, ...], **environment: str) -> list[str]:
    """Which of these modules a fresh process has after a program."""
    program += f"\nimport sys\nprint('imported', *(name for name in {modules} if name in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ | environment
    )
    return result.stdout.splitlines()[-1].split()[1:]


def test_importing_shoal_imports_no_compiler_and_no_terminal():
    assert list_imported("import shoal", (*HEAVY, *TERMINAL, *OPTIONAL)) == []


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["server", "--help"]], ids=" ".join)
def test_help_imports_no_compiler_and_no_extra(arguments):
    program = f"""
import sys
from shoal.cli.commands import app
sys.argv = ["shoal", *{arguments}]
try:
    app()
except SystemExit as end:
    assert not end.code
"""
    assert list_imported(program, (*HEAVY, *OPTIONAL, "shoal.runs.session", "shoal.reproduce.run")) == []


@pytest.mark.parametrize("engine", ["serial", "auto"])
def test_a_short_run_on_a_processor_imports_no_compiler(engine):
    assert list_imported(f"import shoal; shoal.run(engine='{engine}', {SMALL})", (*HEAVY, *TERMINAL, *OPTIONAL)) == []


def test_a_second_start_finds_its_programs_and_imports_no_compiler(tmp_path):
    cached = {"XDG_CACHE_HOME": str(tmp_path), "SHOAL_PROGRAM_CACHE": "on"}
    program = f"import shoal; shoal.run('scaffold', engine='batched', {SMALL})"
    list_imported(program, (), **cached)
    assert list_imported(program, (*HEAVY, *TERMINAL, *OPTIONAL), **cached) == []


def test_public_names_are_there_though_they_are_imported_on_use():
    program = """
import shoal
from shoal import *
assert all(callable(getattr(shoal, name)) for name in shoal.__all__ if name != "tree")
import shoal.compare.comparison
assert shoal.compare.__module__ == "shoal", "the function, not the package of the same name"
try:
    shoal.nothing
except AttributeError as error:
    assert "nothing" in str(error)
else:
    raise SystemExit("a name that is not there was found")
"""
    assert list_imported(program, ("shoal.runs.session",)) == ["shoal.runs.session"]

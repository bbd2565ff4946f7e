"""What `make check` refuses: doubled names, vague names, imports that point upwards."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "check_names.py"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the package with its contracts, to plant mistakes in."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def append(project: Path, module: str, text: str) -> None:
    with open(project / "src/shoal" / module, "a", encoding="utf-8") as file:
        file.write(f"\n\n{text}\n")


def check_names(project: Path) -> tuple[int, str]:
    done = subprocess.run([sys.executable, SCRIPT, "src/shoal"], cwd=project, capture_output=True, text=True)
    assert not done.stderr
    return done.returncode, done.stdout


def test_the_package_as_it_is_passes(project: Path):
    assert check_names(project) == (0, "Names: none doubled, none vague.\n")


@pytest.mark.parametrize("kind", ["def fit_value(x):", "async def fit_value(x):", "class fit_value:"])
def test_a_doubled_name_is_refused_with_both_places(project: Path, kind: str):
    append(project, "data/dataset.py", f"{kind}\n    pass")
    code, told = check_names(project)
    assert code == 1 and told.count("\n") == 1
    assert "'fit_value' is also defined in src/shoal/runs/recipe_values.py:" in told
    assert told.startswith("src/shoal/data/dataset.py:")


def test_a_doubled_name_in_a_branch_is_seen(project: Path):
    append(project, "data/dataset.py", "try:\n    pass\nexcept ImportError:\n\n    def fit_value(x):\n        pass")
    assert check_names(project)[0] == 1


def test_what_may_be_doubled(project: Path):
    append(project, "__init__.py", "def fit_value(x):\n    pass")  # the facade
    append(project, "data/dataset.py", "def _fit(x):\n    pass")  # private names
    append(project, "data/cifar.py", "def _fit(x):\n    pass")
    append(project, "data/leaf.py", "class Shelf:\n    def fit_value(self):\n        pass")  # methods
    assert check_names(project)[0] == 0


def define_inner_functions(project: Path, names: list[str]) -> None:
    append(
        project,
        "data/dataset.py",
        "\n".join(f"def outer_function_{name}(x):\n    def {name}(y):\n        pass" for name in names),
    )


def test_vague_names_are_refused(project: Path):
    names = ["told", "_kept", "counted", "Scored", "nearly", "apart", "some", "theirs"]
    define_inner_functions(project, names)
    code, told = check_names(project)
    assert code == 1 and told.count("\n") == len(names)
    assert all(f"{name!r} says nothing" in told for name in names)


def test_names_that_look_vague_and_are_not(project: Path):
    define_inner_functions(
        project, ["embed", "apply_all", "reply", "read", "kept_units", "ReplyRefused", "seed", "multiply"]
    )
    assert check_names(project)[0] == 0


def test_an_exception_that_nothing_needs_any_more_is_a_complaint(project: Path):
    part = project / "src/shoal/parts/selection.py"
    part.write_text(
        part.read_text(encoding="utf-8").replace("class Weighted(", "class WeightedChoice("), encoding="utf-8"
    )
    code, told = check_names(project)
    assert code == 1 and told == "'Weighted' is allowed to be vague and is not any more: take it out of the table\n"


def lint_imports(project: Path) -> tuple[int, str]:
    program = "import sys; sys.path.insert(0, 'src'); from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache", "--no-logo"], cwd=project, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_an_import_that_points_upwards_is_refused(project: Path):
    pytest.importorskip("importlinter", reason="import-linter comes with the extra `dev`")
    assert lint_imports(project)[0] == 0
    append(project, "core/ledger.py", "from shoal.runs.recipe import Recipe  # noqa: E402")
    code, told = lint_imports(project)
    assert code == 1 and "shoal.core.ledger -> shoal.runs.recipe" in told

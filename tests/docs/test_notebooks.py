"""The notebooks of the documentation run from the first cell to the last, and show what they promise."""

import importlib.util
import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
from doc_blocks import differ  # noqa: E402

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def load_tool() -> Any:
    """tools/run_notebooks.py, which is no package."""
    spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "tools/run_notebooks.py")
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def read_said(cell: Any) -> str:
    """The texts of a cell's outputs, pictures and HTML aside."""
    texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.get("outputs", [])]
    return "\n".join(text for text in texts if not re.search(r"<Figure size|IPython\.core\.display", text))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_holds_its_outputs(path):
    """The page of the site and viewers of notebooks show what is kept; nothing of a machine is in it."""
    notebook = nbformat.read(path, as_version=4)
    kinds = [list_kinds(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert all(kinds) and "stderr" not in set().union(*kinds), "run `make notebooks`"
    assert "image/png" in set().union(*kinds) and path.stat().st_size < 500_000
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(tmp|home|Users|root)/|ipykernel_\d", text)


def list_kinds(cell: Any) -> set[str]:
    """The kinds of what a cell shows: text/html, image/png and so on; a stream by its name."""
    outputs = cell.get("outputs", [])
    return {kind for out in outputs for kind in out.get("data", {})} | {out["name"] for out in outputs if "name" in out}


@pytest.mark.whole  # a kernel of its own, 15 seconds; tests/display has bars, HTML and plots
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    kept = deepcopy(cells)
    tool = load_tool()
    tool.execute_notebook(tool.clear_outputs(notebook), tmp_path)
    for cell, before in zip(cells, kept, strict=True):
        assert not differ(read_said(before), read_said(cell)), f"{cell.source}\nrun `make notebooks`"
        assert list_kinds(before) - {"text/plain"} == list_kinds(cell) - {"text/plain"}, cell.source
        kinds = list_kinds(cell)
        assert "stderr" not in kinds, cell.outputs
        if "plot(" in cell.source:
            assert "image/png" in kinds, cell.source
        if cell.source.splitlines()[-1] in ("first", "comparison"):
            (shown,) = [out["data"]["text/html"] for out in cell.outputs if out.output_type == "execute_result"]
            assert "<svg" in shown and "<img" in shown
        if "shoal.run(" in cell.source or "shoal.compare(" in cell.source:
            assert any("<progress" in out.get("data", {}).get("text/html", "") for out in cell.outputs), cell.source
    assert (tmp_path / "report.html").is_file() or path.stem != "first-run"

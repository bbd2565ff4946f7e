"""The notebooks of the documentation run from the first cell to the last, and show what they promise."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def list_kinds(cell: Any) -> set[str]:
    """The kinds of what a cell shows: text/html, image/png and so on; a stream by its name."""
    outputs = cell.get("outputs", [])
    return {kind for out in outputs for kind in out.get("data", {})} | {out["name"] for out in outputs if "name" in out}


def execute(notebook: Any, folder: Path) -> Any:
    """The notebook with its outputs, executed in a kernel of this Python."""
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    assert client.km is not None
    client.km.kernel_spec.argv[0] = sys.executable
    return client.execute()


@pytest.mark.whole  # a kernel of its own, 15 seconds; tests/display has bars, HTML and plots
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs for cell in cells), "outputs are made by the tests, and not kept"
    execute(notebook, tmp_path)
    for cell in cells:
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

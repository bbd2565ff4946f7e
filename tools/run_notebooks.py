"""Runs the notebooks of docs/ and keeps what they put out, so that pages and viewers of notebooks show it.

    python tools/run_notebooks.py            run them anew (make notebooks)

`tests/docs/test_notebooks.py` runs them without what is kept, and compares.
"""

import asyncio
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
VOLATILE = re.compile(r"<Figure size|IPython\.core\.display")
"""What stands in text for a picture or for HTML, and says nothing."""


def execute_notebook(notebook: Any, folder: Path) -> Any:
    """The notebook with its outputs, executed in a kernel of this Python."""
    if sys.platform == "win32":
        asyncio.set_event_loop_policy(asyncio.WindowsSelectorEventLoopPolicy())
    client = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(folder)}})
    client.create_kernel_manager()
    assert client.km is not None and client.km.kernel_spec is not None
    client.km.kernel_spec.argv[0] = sys.executable
    return client.execute()


def clear_outputs(notebook: Any) -> Any:
    """The notebook as it is before it was ever run."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def keep_outputs(path: Path) -> None:
    notebook = clear_outputs(nbformat.read(path, as_version=4))
    with tempfile.TemporaryDirectory() as folder:
        execute_notebook(notebook, Path(folder))
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            text = output.get("data", {}).get("text/plain", "")
            if len(output.get("data", {})) > 1 and VOLATILE.search(text):
                del output["data"]["text/plain"]
    notebook.metadata.pop("language_info", None)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for notebook_file in sorted(NOTEBOOKS.glob("*.ipynb")):
        keep_outputs(notebook_file)

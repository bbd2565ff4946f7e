"""A hook of MkDocs (`hooks` in mkdocs.yml): every notebook under docs/ becomes a page with its kept outputs.

docs/notebooks/first-run.ipynb is the page notebooks/first-run.md to navigation and links; the notebook itself lies
beside it, to be downloaded. Nothing is executed: tools/run_notebooks.py does that, and what it kept is shown.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PICTURES = ("image/png", "image/jpeg")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """MkDocs asks this once it knows the files of docs/."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb") and file.abs_src_path:
            notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
            page = write_notebook_page(notebook, Path(file.src_uri).name)
            files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=page))
    return files


def write_notebook_page(notebook: Mapping[str, Any], name: str) -> str:
    """A notebook (nbformat 4) as Markdown: text as it is, code in blocks, each with what it put out."""
    pieces = [piece for cell in notebook["cells"] for piece in write_cell(cell)]
    return "\n\n".join([*pieces, f"[Download this notebook]({name})"]) + "\n"


def write_cell(cell: Mapping[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"]).strip("\n")
    if cell["cell_type"] == "markdown":
        yield source
    elif cell["cell_type"] == "code" and source:
        yield fence(source, "python")
        for output in cell["outputs"]:
            yield from write_output(output)


def write_output(output: Mapping[str, Any]) -> Iterator[str]:
    """The richest form that a page can show: a picture, HTML, or text."""
    if output["output_type"] == "stream":
        yield fence("".join(output["text"]), "text")
        return
    if output["output_type"] == "error":
        yield fence(f"{output['ename']}: {output['evalue']}", "text")
        return
    data = output["data"]
    for kind in PICTURES:
        if kind in data:
            yield f'<img alt="" src="data:{kind};base64,{"".join(data[kind]).replace(chr(10), "")}">'
            return
    for kind in ("image/svg+xml", "text/html"):
        if kind in data:
            lines = "".join(data[kind]).splitlines()
            yield "\n".join(['<div class="notebook-output">', *filter(str.strip, lines), "</div>"])
            return
    if "text/plain" in data:
        yield fence("".join(data["text/plain"]), "text")


def fence(text: str, language: str) -> str:
    """A block of code, with a fence that its text does not have."""
    ticks = "```" + "`" * max((len(run) for run in re.findall("`{3,}", text)), default=0)
    return f"{ticks}{language}\n{COLOUR.sub('', text).rstrip()}\n{ticks}"

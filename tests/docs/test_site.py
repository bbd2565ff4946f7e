"""The built documentation: it is complete without a network, and the drawing and the notebooks lead somewhere."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.part import POINTS

ROOT = Path(__file__).parents[2]
has_mkdocs = importlib.util.find_spec("mkdocs") is not None and importlib.util.find_spec("mkdocstrings") is not None
needs_mkdocs = pytest.mark.skipif(not has_mkdocs, reason="mkdocs and mkdocstrings come with the extra dev")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return folder


def check_site(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "tools/check_site.py", folder]
    return subprocess.run(command, text=True, capture_output=True)


@needs_mkdocs
def test_the_site_loads_nothing_from_elsewhere(site):
    done = check_site(site)
    assert (done.returncode, done.stdout) == (0, "")
    style = (site / "assets/katex/katex.min.css").read_text()
    fonts = re.findall(r"url\(([^)]+)\)", style)
    assert len(fonts) > 10 and all((site / "assets/katex" / font).is_file() for font in fonts)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.html", '<script src="https://elsewhere.org/x"></script>'),
        ("a.html", '<link rel="stylesheet" href="//elsewhere.org/x.css">'),
        ("a.html", '<p><img src="http://elsewhere.org/x.png"></p>'),
        ("a.html", "<style>@font-face { src: url(https://elsewhere.org/x.woff2) }</style>"),
        ("a.html", '<pre class="mermaid">graph</pre>'),
        ("a.css", '@import "https://elsewhere.org/x.css";'),
        ("a.js", 'load("https://cdn.elsewhere.org/x")'),
        ("a.js", "fetch('https://elsewhere.org/x')"),
    ],
)
def test_what_is_loaded_from_elsewhere_is_found(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    done = check_site(tmp_path)
    assert done.returncode == 1 and name in done.stdout


def test_links_and_pictures_of_ones_own_are_allowed(tmp_path):
    page = '<a href="https://elsewhere.org">x</a><link rel="canonical" href="https://elsewhere.org/x"><img src="x.png">'
    (tmp_path / "a.html").write_text(page)
    assert check_site(tmp_path).returncode == 0


@needs_mkdocs
def test_every_point_of_the_drawing_leads_to_its_place(site):
    page = (site / "explanation/the-round/index.html").read_text()
    drawing = page.split('<svg class="round-drawing"')[1].split("</svg>")[0]
    led_to = set(re.findall(r'href="#(point-\w+)"', drawing))
    assert led_to == {f"point-{point}" for point in POINTS}
    assert led_to == set(re.findall(r'id="(point-\w+)"', page))


@needs_mkdocs
def test_formulas_are_marked_and_none_is_left_as_dollars(site):
    for page in (site / "methods").rglob("index.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", page.read_text(), flags=re.DOTALL)
        text = re.sub(r'<(span|div) class="arithmatex">.*?</\1>', "", text, flags=re.DOTALL)
        assert "$" not in text and "\\frac" not in text, page.parent.name


@needs_mkdocs
def test_every_public_name_has_an_entry(site):
    import shoal

    page = (site / "reference/api/index.html").read_text()
    assert not [name for name in shoal.__all__ if f'id="shoal.{name}"' not in page]


@needs_mkdocs
def test_a_notebook_becomes_a_page_with_its_outputs(tmp_path):
    picture = {
        "output_type": "display_data",
        "data": {"image/png": "iVBOR\n", "text/plain": "<Figure>"},
        "metadata": {},
    }
    table = {"output_type": "execute_result", "data": {"text/html": ["<table>\n\n", "<tr><td>7</td></tr></table>"]}}
    printed = {"output_type": "stream", "name": "stdout", "text": ["\x1b[31mred\x1b[0m ", "```\n"]}
    cells = [
        {"cell_type": "markdown", "source": ["# First run\n", "text with $x^2$"]},
        {"cell_type": "code", "source": "print(1)", "outputs": [printed, picture, table]},
        {"cell_type": "code", "source": "", "outputs": []},
    ]
    (tmp_path / "docs/notebooks").mkdir(parents=True)
    (tmp_path / "docs/index.md").write_text("# Home\n\n[notebook](notebooks/first.md)\n")
    (tmp_path / "docs/notebooks/first.ipynb").write_text(json.dumps({"cells": cells, "nbformat": 4}))
    hook = ROOT / "tools/notebook_pages.py"
    extensions = "[pymdownx.superfences, md_in_html, {pymdownx.arithmatex: {generic: true}}]"
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nhooks: [{hook}]\nmarkdown_extensions: {extensions}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site/notebooks/first/index.html").read_text()
    assert "<h1" in page and 'class="arithmatex"' in page and "<tr><td>7</td></tr>" in page
    assert 'src="data:image/png;base64,iVBOR"' in page and "red ```" in page and "\x1b" not in page
    assert (tmp_path / "site/notebooks/first.ipynb").is_file()

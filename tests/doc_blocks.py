"""The blocks of a page of the documentation, run one after the other in a folder of their own.

`python tests/doc_blocks.py docs/tutorial.md` runs a page and writes what came out into it.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"(?P<note>(?:<!-- [^\n]* -->\n)?)```(?P<language>\w+)\n(?P<body>.*?)```\n", re.DOTALL)
SKIPPED = "<!-- not run"
"""A comment that begins like this above a block says why it is not run."""
DECIMAL = re.compile(r"\d+\.\d+(?:e[+-]?\d+)?")
MEASURED = re.compile(r"wall time.*|\"wall_seconds\":[0-9.e+-]+|about \d+ s of work")
"""What differs from machine to machine."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `shown` is the output printed below it, if any."""

    language: str
    body: str
    skipped: bool
    shown: str | None


def read_blocks(page: str) -> Iterator[Block]:
    """Commands and programs of a page, each with the output that the page shows after it."""
    found = list(FENCE.finditer(page))
    for fence, following in zip(found, [*found[1:], None]):
        language = fence["language"]
        if language not in ("sh", "python", "toml"):
            continue
        shown = following["body"] if following and following["language"] in ("text", "json") else None
        yield Block(language, fence["body"], fence["note"].startswith(SKIPPED), shown)


def run_block(block: Block, folder: Path, program: str) -> tuple[str, str]:
    """What a block prints, and the program so far: Python blocks of a page build on each other."""
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "COLUMNS": "120",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    if block.language == "toml":
        name = re.match(r"# (\S+\.toml)\n", block.body)
        (folder / (name[1] if name else "recipe.toml")).write_text(block.body)
        return "", program
    if block.language == "python" and "(Part)" in block.body:
        (folder / "my_parts.py").write_text(block.body)
        return "", program
    if block.language == "python":
        quiet = "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n"
        before = quiet + "".join(f"    {line}\n" for line in [*program.splitlines(), "pass"])
        command = [sys.executable, "-c", before + block.body]
        program += block.body
    else:
        command = ["bash", "-c", block.body]
    said = subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=600
    )
    refused = said.stderr if said.returncode in range(10, 40) else ""
    if said.returncode and not refused:
        raise AssertionError(f"{block.body}\nended with {said.returncode}:\n{said.stdout}{said.stderr}")
    return said.stdout + refused, program


def run_page(page: str, folder: Path) -> Iterator[tuple[Block, str]]:
    """Every block of a page with what it printed."""
    program = ""
    for block in read_blocks(page):
        if not block.skipped:
            printed, program = run_block(block, folder, program)
            yield block, printed


def differ(shown: str, printed: str) -> str:
    """Where two outputs tell different things; measured times do not count, decimals may be off by a fiftieth."""
    lines = ((MEASURED.sub("~", line).strip() for line in text.splitlines()) for text in (shown, printed))
    left, right = ([line for line in own if line] for own in lines)
    if len(left) != len(right):
        return f"{len(left)} lines are shown, {len(right)} were printed:\n{printed}"
    for old, new in zip(left, right):
        numbers = [[float(n) for n in DECIMAL.findall(line)] for line in (old, new)]
        words = [re.split(r"\s+", DECIMAL.sub("#", line)) for line in (old, new)]
        near = all(abs(a - b) <= 0.02 * max(abs(a), abs(b)) for a, b in zip(*numbers))
        if words[0] != words[1] or not near:
            return f"shown:   {old}\nprinted: {new}"
    return ""


def rewrite_page(path: Path) -> None:
    """Put what was printed where the page shows an output."""
    page = path.read_text()
    with tempfile.TemporaryDirectory() as folder:
        for block, printed in run_page(page, Path(folder)):
            if block.shown is not None and differ(block.shown, printed):
                before, after = page.split(block.body, 1)
                page = before + block.body + after.replace(block.shown, "\n".join(tidy(printed)) + "\n", 1)
    path.write_text(page)


def tidy(printed: str) -> list[str]:
    return [line.rstrip() for line in printed.strip("\n").splitlines()]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        rewrite_page(Path(name))

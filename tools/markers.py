"""Sections of hand-written files that a program writes, between `<!-- generated: NAME -->` and `<!-- end -->`.

In YAML the markers are the comments `# generated: NAME` and `# end`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

SECTION = re.compile(
    r"(?P<start>^ *(?:<!--|#) generated: (?P<name>[^\n]+?)(?: -->)?\n)"
    r"(?P<text>.*?)"
    r"(?P<end>^ *(?:<!-- end -->|# end)\n)",
    re.DOTALL | re.MULTILINE,
)
ROOT = Path(__file__).resolve().parents[1]


def fill_sections(page: str, writers: Mapping[str, Callable[[], str]]) -> str:
    """The page with every section that one of the writers is named after written anew; others stay as they are."""

    def write_section(found: re.Match[str]) -> str:
        if found["name"] not in writers:
            return found[0]
        return found["start"] + writers[found["name"]]() + found["end"]

    return SECTION.sub(write_section, page)


def list_sections(page: str) -> list[str]:
    """The names of the sections of a page, in their order."""
    return [found["name"] for found in SECTION.finditer(page)]


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int | None = None) -> str:
    """A Markdown table; columns from `numbers_from` on are set to the right."""
    right = len(header) if numbers_from is None else numbers_from
    rule = ["---" if i < right else "--:" for i in range(len(header))]
    lines = [f"| {' | '.join(header)} |", f"|{'|'.join(rule)}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "".join(f"{line}\n" for line in lines)


def format_cell(text: str) -> str:
    """Text as a cell of a table: what Markdown would take for a column or a tag is escaped, but not in `code`."""
    pieces = re.split(r"(`[^`]*`)", " ".join(text.split()))
    plain = [piece if piece.startswith("`") else piece.replace("<", "&lt;") for piece in pieces]
    return "".join(plain).replace("|", "\\|")


def write_changes(pages: Mapping[Path, str], check: bool) -> int:
    """Write the pages whose text is not on disk yet and name them; 1 when only checking and some are not, else 0."""
    changed = [path for path, text in pages.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in changed:
        print(f"{path.relative_to(ROOT)} {'is not what is generated' if check else 'written'}")
        if not check:
            path.write_text(pages[path], encoding="utf-8")
    return int(check and bool(changed))

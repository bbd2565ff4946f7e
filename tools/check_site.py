"""Check that the built documentation asks nobody else for anything: python tools/check_site.py [site]

Pages may link to other places; they must not load from them: no script, style sheet, picture, font or frame, and no
address in a style sheet or script of ours that a browser would fetch. Ends with 1 and the places where they do.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

REMOTE = re.compile(r"\s*(?:https?:)?//", re.IGNORECASE)
LOADING = {"src", "srcset", "data", "poster", "background"}
"""Attributes that load what they name; `href` does so in <link>, <use> and <image>."""
STYLE_ADDRESS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])\s*((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
SCRIPT_ADDRESS = re.compile(
    r"['\"`]((?:https?:)?//[^'\"`\s]*(?:\.m?js|\.css|\.woff2?|\.wasm|unpkg\.|cdn|jsdelivr|googleapis)[^'\"`\s]*)['\"`]"
    r"|(?:fetch\(|import\(|importScripts\()\s*['\"`]((?:https?:)?//[^'\"`\s]+)"
)
UNUSED = ("https://unpkg.com/mermaid@", "https://unpkg.com/resize-observer-polyfill")
"""What the theme would load for a drawing by Mermaid, of which we have none, and in browsers before 2020."""
NOT_LOADED = {"canonical", "prev", "next", "author", "license", "alternate"}
"""Kinds of <link> that only name a page."""


class LoadFinder(HTMLParser):
    """Collects what a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        loads_link = tag in ("use", "image") or (tag == "link" and not NOT_LOADED & set(given.get("rel", "").split()))
        for name, value in given.items():
            if (name in LOADING or (loads_link and name in ("href", "xlink:href"))) and REMOTE.match(value):
                self.found.append(f"<{tag} {name}={value}>")
        self.found += STYLE_ADDRESS.findall(given.get("style", ""))
        self.found += ["a drawing by Mermaid"] * ("mermaid" in given.get("class", "").split())
        self.inside = tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside in ("style", "script"):
            self.found += find_loads_in_text(data)


def find_loads_in_text(text: str) -> list[str]:
    """Addresses elsewhere that a style sheet or a script would load."""
    scripts = [quoted or called for quoted, called in SCRIPT_ADDRESS.findall(text)]
    return [address for address in STYLE_ADDRESS.findall(text) + scripts if not address.startswith(UNUSED)]


def find_remote_loads(site: Path) -> Iterator[tuple[Path, str]]:
    """Every file of a built site that loads something from elsewhere, and what."""
    for file in sorted(site.rglob("*")):
        if file.suffix in (".html", ".svg"):
            finder = LoadFinder()
            finder.feed(file.read_text(encoding="utf-8"))
            yield from ((file, address) for address in finder.found)
        elif file.suffix in (".css", ".js"):
            yield from ((file, address) for address in find_loads_in_text(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    site = Path(sys.argv[1] if len(sys.argv) > 1 else "site")
    loads = [f"{file.relative_to(site)}: {address}" for file, address in find_remote_loads(site)]
    print(*loads, sep="\n", end="\n" if loads else "")
    sys.exit(bool(loads))

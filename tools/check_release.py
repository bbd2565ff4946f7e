"""Check that the version is the same wherever it is written: python tools/check_release.py [--final]

It is set in `src/shoal/core/version.py`; the changelog must have a section for it and CITATION.cff must name it. With
`--final`, for a release, nothing may be left under "Unreleased" and the section must have a date.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_version(root: Path) -> str:
    """The version that `pyproject.toml` takes from the package, without importing it."""
    text = (root / "src/shoal/core/version.py").read_text(encoding="utf-8")
    found = re.search(r'^VERSION = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise SystemExit('src/shoal/core/version.py has no line VERSION = "..."')
    return found[1]


def check_release(root: Path, final: bool = False) -> list[str]:
    """What is not yet as a release needs it, one sentence each."""
    version = read_version(root)
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (root / "CITATION.cff").read_text(encoding="utf-8")
    pieces = re.split(r"^## \[([^\]]+)\](.*)$", changelog, flags=re.MULTILINE)[1:]
    sections = {name: (rest.strip(), body.strip()) for name, rest, body in zip(pieces[::3], pieces[1::3], pieces[2::3])}
    complaints = []
    if version not in sections:
        complaints.append(f"CHANGELOG.md has no section ## [{version}].")
    if f"version: {version}\n" not in citation:
        complaints.append(f"CITATION.cff does not say version: {version}.")
    if final and sections.get("Unreleased", ("", ""))[1]:
        complaints.append(f"CHANGELOG.md still has lines under Unreleased: move them to ## [{version}].")
    if final and not re.fullmatch(r"- \d{4}-\d\d-\d\d", sections.get(version, ("", ""))[0]):
        complaints.append(f"CHANGELOG.md gives no date: write ## [{version}] - YYYY-MM-DD.")
    return complaints


def main(arguments: list[str]) -> int:
    complaints = check_release(ROOT, final="--final" in arguments)
    print("\n".join(complaints) or f"Version {read_version(ROOT)}: changelog and citation agree.")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

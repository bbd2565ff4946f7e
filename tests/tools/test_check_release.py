"""The version is the same in package, changelog and citation; the papers cited are those that reports cite."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shoal.core.version import VERSION
from shoal.report.citations import ENTRIES

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name in ("CHANGELOG.md", "CITATION.cff", "src/shoal/core/version.py", "tools/check_release.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def check_release(project: Path, *words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "tools/check_release.py", *words], cwd=project, capture_output=True, text=True
    )
    return done.returncode, done.stdout


def test_the_version_is_the_same_everywhere(project: Path):
    assert check_release(project) == (0, f"Version {VERSION}: changelog and citation agree.\n")


def test_a_version_that_was_forgotten_somewhere_is_told(project: Path):
    (project / "src/shoal/core/version.py").write_text('VERSION = "9.0.0"\n')
    code, told = check_release(project)
    assert code == 1
    assert told == "CHANGELOG.md has no section ## [9.0.0].\nCITATION.cff does not say version: 9.0.0.\n"


def test_a_release_has_a_date_and_leaves_nothing_unreleased(project: Path):
    changelog = project / "CHANGELOG.md"
    changelog.write_text(f"## [Unreleased]\n\n- a line\n\n## [{VERSION}]\n\n- a line\n")
    told = check_release(project, "--final")[1]
    assert "still has lines under Unreleased" in told and "gives no date" in told
    changelog.write_text(f"## [Unreleased]\n\n## [{VERSION}] - 2030-01-31\n\n- a line\n")
    assert check_release(project, "--final")[0] == 0


def test_the_citation_names_papers_as_the_report_does():
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (found["cff-version"], found["title"], found["version"]) == ("1.2.0", "shoal", VERSION)
    assert len(found["references"]) == 5
    keys = ("liu2025feddhad", "xue2023fedbiad", "zhou2025fedacd", "liu2024feddumap", "liu2023fedbr")
    for paper, entry in zip(found["references"], (ENTRIES[key] for key in keys), strict=True):
        fields = dict(re.findall(r"^  (\w+)\s*= \{((?:[^{}]|\{[^{}]*\})*)\}", entry, re.MULTILINE))
        fields = {key: " ".join(re.sub(r"[{}]", "", value).split()) for key, value in fields.items()}
        authors = [f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]]
        assert (paper["title"], " and ".join(authors)) == (fields["title"], fields["author"])
        assert str(paper["year"]) == fields["year"] and paper.get("doi") == fields.get("doi")

"""The table of what needs a POSIX system names files and tests that are there."""

from pathlib import Path

import portability
import pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", portability.POSIX_FILES)
def test_files_of_the_table_are_there(path: str):
    assert (TESTS / path).exists()


@pytest.mark.parametrize("test", portability.POSIX_TESTS)
def test_tests_of_the_table_are_there(test: str):
    path, name = test.split("::")
    assert f"def {name}(" in (TESTS / path).read_text(encoding="utf-8")


def test_a_file_that_only_begins_like_one_of_the_table_is_another():
    assert portability.is_posix_file("docs/test_docs.py") and not portability.is_posix_file("docs_too/test_docs.py")

"""What tables and help are generated from: the first sentence of every part, and the explanation of its options."""

import re
from dataclasses import fields

import pytest

from shoal.cli.listings import read_first_sentence
from shoal.core.part import Part
from shoal.parts import find_shipped_parts

PARTS = find_shipped_parts()


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_first_sentence_is_an_entry_of_a_table(part: type[Part]):
    sentence = read_first_sentence(part)
    assert sentence.endswith(".") and 20 < len(sentence) <= 115, sentence
    assert sentence == (part.__doc__ or "").split("\n")[0].strip(), "it stands on the first line, alone"
    assert "`" not in sentence and "|" not in sentence.replace("|w - anchor|", ""), "options come later"


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_every_option_is_explained(part: type[Part]):
    missing = [f.name for f in fields(part) if not re.search(rf"\b{f.name}\b", part.__doc__ or "")]
    assert not missing, f"the docstring of {part.__name__} says nothing of {missing}"

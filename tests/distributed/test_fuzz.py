"""A hundred thousand spoiled replies: each is read or refused, and nothing else ever happens."""

import numpy as np
import pytest
from hostile_replies import HEADER, HONEST, assert_read_or_refused, spoil

PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_fuzzed_answers_are_read_or_refused(part):
    generator = np.random.default_rng(part)
    for _ in range(100_000 // PARTS):
        content = bytearray(HONEST)
        for _ in range(generator.integers(1, 5)):
            position = int(generator.integers(0, HEADER if generator.random() < 0.9 else len(content) + 1))
            inserted = generator.bytes(int(generator.integers(0, 7)))
            kind = int(generator.integers(0, 5))
            if kind == 4 and content:
                content[position % len(content)] ^= 1 << int(generator.integers(0, 8))
            spoil(content, position, inserted, kind)
        assert_read_or_refused(bytes(content), bool(generator.integers(0, 2)))

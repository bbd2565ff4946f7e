"""CutMix: boxes, the weights of labels, padding, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.batch import Batch
from shoal.core.errors import ShoalError
from shoal.models.lstm import lstm
from shoal.parts.cutmix import CutMix, patch_batch

DOUBLE = torch.float64


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=DOUBLE)


def test_a_quarter_of_the_image_is_the_partners_and_counts_a_quarter():
    x = torch.stack([torch.zeros(1, 4, 4, dtype=DOUBLE), torch.ones(1, 4, 4, dtype=DOUBLE)])
    batch = Batch(x, ((torch.tensor([3, 7]), None),))
    mixed = patch_batch(batch, number(0.75), number(0.5), number(0.99), number(0.5))
    # a box of 2 x 2 around row 2 and column 3, of which nothing lies beyond the border
    assert mixed.inputs[0, 0].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]]
    (first, own), (second, rest) = mixed.targets
    assert own is not None and rest is not None
    assert first.tolist() == [3, 7] and second.tolist() == [7, 3]
    assert own.tolist() == [0.75, 0.75] and rest.tolist() == [0.25, 0.25]


def test_a_box_at_the_border_counts_what_is_left_of_it():
    x = torch.stack([torch.zeros(1, 4, 4, dtype=DOUBLE), torch.ones(1, 4, 4, dtype=DOUBLE)])
    mixed = patch_batch(Batch(x, ((torch.tensor([0, 1]), None),)), number(0.75), number(0.0), number(0.0), number(0.5))
    weight = mixed.targets[1][1]
    assert mixed.inputs[0].sum() == 1 and weight is not None and weight.tolist() == [1 / 16, 1 / 16]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(0, 3), st.tuples(*[st.floats(0, 0.999)] * 4))
def test_padding_is_nobodys_partner(rows, padding, drawn):
    x, y = torch.randn(rows + padding, 1, 5, 6, dtype=DOUBLE), torch.arange(rows + padding)
    weight = (torch.arange(rows + padding) < rows).to(DOUBLE)
    draws = [number(value) for value in drawn]
    padded = patch_batch(Batch(x, ((y, None),), weight), *draws)
    short = patch_batch(Batch(x[:rows], ((y[:rows], None),)), *draws)
    torch.testing.assert_close(padded.inputs[:rows], short.inputs)
    assert [t[:rows].tolist() for t, _ in padded.targets] == [t.tolist() for t, _ in short.targets]
    weights = [weight for _, weight in short.targets if weight is not None]
    torch.testing.assert_close(weights[0] + weights[1], torch.ones(rows, dtype=DOUBLE))


def test_words_are_refused():
    with pytest.raises(ShoalError, match="cutmix cuts boxes out of images"):
        CutMix().model(lstm((6,), 20))

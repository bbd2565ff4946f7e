"""Normalising: by what the training half shows of each channel, also where that is a single value."""

import pytest
import torch

from shoal.data.dataset import Dataset


def make_dataset(x: torch.Tensor, test_x: torch.Tensor) -> Dataset:
    return Dataset("own", x, torch.zeros(len(x)).long(), test_x, torch.zeros(len(test_x)).long(), 2)


def test_channels_have_mean_0_and_deviation_1_by_the_training_half():
    x, test_x = 3 + 2 * torch.randn(500, 3, 4, 4), torch.full((2, 3, 4, 4), 7.0)
    normalised = make_dataset(x, test_x).normalise()
    torch.testing.assert_close(normalised.inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(normalised.inputs.std((0, 2, 3)), torch.ones(3))
    assert torch.equal(normalised.test_inputs, (test_x - x.mean((0, 2, 3), True)) / x.std((0, 2, 3), keepdim=True))


@pytest.mark.parametrize("value", [0.0, 0.1, 123.456])
def test_a_channel_of_one_value_becomes_0_and_not_its_rounding_errors(value):
    x, test_x = torch.randn(60_000, 2), torch.tensor([[0.0, value], [0.0, value + 1]])
    x[:, 1] = value
    normalised = make_dataset(x, test_x).normalise()
    assert not normalised.inputs[:, 1].any()
    torch.testing.assert_close(normalised.test_inputs[:, 1], torch.tensor([0.0, 1.0]))


def test_a_single_sample_is_normalised_to_0():
    assert make_dataset(torch.ones(1, 3), torch.ones(1, 3)).normalise().inputs.tolist() == [[0.0, 0.0, 0.0]]

"""Augmentation of images: what each kind does, that it can be vectorised, what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ShoalError
from shoal.core.streams import RandomStreams
from shoal.data.affine_augment import Rotate, Shear, Zoom, warp_images
from shoal.data.augment import AUGMENTATIONS, Crop, Flip, parse_augment, refuse_augmenting
from shoal.data.colour_augment import Brightness, Contrast, Erase
from shoal.data.rand_augment import OPERATIONS, RandAugment

DOUBLE = torch.float64
EVERYTHING = "crop:2+flip+rotate:20+shear:10+zoom:0.2+brightness:0.2+contrast:0.3+erase:0.5+rand:2:15"


def make_images(count: int = 3, tall: int = 6, wide: int = 6) -> torch.Tensor:
    return torch.rand(count, 2, tall, wide, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


def test_a_quarter_turn_is_exact():
    x = make_images()
    turned = Rotate(90).transform_images(x, torch.ones(3))
    torch.testing.assert_close(turned, torch.rot90(x, 1, (-2, -1)), atol=1e-6, rtol=0)


def test_a_shift_by_whole_pixels_is_exact():
    x = make_images()
    ones = torch.eye(2, dtype=DOUBLE).expand(3, 2, 2)
    moved = warp_images(x, ones, torch.tensor([[1.0, 2.0]] * 3, dtype=DOUBLE))
    torch.testing.assert_close(moved[..., :4, :5], x[..., 2:, 1:])
    assert not moved[..., 4:, :].any() and not moved[..., 5:].any()


@pytest.mark.parametrize("step", [Rotate(30), Shear(20), Zoom(0.5), Brightness(0.5), Contrast(0.5)], ids=str)
def test_the_middle_of_the_range_changes_nothing(step):
    x = make_images()
    torch.testing.assert_close(step.transform_images(x, torch.zeros(3)), x)


def test_brightness_and_contrast_by_hand():
    x = torch.tensor([[[[1.0, 3.0]]]])
    assert Brightness(0.5).transform_images(x, torch.ones(1)).flatten().tolist() == [1.5, 4.5]
    assert Contrast(0.5).transform_images(x, torch.ones(1)).flatten().tolist() == [0.5, 3.5]


def test_a_rectangle_is_erased_with_its_chance():
    x = torch.ones(4000, 1, 10, 10)
    words = torch.from_numpy(RandomStreams(0).draw_words(5 * 4000, "test").astype("int64"))
    erased = Erase(0.25).transform_images(x, Erase(0.25).read_draws(words))
    missing = (erased == 0).flatten(1).float().mean(1)
    assert float((missing > 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert 0.0099 <= float(missing[missing > 0].min()) and float(missing.max()) <= 0.4
    first = (erased[missing > 0][0, 0] == 0).nonzero()
    (top, left), (bottom, right) = first.min(0).values.tolist(), first.max(0).values.tolist()
    assert len(first) == (bottom - top + 1) * (right - left + 1)


@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=OPERATIONS)
def test_every_operation_of_randaugment_does_what_it_is_called(number):
    x, name = make_images(1), OPERATIONS[number]
    changed = RandAugment(1, 30).transform_images(x, torch.tensor([[[number, 1]]]))
    expected = {
        "identity": lambda: x,
        "rotate": lambda: Rotate(30).transform_images(x, torch.ones(1)),
        "shift_x": lambda: torch.cat((x[..., 2:], torch.zeros_like(x[..., :2])), -1),
        "shift_y": lambda: torch.cat((x[..., 2:, :], torch.zeros_like(x[..., :2, :])), -2),
        "brightness": lambda: 1.9 * x,
        "contrast": lambda: x.mean() + 1.9 * (x - x.mean()),
    }
    if name in expected:
        torch.testing.assert_close(changed, expected[name](), atol=1e-6, rtol=0)
    else:
        middle = (slice(None), slice(None), slice(2, 4), slice(2, 4))
        assert not torch.allclose(changed, x) and not torch.allclose(changed[middle], x[middle])


def test_devices_side_by_side_get_what_each_gets_alone():
    augment = parse_augment(EVERYTHING)
    assert augment is not None
    x = torch.stack([make_images(4), make_images(4).flip(0)])
    words = [torch.from_numpy(RandomStreams(seed).draw_words(4 * augment.words, "test")) for seed in range(2)]
    drawn = [[own[0] for own in augment.read_draws(own_words.long(), [4], 4)] for own_words in words]
    alone = torch.stack([augment.transform_images(x[i], drawn[i]) for i in range(2)])
    stacked = [torch.stack(own) for own in zip(*drawn)]
    together = torch.vmap(lambda images, *own: augment.transform_images(images, list(own)))(x, *stacked)
    torch.testing.assert_close(together, alone)
    assert alone.dtype == DOUBLE and alone.isfinite().all()


def draw_with_torch(step: object, generator: torch.Generator, images: int) -> torch.Tensor:
    """What a kind of augmentation draws for a batch, by torch's own functions."""
    match step:
        case Flip():
            return torch.rand(images, generator=generator) < 0.5
        case Crop():
            return torch.randint(0, 2 * step.pad + 1, (2, images), generator=generator).t()
        case Erase():
            return torch.rand(images, 5, generator=generator)
        case RandAugment():
            which = torch.randint(len(OPERATIONS), (images, step.count), generator=generator)
            return torch.stack((which, 2 * torch.randint(2, (images, step.count), generator=generator) - 1), -1)
    return 2 * torch.rand(images, generator=generator) - 1


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(EVERYTHING.split("+")), min_size=1, max_size=5),
    st.lists(st.integers(1, 5), min_size=1, max_size=7),
    st.integers(0, 2**40),
)
def test_draws_of_all_steps_are_those_that_torch_makes_step_by_step(names, sizes, seed):
    augment, streams = parse_augment("+".join(names)), RandomStreams(seed)
    assert augment is not None
    words = streams.draw_words(augment.words * sum(sizes), "augment", 3, 4).astype("int64")
    drawn = augment.read_draws(torch.from_numpy(words), sizes, max(sizes))
    generator = streams.make_torch_generator("augment", 3, 4)
    for number, size in enumerate(sizes):
        for step, own in zip(augment.steps, drawn, strict=True):
            assert torch.equal(own[number, :size], draw_with_torch(step, generator, size))
            assert not own[number, size:].any()


@pytest.mark.parametrize("text, bytes_per_image", [("rand:2:15", 4), ("crop:63", 2), ("crop:64", 4), ("flip", 1)])
def test_draws_of_whole_numbers_take_up_no_more_than_they_need(text, bytes_per_image):
    augment = parse_augment(text)
    assert augment is not None
    words = torch.from_numpy(RandomStreams(0).draw_words(6 * augment.words, "test").astype("int64"))
    assert sum(t.nbytes for t in augment.read_draws(words, [2, 2, 2], 2)) == 6 * bytes_per_image


@pytest.mark.parametrize("text", ["rand:2:15", "crop:2", "crop:64"])
def test_the_type_of_draws_changes_no_bit(text):
    augment = parse_augment(text)
    assert augment is not None
    words = torch.from_numpy(RandomStreams(0).draw_words(5 * augment.words, "test").astype("int64"))
    drawn, x = [own[0] for own in augment.read_draws(words, [5], 5)], make_images(5).float()
    found, wanted = (augment.transform_images(x, own) for own in (drawn, [t.long() for t in drawn]))
    assert torch.equal(found, wanted)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(sorted(AUGMENTATIONS)), min_size=1, max_size=4), st.sampled_from("+,"))
def test_what_is_written_is_what_is_read(names, separator):
    words = [":".join([name, *(str(kind(high)) for kind, _, high in AUGMENTATIONS[name].numbers)]) for name in names]
    augment = parse_augment(separator.join(words))
    assert augment is not None and [type(step) for step in augment.steps] == [AUGMENTATIONS[n].make for n in names]


@pytest.mark.parametrize(
    "text", ["flip:2", "crop", "crop:0", "rotate:x", "rand:2", "rand:2:31", "erase:-1", "blur", "crop:nan"]
)
def test_what_cannot_be_read_is_refused(text):
    with pytest.raises(ShoalError, match="cannot be read"):
        parse_augment(text)


def test_only_images_are_augmented():
    refuse_augmenting(make_images())
    with pytest.raises(ShoalError, match=r"samples of shape \(5,\)"):
        refuse_augmenting(torch.zeros(4, 5))

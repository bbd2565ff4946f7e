"""What is probably a mistake in a recipe or a model although it can be run: told before the first round."""

from collections.abc import Iterator

import torch

from shoal.core.model.inputs import scale_pixels, take_rows
from shoal.core.model.net import Net
from shoal.data.dataset import Dataset
from shoal.data.plausibility import Doubt
from shoal.models import MODELS
from shoal.runs.owner_split import names_owners
from shoal.runs.recipe import DEFAULTS, Recipe


def find_recipe_doubts(recipe: Recipe, net: Net, dataset: Dataset) -> Iterator[Doubt]:
    """Warnings about settings that do nothing, and about a model whose outputs are no logits."""
    if recipe.lr == 0:
        yield "lr is 0, so that no device learns anything. Give a learning rate above 0.", ()
    if recipe.steps and recipe.epochs != DEFAULTS["epochs"]:
        yield "epochs is %s and steps is %s: steps count, epochs do not. Leave one out.", (recipe.epochs, recipe.steps)
    is_default = all(getattr(recipe, key) == DEFAULTS[key] for key in ("split", "devices"))
    if dataset.owners is not None and is_default and not names_owners(vars(recipe)):
        yield (
            "The data say whose each sample is (%d owners), and the split %s mixes all of them over %d devices. For a "
            "device of each owner give split = owner and devices = 0.",
            (int(dataset.owners.max()) + 1, recipe.split, recipe.devices),
        )
    if recipe.accumulate > recipe.batch:
        wording = "accumulate is %d, and a batch has %d samples: every sample is a micro-batch of its own."
        yield wording, (recipe.accumulate, recipe.batch)
    if recipe.model not in MODELS and net.task.has_class_logits and returns_probabilities(net, dataset):
        yield (
            "The model %s returns probabilities, and the loss expects logits: it would take a softmax twice and learn "
            "slowly. Leave out the softmax at its end.",
            (recipe.model,),
        )


def returns_probabilities(net: Net, dataset: Dataset) -> bool:
    """Whether the outputs for a few samples are numbers from 0 to 1 that add up to 1."""
    rows = torch.arange(min(4, len(dataset.targets)), device=dataset.targets.device)
    with torch.no_grad():
        outputs = net.forward(net.initial, scale_pixels(take_rows(dataset.inputs, rows)))[0].float()
    net.reset_slots()
    is_share = bool((outputs >= 0).all()) and outputs.shape[-1] > 1
    return is_share and bool(torch.allclose(outputs.sum(-1), torch.ones_like(outputs[..., 0]), atol=1e-3))

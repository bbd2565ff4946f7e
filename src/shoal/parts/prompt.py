"""Prompt vectors: rows before the embedded text, or among patches, are all that is trained (Lester et al. 2021)."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.model.net import Net
from shoal.core.model.prompted_module import PROMPT_KEY, PromptPlace
from shoal.core.part import Part
from shoal.core.streams import RandomStreams
from shoal.parts.lib.adapter_layers import choose_head_role, set_head_role
from shoal.parts.lib.checks import require
from shoal.parts.lib.prompt_places import choose_place, insert_prompt

ROLES = ("shared", "personal")
PATCH_DEVIATION = 0.02
"""Of vectors among patches: what class tokens and positions of vision transformers are drawn with."""


@dataclass(frozen=True)
class Prompt(Part):
    """[P; E(x)]: vectors P beside the embedded input E(x) are trained and travel, the model is frozen.

    `length` vectors stand before a text that is read from left to right, else after its first token, and in an image
    after the first position. `init` is words, rows of the embedding drawn by the recipe's seed, or random; empty: words
    where there are any. `role` is that of the vectors, shared or personal, and `head` that of the last linear layer,
    shared, frozen or personal; empty: shared, and frozen where it gives the next word.
    """

    cite: ClassVar = ("lester2021prompt", "jia2022vpt", "zhao2023fedprompt")
    freezes_rest: ClassVar = True
    needs_positions: ClassVar = True

    length: int = 10
    init: str = ""
    role: str = "shared"
    head: str = ""

    def __post_init__(self):
        require(self, "length from 1 to 65536", 1 <= self.length <= 65536)
        require(self, "init words or random, or none", self.init in ("", "words", "random"))
        require(self, f"role one of {', '.join(ROLES)}", self.role in ROLES)
        require(self, "head shared, frozen or personal, or none", self.head in ("", "frozen", *ROLES))

    def model(self, net: Net) -> Net:
        place, width = choose_place(net, self.length)
        prompted = insert_prompt(net, place, self.draw_vectors(net, place, width))
        roles = dict(net.roles) | dict.fromkeys(net.names_with_role("shared"), "frozen")
        if self.role != "shared":
            roles[f"{place.layer}.{PROMPT_KEY}"] = self.role
        head = self.head or choose_head_role(net, (), place.in_outputs)
        made = replace(prompted, roles=set_head_role(prompted, roles, head, bool(self.head)))
        if not made.shared_trainable:
            problem = "With these roles of prompt nothing is left that is trained and shared."
            raise ShoalError("bad-part", problem, "Write role='shared' or head='shared'.")
        return made

    def draw_vectors(self, net: Net, place: PromptPlace, width: int) -> Tensor:
        """The first vectors, the same on all devices: words as the model reads them, or noise as large as these."""
        generator = RandomStreams(net.seed).make_torch_generator(PROMPT_KEY)
        layer = net.module.get_submodule(place.layer)
        noise = torch.randn(place.length, width, generator=generator, dtype=torch.float64)
        if not isinstance(layer, nn.Embedding):
            if self.init == "words":
                problem = "prompt begins with words, and this model reads none."
                raise ShoalError("bad-part", problem, "Write init='random', or leave it out.")
            return (PATCH_DEVIATION * noise).to(net.place, net.dtype)
        words = draw_words(layer, place.length, generator).to(net.place)
        with torch.no_grad():
            rows = layer(words[None])[0]
        if self.init != "random":
            return rows.to(net.dtype)
        deviation = float(f"{float(rows.double().square().mean().sqrt()):.2g}")  # the same digits on every machine
        return (deviation * noise).to(net.place, net.dtype)


def draw_words(layer: nn.Embedding, count: int, generator: torch.Generator) -> Tensor:
    """So many rows of an embedding, but that of padding: different ones as far as there are any."""
    order = torch.randperm(layer.num_embeddings, generator=generator)
    order = order[order != layer.padding_idx] if layer.padding_idx is not None else order
    return order.repeat(-(-count // len(order)))[:count]

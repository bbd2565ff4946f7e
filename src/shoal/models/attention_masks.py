"""Attention masks of four dimensions: which positions a token sees, as models of transformers make them themselves."""

from typing import Any

import torch
from torch import Tensor

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""Kinds of layers by their names in `layer_types` of a config."""


def build_attention_masks(present: Tensor, causal: bool, dtype: torch.dtype, config: Any) -> Tensor | dict[str, Tensor]:
    """The mask of a model, or, where its layers see unequally far, one for each kind of layer.

    `present` is true for tokens and false for padding; `causal` hides what comes after a position.
    """
    kinds = set(getattr(config, "layer_types", None) or ())
    window = int(getattr(config, "sliding_window", None) or 0)
    chunk = int(getattr(config, "attention_chunk_size", None) or 0)
    reach = {FULL: {}, SLIDING: {"window": window}, CHUNKED: {"chunk": chunk}}
    if len(kinds) > 1 and kinds <= reach.keys():
        return {kind: build_attention_mask(present, causal, dtype, **reach[kind]) for kind in sorted(kinds)}
    kind = next(iter(kinds)) if len(kinds) == 1 else SLIDING
    return build_attention_mask(present, causal, dtype, **reach.get(kind, {}))


def build_attention_mask(present: Tensor, causal: bool, dtype: torch.dtype, window: int = 0, chunk: int = 0) -> Tensor:
    """What is added to attention scores, (batch, 1, to, from): 0 where a token is seen, else the least number.

    With a `window` a token sees itself and those before it, so many in all, or, where it sees what comes after, so many
    to each side. With a `chunk` it sees those of its own piece of so many tokens.
    """
    length = present.shape[-1]
    seen = present[:, None, None, :].expand(-1, 1, length, length)
    place = torch.arange(length, device=present.device)
    distance = place[:, None] - place
    if causal:
        seen = seen & (distance >= 0)
    if window:
        seen = seen & (distance < window if causal else distance.abs() <= window)
    if chunk:
        piece = (place - present.long().argmax(-1, keepdim=True)) // chunk  # padding in front is no part of a piece
        seen = seen & (piece[:, None, :, None] == piece[:, None, None, :])
    least = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)  # many models weigh positions in float32
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, least)

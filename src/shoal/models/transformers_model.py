"""A model of Hugging Face's transformers as a module that takes a dict of tokens and mask, and returns logits.

The package itself is not imported here: whoever has a model of it has imported it already.
"""

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.models.attention_masks import build_attention_masks

CAUSAL_CLASSES = ("ForCausalLM", "LMHeadModel")
"""How the names of classes end that predict the next token at every position."""


COUNTS_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer", "mpnet", "esm")
"""Kinds of models whose first position is numbered one above the token of padding."""


ROUNDINGS = 100
"""Roundings of the largest logit by which logits may differ that are the same."""


class TransformersModel(nn.Module):
    """A transformer for text: `{"input_ids": ..., "attention_mask": ...}` to the logits of sentences or positions.

    Token numbers alone, as one tensor, are texts without padding.

    The attention mask, 1 for tokens and 0 for padding, becomes a mask of four dimensions before the model sees it: from
    one of two dimensions transformers makes its own, and looks at its values on the way, which no two devices can do in
    one call. `causal` says that a position sees none after it; by default that is so for next tokens, and for kinds of
    models that predict nothing else.
    A model that peft has wrapped is taken as it is, with its adapters.
    """

    token_inputs = True

    def __init__(self, model: Any, causal: bool | None = None):
        super().__init__()
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            problem = f"A {type(model).__name__} is no model of transformers."
            raise ShoalError("bad-value", problem, "Give one that was made from a config or a folder of weights.")
        refuse_virtual_tokens(model)
        base = find_base_model(model)
        predicts_next = type(base).__name__.endswith(CAUSAL_CLASSES)
        self.causal = predicts_next or is_decoder(base.config) if causal is None else causal
        self.has_dropout = has_dropout(model)
        choose_attention: Any = getattr(base, "set_attn_implementation", None)
        if choose_attention:
            choose_attention("eager")  # fused kernels draw their own random numbers, and not all can be vectorised
        self.model = model
        self.accepts = frozenset(inspect.signature(base.forward).parameters)
        padding = getattr(base.config, "pad_token_id", None)
        self.padding = padding if isinstance(padding, int) else None
        self.text_positions = count_text_positions(base.config)

    def forward(self, inputs: dict[str, Tensor] | Tensor) -> Tensor:
        return self.compute_logits(inputs)

    def compute_logits(self, inputs: dict[str, Tensor] | Tensor, flat_mask: bool = False) -> Tensor:
        """The logits; with `flat_mask` the model is given the mask of two dimensions that it makes its own from."""
        inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
        tokens = inputs["input_ids"]
        present = inputs["attention_mask"] != 0 if "attention_mask" in inputs else torch.ones_like(tokens) != 0
        if self.padding is not None and "attention_mask" in inputs:  # by it decoders find the end of a sentence
            tokens = torch.where(present, tokens, self.padding)
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        mask = (
            present.long()
            if flat_mask
            else build_attention_masks(present, self.causal, dtype, find_base_model(self.model).config)
        )
        given = inputs | {"input_ids": tokens, "attention_mask": mask}
        if "position_ids" in self.accepts and self.causal:  # encoders number them in ways of their own
            given.setdefault("position_ids", (present.long().cumsum(-1) - 1).clamp(min=0))
        if getattr(self.model.config, "type_vocab_size", 0) and "token_type_ids" in self.accepts:
            given.setdefault("token_type_ids", torch.zeros_like(tokens))
        cache = {"use_cache": False} if "use_cache" in self.accepts else {}
        return self.model(**given, **cache, return_dict=True).logits


def find_mask_fault(module: nn.Module, inputs: Any) -> str:
    """Why a model that fails on these inputs does so, if it is the mask of four dimensions; else nothing."""
    if not isinstance(module, TransformersModel):
        return ""
    try:
        module.compute_logits(inputs, flat_mask=True)
    except Exception:
        return ""
    return (
        f"{name_model_class(module)} computes with an attention mask of two dimensions and not with one of four, which "
        "devices side by side need"
    )


def find_mask_difference(module: nn.Module, inputs: Any) -> str:
    """Why a model cannot be trained, if the mask of four dimensions changes its outputs on these inputs; else nothing.

    The token numbers are replaced by unequal ones, and the second half of the last text by padding.
    """
    if not isinstance(module, TransformersModel):
        return ""
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    embedding: Any = find_base_model(module.model).get_input_embeddings()
    tokens, words = inputs["input_ids"], getattr(embedding, "num_embeddings", 0)
    if not words:
        return ""
    present = torch.ones_like(tokens)
    present[-1, (tokens.shape[-1] + 1) // 2 :] = 0
    tokens = (7 * torch.arange(tokens.numel(), device=tokens.device) % words).reshape(tokens.shape)
    given = inputs | {"input_ids": tokens, "attention_mask": present}
    try:
        with torch.no_grad():
            own, flat = module.compute_logits(given), module.compute_logits(given, flat_mask=True)
    except Exception:  # that a model fails is told elsewhere
        return ""
    if own.dim() == 3 and own.shape[1] == tokens.shape[-1]:
        own, flat = own[present != 0], flat[present != 0]
    own, flat = own[flat.isfinite()], flat[flat.isfinite()]
    if not flat.numel() or torch.allclose(
        own, flat, 0, ROUNDINGS * torch.finfo(flat.dtype).eps * float(flat.abs().max())
    ):
        return ""
    return (
        f"{name_model_class(module)} computes other logits with an attention mask of four dimensions, which devices "
        "side by side need, than with one of two"
    )


def name_model_class(module: TransformersModel) -> str:
    return type(find_base_model(module.model)).__name__


class TransformersImageModel(nn.Module):
    """A model of transformers for images: one tensor of pixels to logits."""

    token_inputs = False

    def __init__(self, model: Any):
        super().__init__()
        self.has_dropout = has_dropout(model)
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images, return_dict=True).logits


def takes_token_dict(module: nn.Module) -> bool:
    """Whether a module is a model of transformers for text, which takes `input_ids` by name."""
    base: Any = find_base_model(module)
    return hasattr(base, "config") and "input_ids" in inspect.signature(base.forward).parameters


def find_base_model(model: Any) -> Any:
    """The model itself, or the one that the package peft has put adapters into."""
    return model.get_base_model() if hasattr(model, "peft_config") and hasattr(model, "get_base_model") else model


def count_text_positions(config: Any) -> int:
    """How many tokens a model can read at once; 0 where its config does not say."""
    positions = int(getattr(config, "max_position_embeddings", 0) or 0)
    if getattr(config, "model_type", "") in COUNTS_FROM_PADDING and positions:
        positions -= int(getattr(config, "pad_token_id", 0) or 0) + 1
    return positions


def refuse_virtual_tokens(model: Any) -> None:
    """Refuse a model to which peft has given prompts or prefixes: which need masks of two dimensions."""
    configs = getattr(model, "peft_config", None)
    config = next((c for c in configs.values() if c.is_prompt_learning), None) if isinstance(configs, dict) else None
    if config is not None:
        problem = (
            f"The model has virtual tokens of peft ({type(config).__name__}), which its own masks leave no room for."
        )
        advice = f"Give the model without them, and the method prompt(length={config.num_virtual_tokens})."
        raise ShoalError("bad-value", problem, advice)


def is_decoder(config: Any) -> bool:
    """Whether the positions of a model see none after them: it predicts next tokens and never masked ones.

    A model with an encoder is none, since its encoder reads the text in both directions.
    """
    if getattr(config, "is_encoder_decoder", False):
        return False
    names = import_module("transformers.models.auto.modeling_auto")
    kind = getattr(config, "model_type", "")
    can_predict = kind in names.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return bool(getattr(config, "is_decoder", False)) or (
        can_predict and kind not in names.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    )


def has_dropout(model: Any) -> bool:
    """Whether a model draws random numbers in training, in layers or, as its config says, in between."""
    layers = any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in model.modules())
    settings = model.config.to_dict().items()
    return layers or any("drop" in key and isinstance(value, float) and value > 0 for key, value in settings)

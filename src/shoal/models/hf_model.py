"""Models of Hugging Face as models of a recipe: sentences, next tokens, labels of tokens, images; weights of a folder.

The head follows from the learning task and the config. A head whose size is not that of the data is drawn anew.
"""

import logging
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError, describe_error
from shoal.core.model.inputs import Inputs, InputShape, describe_inputs
from shoal.core.model.net import Net
from shoal.models.hf_folder import find_hf_folder, import_transformers, keep_quiet, list_weight_files, read_hf_config
from shoal.models.transformers_model import (
    CAUSAL_CLASSES,
    TransformersImageModel,
    TransformersModel,
    count_text_positions,
    is_decoder,
)
from shoal.models.user_model import check_forward_pass

log = logging.getLogger("shoal")
AUTO_CLASSES = {
    "sentences": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "next tokens": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "labels of tokens": ("AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "images": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
}
"""By what a head is for, the class that loads it, and the table of the models that have one."""
TEXT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
"""What of the data a model of text is given."""


def build_hf_net(
    name: str, input_shape: InputShape, classes: int, example: Inputs | None = None, task: str = "classify"
) -> Net:
    """The net of `hf:FOLDER` or `hf:NAME` with a head for the task and so many classes."""
    config = read_hf_config(name)
    head = choose_head(config, task, name)
    if head == "images":
        refuse_other_images(config, input_shape, example, name)
    else:
        refuse_other_text(config, input_shape, example, name)
    if head == "next tokens":
        if classes > config.vocab_size:
            raise make_vocabulary_error(name, classes - 1, config.vocab_size)
        classes = config.vocab_size
    else:
        config.num_labels = classes
    if head == "sentences" and is_decoder(config) and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = require_end_of_text(config, name)
    model = load_hf_module(name, head, config)
    is_image = head == "images"
    module = TransformersImageModel(model) if is_image else TransformersModel(model, is_causal(config, head))
    check_forward_pass(name, module, input_shape, classes, not is_image, example)
    return Net(module, input_shape, classes, token_inputs=not is_image, example=example)


def choose_head(config: Any, task: str, name: str) -> str:
    """What the head of a model is for, by the task and, where that leaves it open, by the config's architecture."""
    architecture = next(iter(getattr(config, "architectures", None) or ()), "")
    has = [head for head in AUTO_CLASSES if config.model_type in read_mapping(head)]
    if architecture.endswith("ForImageClassification") or has == ["images"]:
        head = "images"
    elif architecture.endswith("ForTokenClassification") and task == "tokens":
        head = "labels of tokens"
    else:
        head = "next tokens" if task == "tokens" else "sentences"
    if head in has:
        return head
    kind = f"a {architecture}" if architecture else f"of the kind {config.model_type}"
    able = f"has heads for {' and '.join(has)}" if has else "has no head that can be trained here"
    problem = f"{name[:80]} is {kind}, which cannot be trained for {head}: it {able}."
    raise ShoalError("bad-value", problem, "Give another model, or another task.")


def read_mapping(head: str) -> dict[str, str]:
    """The models of transformers that have such a head, by the kind that their config names."""
    return getattr(import_module("transformers.models.auto.modeling_auto"), AUTO_CLASSES[head][1])


def is_causal(config: Any, head: str) -> bool:
    return head == "next tokens" or is_decoder(config)


def is_language_model(config: Any) -> bool:
    """Whether the weights were made for the prediction of next tokens."""
    return any(name.endswith(CAUSAL_CLASSES) for name in getattr(config, "architectures", None) or ())


def require_end_of_text(config: Any, name: str) -> int:
    """The token that stands for padding where a config names none: the end of a text."""
    end = getattr(config, "eos_token_id", None)
    end = end[0] if isinstance(end, (list, tuple)) else end
    if end is None:
        problem = f"The config of {name[:80]} has no pad_token_id, by which the end of a sentence is found."
        raise ShoalError("bad-value", problem, "Write one into config.json.")
    return int(end)


def load_hf_module(name: str, head: str, config: Any) -> nn.Module:
    """A model with the weights of its folder in float32; what they lack is drawn at random, and that is said."""
    folder, transformers = find_hf_folder(name), import_transformers(name)
    auto_class = getattr(transformers, AUTO_CLASSES[head][0])
    files = list_weight_files(folder, name)
    try:
        with keep_quiet():
            if not files:
                model = auto_class.from_config(config, trust_remote_code=False, attn_implementation="eager")
                log.warning("%s has a config and no weights: all of them are drawn at random", name)
                return model.float()
            model, found = auto_class.from_pretrained(
                str(folder),
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                attn_implementation="eager",
                dtype=torch.float32,
            )
    except Exception as error:
        problem = f"{name[:80]} cannot be loaded ({describe_error(error)[:160]})."
        raise ShoalError("bad-value", problem, "Write the folder again with save_pretrained.") from error
    drawn = sorted({*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])})
    if len(drawn) >= len(list(model.parameters())):
        problem = f"The weights in {name[:80]} are those of another model: none has the name and shape of one here."
        raise ShoalError("bad-value", problem, "Give the folder with the weights of its config.")
    if drawn:
        shown = ", ".join(drawn[:3]) + (f" and {len(drawn) - 3} more" if len(drawn) > 3 else "")
        log.info("%s has no weights of the right size for %s: drawn at random", name, shown)
    return model


# what does not fit ----------------------------------------------------------------------------------------------------
def refuse_other_images(config: Any, input_shape: InputShape, example: Inputs | None, name: str) -> None:
    """Refuse data that are no images of the size and with the channels that a model takes."""
    if example is not None or len(input_shape) != 3:
        form = describe_inputs(example) if example is not None else f"of shape {tuple(input_shape)}"
        problem = f"{name[:80]} takes images, and the samples of the data are {form}."
        raise ShoalError("no-data", problem, "Give images as one tensor (samples, channels, height, width).")
    size = getattr(config, "image_size", None)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    wanted = (getattr(config, "num_channels", None), height, width)
    if any(own is not None and own != found for own, found in zip(wanted, input_shape)):
        form = " x ".join("any" if own is None else str(own) for own in wanted)
        problem = f"{name[:80]} takes images of {form}, and those of the data are {' x '.join(map(str, input_shape))}."
        raise ShoalError("no-data", problem, "Bring the images to that size, or give a model of theirs.")


def refuse_other_text(config: Any, input_shape: InputShape, example: Inputs | None, name: str) -> None:
    """Refuse samples that are no token numbers, have further tensors, or are longer than a model has positions."""
    advice = "Give token numbers as input_ids, with attention_mask and token_type_ids if there are any."
    if example is None:
        if len(input_shape) != 1:
            problem = f"{name[:80]} reads text, and the samples of the data are of shape {tuple(input_shape)}."
            raise ShoalError("no-data", problem, advice)
        length = input_shape[0]
    else:
        if not isinstance(example, dict) or not isinstance(example.get("input_ids"), Tensor):
            problem = f"{name[:80]} reads text, and the samples of the data are {describe_inputs(example)}."
            raise ShoalError("no-data", problem, advice)
        more = [key for key in example if key not in TEXT_INPUTS]
        if more:
            problem = f"The data have {', '.join(more)[:80]} beside the tokens, which {name[:80]} does not take."
            raise ShoalError("no-data", problem, "Drop the columns, or name them as label, owner or order.")
        length = example["input_ids"].shape[1]
    positions = count_text_positions(config)
    if positions and length > positions:
        problem = f"The longest text of the data has {length} tokens, and {name[:80]} has {positions} positions."
        raise ShoalError("no-data", problem, f"Cut the texts: text_length = {positions} where shoal makes the tokens.")


def refuse_unknown_tokens(config: Any, inputs: Inputs, name: str) -> None:
    """Refuse token numbers that a model's vocabulary lacks."""
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    tokens = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if not vocabulary or not isinstance(tokens, Tensor) or tokens.is_floating_point() or not tokens.numel():
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise make_vocabulary_error(name, low if low < 0 else high, vocabulary)


def make_vocabulary_error(name: str, token: int, vocabulary: int) -> ShoalError:
    problem = f"The data have the token {token}, and the vocabulary of {name[:80]} has {vocabulary} tokens, from 0 up."
    return ShoalError("no-data", problem, "Make the tokens with the tokenizer of the model.")


def describe_hf_models() -> str:
    """What `shoal list models` says of models of Hugging Face."""
    return (
        "A model of Hugging Face for sentences, next tokens, labels of tokens or images: a folder that save_pretrained "
        "wrote, or a name in the hub cache of this machine; nothing is fetched."
    )

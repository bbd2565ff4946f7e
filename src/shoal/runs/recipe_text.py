"""Texts of a recipe: read by the tokenizer of a model of Hugging Face, and checked against its vocabulary."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from shoal.core.errors import ShoalError
from shoal.data.dataset import Dataset
from shoal.data.text_columns import TextReading
from shoal.models.hf_folder import is_hf_model, read_hf_config
from shoal.models.hf_model import choose_head, is_language_model, refuse_unknown_tokens
from shoal.models.hf_tokens import FolderTokeniser
from shoal.runs.task_targets import find_task_name

TEXT_KEYS = ("model", "task", "text_length")
"""Recipe keys that say how texts are read."""


def make_text_reading(values: Mapping[str, Any]) -> TextReading:
    """How a recipe with these values of `TEXT_KEYS` reads texts: by its model's tokenizer, if that has one."""
    model, task, length = (values.get(key) or default for key, default in zip(TEXT_KEYS, ("", "", 0)))
    if not isinstance(model, str) or not is_hf_model(model):
        if length:
            problem = f"text_length is {length}, and only models of Hugging Face (hf:FOLDER) bring a tokenizer."
            raise ShoalError("bad-value", problem, "Leave it out.")
        return TextReading(next_tokens=task == "tokens")
    is_next = task == "tokens" or (not task and is_language_model(read_hf_config(model)))
    return TextReading(FolderTokeniser(model, int(length)), is_next)


def fit_to_vocabulary(dataset: Dataset, model: str, task: str) -> Dataset:
    """The data set with as many classes as a model's head has outputs; tokens that the model lacks are refused.

    For next tokens those are its vocabulary, for labels of tokens as many as the targets show.
    """
    if not is_hf_model(model):
        return dataset
    config = read_hf_config(model)
    for inputs in (dataset.inputs, dataset.test_inputs, dataset.final_inputs):
        if isinstance(inputs, dict | Tensor):
            refuse_unknown_tokens(config, inputs, model)
    task = task or dataset.task or find_task_name(dataset.inputs, dataset.targets)
    if task != "tokens":
        return dataset
    if choose_head(config, task, model) == "next tokens":
        return replace(dataset, classes=max(dataset.classes, config.vocab_size))
    halves = (dataset.targets, dataset.test_targets, dataset.final_targets)
    return replace(dataset, classes=max(int(own.max()) + 1 for own in halves if own is not None))

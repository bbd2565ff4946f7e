"""The tokenizer that lies in a model's folder, as a function of texts."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import numpy as np

from shoal.core.errors import ShoalError, describe_error
from shoal.models.hf_folder import find_hf_folder, import_transformers, keep_quiet, read_hf_config
from shoal.models.transformers_model import count_text_positions

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
"""Files of which a tokenizer has one at least."""


class FolderTokeniser:
    """Makes tokens of texts, at most `length` of each; 0: as many as the model has positions.

    The tokenizer is read at the first call, so that data without texts need none.
    """

    def __init__(self, name: str, length: int = 0):
        self.name, self.length = name, length
        self.loaded: Any = None

    def __call__(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None
    ) -> tuple[dict[str, list[np.ndarray]], int]:
        """Token columns by name, and how many texts were cut."""
        if self.loaded is None:
            self.loaded = load_tokenizer(self.name)
        length = self.length or count_text_positions(read_hf_config(self.name))
        bounds = {"truncation": True, "max_length": length} if length else {}
        try:
            with keep_quiet():
                made = self.loaded(list(texts), *([list(pairs)] if pairs else []), **bounds)
                whole = made if not length else self.loaded(list(texts), *([list(pairs)] if pairs else []))
        except Exception as error:
            problem = f"The tokenizer of {self.name[:80]} fails on the texts ({describe_error(error)[:120]})."
            raise ShoalError("no-data", problem, "Look at the column of text, and at text_length.") from error
        cut = sum(len(own) < len(long) for own, long in zip(made["input_ids"], whole["input_ids"]))
        columns = {name: [np.asarray(own, dtype=np.int64) for own in values] for name, values in made.items()}
        return {name: columns[name] for name in ("input_ids", "token_type_ids") if name in columns}, cut


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model's folder; one that would have to be fetched, or brings code of its own, is refused."""
    folder = find_hf_folder(name)
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        problem = f"The data hold texts, and in the folder of {name[:80]} lies no tokenizer."
        advice = "Save one there (tokenizer.save_pretrained), or give token numbers as input_ids."
        raise ShoalError("no-data", problem, advice)
    import_transformers(name)
    try:
        with keep_quiet():
            auto = import_module("transformers").AutoTokenizer
            return auto.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        problem = f"The tokenizer of {name[:80]} cannot be read ({describe_error(error)[:120]})."
        raise ShoalError("no-data", problem, "Save it with the version of transformers that is installed.") from error

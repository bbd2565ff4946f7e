"""Where a model of Hugging Face lies: a folder written by `save_pretrained`, or a name in the local hub cache.

Nothing here uses the network, and nothing in a folder is run: the config is JSON, weights are safetensors.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError, describe_error

HF_MODEL = "hf:"
"""How the names of these models begin."""
CONFIG_FILE = "config.json"
UNSAFE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".pkl")
"""How files with weights end that are not read: most of them can run a program when they are."""
READ_SUFFIXES = (".json", ".safetensors", ".txt", ".model")
"""How the files end that decide what a folder gives: config, weights and tokenizer."""
PUBLIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,95})?")
"""A name as it may travel: one word, or an owner and a word as on the hub; no path."""
VOLATILE_KEYS = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
"""Keys of a config that say nothing about what a model computes."""


def is_hf_model(name: str) -> bool:
    """Whether a recipe's model is one of Hugging Face."""
    return name.startswith(HF_MODEL)


def import_transformers(name: str) -> Any:
    """The package, which needs the extra `hf`; `name` is the model that asks for it."""
    if find_spec("transformers") is None:
        problem = f"The model {name[:80]} needs the package transformers, which is not installed."
        raise ShoalError("missing-extra", problem, "pip install 'shoal[hf]'")
    return import_module("transformers")


def find_hf_folder(name: str) -> Path:
    """The folder of `hf:FOLDER`, or of `hf:NAME` in the hub cache of this machine; refused where there is no config."""
    text = name.removeprefix(HF_MODEL)
    folder = Path(text).expanduser()
    if text and folder.is_dir():
        return require_config(folder, name)
    import_transformers(name)
    hub = import_module("huggingface_hub")
    try:
        return require_config(Path(hub.snapshot_download(text, local_files_only=True)), name)
    except ShoalError:
        raise
    except Exception as error:  # the hub has a class for each way in which a name can be wrong
        problem = f"There is no folder {text[:80]!r}, and no model of that name in the hub cache of this machine."
        advice = "Give the folder that save_pretrained wrote; models are never fetched."
        raise ShoalError("no-data", problem, advice) from error


def require_config(folder: Path, name: str) -> Path:
    """The folder, refused where it holds no model."""
    if not (folder / CONFIG_FILE).is_file():
        problem = f"{name[:80]} is a folder without {CONFIG_FILE}, and so no model of Hugging Face."
        raise ShoalError("no-data", problem, "Give the folder that save_pretrained wrote.")
    return folder


def read_hf_config(name: str) -> Any:
    """The config of a model, as transformers reads it; models that bring code of their own are refused."""
    folder = find_hf_folder(name)
    transformers = import_transformers(name)
    try:
        with keep_quiet():
            config = transformers.AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        problem = f"The config of {name[:80]} cannot be used ({describe_error(error)[:160]})."
        advice = "Give a model whose code transformers has itself; code in a folder is not run."
        raise ShoalError("bad-value", problem, advice) from error
    if getattr(config, "quantization_config", None) is not None:
        problem = f"The weights of {name[:80]} are quantised, and only plain numbers can be trained."
        raise ShoalError("bad-value", problem, "Save it in float32 or bfloat16.")
    if getattr(config, "is_encoder_decoder", False):
        problem = f"{name[:80]} is an encoder with a decoder ({config.model_type}), which takes two texts at a time."
        raise ShoalError("bad-value", problem, "Give an encoder, a decoder, or a model of images.")
    return config


def list_weight_files(folder: Path, name: str) -> list[Path]:
    """The safetensors files of a folder; none where it has a config alone, refused where it has only other files."""
    files = sorted(folder.glob("*.safetensors"))
    unsafe = [path.name for path in sorted(folder.iterdir()) if path.suffix in UNSAFE_SUFFIXES]
    if not files and unsafe:
        problem = f"{name[:80]} has its weights in {unsafe[0]} and not in safetensors, and that is not read."
        raise ShoalError("bad-value", problem, "Save it again with save_pretrained, which writes safetensors.")
    return files


def fingerprint_hf_folder(name: str) -> str:
    """16 digits for the content of the files that decide what a model's folder gives."""
    folder = find_hf_folder(name)
    paths = sorted(path for path in folder.iterdir() if path.suffix in READ_SUFFIXES and path.is_file())
    lines = []
    for path in paths:
        state = os.stat(path)
        lines.append(f"{path.name} {hash_file(str(path), state.st_size, state.st_mtime_ns)}")
    return blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


@lru_cache(64)
def hash_file(path: str, size: int, changed: int) -> str:
    """A hash of a file's content; it is read again where its size or time is another."""
    digest = blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def fingerprint_hf_config(name: str) -> str:
    """16 digits for what the config of a model says about what it computes, wherever its folder lies."""
    text = (find_hf_folder(name) / CONFIG_FILE).read_text()
    content = {key: value for key, value in json.loads(text).items() if key not in VOLATILE_KEYS}
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def get_public_name(name: str) -> str:
    """The name under which devices look for a model: of a folder the last word of its path, of the hub the name."""
    folder = Path(name.removeprefix(HF_MODEL)).expanduser()
    public = folder.resolve().name if folder.is_dir() else name.removeprefix(HF_MODEL)
    if not PUBLIC_NAME.fullmatch(public):
        problem = f"Devices look for a model by its name, and {public[:60]!r} is none."
        raise ShoalError("bad-value", problem, "Call the folder by a word of letters, digits, dots and dashes.")
    return HF_MODEL + public


@contextmanager
def keep_quiet() -> Iterator[None]:
    """Inside, transformers prints no bars, tables and warnings: what matters of them is said by the caller."""
    logging = import_module("transformers.utils.logging")
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()

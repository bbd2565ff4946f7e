"""Texts for next-word prediction: Penn Treebank and WikiText-2."""

from pathlib import Path

import numpy as np
import torch

from shoal.data.dataset import Dataset
from shoal.data.download import ZipReader, find_data_file, read_bytes
from shoal.storage.files import damaged_file_error

LENGTH = 35


def read_ptb(folder: Path, length: int = LENGTH) -> Dataset:
    """Penn Treebank as T. Mikolov prepared it: 9,999 words, `<unk>` among them, and `<eos>` make 10,000."""
    train, test = (find_data_file(folder, [f"ptb.{half}.txt"]) for half in ("train", "test"))
    return assemble_corpus("ptb", read_bytes(train), train, read_bytes(test), test, length)


def read_wikitext2(folder: Path, length: int = LENGTH) -> Dataset:
    """WikiText-2 (S. Merity and others, 2016, arXiv:1609.07843) in lower case.

    Its training text has 28,911 words, `<unk>` among them; with `<eos>` and two reserved entries the vocabulary is
    28,914. As written, with capitals, there are 33,277 words and `<eos>`.
    """
    contents, paths = [], []
    for half in ("train", "test"):
        names = (f"{half}.txt", f"wiki.{half}.tokens", f"wikitext-2/wiki.{half}.tokens", "wikitext-2-v1.zip")
        path = find_data_file(folder, names)
        if path.suffix == ".zip":
            archive = ZipReader(path)
            contents.append(archive.read(f"wikitext-2/wiki.{half}.tokens"))
            archive.close()
        else:
            contents.append(read_bytes(path))
        paths.append(path)
    return assemble_corpus(
        "wikitext-2", contents[0], paths[0], contents[1], paths[1], length, lower=True, reserved=("<pad>", "<bos>")
    )


def assemble_corpus(
    name: str,
    train: bytes,
    train_path: Path,
    test: bytes,
    test_path: Path,
    length: int = LENGTH,
    lower: bool = False,
    reserved: tuple[str, ...] = (),
) -> Dataset:
    """Sequences of `length` words, and for each word the one that follows it; what is left at the end is dropped.

    The vocabulary is that of the training text, in sorted order after the reserved entries; a word of the test text
    that is not in it counts as `<unk>`.
    """
    texts = [split_tokens(train, train_path, lower), split_tokens(test, test_path, lower)]
    vocabulary = [*reserved, *sorted({"<unk>", "<eos>", *texts[0]} - set(reserved))]
    numbers = {word: i for i, word in enumerate(vocabulary)}
    halves: list[torch.Tensor] = []
    for text, path in zip(texts, (train_path, test_path), strict=True):
        stream = np.fromiter((numbers.get(word, numbers["<unk>"]) for word in text), np.int64, len(text))
        halves += cut_sequences(stream, length, path)
    return Dataset(name, *halves, classes=len(vocabulary))


def split_tokens(content: bytes, path: Path, lower: bool = False) -> list[str]:
    """The words of a text, with `<eos>` at the end of each line."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise damaged_file_error(path, error) from error
    rows = (text.lower() if lower else text).removesuffix("\n").split("\n")
    return [word for row in rows for word in (*row.split(), "<eos>")]


def cut_sequences(stream: np.ndarray, length: int, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs (N, length), and as targets the same moved on by one."""
    count = (len(stream) - 1) // length
    if count < 1:
        raise damaged_file_error(path, f"{len(stream)} words are too few for a sequence of {length}")
    x, y = (torch.from_numpy(stream[i : i + count * length].reshape(count, length).copy()) for i in (0, 1))
    return x, y

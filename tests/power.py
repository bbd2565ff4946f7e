"""A disk that keeps a log of every step, and what is left on it when its power is cut after any of them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from shoal.storage.durable import Disk

Step = tuple[str, Path, object]


class RememberingDisk(Disk):
    """Writes like any other, and remembers in which order."""

    def __init__(self, root: Path):
        self.root = root
        self.log: list[Step] = []

    def note(self, what: str, path: Path, more: object = None) -> None:
        self.log.append((what, path.relative_to(self.root), more))

    def create(self, path: Path) -> IO[bytes]:
        self.note("create", path)
        return super().create(path)

    def write(self, path: Path, file: IO[bytes], content: bytes) -> None:
        self.note("write", path, content)
        super().write(path, file, content)

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.note("sync", path)

    def rename(self, old: Path, new: Path) -> None:
        self.note("rename", old, new.relative_to(self.root))
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        if path.exists():
            self.note("remove", path)
        super().remove(path)

    def make_folder(self, path: Path) -> None:
        self.note("make_folder", path)
        super().make_folder(path)


@dataclass(eq=False)
class File:
    """What was synced of a file, and what was written to it."""

    synced: bytes = b""
    written: bytes = b""


@dataclass(eq=False)
class Names:
    """The names that were synced in a folder, and the changes since."""

    synced: dict[str, "File | Names"] = field(default_factory=dict)
    changes: list[dict[str, "File | Names | None"]] = field(default_factory=list)

    def kept(self, keep: Callable[[], bool] = lambda: True) -> dict[str, "File | Names"]:
        """The names with those changes that are kept; one that is lost does not keep a later one from being kept."""
        names: dict[str, File | Names | None] = dict(self.synced)
        for change in self.changes:
            if keep():
                names |= change
        return {name: node for name, node in names.items() if node is not None}


class World:
    """What a disk holds for certain, and what it may hold, after some steps."""

    def __init__(self, log: Iterable[Step]):
        self.root, self.told = Names(), 0
        for what, path, more in log:
            if what == "told":
                self.told = int(str(more))
                continue
            folder = self.root
            for name in path.parts[:-1]:
                inner = folder.kept()[name]
                assert isinstance(inner, Names)
                folder = inner
            node = folder.kept().get(path.name) if path.name else self.root
            match what, node, more:
                case "create", _, _:
                    folder.changes.append({path.name: File()})
                case "make_folder", None, _:
                    folder.changes.append({path.name: Names()})
                case "remove", File() | Names(), _:
                    folder.changes.append({path.name: None})
                case "write", File(), bytes(content):
                    node.written += content
                case "rename", File(), Path(name=new):
                    folder.changes.append({path.name: None, new: node})
                case "sync", File(), _:
                    node.synced = node.written
                case "sync", Names(), _:
                    node.synced, node.changes = node.kept(), []
                case _:
                    raise AssertionError(f"{what} {path} cannot be")

    def left(self, keep: Callable[[], bool], content: Callable[[File], bytes]) -> dict[str, bytes]:
        """The files that are there when the power is back, by path."""
        found: dict[str, bytes] = {}

        def look(folder: Names, place: str) -> None:
            for name, node in folder.kept(keep).items():
                if isinstance(node, Names):
                    look(node, f"{place}{name}/")
                else:
                    found[place + name] = content(node)

        look(self.root, "")
        return found

    def outcomes(self, chances: random.Random) -> list[dict[str, bytes]]:
        """What may be left: nothing but what was synced, all names without content, everything, and two mixtures."""

        def torn(file: File) -> bytes:
            """Some of what was written after the last sync, perhaps with nothing in the place of the rest."""
            end = chances.randint(len(file.synced), len(file.written))
            rest = bytes(len(file.written) - end) if chances.random() < 0.5 else b""
            return file.written[:end] + rest

        def perhaps() -> bool:
            return chances.random() < 0.5

        return [
            self.left(lambda: False, lambda file: file.synced),
            self.left(lambda: True, lambda file: file.synced),
            self.left(lambda: True, lambda file: file.written),
            self.left(perhaps, torn),
            self.left(perhaps, torn),
        ]


def materialise(files: dict[str, bytes], root: Path) -> None:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)

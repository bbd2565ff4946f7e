"""What devices remember between rounds: bounded in RAM, spilled to disk, versioned by round.

A round's memories are staged and take effect together when it is committed, so a round that is broken off leaves none.
On disk each version is a file of its own; a checkpoint of round t needs, of every device, the newest version up to t.
Older ones are deleted only after the next checkpoint is safe. A power cut takes no version that a flush has indexed.
"""

from collections import OrderedDict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch

from shoal.core.model import tree
from shoal.core.model.plan import Plan, Slicer
from shoal.core.model.tree import Tree
from shoal.storage.durable import make_folders, remove_file, remove_strays, replace_file, sync_paths
from shoal.storage.files import damaged_file_error, explain_disk_errors, read_tree, tree_as_bytes


class MemoryVersion(NamedTuple):
    """What a device remembered after a round, and how often the model had been pruned by then."""

    device: int
    round: int
    cuts: int


class DeviceMemory:
    """Device number -> what its parts remember."""

    def __init__(self, folder: Path | None = None, limit: int = 1 << 30, place: torch.device | str = "cpu"):
        self.place = place
        self._temporary = None
        self._folder = folder
        self.limit = limit
        self.staged: dict[int, Tree] = {}
        self.held: OrderedDict[int, Tree] = OrderedDict()
        self.dirty: dict[int, int] = {}
        """Devices whose held memory is not on disk, and the round it is of."""
        self.versions: dict[int, list[MemoryVersion]] = {}
        """What is on disk, oldest first."""
        self.unsynced: set[Path] = set()
        """Folders whose newest names a power cut would take."""
        self.cuts: list[tuple[Slicer, Plan]] = []
        self.used = 0

    @property
    def folder(self) -> Path:
        if self._folder is None:
            self._temporary = TemporaryDirectory(prefix="shoal-memory-")
            self._folder = Path(self._temporary.name)
        return self._folder

    def get(self, device: int) -> dict[str, Tree]:
        if device in self.held:
            self.held.move_to_end(device)
            return self.held[device]
        if device not in self.versions:
            return {}
        version = self.versions[device][-1]
        memory = tree.map_tensors(lambda t: t.to(self.place), read_tree(self._version_path(version)))
        for slicer, plan in self.cuts[version.cuts :]:
            memory = slicer.cut_tree(memory, plan)
        self._hold(device, memory)
        return memory

    def put(self, device: int, memory: Tree) -> None:
        """Remember from the end of this round on."""
        nothing = all(isinstance(v, dict) and not v for v in memory.values())
        if not nothing or device in self.held or device in self.versions:
            self.staged[device] = memory

    def commit(self, round: int, kept: bool = True) -> None:
        """The round is over: what was staged is now what devices remember, unless the round was void."""
        if not kept:
            return self.discard()
        for device, memory in self.staged.items():
            self._hold(device, memory)
            self.dirty[device] = round
        self.staged = {}
        self._evict()

    def discard(self) -> None:
        """The round was broken off."""
        self.staged = {}

    def cut(self, slicer: Slicer, plan: Plan) -> None:
        """The model was pruned: what is held is cut now, what is on disk when it is next read."""
        self.cuts.append((slicer, plan))
        self.staged = {d: slicer.cut_tree(m, plan) for d, m in self.staged.items()}
        for device in self.held:
            self.held[device] = slicer.cut_tree(self.held[device], plan)
        self.used = sum(tree.count_tree_bytes(m) for m in self.held.values())

    def flush(self) -> list["MemoryVersion"]:
        """Bring everything to disk; the index that a checkpoint stores to find it again."""
        for device in list(self.dirty):
            self._write(device)
        with explain_disk_errors(self.folder):
            sync_paths(self.unsynced)
        self.unsynced.clear()
        return [versions[-1] for versions in self.versions.values()]

    def forget_old_versions(self) -> None:
        """A checkpoint is safe: versions before the newest are needed no more."""
        for versions in self.versions.values():
            for old in versions[:-1]:
                remove_file(self._version_path(old))
            del versions[:-1]

    def restore(self, index: list["MemoryVersion"], cuts: list[tuple[Slicer, Plan]]) -> None:
        """Take up what a checkpoint knew; later versions are leftovers of a run that was killed."""
        wanted = {self._version_path(version) for version in index}
        for path in wanted:
            if not path.is_file():
                raise damaged_file_error(path, "it is missing")
        self.cuts = cuts
        self.versions = {version.device: [version] for version in index}
        for path in self.folder.glob("*/*.safetensors"):
            if path not in wanted:
                remove_file(path)
        for folder in self.folder.glob("*/"):
            remove_strays(folder)

    def _hold(self, device: int, memory: Tree) -> None:
        if device in self.held:
            self.used -= tree.count_tree_bytes(self.held.pop(device))
        self.held[device] = memory
        self.used += tree.count_tree_bytes(memory)
        self._evict(keep=device)

    def _evict(self, keep: int | None = None) -> None:
        for device in list(self.held):
            if self.used <= self.limit:
                break
            if device != keep:
                self._write(device)
                self.used -= tree.count_tree_bytes(self.held.pop(device))

    def _write(self, device: int) -> None:
        round = self.dirty.get(device)
        if round is not None:
            version = MemoryVersion(device, round, len(self.cuts))
            path = self._version_path(version)
            with explain_disk_errors(path):
                self.unsynced |= make_folders(path.parent, inside=self.folder.parent) | {path.parent}
                replace_file(path, tree_as_bytes(self.held[device]), sync_folder=False)
            self.versions.setdefault(device, []).append(version)
            del self.dirty[device]

    def _version_path(self, version: "MemoryVersion") -> Path:
        device, round, cuts = version
        return self.folder / f"{device % 256:02x}" / f"{device}-{round}-{cuts}.safetensors"

"""Device memory (what parts keep on a device between rounds): bounded in RAM, spilled to disk, versioned by round.

A round's memories are staged and take effect together when it is committed, so an interrupted round leaves no trace.
On disk each version is a file of its own; a checkpoint of round t needs, of every device, the newest version up to t.
Older ones are deleted only after the next checkpoint is on disk. A power cut loses no version that `flush` returned.
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
    """The memory of a device after a round, as a file; `cuts` is how often the model had been pruned by then."""

    device: int
    round: int
    cuts: int


class DeviceMemory:
    """Device number -> memory by part. At most `limit` bytes are held in memory, on the compute device `place`."""

    def __init__(self, folder: Path | None = None, limit: int = 1 << 30, place: torch.device | str = "cpu"):
        self.place = place
        self._temporary = None
        self._folder = folder
        self.limit = limit
        self.staged: dict[int, Tree] = {}
        self.held: OrderedDict[int, Tree] = OrderedDict()
        """Memories in RAM, least recently used first."""
        self.dirty: dict[int, int] = {}
        """Devices whose memory in RAM is not on disk, with the round in which it was committed."""
        self.versions: dict[int, list[MemoryVersion]] = {}
        """By device, the versions on disk, oldest first."""
        self.unsynced: set[Path] = set()
        """Folders with new files that have to be synced."""
        self.cuts: list[tuple[Slicer, Plan]] = []
        """How the model was pruned, oldest first; versions on disk are cut when they are read."""
        self.used = 0
        """Bytes of the memories in RAM."""

    @property
    def folder(self) -> Path:
        """Where versions are written; a temporary folder unless one was given."""
        if self._folder is None:
            self._temporary = TemporaryDirectory(prefix="shoal-memory-")
            self._folder = Path(self._temporary.name)
        return self._folder

    def get(self, device: int) -> dict[str, Tree]:
        """The committed memory of a device by part; empty before its first round."""
        if device in self.held:
            self.held.move_to_end(device)
            return self.held[device]
        if device not in self.versions:
            return {}
        newest = self.versions[device][-1]
        memory = tree.map_tensors(lambda t: t.to(self.place), read_tree(self._version_path(newest)))
        for slicer, plan in self.cuts[newest.cuts :]:
            memory = slicer.cut_tree(memory, plan)
        self._hold(device, memory)
        return memory

    def get_newest(self, device: int) -> dict[str, Tree]:
        """What a device remembers once the round that is under way is committed."""
        return self.staged[device] if device in self.staged else self.get(device)

    def put(self, device: int, memory: Tree) -> None:
        """Stage the memory of a device; `commit` makes it take effect. Empty memories of new devices are not stored."""
        is_empty = all(isinstance(v, dict) and not v for v in memory.values())
        if not is_empty or device in self.held or device in self.versions:
            self.staged[device] = memory

    def commit(self, round: int, kept: bool = True) -> None:
        """End a round: what was staged takes effect, or is discarded where the round is not `kept`."""
        if not kept:
            return self.discard()
        for device, memory in self.staged.items():
            self._hold(device, memory)
            self.dirty[device] = round
        self.staged = {}
        self._evict()

    def discard(self) -> None:
        """Drop what was staged in this round."""
        self.staged = {}

    def cut(self, slicer: Slicer, plan: Plan) -> None:
        """Follow a pruning of the model: memories in RAM are cut now, those on disk when they are next read."""
        self.cuts.append((slicer, plan))
        self.staged = {d: slicer.cut_tree(m, plan) for d, m in self.staged.items()}
        for device in self.held:
            self.held[device] = slicer.cut_tree(self.held[device], plan)
        self.used = sum(tree.count_tree_bytes(m) for m in self.held.values())

    def flush(self) -> list["MemoryVersion"]:
        """Write all memories to disk; returns the newest version of each device, which a checkpoint stores."""
        for device in list(self.dirty):
            self._write(device)
        with explain_disk_errors(self.folder):
            sync_paths(self.unsynced)
        self.unsynced.clear()
        return [versions[-1] for versions in self.versions.values()]

    def forget_old_versions(self) -> None:
        """Delete all versions but the newest of each device; to be called when the checkpoint is safe."""
        for versions in self.versions.values():
            for old in versions[:-1]:
                remove_file(self._version_path(old))
            del versions[:-1]

    def restore(self, index: list["MemoryVersion"], cuts: list[tuple[Slicer, Plan]], keep_others: bool = False) -> None:
        """Go back to the versions and prunings of a checkpoint; files of other versions are deleted.

        With `keep_others` they stay, for one who only reads.
        """
        needed = {self._version_path(version) for version in index}
        for path in needed:
            if not path.is_file():
                raise damaged_file_error(path, "it is missing")
        self.cuts = cuts
        self.versions = {version.device: [version] for version in index}
        if keep_others:
            return
        for path in self.folder.glob("*/*.safetensors"):
            if path not in needed:
                remove_file(path)
        for folder in self.folder.glob("*/"):
            remove_strays(folder)

    def _hold(self, device: int, memory: Tree) -> None:
        """Keep a memory in RAM, and evict others where they are too many."""
        if device in self.held:
            self.used -= tree.count_tree_bytes(self.held.pop(device))
        self.held[device] = memory
        self.used += tree.count_tree_bytes(memory)
        self._evict(keep=device)

    def _evict(self, keep: int | None = None) -> None:
        """Write the least recently used memories to disk and drop them from RAM, until the limit is kept."""
        for device in list(self.held):
            if self.used <= self.limit:
                break
            if device != keep:
                self._write(device)
                self.used -= tree.count_tree_bytes(self.held.pop(device))

    def _write(self, device: int) -> None:
        """Write a memory to disk as a new version, if it is not there yet."""
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

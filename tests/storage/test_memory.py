"""What devices remember: nothing before its round is over, nothing lost on the way to disk and back."""

import copy
import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.core.model import tree
from shoal.storage.memory import DeviceMemory, MemoryVersion


def memory_of(number: float, size: int = 4) -> dict[str, Any]:
    return {"part": {"x": torch.full((size,), float(number)), "seen": [1, (2.5, "text", None, True)]}, "other": {}}


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*.safetensors"))


def test_a_device_that_nobody_met_remembers_nothing(tmp_path):
    assert DeviceMemory(tmp_path).get(3) == {}


def test_what_is_put_takes_effect_at_the_end_of_the_round(tmp_path):
    memory = DeviceMemory(tmp_path)
    memory.put(3, memory_of(1))
    assert memory.get(3) == {}
    memory.commit(0)
    assert tree.is_same_tree(memory.get(3), memory_of(1))


def test_a_round_that_was_broken_off_leaves_nothing(tmp_path):
    memory = DeviceMemory(tmp_path)
    memory.put(3, memory_of(1))
    memory.commit(0)
    memory.put(3, memory_of(2))
    memory.put(4, memory_of(2))
    memory.discard()
    memory.commit(1)
    assert tree.is_same_tree(memory.get(3), memory_of(1)) and memory.get(4) == {}


def test_what_exceeds_the_limit_goes_to_disk_and_comes_back(tmp_path):
    memory = DeviceMemory(tmp_path, limit=40)
    for device in range(5):
        memory.put(device, memory_of(device))
    memory.commit(0)
    assert memory.used <= 40 and len(files(tmp_path)) >= 3
    for device in (4, 0, 3, 1, 2):
        assert tree.is_same_tree(memory.get(device), memory_of(device))
        assert memory.used <= 40


def test_within_the_limit_nothing_is_written(tmp_path):
    memory = DeviceMemory(tmp_path, limit=1000)
    memory.put(0, memory_of(0))
    memory.commit(0)
    assert files(tmp_path) == []


def test_a_version_per_round_until_a_checkpoint_is_safe(tmp_path):
    memory = DeviceMemory(tmp_path)
    for round in range(3):
        memory.put(7, memory_of(round))
        memory.commit(round)
        index = memory.flush()
    assert index == [MemoryVersion(7, 2, 0)]
    assert files(tmp_path) == ["7-0-0.safetensors", "7-1-0.safetensors", "7-2-0.safetensors"]
    memory.forget_old_versions()
    assert files(tmp_path) == ["7-2-0.safetensors"]


def test_flush_writes_only_what_is_new(tmp_path):
    memory = DeviceMemory(tmp_path)
    memory.put(7, memory_of(1))
    memory.commit(0)
    memory.flush()
    memory.commit(1)
    assert memory.flush() == [MemoryVersion(7, 0, 0)]
    assert files(tmp_path) == ["7-0-0.safetensors"]


def test_restore_goes_back_to_a_checkpoint(tmp_path):
    memory = DeviceMemory(tmp_path)
    memory.put(7, memory_of(1))
    memory.commit(0)
    index = memory.flush()
    memory.put(7, memory_of(2))
    memory.put(8, memory_of(2))
    memory.commit(1)
    memory.flush()
    again = DeviceMemory(tmp_path)
    again.restore(index, [])
    assert tree.is_same_tree(again.get(7), memory_of(1)) and again.get(8) == {}
    assert files(tmp_path) == ["7-0-0.safetensors"]


def test_restore_to_the_very_beginning(tmp_path):
    memory = DeviceMemory(tmp_path, limit=0)
    memory.put(7, memory_of(1))
    memory.commit(0)
    memory.flush()
    again = DeviceMemory(tmp_path)
    again.restore([], [])
    assert again.get(7) == {} and files(tmp_path) == []


def test_without_a_folder_of_its_own_it_cleans_up_after_itself(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    memory = DeviceMemory(limit=0)
    for device in range(3):
        memory.put(device, memory_of(device))
    memory.commit(0)
    assert files(tmp_path) and tree.is_same_tree(memory.get(0), memory_of(0))
    del memory
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("own", [torch.zeros(3), torch.ones(3), 0, 0.0, False, "", 5, [], [0]], ids=repr)
def test_a_part_may_remember_anything_that_is_a_tree(tmp_path, own):
    memory = DeviceMemory(tmp_path, limit=0)
    memory.put(0, {"part": 7})
    memory.commit(0)
    memory.put(0, {"part": own})
    memory.commit(1)
    assert tree.is_same_tree(memory.get(0), {"part": own})


def test_a_part_may_forget(tmp_path):
    memory = DeviceMemory(tmp_path)
    memory.put(0, {"part": {"x": torch.ones(2)}})
    memory.commit(0)
    memory.put(0, {"part": {}})
    memory.commit(1)
    assert not memory.get(0).get("part")


class Machine(RuleBasedStateMachine):
    """Any sequence of rounds, checkpoints and kills, against a plain dict."""

    @initialize(limit=st.sampled_from([0, 20, 50, 10**6]))
    def begin(self, limit):
        self.path, self.limit = Path(mkdtemp()), limit
        self.memory = DeviceMemory(self.path / "memory", limit)
        self.now: dict[int, Any] = {}
        self.staged: dict[int, Any] = {}
        self.round = 0
        self.saved: tuple[Any, dict[int, Any], int] = ([], {}, 0)

    @rule(device=st.integers(0, 4) | st.just(256), number=st.integers(0, 99), size=st.integers(1, 8))
    def put(self, device, number, size):
        self.memory.put(device, memory_of(number, size))
        self.staged[device] = memory_of(number, size)

    @rule()
    def commit(self):
        self.memory.commit(self.round)
        self.now |= self.staged
        self.staged = {}
        self.round += 1

    @rule()
    def discard(self):
        self.memory.discard()
        self.staged = {}

    @rule(device=st.integers(0, 5) | st.just(256))
    def get(self, device):
        assert tree.is_same_tree(self.memory.get(device), self.now.get(device, {}))

    @precondition(lambda self: not self.staged)
    @rule(complete=st.booleans())
    def checkpoint(self, complete):
        """Complete, or broken off before the checkpoint that refers to the memories was written."""
        index = self.memory.flush()
        if complete:
            self.saved = (copy.deepcopy(index), dict(self.now), self.round)
            self.memory.forget_old_versions()

    @rule()
    def kill(self):
        self.memory = DeviceMemory(self.path / "memory", self.limit)
        index, now, self.round = self.saved
        self.memory.restore(copy.deepcopy(index), [])
        self.now, self.staged = dict(now), {}
        assert len(files(self.path)) == len(self.now)

    @invariant()
    def is_bounded(self):
        held = list(self.memory.held.values())
        assert self.memory.used == sum(map(tree.count_tree_bytes, held))
        assert self.memory.used <= self.limit or len(held) == 1

    def teardown(self):
        shutil.rmtree(self.path)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)

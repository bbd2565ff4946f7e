"""Frozen tensors and real devices: none travels, and a device with others refuses to train."""

from typing import Any

import torch
from federation import BASE, InProcessTransport, history_rows, make_clients, make_recipe, play_with_devices
from frozen_models import Backboned

import shoal
from shoal.core.model import tree
from shoal.models import MODELS
from shoal.models.user_model import build_user_net
from shoal.remote.tree_bytes import tree_from_bytes
from shoal.service.client import MAX_REQUEST_BYTES


class Recorder(InProcessTransport):
    """Keeps all requests and replies, and runs `at_round` before one."""

    def __init__(self, clients, at_round=lambda round: None):
        super().__init__(clients)
        self.at_round, self.seen = at_round, []

    def exchange(self, requests, kind, timeout):
        self.at_round(self.round + (kind == "train"))
        self.seen += requests.values()
        for device, reply in super().exchange(requests, kind, timeout):
            self.seen.append(reply)
            yield device, reply


def test_no_frozen_tensor_is_in_any_message(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "backboned", lambda shape, classes: build_user_net(Backboned(), shape, classes))
    transport = Recorder(make_clients(tmp_path, model="backboned"))
    real = play_with_devices(make_recipe("scaffold", tmp_path / "run", model="backboned"), transport)
    simulated = shoal.run("scaffold", engine="serial", **dict[str, Any](BASE | {"model": "backboned"}))
    assert history_rows(real) == history_rows(simulated) and real.net.frozen
    shapes = {tuple(value.shape) for value in real.net.frozen.values() if value.dim() > 1}
    contents = [tree_from_bytes(message, MAX_REQUEST_BYTES) for message in transport.seen]
    assert len(contents) == 2 * 3 * 3
    assert not shapes & {tuple(tensor.shape) for content in contents for tensor in tree.collect_tensors(content)}
    digests = {content["setup"]["model_digest"] for content in contents if "setup" in content}
    assert digests == {real.net.digest}


def test_prompts_that_devices_keep_begin_with_the_vectors_of_the_seed(tmp_path):
    method, model, tests = "prompt(length=2, role='personal')", {"model": "vit"}, {"local_test": 0.25}
    transport = Recorder(make_clients(tmp_path, **model))
    real = play_with_devices(make_recipe(method, tmp_path / "run", **model | tests), transport)
    simulated = shoal.run(method, engine="serial", **dict[str, Any](BASE | model | tests))
    assert real.history["personal_mean"] == simulated.history["personal_mean"] and real.net.digest
    assert all(torch.equal(real.params[name], value) for name, value in simulated.params.items())
    contents = [tree_from_bytes(message, MAX_REQUEST_BYTES) for message in transport.seen]
    shapes = {tuple(tensor.shape) for content in contents for tensor in tree.collect_tensors(content)}
    assert (10, 64) in shapes and (2, 64) not in shapes


def test_a_device_with_another_backbone_refuses_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "backboned", lambda shape, classes: build_user_net(Backboned(), shape, classes))

    def change_backbone(round):
        if round == 1:
            other = lambda shape, classes: build_user_net(Backboned(seed=1), shape, classes)  # noqa: E731
            monkeypatch.setitem(MODELS, "backboned", other)

    transport = Recorder(make_clients(tmp_path, model="backboned"), change_backbone)
    result = play_with_devices(make_recipe("fedavg", tmp_path / "run", model="backboned"), transport)
    first, second = result.history.rows
    assert not first.get("dropped")
    assert second["dropped"] == [{"device": d, "why": "its frozen tensors are not those of the run"} for d in range(3)]

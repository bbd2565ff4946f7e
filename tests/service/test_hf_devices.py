"""Models of Hugging Face on real devices: read from the device's own disk, by a name that leads nowhere else."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation import InProcessTransport, history_rows, make_recipe, play_with_devices
from hf_folders import write_hf_folder, write_reviews

import shoal
from shoal.core.compose import Method
from shoal.core.errors import ShoalError
from shoal.core.model import tree
from shoal.core.part import Part
from shoal.data.holding_out import choose_held_out_rows
from shoal.models.hf_folder import fingerprint_hf_config
from shoal.remote.tree_bytes import tree_from_bytes
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.service.client import MAX_REQUEST_BYTES, DeviceClient
from shoal.service.run_description import ModelAbsent, find_own_model

pytest.importorskip("transformers")
DEVICES = 3
VALUES: dict[str, Any] = dict(
    devices=DEVICES, sample=DEVICES, rounds=2, epochs="1", batch=8, lr=0.05, split="iid", seed=1
)


class Recorder(InProcessTransport):
    """Keeps all requests and replies."""

    def __init__(self, clients):
        super().__init__(clients)
        self.seen: list[Any] = []

    def exchange(self, requests, kind, timeout):
        self.seen += requests.values()
        for device, reply in super().exchange(requests, kind, timeout):
            self.seen.append(reply)
            yield device, reply


def write_device_files(folder: Path, values: dict[str, Any]) -> list[str]:
    """CSV files with the texts that devices hold in the simulation of a recipe."""
    setup = assemble_run(Recipe().with_values(**values)).loop.host.setup
    head, *lines = Path(values["data"]).read_text().splitlines()
    kept, _ = choose_held_out_rows(len(lines), 0.2, 0, None)
    paths = []
    for device in range(DEVICES):
        own = [lines[kept[row]] for row in setup.samples(device).index.tolist()]
        own = [line.replace("praise", "1").replace("blame", "0") for line in own]
        paths.append(folder / f"device-{device}.csv")
        paths[-1].write_text("\n".join([head, *own]) + "\n")
    return [str(path) for path in paths]


@pytest.mark.parametrize("kind, label", [("bert", True), ("llama", False)])
def test_devices_read_texts_and_model_themselves_and_give_the_numbers_of_the_simulation(kind, label, tmp_path):
    server, own = write_hf_folder(tmp_path / "server" / "tiny", kind), tmp_path / "own"
    write_hf_folder(own / "tiny", kind)
    values: dict[str, Any] = VALUES | {
        "data": str(write_reviews(tmp_path / "reviews.csv", label)),
        "model": f"hf:{server}",
    }
    clients = [
        DeviceClient(data, tmp_path / f"home-{device}", str(own))
        for device, data in enumerate(write_device_files(tmp_path, values))
    ]
    transport = Recorder(clients)
    real = play_with_devices(make_recipe("fedavg", tmp_path / "run", **values), transport)
    simulated = shoal.run("fedavg", engine="serial", **values)
    # a step whose operations are counted may differ in the last digit, and devices count the first of every request
    for one, other in zip(history_rows(real), history_rows(simulated), strict=True):
        assert one.keys() == other.keys() and one["bytes_up"] == other["bytes_up"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert all(torch.allclose(real.params[k], v, 0, 1e-7) for k, v in simulated.params.items())
    setups = [content["setup"] for seen in transport.seen if "setup" in (content := read(seen))]
    assert {setup["model"] for setup in setups} == {"hf:tiny"}
    assert str(tmp_path).encode() not in b"".join(transport.seen)


def read(message: bytes) -> Any:
    return tree_from_bytes(message, MAX_REQUEST_BYTES)


def test_a_device_without_the_model_or_with_another_config_says_so(tmp_path):
    server = write_hf_folder(tmp_path / "server" / "tiny", "bert")
    values: dict[str, Any] = VALUES | {
        "data": str(write_reviews(tmp_path / "reviews.csv")),
        "model": f"hf:{server}",
        "rounds": 1,
    }
    data = write_device_files(tmp_path, values)
    write_hf_folder(tmp_path / "right" / "tiny", "bert")
    write_hf_folder(tmp_path / "wrong" / "tiny", "bert", layer_norm_eps=1e-3)
    (tmp_path / "empty").mkdir()
    models = [str(tmp_path / name) for name in ("right", "wrong", "empty")]
    clients = [DeviceClient(data[i], tmp_path / f"home-{i}", models[i]) for i in range(DEVICES)]
    result = play_with_devices(make_recipe("fedavg", tmp_path / "run", **values), InProcessTransport(clients))
    # what devices say when they enrol is no answer about samples: they take no part
    assert result.history.rows[0]["devices"] == [0]


@pytest.mark.parametrize(
    "name", ["hf:../secret", "hf:/etc", "hf:..", "hf:a/../../b", "hf:.hidden", "hf:~", "hf:", "hf:a/b/c"]
)
def test_a_server_cannot_name_a_path(name, tmp_path):
    write_hf_folder(tmp_path / "secret", "bert")
    config = fingerprint_hf_config(f"hf:{tmp_path / 'secret'}")
    (tmp_path / "own").mkdir()
    with pytest.raises(ShoalError, match="The server names a path"):
        find_own_model(name, config, str(tmp_path / "own"))


def test_a_device_that_offers_no_models_reads_none(tmp_path, monkeypatch):
    write_hf_folder(tmp_path / "tiny", "bert")
    monkeypatch.chdir(tmp_path)
    config = fingerprint_hf_config("hf:tiny")
    with pytest.raises(ModelAbsent):
        find_own_model("hf:tiny", config, "")
    assert find_own_model("hf:tiny", config, str(tmp_path)) == f"hf:{tmp_path / 'tiny'}"


class Freeze(Part):
    """Keeps everything but the head as it is."""

    def model(self, net):
        return replace(net, roles={name: "frozen" for name in net.initial if "classifier" not in name})


def test_nothing_frozen_travels_and_other_weights_are_refused(tmp_path, monkeypatch):
    server = write_hf_folder(tmp_path / "server" / "tiny", "bert")
    values: dict[str, Any] = VALUES | {
        "data": str(write_reviews(tmp_path / "reviews.csv")),
        "model": f"hf:{server}",
        "rounds": 1,
    }
    data = write_device_files(tmp_path, values)
    monkeypatch.setattr("shoal.service.run_description.load_method", lambda expression, files: Method((Freeze(),)))
    monkeypatch.setattr("shoal.runs.build.load_method", lambda expression, files: Method((Freeze(),)))
    write_hf_folder(tmp_path / "same" / "tiny", "bert")
    write_hf_folder(tmp_path / "other" / "tiny", "bert", weights=False)  # the same config, and weights of its own
    models = [str(tmp_path / name) for name in ("same", "same", "other")]
    clients = [DeviceClient(data[i], tmp_path / f"home-{i}", models[i]) for i in range(DEVICES)]
    transport = Recorder(clients)
    result = play_with_devices(make_recipe("fedavg", tmp_path / "run", **values), transport)
    assert result.net.frozen and result.net.trainable == ("model.classifier.weight", "model.classifier.bias")
    shapes = {tuple(value.shape) for value in result.net.frozen.values()} - {(2, 8)}  # that of the head, too
    sent = {tuple(own.shape) for seen in transport.seen for own in tree.collect_tensors(read(seen))}
    assert not shapes & sent and (2, 8) in sent
    [row] = result.history.rows
    assert row["devices"] == [0, 1]

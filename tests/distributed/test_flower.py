"""Real devices: a server and its nodes as processes of their own, with TLS and keys, and all that can go wrong."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from federation import (
    BASE,
    DEVICES,
    SHOAL,
    InProcessTransport,
    free_port,
    history_rows,
    make_clients,
    make_recipe,
    play_with_devices,
    strip_judging,
    wait_until,
    write_samples_file,
)
from hf_folders import write_hf_folder, write_reviews

import shoal
from shoal.core.errors import ShoalError
from shoal.remote.keys import AUTHORITY, device_key_name, make_keys
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result
from shoal.runs.start import load_result
from shoal.service.private_socket import PrivateFolder
from shoal.service.processes import FlowerServer, end_processes, explain_refusal, start_process, start_supernode
from shoal.service.supervisor import LOOP_PID_FILE, DeviceTerms, Supervisor, prepare_run_folder, read_played_rows

pytest.importorskip("flwr")
SPARE = DEVICES
"""The number of a device that is registered, and takes part in nothing."""
FAULTY = 1
LATE = 40.0

DEVICE = '''
"""A device whose samples are loaded by this file, and which misbehaves in the rounds that a file beside it names."""
import json, os, resource, sys, time
from pathlib import Path
from typing import Any, cast
import numpy as np
import torch
from shoal.service import client
from shoal.remote import messages
from shoal.remote import tree_bytes

torch.set_num_threads(1)
HERE = Path(__file__).parent
honest = client.reply_to_bytes


def load():
    with np.load(HERE / "@DEVICE@.npz") as file:
        inputs = {name: file[name] for name in file if name != "y"}
        samples = inputs.get("x", inputs), file["y"]
    plan = HERE / "faults-@DEVICE@.json"
    if plan.exists() and (number := present_round()) is not None:
        commit(json.loads(plan.read_text())[number])
    return samples


def present_round():
    """The round of the training request that is being answered; None where the device enrols."""
    frame = sys._getframe()
    while frame:
        if "train_request" in frame.f_locals:
            return frame.f_locals["train_request"].stamp.round
        frame = frame.f_back


def commit(fault):
    if fault == "raise":
        raise RuntimeError("patient 17 in /secret")
    if fault == "die":
        os._exit(9)
    if fault == "late":
        time.sleep(@LATE@ + 5)
    if fault == "vanished":
        raise FileNotFoundError("/secret/data")
    if fault == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    client.reply_to_bytes = lambda *answer: bad(fault, *answer)


def bad(fault, stamp, outcome, remembers):
    answer = honest(stamp, outcome, remembers)
    found = tree_bytes.tree_from_bytes(answer, 1 << 30)
    entry = next(iter(found["body"].values()))
    if fault == "nan":
        entry["value"][0] = float("nan")
    if fault == "shape":
        entry["value"] = entry["value"][1:]
    if fault == "short":
        return answer[:-3]
    if fault == "huge":
        return bytes(400_000_000)
    if fault == "replay":
        return (HERE / "kept").read_bytes()
    if fault == "keep":
        (HERE / "kept").write_bytes(answer)
        return answer
    return tree_bytes.tree_to_bytes(found)
'''
FAULTS = {
    "keep": "",
    "raise": "its data are missing or do not fit",
    "nan": "A message has numbers that are not finite or too large.",
    "shape": "A message has values of another form for fc1.weight.",
    "short": "A message cannot be read.",
    "huge": "A message has 400000000 bytes where at most",
    "replay": "A message answers another question.",
    "vanished": "its data are missing or do not fit",
    "full": "its disk is full or out of reach",
    "late": "it",
    "die": "it",
}
"""What the device does in each round, and how the reason that the history gives begins."""


class Federation:
    """A server and its devices, up and running."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.keys, self.runs = folder / "keys", folder / "runs"
        self.runs.mkdir()
        make_keys(self.keys, "", DEVICES + 1)
        self.flower_server = FlowerServer(folder / "flower", self.keys, "127.0.0.1", free_port())
        self.supervisor = Supervisor(self.flower_server, self.runs, DEVICES + 1, DeviceTerms(LATE, 1e6, 300))
        self.nodes: list[subprocess.Popen] = []

    def join(self, device: int) -> subprocess.Popen:
        code = DEVICE.replace("@DEVICE@", str(device)).replace("@LATE@", str(LATE))
        write_samples_file(self.folder, device)
        path = self.folder / f"node_{device}.py"
        path.write_text(code)
        command = [
            "join",
            "--server",
            self.flower_server.local_address,
            "--key",
            str(self.keys / device_key_name(device)),
        ]
        command += ["--data", f"{path}:load", "--folder", str(self.folder / f"home-{device}")]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return start_process([SHOAL, *command], self.folder / f"join-{device}.log", environment)

    def set_reply_timeout(self, timeout: float) -> None:
        """Let the server wait so many seconds for replies from the next run on."""
        self.supervisor.settings["seconds"] = timeout
        end_processes([self.supervisor.processes.pop("exec")])
        self.supervisor.restart_dead_processes()

    def play(self, method: str, name: str, watch: Callable = lambda row: None, **more: object) -> Result:
        path, lock = prepare_run_folder(make_recipe(method, self.runs / name, **more))
        lock.close()
        self.supervisor.play_run(path, watch)
        return load_result(path)


@pytest.fixture(scope="module", autouse=True)
def bare_path():
    """Most people call `.venv/bin/shoal` without entering its environment: no program of Flower's is on the path."""
    bin_folder = Path(sys.executable).parent
    folders = [place for place in os.environ["PATH"].split(os.pathsep) if Path(place) != bin_folder]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join(folders))
        yield


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[Federation]:
    torch.set_num_threads(1)
    federation = Federation(tmp_path_factory.mktemp("federation"))
    with federation.supervisor:
        federation.nodes = [federation.join(device) for device in range(DEVICES)]
        yield federation
        end_processes(federation.nodes)


METHODS = {
    "fedavg": {"rounds": 1},
    "feddhad": {"model": "lenet"},
    "fedbiad(early=1)+dgc": {},
    "fedacd+mixup": {},
    "feddum+fedap(at=1, rule='fixed')": {"model": "lenet", "server_data": "share:0.1"},  # FedDUMAP, pruned at once
    "fedbr": {"model": "lenet"},
}


@pytest.mark.parametrize("method", METHODS)
def test_the_history_is_that_of_a_simulation(method, federation):
    """That of SCAFFOLD is too: see who is killed, below."""
    more = METHODS[method]
    if "server_data" in more:
        for device in range(DEVICES):
            write_samples_file(federation.folder, device, **more)
    simulated = shoal.run(method, engine="serial", **BASE | more)
    name = "".join(c for c in method if c.isalnum())
    real = federation.play(method, name, **more)
    for device in range(DEVICES):
        write_samples_file(federation.folder, device)
    assert history_rows(real) == history_rows(simulated)
    assert all(torch.equal(real.params[k], v) for k, v in simulated.params.items())


@pytest.mark.parametrize("method", ["fedper", "fedavg+finetune"])
def test_devices_test_on_samples_of_their_own(method, federation):
    """Numbers as in a simulation, with what devices remember; their test samples stay where they are."""
    more: dict[str, Any] = {"local_test": 0.25}
    simulated = shoal.run(method, engine="serial", **BASE | more)
    name = f"own-{method.partition('+')[0]}"
    real = federation.play(method, name, **more)
    assert strip_judging(history_rows(real)) == history_rows(simulated)
    assert real.history.rows[-1]["personal_devices"] == DEVICES
    note = json.loads((federation.runs / name / "devices.json").read_text())
    assert len(note["own_tests"]) == DEVICES and np.mean(note["own_tests"]) == pytest.approx(
        real.history.last("personal_mean")
    )


TREE_DATA = '''
import torch

def load():
    """Half images and two numbers of each of 120 digits that nobody wrote."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(120) % 4
    numbers = torch.randn(120, 2, generator=draw) + y[:, None]
    return {"image": torch.randn(120, 1, 4, 8, generator=draw), "numbers": numbers}, y
'''


def test_inputs_of_several_tensors_give_the_history_of_a_simulation(federation):
    path = federation.folder / "trees.py"
    path.write_text(TREE_DATA)
    more: dict[str, Any] = {"data": f"{path}:load", "model": "mlp"}
    simulated = shoal.run("scaffold", engine="serial", **BASE | more)
    setup = assemble_run(Recipe().with_values(**BASE | more)).loop.host.setup
    for device in range(DEVICES):
        samples = setup.samples(device)
        inputs = {name: value.numpy() for name, value in samples.take_all().inputs.items()}
        np.savez(federation.folder / f"{device}.npz", y=samples.targets[samples.index].numpy(), **inputs)
    real = federation.play("scaffold", "trees", **more)
    for device in range(DEVICES):
        write_samples_file(federation.folder, device)
    assert history_rows(real) == history_rows(simulated)
    assert all(torch.equal(real.params[k], v) for k, v in simulated.params.items())


def test_the_state_is_for_its_owner_alone(federation):
    assert (federation.flower_server.folder / "state.db").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in federation.keys.iterdir())


def test_whoever_has_no_right_to_come_is_not_let_in(federation, tmp_path):
    """An unknown key, an unknown authority, and no encryption at all."""
    make_keys(tmp_path / "other", "", 1)
    foreign_key, foreign_authority = tmp_path / "other" / device_key_name(0), tmp_path / "other" / AUTHORITY
    spare, authority = federation.keys / device_key_name(SPARE), federation.keys / AUTHORITY
    credentials = {"key": (foreign_key, authority), "authority": (spare, foreign_authority), "plain": (None, None)}
    settings = lambda name: {"data": "", "folder": str(tmp_path / name)}  # noqa: E731
    address = federation.flower_server.local_address
    nodes = {
        n: start_supernode(address, key, ca, settings(n), PrivateFolder.create())
        for n, (key, ca) in credentials.items()
    }
    before = list_online(federation.flower_server)
    try:
        assert nodes["key"].wait(150) and "does not know this key" in explain_refusal(tmp_path / "key")
        assert nodes["authority"].wait(150) and "authority vouches for" in explain_refusal(tmp_path / "authority")
        assert list_online(federation.flower_server) == before  # the third one goes on trying in vain
    finally:
        end_processes(list(nodes.values()))


def test_an_expired_certificate_is_refused(tmp_path):
    make_keys(tmp_path / "keys", "", 1, days=-1)
    flower_server = FlowerServer(tmp_path / "flower", tmp_path / "keys", "127.0.0.1", free_port())
    process = flower_server.start_superlink()
    settings = {"data": "", "folder": str(tmp_path / "home")}
    trusted = tmp_path / "keys" / AUTHORITY
    node = start_supernode(
        flower_server.local_address, tmp_path / "keys" / device_key_name(0), trusted, settings, PrivateFolder.create()
    )
    try:
        flower_server.wait_until_up(process)
        assert node.wait(150) and "has expired" in explain_refusal(tmp_path / "home")
    finally:
        end_processes([node, process])


def test_every_fault_costs_one_device_one_round(federation):
    """The model is exactly what it would be if the device had never answered, and the reason is told."""
    rounds = len(FAULTS)
    plan = federation.folder / f"faults-{FAULTY}.json"
    plan.write_text(json.dumps(list(FAULTS)))
    found = federation.play("scaffold", "faults", rounds=rounds)
    plan.unlink()
    dropped_by_round = [row.get("dropped", []) for row in found.history.rows]
    for (fault, begins), dropped in zip(FAULTS.items(), dropped_by_round):
        assert [d["device"] for d in dropped] == ([FAULTY] if begins else []), (fault, dropped)
        assert all(d["why"].startswith(begins) for d in dropped), (fault, dropped)
    drop_faulty = lambda device, round, answer: "it was late" if device == FAULTY and round else answer  # noqa: E731
    folder = federation.folder / "reference"
    folder.mkdir()
    other = play_with_devices(
        make_recipe("scaffold", folder / "run", rounds=rounds), InProcessTransport(make_clients(folder), drop_faulty)
    )
    assert all(torch.equal(found.params[k], v) for k, v in other.params.items())
    log = (federation.runs / "faults" / "server.log").read_text()
    assert "patient" not in log and "secret" not in log
    assert all(f"device {FAULTY}, round {r}:" in log for r in range(1, rounds))


def test_killed_at_any_moment_the_run_goes_on_as_if_nothing_had_happened(federation):
    """The loop at five moments, the SuperLink once, and every node once."""
    rounds = 5
    federation.set_reply_timeout(300)
    path, lock = prepare_run_folder(make_recipe("scaffold", federation.runs / "killed", rounds=rounds))
    lock.close()
    killed: list[str] = []

    def kill_loop(pause: float) -> None:
        wait_until((path / LOOP_PID_FILE).exists, 150)
        time.sleep(pause)
        process = int((path / LOOP_PID_FILE).read_text())
        os.kill(process, signal.SIGKILL)
        wait_until(
            lambda: not (path / LOOP_PID_FILE).exists() or (path / LOOP_PID_FILE).read_text() != str(process), 150
        )
        killed.append("loop")

    def kill_processes() -> None:
        kill_loop(0)  # before anybody was asked
        kill_loop(5)  # while devices introduce themselves
        for reached, pause in ((1, 0.0), (1, 3.0), (2, 6.0)):  # right after a round, and in the middle of one
            wait_until(lambda: len(read_played_rows(path)) >= reached, 400)
            kill_loop(pause)
        wait_until(lambda: len(read_played_rows(path)) >= 3, 400)
        time.sleep(3)
        federation.supervisor.processes["link"].kill()
        killed.append("link")
        wait_until(lambda: len(read_played_rows(path)) >= 4, 400)
        time.sleep(3)
        for node in list_supernodes(federation):
            os.kill(node, signal.SIGKILL)
            killed.append("node")

    killer = threading.Thread(target=kill_processes)
    killer.start()
    federation.supervisor.play_run(path, lambda row: None)
    killer.join()
    assert killed == ["loop"] * 5 + ["link"] + ["node"] * DEVICES
    assert history_rows(load_result(path)) == history_rows(
        shoal.run("scaffold", engine="serial", **{**BASE, "rounds": rounds})
    )


def test_a_server_that_was_killed_goes_on_by_the_same_command(tmp_path):
    """The whole command, with everything that it started."""
    torch.set_num_threads(1)
    federation = Federation(tmp_path)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**BASE, "method": "scaffold"}.items())
    (tmp_path / "recipe.toml").write_text(text)
    run = federation.runs / "run"
    command = [SHOAL, "server", str(tmp_path / "recipe.toml"), "--out", str(run), "--keys", str(federation.keys)]
    command += ["--port", str(federation.flower_server.port)]
    server = start_process(command, tmp_path / "server.out", os.environ)
    assert wait_until(lambda: "listening" in (tmp_path / "server.out").read_text(), 150)
    nodes = [federation.join(device) for device in range(DEVICES)]
    try:
        assert wait_until(lambda: len(read_played_rows(run)) == 1, 300), (tmp_path / "server.out").read_text()
        server.kill()
        server.wait()
        server = start_process(command, tmp_path / "server.out", os.environ)
        assert server.wait(400) == 0, (tmp_path / "server.out").read_text()
        assert history_rows(load_result(run)) == history_rows(shoal.run("scaffold", engine="serial", **BASE))
        assert "round 2, accuracy" in (tmp_path / "server.out").read_text()
    finally:
        end_processes([server, *nodes])


def test_sigterm_ends_a_server_and_a_device_in_order(tmp_path):
    """What systemd and container engines send."""
    (tmp_path / "recipe.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in BASE.items()))
    port, log_file = str(free_port()), tmp_path / "said"
    command = ["server", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--insecure", "--port", port]
    server = start_process([SHOAL, *command], log_file, os.environ)
    command = ["join", "--server", f"127.0.0.1:{port}", "--data", write_samples_file(tmp_path, 0), "--insecure"]
    device = start_process([SHOAL, *command, "--folder", str(tmp_path / "home")], tmp_path / "device", os.environ)
    try:
        assert wait_until(lambda: "listening" in log_file.read_text(), 150)
        assert wait_until(lambda: "waiting for work" in (tmp_path / "device").read_text(), 150)
        for process in (device, server):
            process.terminate()
        assert (device.wait(60), server.wait(60)) == (0, 143)
    finally:
        end_processes([server, device])
    assert "terminated: Stopped.\nThe same command goes on" in log_file.read_text()
    assert not any("Traceback" in (tmp_path / name).read_text() for name in ("said", "device"))


def test_a_server_whose_processes_keep_dying_says_so(tmp_path):
    """They are not let in by the SuperLink once their secret is another one."""
    federation = Federation(tmp_path)
    with federation.supervisor, pytest.raises(ShoalError, match=r"died 5 times without a round.*superexec\.log"):
        federation.flower_server.private.secret.write_text("0" * 64)
        end_processes([federation.supervisor.processes["exec"]])
        federation.play("fedavg", "run")


class DoublingGrid:
    """A Flower grid with one node, which answers everything twice."""

    def get_node_ids(self) -> list[int]:
        return [7]

    def push_messages(self, messages):
        for message in messages:
            message.metadata.__dict__["_message_id"] = "asked"
        self.messages = messages
        return ["asked"]

    def pull_messages(self, numbers):
        from flwr.app import Message

        from shoal.service.flower_app import bytes_to_record

        return [Message(bytes_to_record(answer), reply_to=self.messages[0]) for answer in (b"one", b"other")]


def test_of_two_answers_the_first_counts(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    from shoal.service.flower_app import FlowerTransport

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)
    transport = FlowerTransport(cast(Any, DoublingGrid()), {0: 7})
    assert list(transport.exchange({0: b"question"}, "train", 5)) == [(0, b"one")]


def test_without_keys_numbers_are_given_as_devices_come(tmp_path):
    port = free_port()
    (tmp_path / "recipe.toml").write_text('data = "digits"\ndevices = 2\nsample = 2\nrounds = 1\n')
    command = [SHOAL, "server", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--insecure"]
    server = start_process([*command, "--port", str(port)], tmp_path / "server.out", os.environ)
    nodes = []
    for device in range(2):
        arguments = [
            "--data",
            write_samples_file(tmp_path, device),
            "--folder",
            str(tmp_path / f"home-{device}"),
            "--insecure",
        ]
        join_command = [SHOAL, "join", "--server", f"127.0.0.1:{port}", *arguments]
        nodes.append(start_process(join_command, tmp_path / f"join-{device}.log", os.environ))
    try:
        assert server.wait(400) == 0, (tmp_path / "server.out").read_text()
        [row] = read_played_rows(tmp_path / "run")
        assert "dropped" not in row and row["accuracy"] is not None
    finally:
        end_processes([server, *nodes])


def test_devices_read_a_model_of_hugging_face_from_their_own_disks(tmp_path):
    pytest.importorskip("transformers")
    models, port = tmp_path / "models", free_port()
    server_model = write_hf_folder(tmp_path / "server" / "tiny", "bert", num_labels=2)
    write_hf_folder(models / "tiny", "bert", num_labels=2)
    data = write_reviews(tmp_path / "reviews.csv")
    values = {"data": str(data), "model": f"hf:{server_model}", "devices": 2, "sample": 2, "rounds": 1}
    (tmp_path / "recipe.toml").write_text("".join(f"{key} = {value!r}\n" for key, value in values.items()))
    own = tmp_path / "own.csv"
    own.write_text(data.read_text().replace("praise", "1").replace("blame", "0"))
    command = [SHOAL, "server", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "run"), "--insecure"]
    server = start_process([*command, "--port", str(port)], tmp_path / "server.out", os.environ)
    nodes = []
    for device in range(2):
        join = [SHOAL, "join", "--server", f"127.0.0.1:{port}", "--insecure", "--data", str(own)]
        join += ["--models", str(models), "--folder", str(tmp_path / f"home-{device}")]
        nodes.append(start_process(join, tmp_path / f"join-{device}.log", os.environ))
    try:
        assert server.wait(400) == 0, (tmp_path / "server.out").read_text()
        [row] = read_played_rows(tmp_path / "run")
        assert "dropped" not in row and row["devices"] == [0, 1] and row["accuracy"] is not None
    finally:
        end_processes([server, *nodes])


def list_online(flower_server: FlowerServer) -> dict[str, str]:
    from shoal.service.flower_control import list_devices

    return list_devices(flower_server.private.socket)


def list_supernodes(federation: Federation) -> list[int]:
    """The SuperNodes that `shoal join` started."""
    found = []
    for node in federation.nodes:
        children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
        found += [int(child) for child in children]
    return found

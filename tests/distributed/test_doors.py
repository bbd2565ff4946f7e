"""Who can come in: strangers on the same machine, a second local user, and a server that is not ours."""

import json
import os
import shutil
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from federation import BASE, SHOAL, free_port, wait_until, write_samples_file

from shoal.remote.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, device_key_name, make_keys
from shoal.service.private_socket import PrivateFolder
from shoal.service.processes import build_proxy_config, end_processes, start_process, start_supernode

pytest.importorskip("flwr")
BIN_FOLDER = Path(sys.executable).parent
NOBODY = 65534
EVIL = """
from pathlib import Path
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

MARKS = Path(@MARKS@)
server = ServerApp()
client = ClientApp()
(MARKS / "imported").touch()

@server.main()
def main(grid, context):
    (MARKS / "server").touch()
    asked = [Message(RecordDict(), dst_node_id=node, message_type="query.evil") for node in grid.get_node_ids()]
    answers = list(grid.send_and_receive(asked, timeout=60))
    (MARKS / "answers").write_text(str([a.error.code if a.has_error() else 0 for a in answers]))

@client.query("evil")
def evil(message, context):
    (MARKS / "device").touch()
    return Message(RecordDict(), reply_to=message)
"""
PROJECT = """
[project]
name = "evil"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "evil:server"
clientapp = "evil:client"
"""


class Stranger:
    """Somebody with a home of their own, Flower's own programs, an app, and nothing of ours but the authority."""

    def __init__(self, folder: Path, authority: Path, address: str):
        self.folder, self.marks, self.app = folder, folder / "marks", folder / "app"
        for path in (self.marks, self.app / "evil", folder / "flower"):
            path.mkdir(parents=True)
        (self.app / "pyproject.toml").write_text(PROJECT)
        (self.app / "evil" / "__init__.py").write_text(EVIL.replace("@MARKS@", repr(str(self.marks))))
        config = f'[superlink.lab]\naddress = "{address}"\nroot-certificates = "{authority}"\n'
        (folder / "flower" / "config.toml").write_text(config)
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("FLWR", "SHOAL"))}
        path = f"{BIN_FOLDER}{os.pathsep}{os.environ['PATH']}"
        self.environment = environment | {"HOME": str(folder), "FLWR_HOME": str(folder / "flower"), "PATH": path}

    def flwr(self, *command: str) -> dict:
        done = subprocess.run(
            [str(BIN_FOLDER / "flwr"), *command, "--format", "json"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        try:
            return json.loads(done.stdout)
        except ValueError:
            return {"success": False, "error-message": done.stdout + done.stderr}


class WaitingFederation:
    """A server that waits for two devices, of which one has come."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.keys, self.address = folder / "keys", f"127.0.0.1:{self.port}"
        make_keys(self.keys, "", 2)
        recipe = {**BASE, "devices": 2, "sample": 2}
        text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in recipe.items())
        (folder / "recipe.toml").write_text(text)
        command = ["server", str(folder / "recipe.toml"), "--out", str(folder / "run"), "--keys", str(self.keys)]
        self.server = self.shoal([*command, "--port", str(self.port)], "server.out")
        command = ["join", "--server", self.address, "--key", str(self.keys / device_key_name(0))]
        command += ["--data", write_samples_file(folder, 0, devices=2, sample=2), "--folder", str(folder / "home")]
        self.device = self.shoal(command, "join.out")

    def shoal(self, command: list[str], log: str) -> subprocess.Popen:
        return start_process([SHOAL, *command], self.folder / log, os.environ | {"OMP_NUM_THREADS": "1"})

    def sockets(self) -> dict[str, str]:
        """Where the SuperLink and the device's SuperNode listen, by their name."""
        found = {}
        for process in (*list_process_tree(self.server.pid), *list_process_tree(self.device.pid)):
            command = Path(f"/proc/{process}/cmdline").read_text().split("\0")
            found |= {name: command[command.index(name) + 1] for name in ("superlink", "supernode") if name in command}
        return found


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Iterator[WaitingFederation]:
    federation = WaitingFederation(tmp_path_factory.mktemp("village"))
    try:
        log = federation.folder / "home" / "supernode.log"
        wait_until(lambda: federation.server.poll() is not None or "Sent successfully" in read(log), 200)
        assert "Sent successfully" in read(log), read_all_logs(federation)
        yield federation
    finally:
        end_processes([federation.device, federation.server])


def test_a_stranger_with_the_authority_starts_nothing(federation, tmp_path):
    """Nothing on the server, and nothing on a device: neither a run, nor a device of their own, nor a look around."""
    stranger = Stranger(tmp_path / "stranger", federation.keys / AUTHORITY, federation.address)
    make_keys(tmp_path / "own", "", 1)
    public_key = str((tmp_path / "own" / device_key_name(0)).with_suffix(".pub"))
    tries = {
        "run": stranger.flwr("run", str(stranger.app), "lab"),
        "register": stranger.flwr("supernode", "register", public_key, "lab"),
        "nodes": stranger.flwr("supernode", "list", "lab"),
        "runs": stranger.flwr("list", "lab"),
    }
    ran = wait_until(lambda: any(stranger.marks.iterdir()), 60 if tries["run"].get("success") else 5)
    if ran:
        wait_until((stranger.marks / "answers").exists, 60)
    assert not ran, sorted(path.name for path in stranger.marks.iterdir())
    assert not [name for name, found in tries.items() if found.get("success")], tries


def test_the_port_is_for_devices_alone(federation):
    """Whoever trusts the server gets a 403 for everything else, and a 401 without a registered key."""
    import httpx

    with httpx.Client(verify=ssl.create_default_context(cafile=str(federation.keys / AUTHORITY))) as client:
        server = f"https://{federation.address}"
        codes = {path: client.get(server + path).status_code for path in ("/health", "/docs", "/openapi.json", "/")}
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/../control/start-run"):
            codes[path] = client.post(server + path, headers={"content-type": "application/protobuf"}).status_code
        assert set(codes.values()) == {403}, codes
        response = client.post(server + "/v1/fleet/pull-messages", headers={"content-type": "application/protobuf"})
        assert response.status_code == 401


def test_nothing_else_listens(federation):
    """The server has one port, a device has none."""
    assert set(federation.sockets()) == {"superlink", "supernode"}
    assert list_listening_ports(list_process_tree(federation.server.pid)) == {federation.port}
    assert list_listening_ports(list_process_tree(federation.device.pid)) == set()


TRY = """
import os, socket, sys
from pathlib import Path
path = Path(sys.argv[1])
if len(sys.argv) > 2:
    os.setgroups([]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
tries = [lambda: socket.socket(socket.AF_UNIX).connect(str(path)), lambda: os.listdir(path.parent)]
tries += [lambda: (path.parent / "superexec.secret").read_bytes()]
for one in tries:
    try:
        one()
        print("yes")
    except PermissionError:
        print("no")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_a_socket(federation):
    """Neither that of the server nor that of a device, while its owner can."""
    for path in federation.sockets().values():
        for user, answer in (([], "yes"), ([str(NOBODY)], "no")):
            done = subprocess.run([sys.executable, "-c", TRY, path, *user], capture_output=True, text=True)
            assert done.stdout.split() == [answer] * 3, done


def test_tasks_are_given_to_who_knows_the_secret(federation):
    """Even of those who can open the socket, on the server and on a device."""
    import httpx
    from flwr.proto import runtime_pb2
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    from shoal.service.flower_programs import connect_to_socket

    generated: Any = runtime_pb2
    request = generated.AcquireTaskRequest(supported_task_types=["none"])
    named = RuntimeVersionHttpInterceptor(component_name="SuperExec")
    methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
    for path in federation.sockets().values():
        right = Path(path).with_name("superexec.secret").read_bytes()
        for secret in (b"", b"0" * 32, right):
            proof = [SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)] if secret else []
            with connect_to_socket(RuntimeHttpClient, path, [named, *proof]) as client:
                if secret == right:
                    assert not client.AcquireTask(request).token
                else:
                    with pytest.raises(httpx.HTTPStatusError, match="401"):
                        client.AcquireTask(request)


def test_a_device_gives_no_orders(federation):
    """With its own key one device delivers an order for another, in the name of the server."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.app import RecordDict
    from flwr.app.message import make_message, remove_content_from_message
    from flwr.app.metadata import Metadata
    from flwr.common.constant import SUPERLINK_NODE_ID
    from flwr.common.serde import message_to_proto
    from flwr.proto import fleet_pb2, node_pb2
    from flwr.supercore.inflatable.inflatable_object import get_object_tree
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    from shoal.service.flower_control import messages, open_control_client

    fleet: Any = fleet_pb2
    nodes: Any = node_pb2
    with open_control_client(Path(federation.sockets()["superlink"])) as client:
        [run] = client.ListRuns(messages.ListRunsRequest()).run_dict
    numbers = json.loads((federation.folder / "run" / "flower" / "nodes.json").read_text())
    other, own = int(numbers["0"]), int(numbers["1"])
    key: Any = load_ssh_private_key((federation.keys / device_key_name(1)).read_bytes(), None)
    proof = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(key, key.public_key())]
    authority = (federation.keys / AUTHORITY).read_bytes()
    with FleetHttpClient.from_server_address(federation.address, False, authority, interceptors=proof) as client:
        for source in (own, SUPERLINK_NODE_ID):
            about = Metadata(run, "", source, other, "", "", time.time(), 60.0, "query.enrol")
            order = make_message(about, RecordDict())
            about.__dict__["_message_id"] = order.object_id
            request = fleet.PushMessagesRequest(
                node=nodes.Node(node_id=own),
                messages_list=[message_to_proto(remove_content_from_message(order))],
                message_object_trees=[get_object_tree(order)],
            )
            if source == own:
                assert not client.PushMessages(request).objects_to_push  # it is heard, and answers nothing
            else:
                with pytest.raises(httpx.HTTPStatusError, match="401"):
                    client.PushMessages(request)


def test_the_server_runs_no_other_app(federation, tmp_path):
    """Not even one that came in by the socket, or was left in the database."""
    from flwr.common.serde import fab_to_proto
    from flwr.supercore.fab import Fab

    from shoal.service.flower_control import get_flower_run_status, messages, open_control_client

    stranger = Stranger(tmp_path / "stranger", federation.keys / AUTHORITY, federation.address)
    build = [str(BIN_FOLDER / "flwr"), "build", "--app", str(stranger.app)]
    subprocess.run(build, env=stranger.environment, cwd=stranger.folder, check=True)
    [content] = [path.read_bytes() for path in stranger.folder.glob("*.fab")]
    socket = Path(federation.sockets()["superlink"])
    with open_control_client(socket) as client:
        app = fab_to_proto(Fab(sha256(content).hexdigest(), content, {}))
        number = str(client.StartRun(messages.StartRunRequest(fab=app)).run_id)
    assert wait_until(lambda: get_flower_run_status(socket, number) == "finished", 120), read_all_logs(federation)
    assert not list(stranger.marks.iterdir())
    assert "and it is not shoal's own" in read(federation.folder / "run" / "flower" / "superexec.log")


def test_a_device_runs_no_other_app(tmp_path):
    """Its server was taken over: it is Flower's own SuperLink, and sends another app to be run."""
    keys, port, home = tmp_path / "keys", free_port(), tmp_path / "home"
    make_keys(keys, "", 1)
    stranger = Stranger(tmp_path / "stranger", keys / AUTHORITY, f"127.0.0.1:{port}")
    address = ["--host", "127.0.0.1", "--port", str(port), "--isolation", "process", "--enable-supernode-auth"]
    own = ["--ssl-ca-certfile", str(keys / AUTHORITY), "--ssl-certfile", str(keys / CERTIFICATE)]
    own += ["--ssl-keyfile", str(keys / SERVER_KEY), "--disable-runtime-dependency-installation"]
    near = ["--runtime-api-address", f"127.0.0.1:{port}", "--root-certificates", str(keys / AUTHORITY)]
    log = tmp_path / "flower.log"
    running = [start_process([str(BIN_FOLDER / "flower-superlink"), *address, *own], log, stranger.environment)]
    try:
        running.append(start_process([str(BIN_FOLDER / "flower-superexec"), *near], log, stranger.environment))
        public = str((keys / device_key_name(0)).with_suffix(".pub"))
        assert wait_until(lambda: bool(stranger.flwr("supernode", "register", public, "lab").get("success")), 60), read(
            log
        )
        settings = {"data": "", "folder": str(home)}
        running.append(
            start_supernode(
                f"127.0.0.1:{port}", keys / device_key_name(0), keys / AUTHORITY, settings, PrivateFolder.create()
            )
        )
        assert wait_until(lambda: "SuperNode ID" in read(home / "supernode.log"), 60), read(home / "supernode.log")
        assert stranger.flwr("run", str(stranger.app), "lab").get("success")
        assert wait_until((stranger.marks / "answers").exists, 120), read(log) + read(home / "supernode.log")
        assert (stranger.marks / "answers").read_text() == "[1]"  # it could not be loaded
        assert not (stranger.marks / "device").exists()
        assert "and it is not shoal's own" in read(home / "supernode.log")
    finally:
        end_processes(running[::-1])


@pytest.mark.skipif(not shutil.which("nginx"), reason="nginx is not installed")
def test_from_outside_devices_come_in_and_nothing_else(federation, tmp_path):
    """Through the proxy a device is let in, while registering one and submitting a run are refused."""
    port = free_port()
    config = tmp_path / "nginx.conf"
    config.write_text(build_proxy_config(federation.keys, f"127.0.0.1:{port}", federation.address, tmp_path))
    nginx = start_process([shutil.which("nginx") or "", "-c", str(config)], tmp_path / "nginx.out", os.environ)
    settings = {"data": "", "folder": str(tmp_path / "home")}
    key, trusted = federation.keys / device_key_name(1), federation.keys / AUTHORITY
    node = start_supernode(f"127.0.0.1:{port}", key, trusted, settings, PrivateFolder.create())
    try:
        log = tmp_path / "home" / "supernode.log"
        assert wait_until(lambda: "SuperNode ID" in read(log), 150), read(log)
        stranger = Stranger(tmp_path / "stranger", trusted, f"127.0.0.1:{port}")
        make_keys(tmp_path / "own", "", 1)
        public_key = str((tmp_path / "own" / device_key_name(0)).with_suffix(".pub"))
        assert not stranger.flwr("supernode", "register", public_key, "lab").get("success")
        assert not stranger.flwr("run", str(stranger.app), "lab").get("success")
    finally:
        end_processes([node, nginx])


def list_process_tree(process: int) -> list[int]:
    """A process and all that it started, which may end meanwhile."""
    found = [process]
    for one in found:
        children = Path(f"/proc/{one}/task/{one}/children")
        found += [int(child) for child in read(children).split()]
    return found


def list_listening_ports(processes: list[int]) -> set[int]:
    """The TCP ports at which processes listen."""
    listening = {}
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        rows = [line.split() for line in read(table).splitlines()[1:]]
        listening |= {f"socket:[{row[9]}]": int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    links = [os.readlink(path) for one in processes for path in Path(f"/proc/{one}/fd").glob("*") if path.is_symlink()]
    return {listening[name] for name in links if name in listening}


def read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def read_all_logs(federation: WaitingFederation) -> str:
    """What everybody there has written."""
    return "\n".join(f"{path}:\n{read(path)[-2000:]}" for path in federation.folder.rglob("*.[lo][ou][gt]"))

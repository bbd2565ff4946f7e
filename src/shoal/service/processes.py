"""The processes of a federation: Flower's SuperLink and SuperExec on the server, a SuperNode on each device.

They are started with TLS and keys unless the user asks for neither, and they end with the process that started them.
Which interfaces they offer is in flower_programs.py.
"""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.remote.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, device_key_name
from shoal.service.private_socket import PrivateFolder
from shoal.storage.files import write_bytes

QUIET_VARIABLES = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
REFUSAL_MEANINGS = {
    "certificate has expired": "the server's certificate has expired: make new keys",
    "CERTIFICATE_VERIFY_FAILED": "the server is not the one that the authority vouches for",
    "[code: 2004]": "the server does not know this key, or takes the device for being there still",
    "Exit Code: 305": "the server cannot be reached like this",
}
"""Words in a SuperNode's log when the server refuses it, and what they mean."""
DEPARTURE_SECONDS = 60
"""Seconds until a server notices that a device is gone; before that it refuses the same key."""


@dataclass(frozen=True)
class FlowerServer:
    """The server's Flower processes: how they are started, reached and secured."""

    folder: Path
    """Where Flower keeps its state."""
    keys: Path | None
    """The folder of keys; None is without TLS and keys."""
    host: str
    port: int
    private: PrivateFolder = field(default_factory=PrivateFolder.create)
    """The private socket by which processes on this machine reach the SuperLink."""

    def key_path(self, name: str) -> str:
        assert self.keys
        return str(self.keys / name)

    def start_superlink(self) -> subprocess.Popen:
        """Start the SuperLink, which holds messages until they are fetched; its database survives being killed."""
        security = ["--insecure"]
        if self.keys:
            security = ["--ssl-ca-certfile", self.key_path(AUTHORITY), "--ssl-certfile", self.key_path(CERTIFICATE)]
            security += ["--ssl-keyfile", self.key_path(SERVER_KEY), "--enable-supernode-auth"]
        address = ["--host", self.host, "--port", str(self.port), "--database", str(self.folder / "state.db")]
        options = ["--isolation", "process", "--disable-runtime-dependency-installation"]
        secret = ["--superexec-auth-secret-file", str(self.private.secret)]
        command = [*find_program_command("superlink"), str(self.private.socket), *address, *security, *options, *secret]
        return start_process(command, self.folder / "superlink.log", build_environment(self.folder))

    def start_superexec(self, settings: Mapping[str, Any]) -> subprocess.Popen:
        """Start the SuperExec, which starts a process for every run that is submitted."""
        connection = [str(self.private.socket), str(self.private.secret), str(os.getpid())]
        environment = build_environment(self.folder) | {"SHOAL_DESK": json.dumps(settings)}
        command = [*find_program_command("superexec"), "serverapp", *connection]
        return start_process(command, self.folder / "superexec.log", environment)

    @property
    def local_address(self) -> str:
        """The address for processes on the same machine."""
        return f"127.0.0.1:{self.port}" if self.host == "0.0.0.0" else f"{self.host}:{self.port}"

    def wait_until_up(self, process: subprocess.Popen, timeout: float = 60) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if process.poll() is not None:
                problem = f"Flower's SuperLink ended with code {process.returncode}."
                raise ShoalError("unreachable", problem, f"See {self.folder / 'superlink.log'}; is the port taken?")
            host, _, port = self.local_address.rpartition(":")
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.2)
        raise ShoalError("unreachable", "Flower's SuperLink did not come up.", f"See {self.folder / 'superlink.log'}.")

    def register_devices(self, devices: int) -> Path:
        """Register the devices' keys at the SuperLink; the file with the node id that it gave each of them."""
        from shoal.service.flower_control import register_device

        path = self.folder / "nodes.json"
        node_ids = json.loads(path.read_text()) if path.exists() else {}
        for device in range(devices):
            if str(device) not in node_ids:
                public_key = Path(self.key_path(device_key_name(device))).with_suffix(".pub")
                try:
                    node_ids[str(device)] = register_device(self.private.socket, public_key, f"device-{device}")
                except ShoalError as error:
                    problem = f"Device {device} could not be registered: {error.problem}"
                    advice = "Make its key with `shoal keys`, or start in a new folder."
                    raise ShoalError("unreachable", problem, advice) from error
                write_bytes(path, json.dumps(node_ids).encode())
        return path

    def submit_run(self, name: str) -> str:
        """Start the run in the folder of this name; Flower's id of it."""
        from shoal.service.flower_control import start_flower_run

        try:
            return start_flower_run(self.private.socket, name)
        except ShoalError as error:
            problem = f"The run could not be submitted: {error.problem}"
            raise ShoalError("unreachable", problem, f"See {self.folder / 'superlink.log'}.") from error

    def get_run_status(self, run_id: str) -> str:
        """Flower's status of a run: pending, starting, running, finished; empty where it cannot be asked."""
        from shoal.service.flower_control import get_flower_run_status

        try:
            return get_flower_run_status(self.private.socket, run_id)
        except ShoalError:
            return ""

    def stop_run(self, run_id: str) -> None:
        from shoal.service.flower_control import stop_flower_run

        with suppress(ShoalError):
            stop_flower_run(self.private.socket, run_id)


def start_supernode(
    server: str, key: Path | None, trust: Path | None, settings: Mapping[str, str], private: PrivateFolder
) -> subprocess.Popen:
    """Start a device's SuperNode, which starts its SuperExec; `settings` are the device's data and folder."""
    folder = Path(settings["folder"])
    security = ["--insecure"]
    if key and trust:
        security = ["--root-certificates", str(trust), "--auth-supernode-private-key", str(key)]
    command = [
        *find_program_command("supernode"),
        str(private.socket),
        str(private.secret),
        "--superlink",
        server,
        *security,
    ]
    return start_process(
        command, folder / "supernode.log", build_environment(folder) | {"SHOAL_SEAT": json.dumps(dict(settings))}
    )


def explain_refusal(folder: Path) -> str:
    """Why the last SuperNode of a device ended, from its log."""
    log = (folder / "supernode.log").read_text(errors="replace").rpartition("Starting Flower SuperNode")[2]
    return next((why for mark, why in REFUSAL_MEANINGS.items() if mark in log), f"see {folder / 'supernode.log'}")


def build_proxy_config(keys: Path, listen: str, server: str, folder: Path) -> str:
    """The configuration of an nginx that forwards the devices' interface and nothing else."""
    text = Path(__file__).with_name("nginx.conf").read_text()
    values = {"KEYS": keys.resolve(), "LISTEN": listen, "SERVER": server, "FOLDER": folder.resolve()}
    for name, value in values.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def build_environment(folder: Path) -> dict[str, str]:
    """The environment of Flower's processes, without the user's FLWR_ variables: those could open more interfaces."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    return variables | QUIET_VARIABLES | {"FLWR_HOME": str(folder / "flower")}


def start_process(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """Start a process that ends with this one (on Linux); its log and files are readable by their owner only."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        return subprocess.Popen(
            command, stdout=file, stderr=file, env=dict(environment), umask=0o077, preexec_fn=make_parent_death_hook()
        )


def make_parent_death_hook():
    """What a child calls first, on Linux: ask for SIGTERM when its parent dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, signal.SIGTERM)


def end_processes(processes: Sequence[subprocess.Popen], timeout: float = 15) -> None:
    """End processes: SIGTERM, and SIGKILL after `timeout` seconds."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.terminate()
    for process in processes:
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def find_program_command(name: str) -> list[str]:
    """The command line of one of the programs in flower_programs.py."""
    if not find_spec("flwr"):
        problem = "Real devices are reached by Flower, which is not installed."
        raise ShoalError("missing-extra", problem, 'Install it: pip install "shoal[flower]".')
    return [sys.executable, "-P", str(Path(__file__).with_name("flower_programs.py")), name]

"""The processes of a federation: Flower's SuperLink and SuperExec on the server, a SuperNode on each device.

They are started with encryption and keys unless somebody insists on neither, and they end with whoever started them.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ShoalError
from shoal.devices.keys import AUTHORITY, CERTIFICATE, SECRET, SERVER_KEY, device_key
from shoal.files import write_bytes

QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1"}
REFUSALS = {
    "certificate has expired": "the server's certificate has expired: make new keys",
    "CERTIFICATE_VERIFY_FAILED": "the server is not the one that the authority vouches for",
    "[code: 2004]": "the server does not know this key, or takes the device for being there still",
    "Exit Code: 305": "the server cannot be reached like this",
}
"""What Flower's log says of a device that is not let in, and what it means."""
PATIENCE = 60
"""Seconds that a server needs to notice that a device is gone; before that it lets no other one in with its key."""
SHIM = Path(__file__).with_name("shim")


@dataclass(frozen=True)
class Link:
    """How the server's processes are reached and secured."""

    folder: Path
    """Where Flower keeps its state."""
    keys: Path | None
    """The folder of keys; None is without any security."""
    host: str
    port: int

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return surroundings(self.folder) | dict(more or {})

    def key(self, name: str) -> str:
        assert self.keys
        return str(self.keys / name)

    def trust(self) -> list[str]:
        return ["--root-certificates", self.key(AUTHORITY)] if self.keys else ["--insecure"]

    def start_link(self) -> subprocess.Popen:
        """The SuperLink: it holds messages until they are fetched, and survives being killed."""
        secured = ["--insecure"]
        if self.keys:
            secured = ["--ssl-ca-certfile", self.key(AUTHORITY), "--ssl-certfile", self.key(CERTIFICATE)]
            secured += ["--ssl-keyfile", self.key(SERVER_KEY), "--enable-supernode-auth"]
            secured += ["--superexec-auth-secret-file", self.key(SECRET)]
        address = ["--host", self.host, "--port", str(self.port), "--database", str(self.folder / "state.db")]
        fixed = ["--isolation", "process", "--disable-runtime-dependency-installation"]
        return self.started("flower-superlink", [*address, *secured, *fixed], "superlink.log")

    def start_exec(self, desk: Mapping[str, Any]) -> subprocess.Popen:
        """The SuperExec: it starts our loop when a run is submitted."""
        secret = ["--superexec-auth-secret-file", self.key(SECRET)] if self.keys else []
        where = ["--runtime-api-address", self.near, *self.trust()]
        environment = {"SHOAL_DESK": json.dumps(desk)}
        return self.started("flower-superexec", [*where, *secret], "superexec.log", environment)

    @property
    def near(self) -> str:
        """The address for processes on the same machine."""
        return f"127.0.0.1:{self.port}" if self.host == "0.0.0.0" else f"{self.host}:{self.port}"

    def started(
        self, program: str, arguments: Sequence[str], log: str, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen:
        self.folder.mkdir(parents=True, exist_ok=True)
        return start([tool(program), *arguments], self.folder / log, self.environment(more))

    def wait_until_up(self, process: subprocess.Popen, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if process.poll() is not None:
                problem = f"Flower's SuperLink ended with code {process.returncode}."
                raise ShoalError("unreachable", problem, f"See {self.folder / 'superlink.log'}; is the port taken?")
            host, _, port = self.near.rpartition(":")
            with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
                return
            time.sleep(0.2)
        raise ShoalError("unreachable", "Flower's SuperLink did not come up.", f"See {self.folder / 'superlink.log'}.")

    def asked(self, *words: str) -> dict[str, Any]:
        """What Flower's own command says, which talks to the SuperLink."""
        home = self.folder / "flower"
        trust = f'root-certificates = "{self.key(AUTHORITY)}"' if self.keys else "insecure = true"
        write_bytes(home / "config.toml", f'[superlink.shoal]\naddress = "{self.near}"\n{trust}\n'.encode())
        done = subprocess.run(
            [tool("flwr"), *words, "--format", "json"], env=self.environment(), capture_output=True, text=True
        )
        with suppress(ValueError):
            found = json.loads(done.stdout)
            if isinstance(found, dict):
                return found
        return {"success": False, "error-message": (done.stdout + done.stderr).strip()[-300:]}

    def register(self, devices: int) -> Path:
        """Tell the SuperLink the devices' keys; the file with the number that it gave each of them."""
        path = self.folder / "nodes.json"
        known = json.loads(path.read_text()) if path.exists() else {}
        for device in range(devices):
            if str(device) not in known:
                shown = str(Path(self.key(device_key(device))).with_suffix(".pub"))
                found = self.asked("supernode", "register", shown, "shoal", "--name", f"device-{device}")
                if not found.get("success"):
                    problem = f"Device {device} could not be registered ({found.get('error-message', '')[:120]})."
                    raise ShoalError(
                        "unreachable", problem, "Make its key with `shoal keys`, or start in a new folder."
                    )
                known[str(device)] = str(found["node-id"])
                write_bytes(path, json.dumps(known).encode())
        return path

    def submit(self, run: str) -> str:
        """Have a run started; Flower's number of it."""
        found = self.asked("run", str(SHIM), "shoal", "--run-config", f'run="{run}"')
        if not found.get("success"):
            problem = f"The run could not be submitted ({found.get('error-message', '')[:160]})."
            raise ShoalError("unreachable", problem, f"See {self.folder / 'superlink.log'}.")
        return str(found["run-id"])

    def status(self, run: str) -> str:
        """What Flower says of a run: pending, running, finished:... ; empty where it does not say."""
        runs = self.asked("list", "shoal", "--run-id", run).get("runs") or [{}]
        return str(runs[0].get("status", ""))

    def stop(self, run: str) -> None:
        self.asked("stop", run, "shoal")


def start_node(
    server: str, key: Path | None, trust: Path | None, seat: Mapping[str, str], port: int
) -> subprocess.Popen:
    """A device's SuperNode."""
    folder = Path(seat["folder"])
    secured = ["--insecure"]
    if key and trust:
        secured = ["--root-certificates", str(trust), "--auth-supernode-private-key", str(key)]
    words = [tool("flower-supernode"), "--superlink", server, *secured, "--host", "127.0.0.1", "--port", str(port)]
    return start(words, folder / "supernode.log", surroundings(folder) | {"SHOAL_SEAT": json.dumps(dict(seat))})


def refusal(folder: Path) -> str:
    """Why the last SuperNode of a device ended."""
    log = (folder / "supernode.log").read_text(errors="replace").rpartition("Starting Flower SuperNode")[2]
    return next((why for mark, why in REFUSALS.items() if mark in log), f"see {folder / 'supernode.log'}")


def proxy_of(keys: Path, listen: str, server: str, folder: Path) -> str:
    """The configuration of an nginx that forwards what devices need and nothing else."""
    text = Path(__file__).with_name("nginx.conf").read_text()
    given = {"KEYS": keys.resolve(), "LISTEN": listen, "SERVER": server, "FOLDER": folder.resolve()}
    for name, value in given.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of Flower's processes, which start each other by name: theirs must be found first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return os.environ | QUIET | {"FLWR_HOME": str(folder / "flower"), "PATH": path}


def start(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen:
    """A process of its own group that ends with this one, whose files only its owner can read."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        return subprocess.Popen(
            words, stdout=file, stderr=file, env=dict(environment), umask=0o077, preexec_fn=die_with_parent()
        )


def die_with_parent():
    """What a child does before anything else, on Linux: ask to be told when its parent dies."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(1, signal.SIGTERM)


def end(processes: Sequence[subprocess.Popen], seconds: float = 15) -> None:
    """Ask processes to end, then make them."""
    for process in processes:
        with suppress(ProcessLookupError):
            process.terminate()
    for process in processes:
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tool(name: str) -> str:
    """A program of Flower's, beside this Python or on the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        problem = f"{name} is not there: real devices are reached by Flower, which is not installed."
        raise ShoalError("missing-extra", problem, 'Install it: pip install "shoal[flower]".')
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

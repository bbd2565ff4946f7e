"""What tests of real devices share: a recipe on the digits, samples in files, and a transport without a network."""

import socket
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.local.device import TrainingSetup
from shoal.data.dataset import read_digits
from shoal.remote.engine import MAX_CLAIMED_SAMPLES
from shoal.runs.build import assemble_run
from shoal.runs.recipe import Recipe
from shoal.runs.session import Result
from shoal.runs.store import RunFolder
from shoal.service.client import DeviceClient
from shoal.service.server_run import adapt_recipe_to_devices, play_server_run

SHOAL = str(Path(sys.executable).with_name("shoal"))
DEVICES = 3
BASE: dict[str, Any] = {
    "data": "digits",
    "model": "mlp",
    "devices": DEVICES,
    "sample": DEVICES,
    "rounds": 2,
    "epochs": "1",
    "batch": 16,
    "lr": 0.05,
    "split": "dirichlet:0.5",
    "seed": 1,
}
Tamper = Callable[[int, int, bytes], bytes | str]
"""(device, round, the honest reply) -> what arrives instead."""


class InProcessTransport:
    """Passes requests to device clients in this process; `tamper` may change their replies to training requests."""

    def __init__(self, clients: list[DeviceClient], tamper: Tamper = lambda device, round, reply: reply):
        self.clients, self.tamper, self.round = clients, tamper, -1

    def exchange(self, requests: Mapping[int, bytes], kind: str, timeout: float) -> Iterator[tuple[int, bytes | str]]:
        if kind == "train":
            self.round += 1
        for device, request in reversed(list(requests.items())):
            reply = self.clients[device].answer_request(request, kind)
            yield device, reply if kind != "train" else self.tamper(device, self.round, reply)


def make_recipe(method: str, out: Path, **values: object) -> Recipe:
    return adapt_recipe_to_devices(Recipe().with_values(**BASE | {"method": method, "out": str(out)} | values))


def write_samples_file(folder: Path, device: int, **values: object) -> str:
    """The name of a function in a Python file that loads what a device holds in the simulation of a recipe."""
    assembly = assemble_run(Recipe().with_values(**BASE | values))
    setup: TrainingSetup = assembly.loop.host.setup
    index, data = setup.samples(device).index, read_digits()
    np.savez(folder / f"{device}.npz", x=data.inputs[index].numpy(), y=data.targets[index].numpy())
    code = f"""
        import numpy as np

        def load():
            with np.load({str(folder / f"{device}.npz")!r}) as file:
                return file["x"], file["y"]
        """
    path = folder / f"device_{device}.py"
    path.write_text(textwrap.dedent(code))
    return f"{path}:load"


def make_clients(folder: Path, **values: object) -> list[DeviceClient]:
    devices = int(str(values.get("devices", DEVICES)))
    return [DeviceClient(write_samples_file(folder, d, **values), folder / f"home-{d}") for d in range(devices)]


def play_with_devices(
    recipe: Recipe, transport: InProcessTransport, max_norm: float = 1e6, max_samples: int = MAX_CLAIMED_SAMPLES
) -> Result:
    """The result of a run with devices in this process, from the beginning or from its checkpoint."""
    path = Path(recipe.out)
    if not path.exists():
        RunFolder.create(recipe).close()
    return play_server_run(path, transport, 60, max_norm, 1, max_samples=max_samples)


def history_rows(result: Result) -> list[dict]:
    """The rows of a history without `wall_seconds`."""
    return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in result.history.rows]


def strip_judging(rows: list[dict]) -> list[dict]:
    """Rows without the bytes of tests, which cost nothing in simulation."""
    rows = [{**row, "bytes_by": {way: dict(by) for way, by in row["bytes_by"].items()}} for row in rows]
    for row in rows:
        for way in ("down", "up"):
            row[f"bytes_{way}"] -= row["bytes_by"][way].pop("judge")
    return rows


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition comes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

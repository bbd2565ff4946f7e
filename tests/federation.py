"""What tests of real devices share: a recipe on the digits, each device's samples in files, a post without a net."""

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
from shoal.engines.host import LocalDevices
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
Answer = Callable[[bytes, str], bytes]
Tamper = Callable[[int, int, bytes], bytes | str]
"""(device, round, the honest answer) -> what arrives instead."""


class Nearby:
    """Carries questions to seats in this process."""

    def __init__(self, seats: list[DeviceClient], tamper: Tamper = lambda device, round, answer: answer):
        self.seats, self.tamper, self.round = seats, tamper, -1

    def exchange(self, questions: Mapping[int, bytes], kind: str, seconds: float) -> Iterator[tuple[int, bytes | str]]:
        if kind == "train":
            self.round += 1
        for device, question in reversed(list(questions.items())):
            answer = self.seats[device].answer_request(question, kind)
            yield device, answer if kind == "enrol" else self.tamper(device, self.round, answer)


def recipe(method: str, out: Path, **more: object) -> Recipe:
    return adapt_recipe_to_devices(Recipe().with_values(**BASE | {"method": method, "out": str(out)} | more))


def samples_file(folder: Path, device: int, **more: object) -> str:
    """A Python file that loads what a device holds in the simulation of a recipe."""
    assembly = assemble_run(Recipe().with_values(**BASE | more))
    assert isinstance(assembly.loop.engine, LocalDevices)
    setup: TrainingSetup = assembly.loop.engine.setup
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


def seats(folder: Path, **more: object) -> list[DeviceClient]:
    devices = int(str(more.get("devices", DEVICES)))
    return [DeviceClient(samples_file(folder, d, **more), folder / f"home-{d}") for d in range(devices)]


def played(found: Recipe, post: Nearby, bound: float = 1e6, max_samples: int = MAX_CLAIMED_SAMPLES) -> Result:
    """A run with devices in this process, from the beginning or from where it was left."""
    path = Path(found.out)
    if not path.exists():
        RunFolder.create(found).close()
    return play_server_run(path, post, 60, bound, 1, max_samples=max_samples)


def rows(result: Result) -> list[dict]:
    """A history without what clocks say."""
    return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in result.history.rows]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def soon(true: Callable[[], bool], seconds: float) -> bool:
    """Whether something comes true in time."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True

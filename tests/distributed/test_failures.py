"""Devices that fail, again and again: the run ends, and learns what one with so many fewer devices learns."""

from typing import Any

import numpy as np
from federation import InProcessTransport, make_clients, make_recipe, play_with_devices

import shoal

DEVICES, SEEDS, ROUNDS = 10, 6, 50
MORE: dict[str, Any] = {"devices": DEVICES, "sample": DEVICES, "rounds": ROUNDS, "lr": 0.02, "eval_every": ROUNDS}


def test_a_third_of_the_devices_fails_in_every_round(tmp_path):
    """30 % in each of 50 rounds, other ones each time."""

    def drop_three(device: int, round: int, reply: bytes) -> bytes | str:
        failing = np.random.default_rng(round).choice(DEVICES, 3, replace=False)
        return "it was late" if device in failing else reply

    found = play_with_devices(
        make_recipe("fedavg", tmp_path / "run", **MORE), InProcessTransport(make_clients(tmp_path, **MORE), drop_three)
    )
    assert [len(row["dropped"]) for row in found.history.rows] == [3] * ROUNDS
    base: dict[str, Any] = {
        "data": "digits",
        "model": "mlp",
        "epochs": "1",
        "batch": 16,
        "split": "dirichlet:0.5",
        "engine": "serial",
    }
    fewer = [shoal.run("fedavg", seed=s, **{**base, **MORE, "sample": 7}).accuracy or 0 for s in range(SEEDS)]
    assert min(fewer) <= (found.accuracy or 0) <= max(fewer), (found.accuracy, fewer)

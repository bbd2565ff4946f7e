"""Makes the golden folders: what a version writes, and what going on with it must give.

    python tests/golden/make.py 0.1

They are made once for a version, before anything about its files changes, and never again.
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from federation import InProcessTransport, history_rows, make_clients, make_recipe, play_with_devices
from safetensors.torch import save_file

import shoal
from shoal.runs.recipe import Recipe

RUN: dict[str, Any] = {
    "devices": 4,
    "sample": 3,
    "steps": "3",
    "batch": 8,
    "split": "dirichlet:0.5",
    "engine": "serial",
    "seed": 5,
}
METHOD = "scaffold+topk(ratio=0.1)"
"""Of the run: the server has a state, devices remember two things, and a codec has its own."""
STOPPED, WHOLE = 2, 4
"""Rounds that the folders hold, and those that are played in the end."""


def numbers(result: shoal.Result) -> list[dict]:
    """A history without what clocks say."""
    return [{k: v for k, v in row.items() if k != "wall_seconds"} for row in result.history.rows]


def make(target: Path) -> None:
    whole = shoal.run(METHOD, rounds=WHOLE, **RUN)
    shoal.run(METHOD, rounds=STOPPED, out=target / "run", **RUN)
    save_file(whole.params, target / "run.safetensors")
    methods: list[str] = ["fedavg", "feddyn"]
    expected: dict[str, Any] = {"run": numbers(whole)}
    shoal.compare(methods, seeds=2, rounds=STOPPED, out=target / "comparison", **RUN)
    both = shoal.compare(methods, seeds=2, rounds=WHOLE, **RUN)
    expected["comparison"] = {method: [numbers(r) for r in own] for method, own in both.results.items()}
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        play_with_devices(
            make_recipe("scaffold", target / "server", rounds=STOPPED), InProcessTransport(make_clients(there))
        )
        for device in range(3):
            shutil.copytree(there / f"home-{device}", target / f"device-{device}")
        whole_server = play_with_devices(
            make_recipe("scaffold", there / "whole", rounds=WHOLE), InProcessTransport(make_clients(there))
        )
        expected["server"] = history_rows(whole_server)
    full = Recipe().with_values(method=METHOD, rounds=WHOLE, **RUN)
    (target / "recipe.toml").write_text(full.to_toml())
    expected["fingerprint"] = full.fingerprint()
    (target / "expected.json").write_text(json.dumps(expected))
    for lock in target.rglob(".lock"):
        lock.unlink()
    for file in target.rglob("*.toml"):  # where they were made does not matter
        file.write_text(re.sub(r'^(out|data_dir) = ".*"$', r'\1 = ""', file.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    place = Path(__file__).parent / sys.argv[1]
    place.mkdir()
    make(place)

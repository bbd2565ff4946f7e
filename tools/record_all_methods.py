"""Run every method at its defaults on digits, and write the runs to the ledger: `python tools/record_all_methods.py`.

It gives every method's page a curve and its cost in a setting that takes minutes on a processor. Nothing is tuned, so
the runs say what a method costs and that it learns, and not which method is better. Left out are methods that refuse
the recipe, and those that are about models of devices' own, which the global accuracy does not judge.
"""

from typing import Any

from ledger import FOLDER

import shoal
from shoal.core.errors import ShoalError
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.load import load_method
from shoal.reproduce.ledger import LEDGER_SUFFIX, LedgerRun, make_ledger_run, write_ledger_file

NAME = "all-methods-digits-mlp-dirichlet0.1"
SEEDS = 3
RECIPE: dict[str, Any] = dict(
    data="digits",
    model="mlp",
    split="dirichlet:0.1",
    server_data="share:0.05",
    devices=20,
    sample=5,
    rounds=60,
    epochs=2,
    batch=16,
    lr=0.05,
    fleet="tiers",
)


def list_methods() -> list[str]:
    """FedAvg first, then parts and presets whose global model is what they are about."""
    names = sorted({*find_shipped_parts(), *PRESETS} - {"fedavg"})
    return ["fedavg", *(name for name in names if not makes_own_models(name))]


def makes_own_models(name: str) -> bool:
    """Whether devices use models of their own by this method."""
    parts = load_method(name, ()).parts
    return any(part.keeps_layers or part.acts_at("personal") or part.acts_at("finetune") for part in parts)


def run_methods() -> list[LedgerRun]:
    """The runs of all methods that the recipe suits; those that refuse it are told."""
    runs: list[LedgerRun] = []
    for method in list_methods():
        try:
            results = [shoal.run(method, seed=seed, progress=False, **RECIPE) for seed in range(SEEDS)]
        except ShoalError as error:
            print(f"{method}: left out: {error}")
            continue
        if results[0].net.names_with_role("personal"):
            print(f"{method}: left out: devices keep tensors of their own")
            continue
        runs += [make_ledger_run(result.recipe, result.history.rows) for result in results]
        print(f"{method}: {', '.join(f'{result.accuracy:.4f}' for result in results)}", flush=True)
    return runs


if __name__ == "__main__":
    write_ledger_file(FOLDER / f"{NAME}{LEDGER_SUFFIX}", run_methods())

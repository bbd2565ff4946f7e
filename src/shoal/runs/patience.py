"""When a run ends because its validation metric has not improved for some rounds."""

from shoal.runs.history import History
from shoal.runs.recipe import Recipe


def describe_end_of_patience(recipe: Recipe, history: History) -> str:
    """Why a run ends with the last round of its history, by its `patience`; "" where it goes on.

    It is decided in rounds that are evaluated; a model that diverged has not improved.
    """
    if not recipe.patience or not history.rows or history.headline not in history.rows[-1]:
        return ""
    best = history.find_best_round()
    waited = len(history) - (0 if best is None else best + 1)
    if waited < recipe.patience:
        return ""
    reached = "none yet" if best is None else f"{history.best:.4g} in round {best + 1}"
    rounds = "1 round" if waited == 1 else f"{waited} rounds"
    return f"no better {history.headline} on validation samples for {rounds} (best: {reached})"

"""Runs that failed to learn: every round was void, so that the model never changed, or the last loss is not finite."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import log
from typing import TYPE_CHECKING

from shoal.core.errors import ShoalError
from shoal.runs.history import History
from shoal.runs.warn_once import warn_once

if TYPE_CHECKING:
    from shoal.runs.session import Result

ADVICE = {
    "its update is not finite": "Give a smaller lr or a clip, or inputs of a smaller range.",
    "it failed": "Give a smaller --failures.",
    "it was late": "Give a longer --deadline or quicker devices.",
}
"""What helps, by the reason why a reply was dropped."""


def are_all_rounds_void(history: History) -> bool:
    return len(history) > 0 and all(row.get("void") for row in history.rows)


def has_diverged(history: History) -> bool:
    """Whether the loss at the last evaluation is not finite, which a history stores as None.

    The accuracy is a number even then. Where a task has none, the last row is looked at: it is always evaluated.
    """
    evaluated = [row for row in history.rows if row.get("accuracy") is not None]
    if not evaluated and history.rows and "accuracy" not in history.rows[-1]:
        evaluated = history.rows[-1:]
    return bool(evaluated) and evaluated[-1].get("loss") is None


def explain_failure(history: History) -> tuple[str, str] | None:
    """Why a run failed to learn and what may help; None where it did not fail."""
    if are_all_rounds_void(history):
        return explain_void_rounds(history)
    if not has_diverged(history):
        return None
    void = sum(bool(row.get("void")) for row in history.rows)
    problem = f"The loss of the model is not finite after {len(history)} rounds, of which {void} were void."
    return problem, ADVICE["its update is not finite"]


FAR = 10
"""A last loss of so many times the first one, or the loss of guessing, is told."""


def explain_grown_loss(result: "Result") -> tuple[str, str] | None:
    """What is odd about a last loss that is far above the first or that of guessing; None where nothing is.

    The loss of guessing is known of the cross-entropy of classes alone; a loss below it is never told.
    """
    losses = [(number, row["loss"]) for number, row in enumerate(result.history.rows, 1) if row.get("loss") is not None]
    if not losses:
        return None
    (begin, first), (end, last) = losses[0], losses[-1]
    guess = log(max(2, result.net.classes)) if result.net.task.has_class_logits and not result.recipe.loss else 0.0
    advice = ADVICE["its update is not finite"]
    if last > FAR * first and last > guess:
        return f"The loss rose from {first:.3g} after round {begin} to {last:.3g} after round {end}.", advice
    if guess and last > FAR * guess:
        return f"The loss is {last:.3g} after round {end}, and that of guessing is {guess:.3g}.", advice
    return None


def explain_void_rounds(history: History) -> tuple[str, str]:
    """Why all rounds were void, by the most frequent reason, and what may help."""
    dropped = [reply for row in history.rows for reply in row.get("dropped", ())]
    whys = Counter(reply.get("why") for reply in dropped if isinstance(reply, Mapping)).most_common(1)
    if whys:
        why, _ = whys[0]
        reason, advice = f"no reply could be used ({why})", ADVICE.get(str(why), "See `dropped` in its history.")
    elif any(row.get("devices") for row in history.rows):
        reason, advice = "the new model was not finite", "Give a smaller lr, or another value to the method's parts."
    else:
        reason, advice = "no device took part", "Give a --fleet in which more devices are available."
    return f"In all {len(history)} rounds {reason}: the model is as it was before the run.", advice


def warn_of_failed_runs(runs: Mapping[str, Sequence["Result"]], unless_all_void: bool = False) -> None:
    """Log one warning for each method whose runs failed to learn or have a loss that rose, with the number of seeds."""
    if unless_all_void and all(are_all_rounds_void(r.history) for results in runs.values() for r in results):
        return
    for label, results in runs.items():
        explained = (explain_failure(result.history) or explain_grown_loss(result) for result in results)
        failures = [why for why in explained if why]
        if failures:
            problem, advice = failures[0]
            seeds = f" ({len(failures)} of {len(results)} seeds)" if len(results) > 1 else ""
            warn_once(f"{label}{seeds}: {problem} {advice}")


def refuse_all_void(histories: Iterable[History]) -> None:
    """Raise `nothing-learnt` where all rounds of all runs are void; what was written stays."""
    histories = list(histories)
    if histories and all(map(are_all_rounds_void, histories)):
        raise ShoalError("nothing-learnt", *explain_void_rounds(histories[0]))

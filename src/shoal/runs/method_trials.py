"""What methods could do with a model: each is composed and plays a round in miniature with it, or says why not."""

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shoal.core.clashes import refuse_task
from shoal.core.compose import Method
from shoal.core.errors import ShoalError, describe_error
from shoal.core.local.optimiser_checks import (
    refuse_accumulation,
    refuse_optimiser_clashes,
    refuse_unmatched_groups,
)
from shoal.core.optimiser import Optimiser
from shoal.core.session import Session, play_round
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.load import load_method, load_part_files
from shoal.plugins.smoke_run import SmokeSetup, build_tiny_run, describe_obstacle, step_two_devices

FAILED = "bug"
"""The kind of a trial that ended in an exception which is no refusal."""


@dataclass(frozen=True)
class MethodTrial:
    """Whether a method trains a model: empty `reason` if so, else one sentence and the kind of error it is."""

    method: str
    reason: str = ""
    advice: str = ""
    kind: str = ""
    cause: str = ""
    """The reason without names of parts: others may have the same."""
    vectorised: bool = False
    """Whether its steps can be made for many devices in one call; else devices train one after the other."""

    @property
    def trains(self) -> bool:
        return not self.reason


def list_method_names(files: Sequence[str] = ()) -> list[str]:
    """All names that a method expression knows: parts, parts of these files, presets."""
    return sorted({*find_shipped_parts(), *load_part_files(files), *PRESETS})


def try_methods(
    names: Iterable[str], setting: SmokeSetup, optimiser: Optimiser, files: Sequence[str] = ()
) -> list[MethodTrial]:
    """A trial of each method with the model and the samples of `setting`."""
    with quiet_log():
        return [try_method(name, setting, optimiser, files) for name in names]


def try_method(name: str, setting: SmokeSetup, optimiser: Optimiser, files: Sequence[str] = ()) -> MethodTrial:
    """One round of two devices, then one step of two devices in one call."""
    method = load_method(name, files)
    own = {name for part in method.parts for name in (part.name(), part.needs_part) if name}
    names = "|".join(map(re.escape, sorted(own))) or "$."

    def refuse_method(reason: str, advice: str, kind: str) -> MethodTrial:
        return MethodTrial(name, reason, advice, kind, re.sub(rf"\b({names})\b", "it", reason))

    try:
        refuse_optimiser_clashes(method, optimiser)
        refuse_task(method.parts, setting.net.task)
        loop, net = build_tiny_run(method, setting.sizes, setting=setting, optimiser=optimiser)
        refuse_accumulation(net, optimiser)
        refuse_unmatched_groups(net, optimiser)
        play_round(Session(loop, net))
    except ShoalError as error:
        return refuse_method(error.problem, error.advice, error.kind.name)
    except Exception as error:
        return refuse_method(f"{name} raises {describe_error(error)}.", "Please report it.", FAILED)
    return MethodTrial(name, vectorised=not find_obstacle(method, setting))


def find_obstacle(method: Method, setting: SmokeSetup) -> str:
    """Why a step cannot be made for two devices in one call; empty where it can."""
    try:
        step_two_devices(method, setting)
    except Exception as error:
        return describe_obstacle(error)
    return ""


@contextmanager
def quiet_log() -> Iterator[None]:
    """Inside, the log says nothing: what a trial warns of is no news of a run."""
    log = logging.getLogger("shoal")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)

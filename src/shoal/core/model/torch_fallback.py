"""What is said where this release of torch lacks a private interface: something is slower, and nothing is broken."""

import logging
from functools import cache

import torch

log = logging.getLogger("shoal")


@cache
def log_fallback(interface: str, effect: str) -> None:
    """Warn, once in a process, that torch does not offer an interface as it did in the releases that were tested."""
    log.warning("torch %s does not offer %s as expected; %s, which is slower.", torch.__version__, interface, effect)

"""Citations: the BibTeX entries of the papers that a method comes from."""

import ast

from shoal.core.errors import ShoalError
from shoal.core.expression import MAX_EXPRESSION_LENGTH, parse_call, split_terms
from shoal.parts import PRESETS, find_shipped_parts
from shoal.report.bibliography import BIBTEX

FEDAVG_KEY = "mcmahan2017fedavg"
"""Every method is a change of FedAvg, so its paper is cited with each of them."""


def split_bibtex(text: str) -> dict[str, str]:
    """The entries of a BibTeX file by their keys."""
    return {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in text.strip().split("\n\n")}


ENTRIES = split_bibtex(BIBTEX)
"""By key, the entry of every paper that a shipped part cites."""


def cite_method(method: str) -> list[str]:
    """The BibTeX entries for the parts of an expression, FedAvg's first, each once; unknown parts have none."""
    parts = find_shipped_parts()
    keys = [key for name in list_part_names(method) if name in parts for key in parts[name].cite]
    return [ENTRIES[key] for key in dict.fromkeys([FEDAVG_KEY, *keys])]


def list_part_names(method: str) -> list[str]:
    """The names in an expression, presets written out; none if it cannot be read."""
    try:
        tree = ast.parse(method[:MAX_EXPRESSION_LENGTH].strip(), mode="eval").body
        names = [parse_call(node, method)[0] for node in split_terms(tree, method)]
    except (ShoalError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [part for name in names for part in (list_part_names(PRESETS[name]) if PRESETS.get(name) else [name])]

"""docs/reference/audit.md: what each shipped part sends beside the model, and what it reads on the server."""

from dataclasses import replace
from typing import Any

import torch
from markers import format_cell, format_table

from shoal.core.extra_checks import get_declared_card, get_declared_extras
from shoal.core.extras import LARGEST, READABLE, Declaration, Extra
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.part import Part
from shoal.parts import find_shipped_parts
from shoal.plugins.smoke_run import make_tiny_setup

HEAD = """# Audit

<!-- this whole page is written by tools/generate_docs.py (`make generate`) -->

What leaves a device beside the change of its model, and what the server's half of each part reads about single devices.
Both are declared by the parts: [Write a part](../how-to/write-a-part.md#declare-what-is-sent-and-read). Every answer is
compared with the declaration before a part sees it, in simulations and with real devices: one that is not as declared
costs its device the round. Laws 9 and 10 of [shoal.testing](api.md#shoaltesting) hold the parts to what stands here.

## What devices send beside the model

"""
READS_HEAD = """
## What is read on the server

Of single devices: *updates* are the changes of their models, *extras* what stands above, *cards* what they tell at
enrolment, *sizes* their numbers of samples, *outcomes* what their training cost. Where no part does otherwise, the mean
of the updates is taken, weighted by sizes, as in FedAvg; the table is about what parts read themselves. The parts that
are not listed read none of it.

"""
SETTINGS: dict[str, dict[str, Any]] = {"feddh": {"gradient_from": "client_grad"}}
"""Settings at which a part sends more than by default."""
FORMS = {
    "number": "a number",
    "params": "like the trained parameters",
    "axes": "a number per unit",
    "classes": "a number per class",
    "bits": "bits",
}


def write_audit_page() -> str:
    """Two tables: what is sent, in which form and when; what is read."""
    parts = find_shipped_parts()
    header = ["part", "extra", "what it tells", "form", "range", "when", "the server needs"]
    sent = [row for name, cls in parts.items() for row in list_sent(name, cls)]
    read = [
        [link_part(name), *("yes" if word in cls.reads else "" for word in READABLE)]
        for name, cls in parts.items()
        if cls.reads
    ]
    return HEAD + format_table(header, sent) + READS_HEAD + format_table(["part", *READABLE], read)


def list_sent(name: str, cls: type[Part]) -> list[list[str]]:
    """A row for each extra of a part."""
    default, part = cls(), cls(**SETTINGS.get(name, {}))
    net = part.model(make_tiny_setup(1, part).net)
    usual, extras = declare(default, net), declare(part, net)
    setting = ", ".join(f"{key}={value!r}" for key, value in SETTINGS.get(name, {}).items())
    rows = [
        describe_extra(name, entry, extra, "" if entry in usual else f"with `{setting}`")
        for entry, extra in extras.items()
    ]
    card = get_declared_card(part, net) or {}
    return rows + [describe_extra(name, entry, extra, "once, at enrolment") for entry, extra in card.items()]


def declare(part: Part, net: Net) -> Declaration:
    """What a part measures under a plan with masks; of extras for each tensor, one stands for all."""
    masks = {k: torch.ones_like(v, dtype=torch.bool) for k, v in net.initial.items() if v.dim() > 1}
    declared = get_declared_extras(part, net, replace(Plan(), masks=masks)) or {}
    named = {}
    for entry, extra in declared.items():
        tensor = next((k for k in net.initial if entry.endswith(f" {k}")), "")
        named[f"{entry.removesuffix(tensor)}TENSOR" if tensor else entry] = extra
    return named


def describe_extra(part: str, name: str, extra: Extra, when: str) -> list[str]:
    """The cells of one row."""
    kind = {"float": "", "int": ", whole", "bool": ", true or false", "float32": ""}.get(extra.kind, f", {extra.kind}")
    form = FORMS.get(extra.like) or (f"a row for each of `{extra.rows}`" if extra.rows else "a list of numbers")
    low = "" if extra.low <= -LARGEST else f"from {extra.low:g}"
    high = "" if extra.high >= LARGEST else f" to {extra.high:g}"
    asked = "when asked" if extra.when else "every round"
    asked += ", may be left out" if extra.optional else ""
    needs = f"the {extra.crowd}" if extra.crowd else "every value"
    cells = [f"`{name}`", format_cell(extra.about), form + kind, (low + high).strip() or "any", when or asked, needs]
    return [link_part(part), *cells]


def link_part(name: str) -> str:
    return f"[`{name}`](../methods/{name}.md)"

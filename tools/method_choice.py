"""What docs/methods/choose.md and the navigation say about methods: what they are for, and what goes with what."""

from collections import defaultdict
from collections.abc import Iterable
from functools import cache, partial
from itertools import combinations

from markers import ROOT, format_cell, format_table

from shoal.core.compose import compose
from shoal.core.errors import ShoalError
from shoal.core.part import Part
from shoal.parts import PRESETS, find_shipped_parts
from shoal.plugins.load import load_method
from shoal.testing.toy import toy

METHOD_PAGES = ROOT / "docs/methods"

GROUPS = {
    "Uneven labels: local steps that agree": "fedprox scaffold feddyn fedcm fedda moon fedntd feddecorr fedmlb fednova",
    "Uneven labels: losses and heads": "fedlc balanced_softmax fedrod fedacd fednh creff mixup cutmix",
    "Uneven labels: flat minima": "fedsam fedlesam mofedsam fedspeed fedsmoo",
    "Uneven labels: who counts how much": "feddh fedjs feddhe feddhad feddh_released qffl",
    "A model for every device": "finetune fedper fedrep fedbabu lgfedavg fedbn ditto apfl pfedme perfedavg fedala "
    "fedas",
    "Momentum and steps of the server": "fedavgm fedadam fedyogi fedacg fedexp devicem serverm_released",
    "Averages of the judged model": "ema swa window",
    "Slow and small devices": "fedad fedad_released heterofl fjord feddrop afd fedmp",
    "Smaller models for all": "fedap hrank imc prunefl feddst",
    "Thin links": "half fedpaq topk stc catchup dgc randomk signsgd fedbiad fedbr",
    "Large models, small messages": "lora ffalora fedsalora hetlora prompt biasonly lastlayers",
    "Data on the server": "feddu feddum datasharing hybridfl feddf fedkt",
    "Who takes part": "uniform weighted poc oort",
    "Wrong or hostile replies": "median trimmedmean normbound",
}
"""The pages of methods, by what they are for; FedAvg, which the others build on, stands before all groups."""


@cache
def read_titles() -> dict[str, str]:
    """The titles of the pages of methods, by name; every page must be in one group."""
    files = [file for file in METHOD_PAGES.glob("*.md") if file.stem not in ("index", "choose")]
    titles = {file.stem: file.read_text(encoding="utf-8").split("\n")[0].removeprefix("# ") for file in files}
    grouped = [name for names in GROUPS.values() for name in names.split()] + ["fedavg"]
    wrong = titles.keys() ^ set(grouped) | {name for name in grouped if grouped.count(name) > 1}
    if wrong:
        raise SystemExit(f"GROUPS in tools/method_choice.py must have each page once: {', '.join(sorted(wrong))}.")
    return titles


def write_method_navigation() -> str:
    """The pages of methods for mkdocs.yml, group by group."""
    titles = read_titles()
    lines = [f"      - {titles['fedavg']}: methods/fedavg.md"]
    for group, names in GROUPS.items():
        lines.append(f'      - "{group}":')
        lines += [f"          - {titles[name]}: methods/{name}.md" for name in names.split()]
    return "".join(f"{line}\n" for line in lines)


# one group ------------------------------------------------------------------------------------------------------------
def write_group(group: str, ideas: dict[str, str]) -> str:
    """The methods of a group: what they do, what travels beside the model, who remembers, what the server looks at."""
    rows = []
    for name in GROUPS[group].split():
        parts = list_parts(name)
        idea = format_cell(ideas[name]) if name in ideas else f"`{PRESETS[name]}`"
        cells = [describe_traffic(parts), describe_memory(name), describe_reads(parts)]
        rows.append([f"[{read_titles()[name]}]({name}.md)", idea, *cells])
    header = ["method", "what it does", "travels, beside the model", "devices remember", "server looks at single"]
    return format_table(header, rows)


def list_parts(name: str) -> tuple[Part, ...]:
    """The parts of a method, with their defaults."""
    return load_method(name, ()).parts


def describe_traffic(parts: Iterable[Part]) -> str:
    words = {
        "less": any(part.stage for part in parts) or any("plan" in part.sets for part in parts),
        "more down": any(part.acts_at("send") for part in parts),
        "more up": any(part.acts_at("measure") for part in parts),
        "a card, once": any(part.acts_at("enrol") for part in parts),
    }
    return ", ".join(word for word, holds in words.items() if holds)


def describe_memory(name: str) -> str:
    """What devices keep from round to round, as a run in miniature has it after a round."""
    run = toy(name)
    run.play()
    kept = {part: memory for part, memory in run.memory(0).items() if memory}
    words = ["tensors of their own" if part == ".personal" else join_names(memory) for part, memory in kept.items()]
    return ", ".join(words)


def describe_reads(parts: Iterable[Part]) -> str:
    return ", ".join(sorted({word for part in parts for word in part.reads}))


# what goes with what --------------------------------------------------------------------------------------------------
@cache
def find_refusals() -> dict[str, set[tuple[str, str]]]:
    """By reason, the pairs of shipped parts that are refused; a reason that names parts says `FIRST` and `SECOND`."""
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    known = find_shipped_parts()
    for a, b in combinations(known, 2):
        try:
            compose([known[a](), known[b]()])
        except ShoalError as refusal:
            pair, reason = refusal.problem.split(" cannot be used together: ")
            first, second = pair.split(" and ")
            reason = reason.rstrip(".").replace(f"{first} ", "FIRST ").replace(f"{second} ", "SECOND ")
            found[reason].add((first, second))
    return dict(found)


def write_refusals() -> str:
    """The table of pairs that are refused: sets of which a method takes one, sets that do not go with each other."""
    refused = {frozenset(pair) for pairs in find_refusals().values() for pair in pairs}
    rows = []
    for reason, pairs in find_refusals().items():
        if "FIRST" not in reason:
            for names in join_pairs(pairs):
                assert all(frozenset(pair) in refused for pair in combinations(names, 2)), (reason, names)
                rows.append([f"one of {join_names(names)}", format_cell(reason)])
            continue
        others = sorted({second for _, second in pairs})
        sides: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for first in sorted({first for first, _ in pairs}):
            sides[tuple(name for name in others if frozenset((first, name)) in refused)].append(first)
        because = reason.replace("FIRST", "the first").replace("SECOND", "the second")
        rows += [
            [f"{join_names(firsts)} with none of {join_names(seconds)}", because] for seconds, firsts in sides.items()
        ]
    return format_table(["", "because"], rows)


def join_pairs(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """The sets of names that the pairs connect."""
    found: list[set[str]] = []
    for pair in pairs:
        touched = [names for names in found if names & set(pair)]
        found = [names for names in found if names not in touched] + [set(pair).union(*touched)]
    return sorted(sorted(names) for names in found)


def write_assumptions() -> str:
    """The parts that a recipe can clash with."""
    claims = {
        "assumes_sgd": ("`optimiser` `adam` or `adamw`", "they take the way of a device for lr times its gradients"),
        "assumes_constant_lr": ("`local_lr_schedule`, `local_lr_warmup`", "they count steps of one length"),
        "mixes_batch": ("`accumulate`", "their loss of a batch is not a mean over its samples"),
    }
    rows = []
    for claim, (key, why) in claims.items():
        names = [name for name, part in find_shipped_parts().items() if getattr(part, claim)]
        rows.append([key, join_names(names), why])
    return format_table(["recipe", "refused with", "because"], rows)


def write_parts_that_read(word: str) -> str:
    """The parts that look at something of single devices on the server, in a line."""
    names = [name for name, part in find_shipped_parts().items() if word in part.reads]
    return f"{join_names(names)}\n"


def join_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def make_writers(ideas: dict[str, str]) -> dict:
    """The sections of docs/methods/choose.md and of the navigation, by name."""
    groups = {f"methods for: {group}": partial(write_group, group, ideas) for group in GROUPS}
    reads = {f"parts that read {word}": partial(write_parts_that_read, word) for word in ("updates",)}
    return (
        groups
        | reads
        | {
            "method navigation": write_method_navigation,
            "what goes with what": write_refusals,
            "recipes that parts refuse": write_assumptions,
        }
    )

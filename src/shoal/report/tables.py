"""The tables of a report as HTML, which need no script."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from shoal.display.curve_style import COLOURS
from shoal.display.quantities import format_by_unit, format_count, format_number, format_seconds, format_size
from shoal.runs.headline import pick_best

Cell = Callable[[dict[str, Any]], str]


def render_summaries(facts: dict[str, Any]) -> str:
    """One line per method: how far it came, at what cost."""
    groups, better = facts["groups"], facts["about"][facts["headline"]]["better"]
    best = pick_best((g["table"]["accuracy"] for g in groups), better)
    made = []
    for at, group in enumerate(groups):
        row = group["table"]
        told = (
            f"{row['rounds']:.0f} rounds, {format_size(row['bytes'])}, {format_seconds(row['sim_seconds'])} simulated"
        )
        told += "".join(f"; stopped: {why}" for why in row["stop_reasons"])
        if row["unfinished"]:
            told = f"unfinished{format_seeds_unfinished(row)}: {told}"
        if row["target"]:
            rounds = f"in {row['rounds_to_target']:.0f} rounds" if row["reached"] else "not reached"
            told += f"; {row['target']:g} {rounds}{format_seeds_reached(row)}"
        top = ' class="best"' if len(groups) > 1 and best is not None and row["accuracy"] == best else ""
        made.append(
            f'<li{top}><span class="name"><i class="swatch c{at % len(COLOURS)}"></i>{format_method_name(group)}</span>'
            f'<strong>{format_accuracy(row)}</strong><span class="told">{escape(told)}</span></li>'
        )
    return "\n".join(made)


def render_results_table(facts: dict[str, Any]) -> str:
    """End values, total costs, and the cost to the target where there is one."""
    groups = facts["groups"]
    columns: list[tuple[str, str, Cell]] = [
        ("", "seeds", lambda r: str(r["seeds"])),
        ("", "rounds", lambda r: f"{r['rounds']:.4g}" + (" (unfinished)" if r["unfinished"] else "")),
        ("at the end", facts["headline"], format_accuracy),
        ("at the end", "best", lambda r: format_number(r["best"], 4)),
    ]
    further = [
        (name, about)
        for name, about in facts["about"].items()
        if about["compared"]
        and name not in ("accuracy", facts["headline"])
        and any(group["table"].get(name) is not None for group in groups)
    ]
    columns += [("at the end", *make_metric_column(*known)) for known in further if known[1]["total"] == "last"]
    columns += [
        ("in all", "down", lambda r: format_size(r["bytes_down"])),
        ("in all", "up", lambda r: format_size(r["bytes_up"])),
        ("in all", "MACs", lambda r: format_count(r["macs"])),
        ("in all", "simulated", lambda r: format_seconds(r["sim_seconds"])),
        ("in all", "wall", lambda r: format_seconds(r["wall_seconds"])),
    ]
    columns += [("in all", *make_metric_column(*known)) for known in further if known[1]["total"] == "sum"]
    titles = [f"{about['label']}: {about['title']}." for _, about in further if about["total"] == "sum"]
    notes = f'<p class="note">{escape(" ".join(titles))}</p>' if titles else ""
    return render_table(columns, groups, "Results of every method") + notes


def make_metric_column(name: str, about: dict[str, Any]) -> tuple[str, Cell]:
    """The head and the cells of a metric in the table of results."""
    head = about["label"][:1].lower() + about["label"][1:]
    return head, lambda r: "-" if r.get(name) is None else format_by_unit(r[name], about["unit"])


def render_targets_table(facts: dict[str, Any]) -> str:
    """What each method paid until it first reached its target; nothing where no recipe has one."""
    shown = [group for group in facts["groups"] if group["table"]["target"]]
    columns: list[tuple[str, str, Cell]] = [
        ("", "target", lambda r: f"{r['target']:g}"),
        ("", "seeds there", lambda r: f"{r['reached']} of {r['seeds']}"),
    ]
    for key, name, told in TO_TARGET:
        columns.append(("", name, lambda r, key=key, told=told: told(r[key]) if r["reached"] else "-"))
    made = render_table(columns, shown, f"Cost to the target {facts['headline']}")
    return f"<h3>Cost to the target</h3>{made}" if shown else ""


TO_TARGET: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("rounds_to_target", "rounds", lambda v: f"{v:.4g}"),
    ("sim_seconds_to_target", "simulated", format_seconds),
    ("bytes_to_target", "bytes", format_size),
    ("macs_to_target", "MACs", format_count),
)


def render_budgets_table(facts: dict[str, Any]) -> str:
    """What each method reached within equal costs; nothing where one method is alone and no budget was given."""
    if not facts["budgets"]:
        return ""
    heads = {"seconds": ("within simulated time", format_seconds), "bytes": ("within bytes, both ways", format_size)}
    columns: list[tuple[str, str, Cell]] = []
    for nth, at in enumerate(facts["groups"][0]["table"]["at_budgets"]):
        head, told = heads[at["cost"]]
        columns.append((head, told(at["budget"]), lambda r, nth=nth: format_budget_accuracy(r, nth)))
    made = render_table(columns, facts["groups"], f"{facts['about'][facts['headline']]['label']} at equal cost")
    return f'<h3>At equal cost</h3>{made}<p class="note">{escape(facts["budgets"])}</p>'


def format_budget_accuracy(row: dict[str, Any], nth: int) -> str:
    """The mean over the seeds that have an evaluated round within the budget, and how many have where not all."""
    at = row["at_budgets"][nth]
    few = f" ({at['seeds']} of {row['seeds']} seeds)" if 0 < at["seeds"] < row["seeds"] else ""
    return format_accuracy(at) + few


def format_seeds_reached(row: dict[str, Any]) -> str:
    """How many seeds reached the target, where not all did."""
    return f" ({row['reached']} of {row['seeds']} seeds)" if 0 < row["reached"] < row["seeds"] else ""


def format_seeds_unfinished(row: dict[str, Any]) -> str:
    """How many seeds have not come to their end, where some have."""
    return f" ({row['unfinished']} of {row['seeds']} seeds)" if row["unfinished"] < row["seeds"] else ""


def render_confusions(groups: Sequence[dict[str, Any]]) -> str:
    """Which classes were taken for which, a table for each method whose runs recorded it; the darker, the more."""
    made = []
    for group in groups:
        if not group["confusion"]:
            continue
        classes = range(len(group["confusion"]))
        heads = "".join(f'<th scope="col">{c}</th>' for c in classes)
        rows = "".join(
            f'<tr><th scope="row">{true}</th>'
            + "".join(
                "<td>-</td>"
                if share is None
                else f'<td style="background: rgba(var(--heat), {0.75 * share:.2f})">{100 * share:.0f}</td>'
                for share in shares
            )
            + "</tr>\n"
            for true, shares in enumerate(group["confusion"])
        )
        label = escape(f"Confusions of {group['label']}")
        made.append(
            f'<h3>{format_method_name(group)}</h3><div class="wide" tabindex="0" role="region" aria-label="{label}">'
            f'<table class="confusion"><thead><tr><th scope="col">true class</th>{heads}</tr></thead>'
            f"<tbody>\n{rows}</tbody></table></div>"
        )
    return "\n".join(made)


def render_devices_table(groups: Sequence[dict[str, Any]]) -> str:
    """Mean, worst tenth and spread over devices, of the file of devices or else of the last evaluation."""
    shown = []
    for group in groups:
        own, row = group["devices"] or {}, group["table"]
        values = [own.get(key, row[f"device_{key}"]) for key in ("mean", "worst", "spread")]
        if any(v is not None for v in values):
            shown.append({"label": group["label"], "table": dict(zip(("mean", "worst", "spread"), values))})
    columns: list[tuple[str, str, Cell]] = [
        ("", "mean", lambda r: format_number(r["mean"], 4)),
        ("", "worst 10 %", lambda r: format_number(r["worst"], 4)),
        ("", "spread", lambda r: format_number(r["spread"], 4)),
    ]
    return render_table(columns, shown, "Accuracy over devices") if shown else ""


def render_table(columns: Sequence[tuple[str, str, Cell]], groups: Sequence[dict[str, Any]], caption: str) -> str:
    heads: list[list[Any]] = []
    for head, _, _ in columns:
        if heads and heads[-1][0] == head:
            heads[-1][1] += 1
        else:
            heads.append([head, 1])
    over = "".join(f'<th colspan="{width}" scope="colgroup">{escape(head)}</th>' for head, width in heads)
    over = f"<tr><td></td>{over}</tr>" if any(head for head, _ in heads) else ""
    names = "".join(f'<th scope="col">{escape(name)}</th>' for _, name, _ in columns)
    rows = "".join(
        f'<tr><th scope="row">{format_method_name(group)}</th>'
        + "".join(f"<td>{escape(cell(group['table']))}</td>" for _, _, cell in columns)
        + "</tr>\n"
        for group in groups
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f'<thead>{over}<tr><th scope="col">method</th>{names}</tr></thead><tbody>\n{rows}</tbody></table></div>'
    )


def format_accuracy(row: dict[str, Any]) -> str:
    return format_number(row["accuracy"], 4) + (f" ± {row['spread']:.4f}" if row["spread"] is not None else "")


def format_method_name(group: dict[str, Any]) -> str:
    """A long expression breaks at its plus signs."""
    return escape(group["label"]).replace("+", "+<wbr>")

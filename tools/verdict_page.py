"""The sections of docs/results/index.md: how many claims hold, claim by claim, computed from results/."""

from collections import Counter
from functools import cache

from ledger import FOLDER
from markers import format_cell, format_table

from shoal.reproduce.claims import Claim
from shoal.reproduce.ledger import LEDGER_SUFFIX
from shoal.reproduce.verdicts import (
    FAILS,
    HOLDS,
    ONLY_AUTHORS,
    OPEN,
    Judgement,
    Verdict,
    find_advantage,
    format_advantage,
    judge_claims,
)

VERDICTS = (HOLDS, ONLY_AUTHORS, FAILS, OPEN)


@cache
def list_verdicts() -> list[Verdict]:
    return judge_claims(FOLDER)


def count_verdicts() -> str:
    """The paragraph at the top: how many claims of which verdict, and by which runs."""
    verdicts = list_verdicts()
    counts = Counter(v.text for v in verdicts)
    earlier = sum(v.is_by_earlier_runs for v in verdicts)
    settled = len(verdicts) - counts[OPEN]
    waiting = Counter(v.why.split(" of ")[0] if v.why.startswith("no runs") else v.why for v in verdicts if v.why)
    reasons = "; ".join(f"{number}: {why}" for why, number in waiting.most_common())
    verdict_words = [
        f"**{counts[HOLDS]} hold**",
        f"{counts[ONLY_AUTHORS]} hold only under the authors' rules",
        f"**{counts[FAILS]} do not hold**",
        f"**{counts[OPEN]} are not settled**" + (f" ({reasons})" if reasons else ""),
    ]
    return (
        f"Of **{len(verdicts)}** claims {', '.join(verdict_words[:-1])}, and {verdict_words[-1]}. "
        f"Of the {settled} that are settled, {settled - earlier} are so by runs under the protocol `fair`, and "
        f"{earlier} by runs from before the protocols, in which all methods had one recipe and none was tuned.\n"
    )


def summarise_claims() -> str:
    """A row for each claim, over all its data sets and models."""
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in list_verdicts():
        groups.setdefault((verdict.claim.paper, verdict.claim.says), []).append(verdict)
    rows = []
    for (paper, says), verdicts in groups.items():
        counts = Counter(v.text for v in verdicts)
        where = list(dict.fromkeys(v.claim.where.removeprefix("abstract, ") for v in verdicts))
        rows.append([paper, format_cell(says), join_places(where), *(str(counts[v] or "") for v in VERDICTS)])
    heads = ["holds", "only under the authors' rules", "does not", "not settled"]
    return format_table(["paper", "claim", "where", *heads], rows, numbers_from=3)


def join_places(places: list[str]) -> str:
    """`Table 10` and `Table 11` as `Tables 10, 11`."""
    numbers = [place.removeprefix("Tables ").removeprefix("Table ") for place in places]
    return f"Tables {', '.join(numbers)}" if len(places) > 1 else places[0]


def list_claims() -> str:
    """A row for each claim, data set and model: published, measured under each protocol, verdict and reason."""
    rows = []
    for verdict in list_verdicts():
        claim = verdict.claim
        rows.append(
            [
                claim.paper,
                f"{format_cell(claim.says)} *{claim.where}; {claim.column}*",
                format_published(verdict),
                format_judgement(claim, verdict.authors),
                format_judgement(claim, verdict.fair),
                format_earlier(verdict),
                format_verdict(verdict),
                format_links(verdict),
            ]
        )
    heads = [
        "paper",
        "claim",
        "published",
        "measured, `authors`",
        "measured, `fair`",
        "measured earlier",
        "verdict",
        "runs",
    ]
    return format_table(heads, rows)


def format_published(verdict: Verdict) -> str:
    """The published advantage over the row that it is smallest for, or the figure itself."""
    claim, published = verdict.claim, verdict.published
    if claim.row not in published:
        return ""
    own = published[claim.row]
    if claim.test == "near":
        return claim.measure.format_value(own)
    gaps = {o: find_advantage(claim.measure, claim.test, own, published[o]) for o in claim.than if o in published}
    if not gaps:
        return ""
    name = min(gaps, key=lambda o: gaps[o])
    beside = f" to {name}" if len(claim.than) > 1 else ""
    values = f"{claim.measure.format_value(own)} against {claim.measure.format_value(published[name])}"
    return f"{format_advantage(claim, gaps[name])}{beside} ({values})"


def format_judgement(claim: Claim, judged: Judgement) -> str:
    """What was measured, with its interval and the number of seeds."""
    if judged.estimate is None:
        return ""
    beside = f" to {judged.against}" if len(claim.than) > 1 else ""
    seeds = "1 seed" if judged.seeds == 1 else f"{judged.seeds} seeds"
    return f"{format_advantage(claim, judged.estimate, judged.interval)}{beside}, {seeds}"


def format_earlier(verdict: Verdict) -> str:
    text = format_judgement(verdict.claim, verdict.earlier)
    return f"{text} ({format_cell(verdict.differs)})" if text else ""


def format_verdict(verdict: Verdict) -> str:
    if verdict.text == OPEN:
        return f"{OPEN}: {verdict.why}" if verdict.why else OPEN
    return f"**{verdict.text}**" + (", earlier runs" if verdict.is_by_earlier_runs else "")


def format_links(verdict: Verdict) -> str:
    """The files of the runs that are quoted, and the page that discusses them."""
    files = dict.fromkeys(file for j in (verdict.fair, verdict.authors, verdict.earlier) for file in j.files)
    links = [f"`results/{file}{LEDGER_SUFFIX}`" for file in files]
    if verdict.page and verdict.earlier.files:
        links.append(f"[{verdict.page.removesuffix('.md')}]({verdict.page})")
    return ", ".join(links)


VERDICT_SECTIONS = {
    "verdict counts": count_verdicts,
    "claims": summarise_claims,
    "verdicts": list_claims,
}

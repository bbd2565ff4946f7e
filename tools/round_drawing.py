"""The round as a drawing: an SVG whose boxes are the points of a round, each a link to what the page says of it.

It takes its colours from the page around it (`docs/assets/shoal.css`), so it is inlined and not a file of its own.
"""

from collections.abc import Iterator, Sequence

from shoal.core.part import POINTS

LANES = (
    ("once", ("model enrol",)),
    ("server", ("select plan send encode",)),
    ("device", ("decode data begin", "draw mask objective gradient step", "end measure encode")),
    ("server", ("decode sift weigh combine", "serve prune observe evaluate")),
    ("device", ("personal finetune",)),
)
"""Where a point is played, from above to below; the rows of a lane follow each other."""
LOOP = "draw mask objective gradient step"
LINKS = {1: "model down", 2: "change up"}
"""What crosses the link below a lane."""
NOTES = {0: "before the first round", 4: "whenever its own model is wanted"}

LABEL, WIDTH, HEIGHT, GAP = 84, 112, 32, 26
"""Lengths: of a lane's label, of a box both ways, between boxes."""
ROW, PAD, BETWEEN, MARGIN = 58, 14, 34, 12
"""From row to row, within a band, between bands with a link and without one."""
WHOLE = LABEL + 5 * WIDTH + 4 * GAP + 2 * PAD


def draw_round() -> str:
    """The drawing, as one block of HTML without blank lines."""
    missing = set(POINTS) ^ {point for _, rows in LANES for row in rows for point in row.split()}
    if missing:
        raise SystemExit(f"The drawing of the round and POINTS differ in {', '.join(sorted(missing))}.")
    body: list[str] = []
    top = MARGIN
    for number in range(len(LANES)):
        body += draw_lane(number, top)
        top += measure_depth(number) + (BETWEEN if number in LINKS else MARGIN)
    head = (
        f'<svg class="round-drawing" viewBox="0 0 {WHOLE} {top}" role="img" font-size="14" '
        'aria-label="The points of a round, in their order" fill="none" stroke="currentColor">'
    )
    marker = (
        '<defs><marker id="round-arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse"><path d="M0,0L8,4L0,8z" fill="currentColor" stroke="none"/></marker></defs>'
    )
    return "\n".join(['<div class="round-scroll">', head, marker, *body, "</svg>", "</div>", ""])


def measure_depth(number: int) -> int:
    """How high the band of a lane is."""
    return 2 * PAD + (len(LANES[number][1]) - 1) * ROW + HEIGHT


def draw_lane(number: int, top: int) -> Iterator[str]:
    """The band of a lane with its rows, and the arrow that crosses the link below it."""
    side, rows = LANES[number]
    depth, first = measure_depth(number), top + PAD
    yield (
        f'<rect x="1" y="{top}" width="{WHOLE - 2}" height="{depth}" rx="8" fill="currentColor" fill-opacity="0.05" '
        'stroke="none"/>'
    )
    yield write_text(PAD, first + HEIGHT / 2, side, 'font-weight="bold"')
    for index, row in enumerate(rows):
        yield from draw_row(row.split(), first + index * ROW, row == LOOP)
        if index + 1 < len(rows):
            yield draw_turn(len(row.split()), first + index * ROW)
    if number in NOTES:
        beside = LABEL + PAD + len(rows[0].split()) * (WIDTH + GAP)
        yield write_text(beside, first + HEIGHT / 2, NOTES[number], 'font-style="italic"')
    if number in LINKS:
        x, bottom = LABEL + PAD + WIDTH / 2, top + depth
        yield draw_line([(x, bottom), (x, bottom + BETWEEN)], ' stroke-dasharray="4 3"')
        yield write_text(x + 12, bottom + BETWEEN / 2, LINKS[number], 'font-style="italic"')


def draw_row(points: Sequence[str], y: float, loops: bool) -> Iterator[str]:
    """The boxes of a row with arrows between them; those of a local step in a frame that leads back to the first."""
    if loops:
        x, length = LABEL + PAD - 8, len(points) * (WIDTH + GAP) - GAP + 16
        yield f'<rect x="{x}" y="{y - 7:g}" width="{length}" height="{HEIGHT + 14}" rx="6" stroke-dasharray="4 3"/>'
        yield write_text(PAD, y + HEIGHT / 2, "each step", 'font-style="italic"')
    for index, point in enumerate(points):
        x = LABEL + PAD + index * (WIDTH + GAP)
        yield (
            f'<a href="#point-{point}"><rect x="{x}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="4"/>'
            + write_text(x + WIDTH / 2, y + HEIGHT / 2, point, 'text-anchor="middle"')
            + "</a>"
        )
        if index:
            yield draw_line([(x - GAP, y + HEIGHT / 2), (x, y + HEIGHT / 2)])


def draw_turn(boxes: int, y: float) -> str:
    """The arrow from the last box of a row to the first of the next."""
    start, end = LABEL + PAD + (boxes - 0.5) * WIDTH + (boxes - 1) * GAP, LABEL + PAD + WIDTH / 2
    middle = y + (HEIGHT + ROW) / 2
    return draw_line([(start, y + HEIGHT), (start, middle), (end, middle), (end, y + ROW)])


def draw_line(corners: Sequence[tuple[float, float]], look: str = "") -> str:
    path = "L".join(f"{x:g},{y:g}" for x, y in corners)
    return f'<path d="M{path}" marker-end="url(#round-arrow)"{look}/>'


def write_text(x: float, y: float, text: str, look: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" dy="0.35em" fill="currentColor" stroke="none" {look}>{text}</text>'

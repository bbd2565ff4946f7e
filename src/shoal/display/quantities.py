"""Numbers as people read them: sizes, counts and durations in few digits."""

ROUNDED_UP = 999.5
"""What three digits make a thousand of, which has the next unit."""


def format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def format_size(nbytes: float) -> str:
    """Decimal units, as in the papers."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < ROUNDED_UP:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def format_count(value: float) -> str:
    for unit in ("", "k", "M", "G", "T"):
        if value < ROUNDED_UP:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.4g}P"


def format_by_unit(value: float, unit: str) -> str:
    """A number of a metric in the way of its unit; with four digits where it has none."""
    formats = {"bytes": format_size, "macs": format_count, "seconds": format_seconds}
    return formats[unit](value) if unit in formats else format_number(value, 4)


def format_seconds(value: float) -> str:
    if value < 100:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"

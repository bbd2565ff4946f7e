"""Which laws ran for which parts on which engines: `pytest -p law_table tests/testing`, also with `-m whole`."""

from collections import Counter, defaultdict

import pytest

from shoal.core.task import Engine
from shoal.testing import laws

LAWS = {
    "check_is_value": "1 is a value",
    "smoke_test_part": "1 changes nothing",
    "play_on": "2 engines agree",
    "check_masked_equals_sliced": "3 masked = sliced",
    "check_padding_leaves_no_trace": "4 padding",
    "check_bytes_are_what_travels": "5 bytes",
    "check_decodes_what_it_encodes": "5 codec",
    "check_neutral_setting": "6 neutral",
    "check_resumes_exactly": "7 resume",
    "check_tells_what_it_declares": "11 metrics",
    "check_pair": "8 pairs",
    "check_reads_are_declared": "9 reads",
    "check_survives_wrong_extras": "10 wrong extras",
    "check_survives_wrong_cards": "10 wrong cards",
}


def name_engine(engine: Engine) -> str:
    """An engine and how wide it is."""
    limits = [f"{name}={vars(engine)[name]}" for name in ("width", "budget") if vars(engine).get(name)]
    return f"{type(engine).__name__}({', '.join(limits)})"


@pytest.fixture(autouse=True)
def note_laws(request, monkeypatch):
    """Have every law write down its name, the part and the engine; the notes travel in the test's report."""
    for function, law in LAWS.items():
        honest = getattr(laws, function)

        def call(*given, honest=honest, law=law, **more):
            made = honest(*given, **more)
            engine, rest = (name_engine(given[0]), given[1:]) if law.startswith("2") else ("SerialEngine()", given)
            pair = [str(part) for part in rest[: 2 if law.startswith("8") else 1]]
            request.node.user_properties.append(("law", (law, engine, "+".join(pair))))
            return made

        monkeypatch.setattr(laws, function, call)
        if hasattr(request.module, function):
            monkeypatch.setattr(request.module, function, call)


def pytest_terminal_summary(terminalreporter):
    """The table: laws and engines, how many different parts met them, and how often."""
    runs: dict[tuple[str, str], Counter] = defaultdict(Counter)
    for report in terminalreporter.stats.get("passed", []):
        if report.when == "teardown":
            continue
        for law, engine, part in (value for name, value in report.user_properties if name == "law"):
            runs[law, engine][part] += 1
    terminalreporter.section("laws")
    terminalreporter.write_line(f"{'law':<20}{'engine':<22}{'parts or pairs':>15}{'runs':>8}")
    for (law, engine), own in sorted(runs.items()):
        terminalreporter.write_line(f"{law:<20}{engine:<22}{len(own):>15}{sum(own.values()):>8}")

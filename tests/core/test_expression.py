"""Method expressions: any text is a method or a sentence about why not; nothing is ever run."""

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shoal import Method, ShoalError
from shoal.core import expression
from shoal.parts import PRESETS, find_shipped_parts


def parse(text: str) -> Method:
    return expression.parse_method(text, find_shipped_parts(), PRESETS)


def refusal(text: str) -> ShoalError:
    with pytest.raises(ShoalError) as error:
        parse(text)
    assert "\n" not in str(error.value)
    return error.value


def test_parts_come_in_their_listed_order():
    assert [part.name() for part in parse("scaffold+fedprox(mu=0.5)+fedavgm").parts] == [
        "scaffold",
        "fedprox",
        "fedavgm",
    ]


def test_values_are_given_by_name():
    assert str(parse("fedavgm( beta = 0.5,lr=2 )")) == "fedavgm(beta=0.5, lr=2.0)"


def test_a_whole_number_will_do_for_any_number():
    assert parse("fedprox(mu=1)") == parse("fedprox(mu=1.0)")


def test_case_and_space_do_not_matter():
    assert parse("  FedProx( mu=0.1 )  +\tSCAFFOLD ") == parse("fedprox(mu=0.1)+scaffold")


def test_no_parts_is_fedavg():
    assert parse("fedavg").parts == () and str(parse("fedavg")) == "fedavg"
    assert parse("fedavg+fedprox+fedavg") == parse("fedprox")


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_parts(name):
    assert parse(name) == (parse(PRESETS[name]) if PRESETS[name] else Method())


def test_a_preset_takes_no_values():
    assert refusal("serverm(beta=0.5)").kind.name == "bad-expression"
    assert "fedavgm" in refusal("serverm(beta=0.5)").problem


@pytest.mark.parametrize(
    "text, near", [("fedpro", "fedprox"), ("Scafold", "scaffold"), ("fedvg", "fedavg"), ("fedprox(mo=1)", "mu")]
)
def test_the_nearest_name_is_suggested(text, near):
    assert refusal(text).kind.name == "unknown-name" and f"'{near}'" in refusal(text).advice


@pytest.mark.parametrize("text", ["fedprox(0.1)", "fedprox(*[1])", "fedprox(**{'mu': 1})", "fedavgm(0.5, lr=1)"])
def test_positional_values_are_refused(text):
    assert refusal(text).kind.name == "bad-expression" and "name" in refusal(text).problem


def test_a_value_given_twice_is_refused():
    assert refusal("fedprox(mu=0.1, mu=0.2)").kind.name == "bad-expression"


@pytest.mark.parametrize(
    "value", ["'0.1'", "True", "None", "[1]", "(1)+1", "1j", "b'1'", "...", "mu", "1e999", "-1", "f'{1}'", "-True"]
)
def test_a_value_of_the_wrong_type_or_range_is_refused(value):
    assert refusal(f"fedprox(mu={value})").kind.name in ("bad-value", "bad-expression")


@pytest.mark.parametrize("name", find_shipped_parts())
def test_not_a_number_is_refused_everywhere(name):
    for field in fields(find_shipped_parts()[name]):
        for value in ("1e999", "-1e999", "9" * 400):
            assert refusal(f"{name}({field.name}={value})").kind.name in ("bad-value", "bad-expression")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('touch owned')",
        "fedprox(mu=open('owned', 'w'))",
        "[open('owned', 'w') for x in (1,)]",
        "(lambda: open('owned', 'w'))()",
        "fedprox if open('owned', 'w') else fedavg",
        "fedprox(mu=(x := open('owned', 'w')))",
        "f\"{open('owned', 'w')}\"",
    ],
)
def test_nothing_is_run(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(text).kind.name == "bad-expression"
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "text",
    ["(" * 1999, "-" * 1999, "fedprox+" * 249, "~" * 999 + "a", "[" * 50 + "]" * 50, "a." * 999 + "a", "a()" * 600],
    ids=lambda text: text[:8],
)
def test_deep_nesting_is_refused(text):
    assert refusal(text).kind.name == "bad-expression"


def test_a_long_list_is_read():
    assert parse("+".join(["fedavg"] * 285)) == Method()


WORDS = [
    *find_shipped_parts(),
    *PRESETS,
    "mu",
    "beta",
    "lr",
    "=",
    "(",
    ")",
    "+",
    "-",
    ",",
    " ",
    "1",
    "0.1",
    "'",
    '"',
    "\\",
    "#",
]
WORDS += [
    "lambda:",
    "*",
    "**",
    "[",
    "]",
    "{",
    "}",
    ".",
    ":=",
    "if",
    "else",
    "None",
    "True",
    "1e9",
    "\n",
    "ﬁ",
    "é",
    "\0",
]


@settings(deadline=None, max_examples=400)
@given(st.text() | st.lists(st.sampled_from(WORDS), max_size=12).map("".join))
def test_any_text_is_a_method_or_refused(text):
    try:
        found = parse(text)
    except ShoalError as error:
        assert error.kind.name in ("bad-expression", "unknown-name", "bad-value", "clash")
    else:
        assert isinstance(found, Method)


@st.composite
def methods(draw) -> list:
    """Different shipped parts with values that all of them allow."""
    parts = []
    for name in draw(st.lists(st.sampled_from(list(find_shipped_parts())), unique=True, max_size=4)):
        hints = get_type_hints(find_shipped_parts()[name])
        floats = [f.name for f in fields(find_shipped_parts()[name]) if hints[f.name] is float]
        some = [key for key in floats if draw(st.booleans())]
        parts.append(find_shipped_parts()[name](**{key: draw(st.floats(1e-9, 0.49)) for key in some}))
    return parts


@settings(deadline=None, max_examples=300)
@given(methods())
def test_a_method_is_written_as_it_is_read(parts):
    written = "+".join(map(str, parts)) or "fedavg"
    try:
        found = parse(written)
    except ShoalError as error:
        assume(error.kind.name != "clash")
        raise
    assert found.parts == tuple(parts) and str(found) == written


@pytest.mark.parametrize("name", find_shipped_parts())
def test_a_part_with_default_values_is_its_name(name):
    assert str(parse(name)) == name


def test_an_option_that_was_renamed_is_read_by_its_old_name():
    assert str(parse("feddh(gradient='server_data')")) == "feddh(gradient_from='server_data')"

"""Recipes: from Python, a file or the command line to the same values, or to one sentence about what is wrong."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import shoal
from shoal import Recipe, ShoalError
from shoal.cli.recipe_flags import resolve_recipe
from shoal.core.streams import RandomStreams
from shoal.models import build_model
from shoal.runs.build import make_work_schedule
from shoal.runs.recipe_files import parse_recipe_pairs, read_recipe_file


def kind(call, *args: Any, **more: Any) -> str:
    """The kind of the error that a call ends with, or nothing."""
    try:
        call(*args, **more)
    except ShoalError as error:
        assert "\n" not in str(error)
        return error.kind.name
    return ""


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("recipe") / "recipe.toml"


# TOML -----------------------------------------------------------------------------------------------------------------
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
amounts = st.integers(1, 999).map(str) | st.sampled_from(["1-5", "1,2,5", "size:2.5", "speed:10"])


def values(field) -> st.SearchStrategy:
    low, high, among = (field.metadata[k] for k in ("low", "high", "among"))
    if among:
        return st.sampled_from(among)
    match field.default:
        case bool():
            return st.booleans()
        case int():
            return st.integers(1 if field.name == "devices" else int(low), int(high))  # 0 devices need owners
        case float():
            return st.floats(low, high, allow_infinity=False, allow_nan=False)
        case tuple():
            return st.lists(texts.filter(bool), max_size=3).map(tuple)
    if field.name in ("epochs", "steps"):
        return amounts | st.just("0.5") if field.name == "epochs" else amounts
    if field.name.endswith("lr_schedule"):
        return st.sampled_from(["", "cosine:100", "linear:20:0.1", "step:30:0.5"])
    if field.name == "normalise_by":
        return st.sampled_from(["", "0.5:0.5", "0,1:1,2.5"])
    if field.name == "lr_groups":
        return st.sampled_from(["", "head.*=10", "conv?.weight=0.1,*bias=2"])
    return texts


def chooses(given: dict[str, Any]) -> bool:
    """Whether a recipe needs validation samples, and has none."""
    return bool(given.get("keep_best") or given.get("patience")) and not given.get("validation")


recipes = st.fixed_dictionaries({}, optional={f.name: values(f) for f in fields(Recipe) if f.name != "sample"}).map(
    lambda given: Recipe().with_values(sample=1, **given | {"validation": 0.5} if chooses(given) else given)
)


@settings(deadline=None)
@given(recipes)
def test_any_recipe_comes_back_from_its_file(file, recipe):
    file.write_bytes(recipe.to_toml().encode())
    assert Recipe().with_values(**read_recipe_file(file)) == recipe


@settings(deadline=None)
@given(recipes)
def test_any_recipe_comes_back_from_text(recipe):
    numbers = [f.name for f in fields(Recipe) if isinstance(f.default, (int, float))]
    if recipe.devices == 0:
        numbers.remove("devices")  # comes with an owner, which is no number
    found = Recipe().with_values(**parse_recipe_pairs([f"{name}={getattr(recipe, name)}" for name in numbers]))
    assert all(getattr(found, name) == getattr(recipe, name) for name in numbers)


LINES = ["rounds = 3", "lr = 0.1", "parts = [", "]", "'a'", '"""', "[table]", "[[x]]", "x.y = 1", "lr = nan", "= ="]
LINES += ["seed = 1979-05-27", "method = 'fedavg'", "normalise = true", "sample = -1", "rounds = 0x10", "\0", "{a = 1}"]
LINES += ["self = 1", "lr = " + "9" * 400, "lr = 1e999", "devices = 1e3", "epochs = 1", "epochs = inf", "steps = 0.1"]


@settings(deadline=None, max_examples=300)
@given(
    st.binary(max_size=40) | st.text().map(str.encode) | st.lists(st.sampled_from(LINES)).map("\n".join).map(str.encode)
)
def test_any_file_is_a_recipe_or_refused(file, content):
    file.write_bytes(content)
    assert kind(lambda: Recipe().with_values(**read_recipe_file(file))) in (
        "",
        "bad-recipe",
        "bad-value",
        "unknown-name",
    )


@pytest.mark.parametrize("line", LINES, ids=lambda line: repr(line)[:20])
def test_a_strange_line_is_read_or_refused(file, line):
    file.write_text(line)
    assert kind(lambda: Recipe().with_values(**read_recipe_file(file))) in (
        "",
        "bad-recipe",
        "bad-value",
        "unknown-name",
    )


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "{b=" * 50_000, "a" + ".a" * 2_000 + " = 1"])
def test_deep_nesting_is_refused(file, text):
    file.write_text(text)
    assert kind(read_recipe_file, file) == "bad-recipe"


def test_a_folder_is_no_recipe(tmp_path):
    assert kind(read_recipe_file, tmp_path) == "bad-recipe"


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb"])
def test_text_that_no_file_can_hold_is_refused(text):
    """Lone surrogates, as they come from names that are not UTF-8."""
    assert kind(lambda: Recipe().with_values(data_dir=text).to_toml().encode()) in ("", "bad-value")


# precedence and types -------------------------------------------------------------------------------------------------
def test_defaults_then_the_file_then_words_then_flags(file):
    file.write_text("rounds = 1\nbatch = 1\nlr = 0.25\n")
    found = resolve_recipe(file, ["rounds=2", "batch=2"], {"rounds": 3})
    assert (found.rounds, found.batch, found.lr, found.seed) == (3, 2, 0.25, 0)


def test_a_later_word_wins():
    assert resolve_recipe(None, ["rounds=2", "rounds=4"], {}).rounds == 4


def test_a_value_that_is_overruled_cannot_be_wrong(file):
    file.write_text("devices = 3\n")
    assert resolve_recipe(file, ["sample=2"], {}).sample == 2
    assert resolve_recipe(file, [], {"sample": 2}).sample == 2
    assert resolve_recipe(None, ["devices=3"], {"sample": 2}).devices == 3


@pytest.mark.parametrize(
    "word, key, value",
    [
        ("rounds=50", "rounds", 50),
        ("lr=1e-3", "lr", 0.001),
        ("lr=1", "lr", 1.0),
        ("lr-decay=0.5", "lr_decay", 0.5),
        (" lr = 0.5 ", "lr", 0.5),
        ("normalise=True", "normalise", True),
        ("normalise=false", "normalise", False),
        ("method=fedprox(mu=0.1)", "method", "fedprox(mu=0.1)"),
        ("parts=a.py,b.py", "parts", ("a.py", "b.py")),
        ("parts=", "parts", ()),
        ("epochs=1-5", "epochs", "1-5"),
        ("out=", "out", ""),
    ],
)
def test_a_word_takes_the_type_of_its_field(word, key, value):
    found = getattr(Recipe().with_values(**parse_recipe_pairs([word])), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "key, value",
    [
        ("rounds", 2.0),
        ("rounds", True),
        ("rounds", None),
        ("rounds", "x"),
        ("rounds", "9" * 5000),
        ("lr", True),
        ("lr", "fast"),
        ("lr", [0.1]),
        ("lr", 10**400),
        ("normalise", 1),
        ("normalise", "yes"),
        ("method", 5),
        ("method", None),
        ("parts", 5),
        ("parts", [5]),
        ("epochs", True),
        ("epochs", [1]),
        ("epochs", [1, 10**400]),
        ("lr_groups", {"head.*": 10**400}),
        ("lr_groups", {"head.*": "fast"}),
        ("epochs", 10**400),
        ("seed", 2**63),
    ],
    ids=lambda value: repr(value)[:12],
)
def test_a_value_of_the_wrong_type_is_refused(key, value):
    assert kind(shoal.run, **{key: value}) == "bad-value"


@pytest.mark.parametrize("key, value", [("epochs", lambda n: [1, n]), ("lr_groups", lambda n: {"head.*": n})])
def test_a_number_of_too_many_digits_is_refused(key, value):
    assert kind(shoal.run, **{key: value(10**5000)}) == "bad-value"


MISFITS = [
    ('lr = "0.1"', "lr is the text '0.1', and must be a number. Write lr = 0.1, without quotes."),
    ('lr = "fast"', "lr is the text 'fast', and must be a number. Write for example lr = 0.1."),
    ("lr = true", "lr is True, and must be a number. Write for example lr = 0.1."),
    ("lr = [0.1]", "lr is [0.1], and must be a number. Write for example lr = 0.1."),
    ('rounds = "50"', "rounds is the text '50', and must be a whole number. Write rounds = 50, without quotes."),
    ("rounds = 50.0", "rounds is 50.0, and must be a whole number. Write for example rounds = 30."),
    ("rounds = true", "rounds is True, and must be a whole number. Write for example rounds = 30."),
    ('normalise = "true"', "normalise is the text 'true', and must be true or false. Write normalise = true, without"),
    ("normalise = 1", "normalise is 1, and must be true or false. Write for example normalise = true."),
    ("split = 0.5", 'split is 0.5, and must be text. Write it in quotes: split = "0.5".'),
    ("method = ['fedavg']", "method is ['fedavg'], and must be text. Write for example method = \"fedavg\"."),
    ("parts = 5", 'parts is 5, and must be a list of texts. Write for example parts = ["...", "..."].'),
    ("metrics = ['top3', 5]", "metrics is ['top3', 5], and must be a list of texts."),
    ("seed = 1979-05-27", "seed is datetime.date(1979, 5, 27), and must be a whole number."),
]


@pytest.mark.parametrize("line, says", MISFITS, ids=lambda text: text[:20])
def test_a_value_of_another_type_is_told_with_its_key_and_what_to_write(file, line, says):
    """The same from a file, from Python and from `Recipe` itself."""
    file.write_text(line)
    given = read_recipe_file(file)
    for use in (lambda: resolve_recipe(file, [], {}), lambda: shoal.run(**given), lambda: Recipe(**given)):
        with pytest.raises(ShoalError) as error:
            use()
        assert error.value.kind.name == "bad-value" and str(error.value).startswith(says)


@pytest.mark.parametrize("f", fields(Recipe), ids=lambda f: f.name)
def test_text_is_no_number_for_any_key(f):
    if isinstance(f.default, (bool, int, float)):
        assert kind(Recipe().with_values, **{f.name: str(f.default).lower()}) == "bad-value"
        assert parse_recipe_pairs([f"{f.name}={f.default}"]) == {f.name: f.default}
    if not isinstance(f.default, bool):
        assert kind(Recipe().with_values, **{f.name: True}) == "bad-value"


def test_words_of_the_command_line_that_cannot_be_read_are_told_with_what_to_write():
    for word, says in (("lr=fast", "a number, like 0.1"), ("rounds=2.5", "a whole number, like 30")):
        with pytest.raises(ShoalError, match=says):
            parse_recipe_pairs([word])
    with pytest.raises(ShoalError, match="true or false, like false"):
        parse_recipe_pairs(["normalise=yes"])


@pytest.mark.parametrize(
    "given, says",
    [
        ({"methods": "fedavg"}, "methods is the text 'fedavg', and must be a list"),
        ({"methods": ["fedavg"], "vary": "lr=1,2"}, "vary is the text 'lr=1,2', and must be a list"),
        ({"methods": ["fedavg"], "seeds": "3"}, "seeds is the text '3', and must be a whole number. Write seeds = 3"),
        ({"methods": ["fedavg"], "workers": 1.5}, "workers is 1.5, and must be a whole number"),
    ],
    ids=str,
)
def test_what_compare_is_given_has_its_type_too(given, says):
    with pytest.raises(ShoalError, match=says):
        shoal.compare(**given)


def test_numbers_of_numpy_are_numbers():
    found = Recipe().with_values(lr=np.float32(0.5), rounds=np.int64(3), epochs=np.float64(0.5))
    assert found == Recipe(lr=0.5, rounds=3, epochs="0.5") and type(found.rounds) is int and type(found.lr) is float
    assert kind(Recipe().with_values, rounds=np.float64(3)) == kind(Recipe().with_values, lr=10**5000) == "bad-value"


@pytest.mark.parametrize("f", [f for f in fields(Recipe) if f.metadata["low"] is not None], ids=lambda f: f.name)
def test_a_number_has_its_bounds(f):
    low, high = f.metadata["low"], f.metadata["high"]
    assert kind(Recipe().with_values, **{f.name: low - 1}) == "bad-value"
    assert high is None or kind(Recipe().with_values, **{f.name: high + 1}) == "bad-value"
    if isinstance(f.default, float):
        assert kind(Recipe().with_values, **{f.name: float("nan")}) == "bad-value"
        assert kind(Recipe().with_values, **{f.name: float("inf")}) == "bad-value"


def test_no_more_devices_in_a_round_than_there_are():
    assert kind(Recipe, devices=3, sample=4) == "bad-value"
    assert kind(Recipe, devices=4, sample=4) == ""


@pytest.mark.parametrize("key", ["round", "self", "cls", "", "lr_", "Rounds"])
def test_an_unknown_key_is_refused(key):
    assert kind(lambda: Recipe().with_values(**{key: 1})) == "unknown-name"


# amounts of work ------------------------------------------------------------------------------------------------------
def works(**given: Any):
    return make_work_schedule(Recipe(**given), RandomStreams(0))


def test_whole_epochs_are_drawn_per_device_and_round():
    work = works(epochs="1-5")
    drawn = [work(round, device).epochs for round in range(20) for device in range(20)]
    assert set(drawn) == {1.0, 2.0, 3.0, 4.0, 5.0}
    assert drawn == [works(epochs="1-5")(round, device).epochs for round in range(20) for device in range(20)]


def test_parts_of_an_epoch_are_drawn_in_between():
    drawn = [works(epochs="0.5-1.5")(round, 0).epochs for round in range(50)]
    assert 0.5 <= min(drawn) < 0.8 and 1.2 < max(drawn) <= 1.5


def test_steps_go_before_epochs():
    drawn = [works(steps="5-20", epochs="3")(round, 0) for round in range(200)]
    assert {work.steps for work in drawn} == set(range(5, 21)) and {work.epochs for work in drawn} == {0.0}


def test_half_an_epoch_is_half_the_batches():
    one, half = (
        shoal.run(devices=1, sample=1, split="iid", rounds=1, epochs=e).history["macs_work"][0] for e in ("1", "0.5")
    )
    assert half == pytest.approx(one / 2, rel=0.02)


def test_numbers_will_do_as_well_as_text():
    assert Recipe().with_values(epochs=2).epochs == "2"
    assert Recipe().with_values(epochs=0.5).epochs == "0.5"
    assert Recipe().with_values(steps=999_999).steps == "999999"


@pytest.mark.parametrize("epochs", [1 / 3, 0.00001])
def test_a_number_of_epochs_keeps_its_digits(epochs):
    assert make_work_schedule(Recipe().with_values(epochs=epochs), RandomStreams(0))(0, 0).epochs == epochs


@pytest.mark.parametrize(
    "text", ["0", "-1", "1-", "-", "5-1", "1-2-3", "one", "nan", "inf", "1e6", "1-inf", "0-5", "1,,5"]
)
@pytest.mark.parametrize("key", ["epochs", "steps"])
def test_an_amount_that_cannot_be_read(key, text):
    assert kind(Recipe, **{key: text}) == "bad-value"


def test_the_rate_decays_per_round():
    work = works(lr=0.5, lr_decay=0.1)
    assert [work(round, 0).lr for round in range(3)] == pytest.approx([0.5, 0.05, 0.005])


def test_a_rate_that_grows_beyond_all_bounds_breaks_nothing():
    """Such rounds are void: what devices send back is not finite."""
    works(lr_decay=10.0)(400, 0)


# the fingerprint ------------------------------------------------------------------------------------------------------
WHERE_AND_HOW_LONG = {
    "data_dir": "elsewhere",
    "rounds": 99,
    "target": 0.5,
    "until_accuracy": 0.5,
    "until_seconds": 5.0,
    "until_bytes": 5.0,
    "until_macs": 5.0,
    "patience": 5,
    "evaluate_test": False,
    "keep_best": True,
    "checkpoint_every": 5,
    "memory_mb": 5,
    "address": "auto",
    "out": "elsewhere",
}


@pytest.mark.parametrize("key", WHERE_AND_HOW_LONG)
def test_where_and_how_long_do_not_steer(key):
    plain = Recipe(validation=0.5)
    assert plain.with_values(**{key: WHERE_AND_HOW_LONG[key]}).fingerprint() == plain.fingerprint()


OTHER: dict[str, Any] = {"epochs": "2", "steps": "2", "precision": "float64", "parts": ("x.py",), "devices": 9}
OTHER |= {
    "headline": "loss",
    "missing": "mean",
    "engine": "serial",
    "momentum": 0.5,
    "failures": 0.5,
    "metrics": ("top3",),
    "validation": 0.5,
    "optimiser": "adamw",
    "lr_schedule": "cosine:9",
    "local_lr_schedule": "cosine",
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 0.5,
    "label_smoothing": 0.5,
    "lr_groups": "fc2.*=2",
    "normalise_by": "0.5:0.5",
    "local_test": 0.5,
    "local_test_of": "all",
}
STEERING = [f for f in fields(Recipe) if f.name not in WHERE_AND_HOW_LONG and len(f.metadata["among"]) != 1]


@pytest.mark.parametrize("f", STEERING, ids=lambda f: f.name)
def test_everything_else_steers(f):
    other = {bool: True, int: 3, float: 3.0, str: "x"}
    value = OTHER[f.name] if f.name in OTHER else other[type(f.default)]
    assert Recipe().with_values(**{f.name: value}).fingerprint() != Recipe().fingerprint()


def test_a_fingerprint_stays_what_it_is():
    """It lies in every checkpoint: two processes must agree on it."""
    assert Recipe(rounds=5, seed=3).fingerprint() == Recipe(rounds=7, seed=3, out="x").fingerprint()
    assert len(Recipe().fingerprint()) == 16 and int(Recipe().fingerprint(), 16)


def test_checkpoints_from_before_a_key_was_there_still_fit():
    """The first of these lay in checkpoints before there was a key `threads`."""
    assert (
        Recipe().fingerprint()
        == Recipe(threads=0).fingerprint()
        == "061d9bcc7d335f76"
        != Recipe(threads=1).fingerprint()
    )


# the headline ---------------------------------------------------------------------------------------------------------
SHORT = {"devices": 4, "sample": 2, "rounds": 6, "engine": "serial"}


def test_a_headline_that_a_run_does_not_have_is_refused():
    assert kind(shoal.run, headline="acuracy", **SHORT) == "unknown-name"
    assert kind(shoal.run, headline="feddu.alpha", **SHORT) == "unknown-name"
    with pytest.raises(ShoalError, match="top3, which is measured only where it is asked for. Add --metrics top3"):
        shoal.run(headline="top3", **SHORT)
    with pytest.raises(ShoalError, match="neither more nor less of it is better"):
        shoal.run("scaffold", headline="scaffold.drift", **SHORT)


def test_a_run_ends_where_its_headline_is_reached():
    losses = shoal.run(**SHORT).history["loss"]
    stopped = shoal.run(headline="loss", until_accuracy=losses[2], target=losses[1], **SHORT).history
    assert stopped["loss"] == losses[:3] and stopped.best == losses[2]
    cost = stopped.cost_to_target(losses[1])
    assert cost and cost["rounds"] == 2
    assert losses[0] > losses[1] > losses[2] > 1, "the example must fall, and be no share"


def test_targets_of_shares_are_shares():
    assert kind(shoal.run, target=1.5, **SHORT) == "bad-value"
    assert kind(shoal.run, until_accuracy=2.0, **SHORT) == "bad-value"
    assert len(shoal.run(target=1.5, headline="loss", **SHORT).history) == 6


# first weights --------------------------------------------------------------------------------------------------------
def weights() -> dict[str, torch.Tensor]:
    return build_model("mlp", (1, 8, 8), 10, seed=5).initial


def started(path: Path, **more: Any) -> shoal.Result:
    return shoal.run(devices=3, sample=2, rounds=1, steps="1", init=str(path), **more)


def test_first_weights_from_a_file(tmp_path):
    """With a rate of 0 they are the last ones too."""
    save_file(weights(), tmp_path / "w.safetensors")
    found = started(tmp_path / "w.safetensors", lr=0.0).params
    assert all(torch.equal(found[k], v) for k, v in weights().items())


def test_what_a_file_has_too_much_does_not_matter(tmp_path):
    save_file(weights() | {"more": torch.zeros(3)}, tmp_path / "w.safetensors")
    assert "more" not in started(tmp_path / "w.safetensors").params


def test_first_weights_of_another_shape(tmp_path):
    save_file(weights() | {"fc1.bias": torch.zeros(5)}, tmp_path / "w.safetensors")
    with pytest.raises(ShoalError, match=r"shape \(5,\) for fc1.bias") as error:
        started(tmp_path / "w.safetensors")
    assert error.value.kind.name == "no-data"


def test_first_weights_with_a_tensor_missing(tmp_path):
    save_file({k: v for k, v in weights().items() if k != "fc2.bias"}, tmp_path / "w.safetensors")
    with pytest.raises(ShoalError, match="nothing for fc2.bias") as error:
        started(tmp_path / "w.safetensors")
    assert error.value.kind.name == "no-data"


@pytest.mark.parametrize("content", [b"", b"hello", b"\xff" * 100, b"\x02" + bytes(7) + b"[]", b"PK\x03\x04"])
def test_first_weights_from_what_is_no_safetensors_file(tmp_path, content):
    (tmp_path / "w.safetensors").write_bytes(content)
    assert kind(started, tmp_path / "w.safetensors") == "damaged"


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_first_weights_from_any_bytes(file, content):
    file.write_bytes(content)
    assert kind(started, file) in ("damaged", "no-data")


def test_first_weights_from_nowhere(tmp_path):
    assert kind(started, tmp_path / "w.safetensors") in ("disk", "no-data")
    assert kind(started, tmp_path) == "no-data"

"""What the report promises: the numbers of the histories, strangers' text as text, pictures in a real browser."""

import json
import re
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from html import unescape
from pathlib import Path
from statistics import mean

import numpy as np
import pytest

from shoal.compare.comparison import run_comparison
from shoal.core.errors import ShoalError
from shoal.core.measures.evaluate import summarise_device_accuracy
from shoal.core.metric import Metric, encode_metrics
from shoal.parts import find_shipped_parts
from shoal.report.citations import ENTRIES, FEDAVG_KEY, cite_method
from shoal.report.facts import summarise_devices
from shoal.report.plots import draw_curves, draw_split, find_tallest_stack, open_canvas
from shoal.report.run_groups import ReportedRun
from shoal.report.write import write_report
from shoal.runs.history import History
from shoal.runs.loggers import KINDS, flatten_numbers, open_logger
from shoal.runs.recipe import Recipe
from shoal.runs.start import run_recipe

EVIL = "</script><script>alert(1)</script>"
TINY = Recipe(devices=6, sample=2, rounds=4, batch=32, lr=0.05, target=0.2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A comparison of two methods and two seeds, and one run apart from it; made once, and only read."""
    place = tmp_path_factory.mktemp("runs")
    run_comparison(["fedavg", "scaffold"], replace(TINY, out=str(place / "both")), seeds=2)
    run_recipe(replace(TINY, out=str(place / "slow"), lr=0.01, eval_every=2))
    return place


@pytest.fixture
def place(folders, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(folders, tmp_path / "runs"))


@pytest.fixture
def no_pictures(monkeypatch):
    """Only the page, which is quickly written."""
    monkeypatch.setattr("shoal.report.write.draw_all", lambda *_: [])


def histories(folder: Path) -> list[list[dict]]:
    return [rows(path) for path in sorted(folder.glob("**/history.jsonl"))]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def told_more(folder: Path) -> None:
    """Everything that a run may tell beside its costs."""
    found = rows(folder / "history.jsonl")
    for row in found:
        down, up, time = row["bytes_down"], row["bytes_up"], row["sim_seconds"]
        row["bytes_by"] = {"down": {"model": down - 100, "extra": 100}, "up": {"model": up}}
        row["seconds_by"] = {"down": time / 4, "compute": time / 2, "up": time / 4}
        row |= {"top3": 0.75, "perplexity": 12.5, "per_class": [0.1, None, 0.9]}
        row |= {"device_mean": 0.5, "device_worst": 0.25, "device_spread": 0.125}
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    split = {
        "sizes": [3, 4],
        "labels": [[1, 2, 0], [0, 0, 4]],
        "degrees": [0.1, 0.9],
        "degree": 0.5,
        "server": [1, 0, 0],
    }
    (folder / "split.json").write_text(json.dumps(split))
    (folder / "devices.json").write_text(json.dumps({"accuracy": [0.9, None, 0.1, 0.5]}))


def facts(page: Path) -> dict:
    found = re.search(r'<script type="application/json" id="facts">(.*?)</script>', page.read_text(), re.S)
    assert found
    return json.loads(found[1])


def refused(kind: str, folders: list[Path], out: Path) -> str:
    with pytest.raises(ShoalError) as error:
        write_report(folders, out)
    assert error.value.kind.name == kind
    assert not out.exists()
    return str(error.value)


def test_a_report_that_is_no_page_is_refused_before_anything_is_drawn(place):
    assert "report.html" in refused("bad-value", [place / "both"], place / "report.pdf")


def test_the_page_holds_the_numbers_of_the_histories(place):
    page, *pictures = write_report([place / "both"], place / "report.html")
    for group, folder in zip(facts(page)["groups"], ("0-fedavg", "1-scaffold"), strict=True):
        seeds = histories(place / "both" / folder)
        curve = group["curves"]["accuracy"]
        ends = [[row["accuracy"] for row in seed] for seed in seeds]
        assert curve["rounds"] == [1, 2, 3, 4]
        assert curve["mean"] == pytest.approx([mean(v) for v in zip(*ends)], rel=1e-6)
        assert curve["low"] == pytest.approx([min(v) for v in zip(*ends)], rel=1e-6)
        assert curve["high"] == pytest.approx([max(v) for v in zip(*ends)], rel=1e-6)
        for cost, columns in {
            "seconds": ["sim_seconds"],
            "bytes": ["bytes_down", "bytes_up"],
            "macs": ["macs_work"],
        }.items():
            total = mean(sum(row[c] for row in seed for c in columns) for seed in seeds)
            assert curve[cost][-1] == pytest.approx(total, rel=1e-6)
        assert sum(v[0] for v in group["bytes"]["values"]) == pytest.approx(
            mean(seed[0]["bytes_down"] + seed[0]["bytes_up"] for seed in seeds)
        )
        assert sum(v[2] for v in group["seconds"]["values"]) == pytest.approx(mean(s[2]["sim_seconds"] for s in seeds))
        assert group["table"]["accuracy"] == pytest.approx(mean(v[-1] for v in ends))
    assert {p.name for p in pictures} >= {"accuracy.png", "loss.png", "bytes.png", "seconds.png"}
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures)


def table_of(page: Path, caption: str) -> list[list[str]]:
    """The words of a table by rows."""
    found = re.search(f'aria-label="{caption}"><table>(.*?)</table>', page.read_text(), re.S)
    assert found
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", found[1], re.S)]
    return [[unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def set_history(folder: Path, accuracies: list[float | None], seconds: float, sent: int, **more) -> None:
    """Rounds of equal cost in the place of those of a run."""
    costs = {"bytes_down": sent, "bytes_up": 0, "macs_work": 1, "sim_seconds": seconds, "wall_seconds": 1.0, **more}
    lines = [json.dumps({"round": n, "accuracy": a, "loss": a, **costs}) for n, a in enumerate(accuracies)]
    (folder / "history.jsonl").write_text("\n".join(lines) + "\n")


def test_the_page_compares_at_equal_cost(place, no_pictures):
    for seed in (0, 1):
        set_history(place / "both" / "0-fedavg" / f"seed-{seed}", [0.1, 0.2 + 0.2 * seed, 0.5], 1.0, 2000)
        set_history(place / "both" / "1-scaffold" / f"seed-{seed}", [0.3, 0.6, 0.7], 2.0, 1000)
    page = write_report([place / "both"], place / "report.html")[0]
    heads, budgets, fedavg, scaffold = table_of(page, "Accuracy at equal cost")
    assert heads == ["", "within simulated time", "within bytes, both ways"]
    assert budgets == ["method", "3 s", "3 kB"]
    assert fedavg == ["fedavg", "0.5000 ± 0.0000", "0.1000 ± 0.0000"]
    assert scaffold == ["scaffold", "0.3000 ± 0.0000", "0.7000 ± 0.0000"]
    text = page.read_text()
    assert "<h3>At equal cost</h3>" in text and "what the cheapest method spent in all" in text
    assert "blocks alike" not in text

    listed = place / "both" / "compare.toml"
    listed.write_text("budget_seconds = [2, 1.5]\n" + listed.read_text())
    page = write_report([place / "both"], place / "report.html")[0]
    _, budgets, fedavg, scaffold = table_of(page, "Accuracy at equal cost")
    assert budgets == ["method", "1.5 s", "2 s", "3 kB"]
    assert fedavg[1:3] == ["0.1000 ± 0.0000", "0.3000 ± 0.1414"] and scaffold[1:3] == ["-", "0.3000 ± 0.0000"]


def test_one_method_has_nothing_to_be_equal_to(place, no_pictures):
    assert "At equal cost" not in write_report([place / "slow"], place / "report.html")[0].read_text()


def test_bytes_with_blocks_counted_alike_are_a_column_where_a_run_has_them(place, no_pictures):
    set_history(place / "slow", [0.1, 0.2], 1.0, 1000, bytes_down_by_blocks=600)
    page = write_report([place / "both", place / "slow"], place / "report.html")[0]
    _, heads, *rows = table_of(page, "Results of every method")
    assert [row[heads.index("blocks alike")] for row in rows] == ["-", "-", "1.2 kB"]
    assert "bytes down, blocks counted alike" in page.read_text()


def test_what_parts_tell_is_drawn(place):
    page, *pictures = write_report([place / "both"], place / "report.html")
    found = facts(page)
    assert found["told"] == ["scaffold.drift", "scaffold.c_norm"] and "scaffold.drift" not in found["metrics"]
    fedavg, scaffold = found["groups"]
    assert "scaffold.drift" not in fedavg["curves"] and len(scaffold["curves"]["scaffold.drift"]["mean"]) == 4
    assert {"scaffold.drift.png", "scaffold.c_norm.png"} <= {p.name for p in pictures}
    assert found["about"]["scaffold.c_norm"]["title"] == "scaffold: norm of the control variate c"


def test_a_part_that_is_not_installed_is_drawn_from_what_its_folder_noted(place, no_pictures):
    ghost = Metric("ghost.size", "ghost: size", "bytes", total="sum", drawn=True, compared=True, label="ghost size")
    (place / "slow" / "metrics.json").write_text(json.dumps(encode_metrics({"ghost.size": ghost})))
    (place / "slow" / "recipe.toml").write_text(replace(TINY, method="ghost").to_toml())
    set_history(place / "slow", [0.1, 0.2], 1.0, 1000, **{"ghost.size": 600})
    page = write_report([place / "slow"], place / "report.html")[0]
    assert facts(page)["told"] == ["ghost.size"]
    _, heads, row = table_of(page, "Results of every method")
    assert row[heads.index("ghost size")] == "1.2 kB"


def test_the_headline_is_what_the_page_is_about(place, no_pictures):
    for path in (place / "slow").glob("recipe.toml"):
        path.write_text(replace(TINY, headline="loss", target=0.0).to_toml())
    page = write_report([place / "slow"], place / "report.html")[0]
    _, heads, row = table_of(page, "Results of every method")
    ends = [r["loss"] for r in rows(place / "slow" / "history.jsonl") if r["loss"] is not None]
    assert heads[3:5] == ["loss", "best"] and row[3:5] == [f"{ends[-1]:.4f}", f"{min(ends):.4f}"]


def test_runs_with_several_headlines_are_not_put_in_one_column(place, no_pictures):
    """A loss of 2.3 would stand under accuracy, and be the best."""
    (place / "slow" / "recipe.toml").write_text(replace(TINY, headline="loss", target=0.0).to_toml())
    told = refused("bad-value", [place / "both", place / "slow"], place / "report.html")
    assert "slow" in told and "by loss" in told and "by accuracy" in told


def test_of_two_folders_with_the_same_run_the_longer_is_shown_and_the_other_told(place, no_pictures, caplog):
    whole = place / "slow"
    shutil.copytree(whole, place / "again")
    (place / "again" / "history.jsonl").write_bytes(
        b"".join((whole / "history.jsonl").read_bytes().splitlines(True)[:2])
    )
    for folders in ([whole, place / "again"], [place / "again", whole]):
        caplog.clear()
        page = write_report(folders, place / "report.html")[0]
        assert facts(page)["groups"][0]["rounds"] == 4
        assert "again is left out" in caplog.text and "slow" in caplog.text


def test_the_worst_tenth_is_that_of_histories():
    """A tenth of 15 devices is one device, as in the columns device_worst and personal_worst."""
    values = np.arange(15) / 15
    runs = [ReportedRun(Path(), Recipe(), History(), None, values.tolist())]
    found = summarise_devices(runs)
    assert found and found["worst"] == summarise_device_accuracy(values)["device_worst"] == 0.0


def test_runs_are_grouped_by_all_but_the_seed(place, no_pictures):
    page = write_report([place / "both", place / "slow", place / "both" / "0-fedavg" / "seed-0"], place / "new")[0]
    assert page == place / "new" / "report.html"
    groups = {group["label"]: group for group in facts(page)["groups"]}
    assert [g["seeds"] for g in groups.values()] == [[0, 1], [0, 1], [0]]
    assert list(groups) == ["fedavg, lr=0.05, eval_every=1", "scaffold", "fedavg, lr=0.01, eval_every=2"]
    assert groups["fedavg, lr=0.01, eval_every=2"]["curves"]["accuracy"]["rounds"] == [2, 4]
    text = page.read_text()
    assert "<mark>lr = 0.01</mark>" in text and "<mark>rounds" not in text and "seed = 0, 1" in text
    assert str(place) not in text


def test_everything_optional_is_drawn_when_it_is_there(place):
    told_more(place / "slow")
    page, *pictures = write_report([place / "slow"], place / "report.html")
    found = facts(page)
    group = found["groups"][0]
    assert found["metrics"][:4] == ["accuracy", "loss", "top3", "perplexity"]
    assert group["bytes"]["causes"] == ["down: model", "down: extra", "up: model"]
    assert group["bytes"]["values"][1] == [100.0] * 4
    assert group["seconds"]["causes"] == ["down", "compute", "up"]
    assert group["devices"]["sorted"] == [0.1, 0.5, 0.9]
    assert (group["devices"]["mean"], group["devices"]["worst"]) == pytest.approx((0.5, 0.1))
    assert group["classes"] == [0.1, None, 0.9]
    assert found["splits"][0]["counts"] == [[1, 2, 0], [0, 0, 4]] and found["splits"][0]["degree"] == 0.5
    assert {p.stem for p in pictures} >= {"top3", "perplexity", "split", "devices", "classes"}
    assert "worst 10 %" in page.read_text()


def test_what_is_not_told_is_left_out(place):
    for name in ("split.json", "devices.json"):
        (place / "slow" / name).unlink(missing_ok=True)
    keys = ("round", "accuracy", "loss", "bytes_down", "bytes_up", "macs_work", "sim_seconds", "wall_seconds")
    path = place / "slow" / "history.jsonl"
    path.write_text("".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows(path)))
    page, *pictures = write_report([place / "slow"], place / "report.html")
    found = facts(page)
    assert found["splits"] == [] and found["groups"][0]["devices"] is None and found["groups"][0]["classes"] is None
    assert found["groups"][0]["bytes"]["causes"] == ["down", "up"] and found["groups"][0]["seconds"]["causes"] == [
        "all"
    ]
    assert not {"split", "devices", "classes", "top3"} & {p.stem for p in pictures}


def test_long_runs_make_small_pages(place, no_pictures):
    count = 2500
    row = rows(place / "slow" / "history.jsonl")[-1]
    lines = [json.dumps(row | {"round": n, "accuracy": n / count}) for n in range(count)]
    (place / "slow" / "history.jsonl").write_text("\n".join(lines) + "\n")
    group = facts(write_report([place / "slow"], place / "report.html")[0])["groups"][0]
    curve = group["curves"]["accuracy"]
    assert len(curve["rounds"]) <= 600 and (curve["rounds"][0], curve["rounds"][-1]) == (1, count)
    assert curve["bytes"][-1] == pytest.approx(count * (row["bytes_down"] + row["bytes_up"]), rel=1e-6)
    assert len(group["bytes"]["edges"]) == 101 and group["bytes"]["edges"][-1] == count


NAMES = (EVIL, "$x_{\\frac$", "_hidden", 'a"b&c', "名前", "x" * 500)


def test_names_are_shown_as_text(place):
    folders = [Path(shutil.copytree(place / "slow", place / str(number))) for number in range(len(NAMES))]
    for folder, name in zip(folders, NAMES):
        (folder / "recipe.toml").write_text(replace(TINY, method=name, split=EVIL).to_toml())
    told_more(folders[0])
    text = write_report(folders, place / "report.html")[0].read_text()
    assert EVIL not in text and len(re.findall("<script", text)) == 2
    assert all(f"<summary>{name}</summary>" in unescape(text) for name in NAMES)
    assert [group["label"] for group in facts(place / "report.html")["groups"]] == list(NAMES)


DAMAGE = {
    "split.json": [
        b"{",
        b"[]",
        b'{"labels": 3}',
        b'{"labels": [[1], [1, 2]]}',
        b'{"labels": [[]]}',
        b'{"labels": [["a"]]}',
    ]
    + [b'{"labels": [[1, 2]], "degrees": []}', b'{"labels": [[1]], "degree": "x"}', b'{"labels": [[-1]]}', b"\xff\xfe"]
    + [b'{"labels": [[NaN]]}', b"[" * 100_000, b'{"labels": [[1' + b"0" * 400 + b"]]}", b'{"labels": [[true]]}'],
    "metrics.json": [b"{", b"[]", b'{"a.b": 3}', b'{"a.b": {"name": "a.b", "title": 3}}', b"\xff\xfe"],
    "devices.json": [b"", b"3", b'{"accuracy": 1}', b'{"accuracy": ["a"]}', b'{"accuracy": [{}]}'],
    "recipe.toml": [b"a = ", b"devices = 'x'", b"nobody = 3", b"\xff"],
    "history.jsonl": [b"{}\n", b"x\n", b"[]\n"],
}


@pytest.mark.parametrize("name, content", [(name, c) for name, cases in DAMAGE.items() for c in cases])
def test_damaged_files_are_named_in_one_sentence(place, name, content):
    (place / "slow" / name).write_bytes(content)
    said = refused("damaged", [place / "slow"], place / "report.html")
    assert name in said and "\n" not in said


@pytest.mark.parametrize(
    "change",
    [{"accuracy": "high"}, {"accuracy": True}, {"bytes_by": 3}, {"bytes_by": {"up": {"model": "x"}}}]
    + [{"seconds_by": {"up": []}}, {"per_class": 3}, {"bytes_up": float("nan")}, {"macs_work": -1}, {"loss": {}}]
    + [{"bytes_down_by_blocks": -1}, {"bytes_down_by_blocks": "x"}],
)
def test_damaged_rows_are_refused(place, change):
    path = place / "slow" / "history.jsonl"
    found = rows(path)
    path.write_text("".join(json.dumps(row | change) + "\n" for row in found))
    assert "line 1" in refused("damaged", [place / "slow"], place / "report.html")


def test_folders_without_runs_are_refused(place):
    refused("no-run", [place / "nowhere"], place / "report.html")
    refused("no-run", [], place / "report.html")
    (place / "slow" / "history.jsonl").unlink()
    refused("no-run", [place / "slow"], place / "report.html")
    (place / "both" / "compare.toml").write_text("methods = 3")
    refused("damaged", [place / "both"], place / "report.html")


def test_a_comparison_that_was_broken_off_is_reported_as_far_as_it_went(place, no_pictures):
    shutil.rmtree(place / "both" / "1-scaffold" / "seed-1")
    shutil.rmtree(place / "both" / "0-fedavg")
    groups = facts(write_report([place / "both"], place / "report.html")[0])["groups"]
    assert [(g["label"], g["seeds"]) for g in groups] == [("scaffold", [0])]


def test_a_split_is_drawn_by_itself(tmp_path):
    draw_split({"labels": [[5, 0], [0, 700]], "degree": 0.3}, tmp_path / "new" / "split.png")
    assert (tmp_path / "new" / "split.png").stat().st_size > 5000


def test_stacks_share_a_scale_that_holds_the_tallest():
    flat = {"edges": [0, 1, 2], "causes": ["down", "up"], "values": [[1.0, 2.0], [3.0, 5.0]]}
    low = {"edges": [0, 1], "causes": [], "values": []}
    assert find_tallest_stack([{"bytes": low}, {"bytes": flat}], "bytes") == 7.0


def test_every_shipped_part_says_which_papers_it_comes_from():
    parts = find_shipped_parts()
    assert all("cite" in vars(part) for part in parts.values()), "an empty tuple says that there is no paper"
    assert {name for name, part in parts.items() if not part.cite} == {
        "finetune",
        "half",
        "lastlayers",
        "uniform",
        "weighted",
    }
    assert set(ENTRIES) == {FEDAVG_KEY, *(key for part in parts.values() for key in part.cite)}
    for key, entry in ENTRIES.items():
        assert entry.count("{") == entry.count("}") and re.match(rf"@\w+\{{{key},\n", entry)


def test_a_method_cites_fedavg_and_its_parts():
    fedavg = ENTRIES[FEDAVG_KEY]
    assert cite_method("fedavg") == cite_method("nobody(x=1)") == cite_method("((") == [fedavg]
    others = [ENTRIES[key] for key in ("li2020fedprox", "karimireddy2020scaffold")]
    assert cite_method("fedprox(mu=0.1)+SCAFFOLD") == [fedavg, *others]
    assert cite_method("serverm") == cite_method("fedavgm") and len(cite_method("fedadam+fedyogi")) == 2
    assert cite_method("nobody(text='+scaffold')") == [fedavg]


def test_a_real_browser_draws_it_without_complaint(place, no_pictures):
    for folder in (place / "both" / "0-fedavg" / "seed-0", place / "slow"):
        told_more(folder)
    (place / "slow" / "recipe.toml").write_text(replace(TINY, method=EVIL).to_toml())
    page = write_report([place / "both", place / "slow"], place / "report.html")[0]
    for size, scheme in (("1200,900", 1), ("1200,900", 0), ("500,900", 1)):
        dom, log = browsed(page.as_uri() + "#selftest", place, size, scheme)
        assert selftest(dom) == "selftest ok"
        assert dom.count('class="curve c') == 7, "three methods, devices of two, and two numbers of SCAFFOLD"
        assert "CONSOLE" not in log

    text = page.read_text()
    page.write_text(text.replace('"mean":[', '"mean":["x",', 1))
    dom, _ = browsed(page.as_uri() + "#selftest", place, "1200,900", 1)
    assert "NaN" in selftest(dom) and "Uncaught" in selftest(dom), "a fault goes unseen"

    page.write_text(text.replace("</main>", "<script>document.title='taken'</script></main>"))
    dom, log = browsed(page.as_uri(), place, "1200,900", 1)
    assert "<title>taken" not in dom and "CONSOLE" in log, "a script that got in would run"


def selftest(dom: str) -> str:
    """What the page says about itself."""
    found = re.search(r'<output id="selftest"[^>]*>(.*?)</output>', dom, re.S)
    return found[1] if found else ""


def browsed(address: str, place: Path, size: str, scheme: int) -> tuple[str, str]:
    """The page as a headless browser leaves it, and what was logged."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    browser = next((found for name in names if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    more = "--disable-component-update --disable-dev-shm-usage --enable-logging=stderr --v=0 --dump-dom"
    own = [f"--user-data-dir={place / 'browser'}", f"--window-size={size}"]
    scheme_flag = f"--blink-settings=preferredColorScheme={scheme}"
    command = [browser, *flags.split(), *more.split(), *own, scheme_flag, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def test_numbers_of_a_row_for_loggers():
    row = {"round": 3, "devices": [1, 2], "accuracy": None, "loss": 0.5, "void": True, "bytes_by": {"up": {"a b": 3}}}
    assert dict(flatten_numbers(row)) == {"devices": 2, "loss": 0.5, "bytes_by/up/a-b": 3}


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # pyright: ignore

    result = run_recipe(TINY, open_logger(f"tensorboard:{tmp_path / 'board'}"))
    events = EventAccumulator(str(tmp_path / "board" / "fedavg-seed-0"))
    events.Reload()
    for column in ("accuracy", "bytes_up", "sim_seconds", "train_loss"):
        found = [(event.step, event.value) for event in events.Scalars(column)]
        assert found == [(n + 1, pytest.approx(v, rel=1e-6)) for n, v in enumerate(result.history[column])]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_every_number(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    where = (tmp_path / "store").as_uri()
    result = run_recipe(TINY, open_logger(f"mlflow:{where}"))
    client = mlflow.MlflowClient(where)
    [found] = client.search_runs([client.get_experiment_by_name("shoal").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["method"] == "fedavg"
    told = [(m.step, m.value) for m in client.get_metric_history(found.info.run_id, "accuracy")]
    assert sorted(told) == [(n + 1, pytest.approx(v)) for n, v in enumerate(result.history["accuracy"])]


@pytest.mark.parametrize("spec", ["tensorboard:x", "mlflow:", "wandb:mine"])
def test_a_logger_that_is_not_installed_says_how_to_get_it(spec, monkeypatch):
    name = spec.partition(":")[0]
    monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ShoalError, match=re.escape(f"pip install 'shoal[{name}]'")) as error:
        open_logger(spec)
    assert error.value.kind.name == "missing-extra"


@pytest.mark.parametrize(
    "spec, kind", [("tensorbored:x", "unknown-name"), ("wandb:", "bad-value"), ("", "unknown-name")]
)
def test_a_logger_that_cannot_be_meant_is_refused(spec, kind):
    with pytest.raises(ShoalError) as error:
        open_logger(spec)
    assert error.value.kind.name == kind


def test_a_logger_that_fails_is_told_in_one_sentence(monkeypatch):
    def broken(where):
        def begin(recipe, name):
            raise ConnectionError("nobody there\nat all")

        return begin

    monkeypatch.setitem(KINDS, "mlflow", broken)
    with pytest.raises(ShoalError, match="The logger mlflow failed .ConnectionError: nobody there"):
        run_recipe(TINY, open_logger("mlflow:x"))


@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_every_number(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    for key, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    run_recipe(TINY, open_logger("wandb:mine"))
    [found] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    until = time.monotonic() + 60  # another process writes the file, and on a busy machine it is not done at once
    while b"accuracy" not in found.read_bytes() and time.monotonic() < until:
        time.sleep(0.2)
    assert b"accuracy" in found.read_bytes()


def test_a_long_title_stays_beside_its_own_panel(monkeypatch, tmp_path):
    """Of the four panels two have a label; each is no higher than its panel, so that neither runs into the other."""
    pytest.importorskip("matplotlib")
    heights = []

    @contextmanager
    def measure_canvas(*given, **more):
        with open_canvas(*given, **more) as (figure, panels):
            yield figure, panels
            figure.draw_without_rendering()
            for panel in (panels[0], panels[2]):
                heights.append((panel.yaxis.label.get_window_extent().height, panel.bbox.height))

    monkeypatch.setattr("shoal.report.plots.open_canvas", measure_canvas)
    curve = {cost: [1, 2] for cost in ("rounds", "seconds", "bytes", "macs")}
    group = {
        "label": "a",
        "seeds": [0, 1, 2],
        "curves": {"m": curve | {k: [1.0, 2.0] for k in ("mean", "low", "high")}},
    }
    draw_curves(
        [group], "m", "scaffold: drift of devices: norm of what a round changes in c_k, mean", (), tmp_path / "m.png"
    )
    assert all(label <= panel for label, panel in heights) and len(heights) == 2

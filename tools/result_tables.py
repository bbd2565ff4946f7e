"""The tables of docs/results that are computed from the ledger, each by the name of its section."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import mean

from ledger import FOLDER, format_command, format_interval, group_by_method, read_runs
from markers import ROOT, format_table
from paper_tables import show_pruned_sizes, show_uploads

from shoal.plugins.load import load_method
from shoal.reproduce.ledger import LedgerRun

NAMES = {
    "fedavg": "FedAvg",
    "feddh": "FedDH",
    "fedjs": "FedJS",
    "scaffold": "SCAFFOLD",
    "fedprox": "FedProx",
    "feddum": "FedDUM",
    "feddumap": "FedDUMAP",
    "fednova": "FedNova",
    "fedsam": "FedSAM",
    "fedspeed": "FedSpeed",
    "fedsmoo": "FedSMOO",
    "fedsam(rho=0.01)": "FedSAM, rho 0.01",
    "fedspeed(rho=0.003)": "FedSpeed, rho 0.003",
    "fedsmoo(rho=0.01)": "FedSMOO, rho 0.01",
    "ema": "FedAvg, judged by `ema`",
    "fedlc+ema": "FedLC, judged by `ema`",
    "fedacd+mixup": "FedACD",
}
FEDDH_05, FEDDH_01 = "feddh-cifar10-lenet-dirichlet0.5", "feddh-cifar10-lenet-dirichlet0.1"
SCAFFOLD = "scaffold-cifar10-lenet-dirichlet0.1"
FEDDUM, FEDDUMAP = "feddum-cifar10-cnn", "feddumap-cifar10-cnn"
FEDACD = "fedacd-cifar10-conv2cifar-dirichlet0.1"
FLAT_MINIMA = "flat-minima-cifar10-lenet-dirichlet0.1"
FLAT_MINIMA_TUNING, FLAT_MINIMA_TUNED = f"{FLAT_MINIMA}-tuning", f"{FLAT_MINIMA}-tuned"
FEDBIAD = ("fedbiad-1", "fedbiad-2")
NIID_BENCH = "niid-bench-cifar10-lenet-dirichlet0.5"


def compare_to_first(*names: str, whole: bool = False) -> str:
    """For each method the mean of the last 20 rounds of each seed, of all, and the paired difference to the first.

    With `whole`, methods whose runs were broken off are left out.
    """
    groups = {method: runs for name in names for method, runs in group_by_method(name).items()}
    first = next(iter(groups.values()))
    if whole:
        groups = {method: runs for method, runs in groups.items() if len(runs[0].rows) >= len(first[0].rows)}
    until = len(first[0].rows)
    base = [run.mean_accuracy(until) for run in first]
    rows = []
    for method, runs in groups.items():
        values = [run.mean_accuracy(until) for run in runs]
        row = [NAMES[method], *(f"{value:.2f}" for value in values), format_interval(values)]
        rows.append([*row, "" if runs is first else format_gaps(values, base)])
    header = ["", *(f"seed {run.seed}" for run in first), "mean", f"minus {NAMES[first[0].method]}, paired"]
    return format_table(header, rows, numbers_from=1)


def compare_unequal_lengths(name: str, window: int, with_bytes: bool = False) -> str:
    """Each method up to its own last round, and the paired difference to the first method in that same round.

    `with_bytes` adds the difference to the first method in the last round until which that one has sent no more bytes.
    """
    groups = group_by_method(name)
    first = next(iter(groups.values()))
    rows = []
    for method, runs in groups.items():
        until = len(runs[0].rows)
        values = [run.mean_accuracy(until, window) for run in runs]
        row = [NAMES[method], str(until), *(f"{value:.2f}" for value in values), format_interval(values)]
        row.append("" if runs is first else format_gaps(values, [run.mean_accuracy(until, window) for run in first]))
        if with_bytes:
            sent = runs[0].total_bytes()
            within = max(n for n in range(1, len(first[0].rows) + 1) if first[0].total_bytes(n) <= sent)
            base = [run.mean_accuracy(within, window) for run in first]
            row.append(f"{sent / 1e9:.2f}")
            row.append("" if runs is first else f"{format_gaps(values, base)}, round {within}")
        rows.append(row)
    title = NAMES[first[0].method]
    header = ["", "rounds", *(f"seed {run.seed}" for run in first), "mean", f"minus {title} in that round, paired"]
    header += ["GB, both ways", f"minus {title} after as many bytes"] if with_bytes else []
    return format_table(header, rows, numbers_from=1)


def format_gaps(values: list[float], base: list[float]) -> str:
    """The mean of the paired differences with its interval, and each of them."""
    gaps = [a - b for a, b in zip(values, base)]
    return f"{format_interval(gaps, '+')} ({', '.join(f'{gap:+.2f}' for gap in gaps)})"


def compare_repetitions() -> str:
    """The same recipes and seeds on two machines, in the last round that both have."""
    rows = []
    for name in (FEDDH_05, FEDDH_01):
        groups, repeated = group_by_method(name), group_by_method(f"{name}-again")
        for method, runs in groups.items():
            again = repeated[method]
            until = min(len(run.rows) for run in (*runs, *again))
            pairs = [(run.mean_accuracy(until), other.mean_accuracy(until)) for run, other in zip(runs, again)]
            cells = [f"{a:.2f}, {b:.2f}" for a, b in pairs]
            split = f"{name.removeprefix('feddh-cifar10-lenet-dirichlet')}, round {until}"
            rows.append([split, NAMES[method], *cells, f"{max(abs(a - b) for a, b in pairs):.2f}"])
    header = ["Dirichlet", "", "seed 0", "seed 1", "seed 2", "largest difference"]
    return format_table(header, rows, numbers_from=2)


def compare_repeated_gap() -> str:
    """FedJS minus FedAvg in both sets of runs, in the last round that both have."""
    texts = []
    for name in (f"{FEDDH_05}-again", FEDDH_05):
        groups = group_by_method(name)
        until = len(read_runs(f"{FEDDH_05}-again")[0].rows)
        gaps = [a.mean_accuracy(until) - b.mean_accuracy(until) for a, b in zip(groups["fedjs"], groups["fedavg"])]
        texts.append(format_interval(gaps, "+"))
    return (
        f"FedJS minus FedAvg at 0.5, in round {until}: {texts[0]} in the repetition, {texts[1]} in the table's runs.\n"
    )


def compare_repeated_scaffold() -> str:
    """SCAFFOLD minus FedAvg in both sets of runs, in the last round of the shorter one."""
    texts, until = [], len(read_runs(f"{SCAFFOLD}-again")[0].rows)
    for name in (f"{SCAFFOLD}-again", SCAFFOLD):
        groups = group_by_method(name)
        values, base = ([run.mean_accuracy(until) for run in groups[method]] for method in ("scaffold", "fedavg"))
        texts.append(format_gaps(values, base))
    return f"SCAFFOLD minus FedAvg in round {until}: {texts[0]} in those, {texts[1]} in the table's runs.\n"


def show_rounds(names: tuple[str, ...], rounds: tuple[int, ...]) -> str:
    """The mean over seeds of each method's accuracy in some rounds, of methods that have them all."""
    groups = {method: runs for name in names for method, runs in group_by_method(name).items()}
    groups = {method: runs for method, runs in groups.items() if len(runs[0].rows) >= rounds[-1]}
    rows = [
        [NAMES[method], *(f"{mean(run.accuracy_in(round) for run in runs):.1f}" for round in rounds)]
        for method, runs in groups.items()
    ]
    return format_table(["", f"round {rounds[0]}", *map(str, rounds[1:])], rows, numbers_from=1)


def show_pruning(files: dict[str, tuple[str, str]]) -> str:
    """Before and after the pruning in round 30: operations, bytes of a reply, accuracies.

    The first round is none of them: in it devices also tell about themselves.
    """
    rows = []
    for name, (title, published) in files.items():
        for run in read_runs(name):
            before, after, end = run.rows[1], run.rows[30], len(run.rows)
            rows.append(
                [
                    f"{title}, {run.seed}",
                    *(f"{row['macs_forward'] / 1e6:.3f}" for row in (before, after)),
                    published,
                    *(f"{row['bytes_up'] / 1e4:.0f}" for row in (before, after)),
                    *(f"{run.accuracy_in(round):.1f}" for round in (29, 30, 31, 40)),
                    f"{run.mean_accuracy(end):.1f} (of {end})",
                ]
            )
    costs = ["M MACs before", "after", "published", "KB up before", "after"]
    return format_table(
        ["model, seed", *costs, "round 29", "30, pruned", "31", "40", "last 20 rounds"], rows, numbers_from=1
    )


def show_fedad() -> str:
    (run,) = read_runs("fedad-cifar10-lenet")
    looks = [(row["accuracy"], row["round"] + 1) for row in run.rows if row["accuracy"] is not None]
    best, where = max(looks)
    macs = mean(row["macs_forward"] for row in run.rows) / 1e6
    row = ["FedAD, corrected rule, one seed, H200", f"{macs:.3f}", "0.615", f"{best:.3f} (round {where})"]
    header = ["", "M MACs, mean of 500 rounds", "published", "best accuracy", "at the end"]
    return format_table(header, [[*row, f"{looks[-1][0]:.3f}"]], numbers_from=1)


def show_fedacd() -> str:
    """Accuracy and local risk after 200 rounds, the means over the last 20, beside what was published."""
    published = {"fedavg": ("68.35", "0.57"), "fedacd+mixup": ("73.13", "0.31")}
    rows, base = [], []
    for method, runs in group_by_method(FEDACD).items():
        until = len(runs[0].rows)
        values, risks = ([run.mean_of(c, until) for run in runs] for c in ("accuracy", "local_risk"))
        values = [100 * value for value in values]
        gaps, base = (format_gaps(values, base), base) if base else ("", values)
        accuracy, risk = published[method]
        rows.append([NAMES[method], format_interval(values), gaps, accuracy, format_interval(risks), risk])
    header = ["", "accuracy", "minus FedAvg, paired", "published", "local risk", "published"]
    return format_table(header, rows, numbers_from=1)


def show_tuning(name: str, key: str, last: int = 5) -> str:
    """The validation accuracy of each try, the mean of its last evaluations as `shoal tune` reads it; the best bold."""
    tries: dict[str, dict[float, float]] = {}
    for run in read_runs(name):
        (part,) = load_method(run.method, ()).parts
        tries.setdefault(part.name(), {})[getattr(part, key)] = run.mean_accuracy(len(run.rows), last)
    values = sorted({value for own in tries.values() for value in own})
    rows = []
    for method, own in tries.items():
        cells = {value: f"{own[value]:.2f}" for value in values}
        best = max(own, key=lambda value: own[value])
        rows.append([NAMES[method], *(f"**{text}**" if value == best else text for value, text in cells.items())])
    return format_table(["", *(f"{key} {value:g}" for value in values)], rows, numbers_from=1)


def compare_tuned(tuned: str, before: str, key: str, window: int = 20) -> str:
    """Each method with its value before and after tuning, and the paired differences to the first method in `before`.

    All are read in the last round that every run has, tuned or not.
    """
    groups, old = group_by_method(tuned), group_by_method(before)
    until = min(len(run.rows) for runs in (*groups.values(), *old.values()) for run in runs)
    base = [run.mean_accuracy(until, window) for run in next(iter(old.values()))]
    rows = [[NAMES[next(iter(old))], "", *(f"{value:.2f}" for value in base), format_interval(base), ""]]
    for method, runs in groups.items():
        (part,) = load_method(method, ()).parts
        for variant, shown in ((type(part)(), old[part.name()]), (part, runs)):
            values = [run.mean_accuracy(until, window) for run in shown]
            cells = [f"{value:.2f}" for value in values]
            rows.append([NAMES[part.name()], f"{getattr(variant, key):g}", *cells, format_interval(values)])
            rows[-1].append(format_gaps(values, base))
    seeds = [f"seed {run.seed}" for run in next(iter(groups.values()))]
    header = [f"round {until}", key, *seeds, "mean", f"minus {rows[0][0]}, paired"]
    return format_table(header, rows, numbers_from=1)


def show_scaffold_looks() -> str:
    """The mean accuracy over seeds at every look."""
    groups = dict(sorted(group_by_method("scaffold-fashion-mnist").items()))
    looks = [row["round"] + 1 for row in groups["fedavg"][0].rows if row["accuracy"] is not None]
    rows = [
        [f"{NAMES[method]}, mean", *(f"{mean(run.accuracy_in(look) for run in runs):.1f}" for look in looks)]
        for method, runs in groups.items()
    ]
    return format_table(["round", *map(str, looks)], rows, numbers_from=1)


MOST_NAMES = 20
"""Methods of a file that the table of the ledger names."""


def list_ledger(texts: Mapping[Path, str]) -> str:
    """The files of the ledger: what they hold, which source ran, and which of the pages quote them."""
    rows = []
    for file in sorted(FOLDER.glob("*.jsonl.gz")):
        runs = read_runs(file.name.removesuffix(".jsonl.gz"))
        pages = {page: text for page, text in texts.items() if page.parent != FOLDER}
        quoting = [page.relative_to(ROOT) for page, text in pages.items() if f"results/{file.name}" in text]
        links = ", ".join(f"[{page.stem}](../{page})" for page in quoting)
        links = links if len(quoting) <= MOST_NAMES else "[pages of methods](../docs/methods/index.md)"
        names = list(dict.fromkeys(run.method for run in runs))
        methods = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} methods"
        lengths = sorted({len(run.rows) for run in runs})
        commits = sorted({run.commit[:8] for run in runs})
        seeds = len({run.seed for run in runs})
        rows.append([f"`{file.name}`", methods, str(seeds), join_numbers(lengths), ", ".join(commits), links])
    return format_table(["file", "methods", "seeds", "rounds", "commit", "quoted in"], rows)


def list_unkept_tables(texts: Mapping[Path, str]) -> str:
    """Where docs/results has figures whose runs were not kept: the page, and the heading that they stand under."""
    lines = []
    for page, text in texts.items():
        heading, found = "", []
        for line in text.splitlines() if page.parent == ROOT / "docs/results" else ():
            heading = line.strip("# ") if line.startswith("#") else heading
            if "*(history not kept" in line:
                found.append(heading)
        if found:
            lines.append(f"- [{page.stem}](../docs/results/{page.name}): {'; '.join(dict.fromkeys(found))}")
    return "".join(f"{line}\n" for line in lines)


def join_numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def list_feddum_runs() -> list[LedgerRun]:
    return [*read_runs(FEDDUM), *read_runs(FEDDUMAP)]


TABLES: dict[str, Callable[[], str]] = {
    "feddh dirichlet 0.5": partial(compare_to_first, FEDDH_05),
    "feddh dirichlet 0.1": partial(compare_to_first, FEDDH_01),
    "feddh repetitions": compare_repetitions,
    "feddh repeated gap": compare_repeated_gap,
    "feddh command": partial(format_command, FEDDH_05),
    "fedad": show_fedad,
    "scaffold cifar10": partial(compare_unequal_lengths, SCAFFOLD, 20, with_bytes=True),
    "scaffold repeated gap": compare_repeated_scaffold,
    "scaffold cifar10 command": partial(format_command, SCAFFOLD),
    "scaffold fashion-mnist": show_scaffold_looks,
    "fedap": partial(show_pruning, {"fedap-cifar10-cnn": ("CNN", "3.0"), "fedap-cifar10-lenet": ("LeNet", "0.6")}),
    "fedap command": partial(format_command, "fedap-cifar10-cnn"),
    "feddum": partial(compare_to_first, FEDDUM, FEDDUMAP),
    "feddum rounds": partial(show_rounds, (FEDDUM, FEDDUMAP), (10, 20, 29, 30, 31, 40, 60, 90, 120, 150, 180)),
    "feddum command": partial(format_command, FEDDUM),
    "feddumap": partial(show_pruning, {FEDDUMAP: ("CNN", "2.7")}),
    "pruned sizes": partial(show_pruned_sizes, "feddumap-10", "feddumap-11", "feddumap-13"),
    "niid-bench": partial(compare_unequal_lengths, NIID_BENCH, 5),
    "niid-bench command": partial(format_command, NIID_BENCH),
    "fedacd": show_fedacd,
    "fedacd command": partial(format_command, FEDACD),
    "flat minima": partial(compare_to_first, FLAT_MINIMA, FLAT_MINIMA_TUNED, whole=True),
    "flat minima rounds": partial(
        show_rounds, (FLAT_MINIMA, FLAT_MINIMA_TUNED), (10, 20, 40, 60, 100, 150, 200, 250, 300)
    ),
    "flat minima broken off": partial(compare_unequal_lengths, FLAT_MINIMA, 20),
    "flat minima tuning": partial(show_tuning, FLAT_MINIMA_TUNING, "rho"),
    "flat minima tuned": partial(compare_tuned, FLAT_MINIMA_TUNED, FLAT_MINIMA, "rho"),
    "flat minima tuned command": partial(format_command, FLAT_MINIMA_TUNED),
    "flat minima command": partial(format_command, FLAT_MINIMA),
    "fedbiad mnist": partial(show_uploads, *FEDBIAD, column="MNIST"),
    "fedbiad fashion-mnist": partial(show_uploads, *FEDBIAD, column="Fashion-MNIST"),
    "fedbiad command": partial(format_command, "fedbiad-1"),
    "fedbiad dgc command": partial(format_command, "fedbiad-2"),
}
LISTS: dict[str, Callable[[Mapping[Path, str]], str]] = {"ledger": list_ledger, "unkept": list_unkept_tables}
"""Sections about what stands on the pages once all other sections are written."""

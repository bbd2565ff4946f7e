"""Who takes part in the speed benchmark, and the environments of other frameworks."""

import argparse
import subprocess
import sys
import venv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from peers.jobs import FOLDER, Job, cores

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Peer:
    """Another framework: what pip is told, in order, and how its script is started."""

    title: str
    script: str
    installs: tuple[str, ...]
    launch: tuple[str, ...] = ()


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cores()))
FEDLAB = "pandas scikit-learn pynvml tqdm munch pillow h5py ujson matplotlib"
PEERS = {
    "flower": Peer(
        f"Flower simulation, {cores()} workers",
        "by_flower.py",
        (f"{TORCH} numpy", "flwr[simulation]==1.41.0"),
    ),
    "pfl": Peer(
        f"pfl-research, {cores()} processes",
        "by_pfl.py",
        (f"{TORCH} numpy", "pfl[pytorch]==0.6.0"),
        TORCHRUN,
    ),
    "fedlab": Peer(
        "FedLab, 1 process x 1 thread",
        "by_fedlab.py",
        (f"{TORCH} numpy", "--no-deps fedlab==1.3.0", FEDLAB),
    ),
    "fedjax": Peer("FedJAX, 1 process", "by_fedjax.py", ("fedjax psutil",)),
}


@dataclass(frozen=True)
class Contestant:
    """A script with its options, and what runs it."""

    title: str
    script: str
    options: tuple[str, ...] = ()
    python: tuple[str, ...] = (sys.executable,)
    plain: bool = False
    absent: str = ""
    """Why it cannot take part; its line in the table says so."""

    def command(self, job: str, rounds: int) -> list[str]:
        return [*self.python, str(Path(__file__).with_name(self.script)), job, str(rounds), *self.options]


def install(name: str) -> None:
    """Make the environment of a peer; torch comes first and by its version, so that no other build is considered."""
    folder = FOLDER / name
    constraints = FOLDER / "constraints.txt"
    if not python_of(name).exists():
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True, symlinks=True)
    constraints.write_text(TORCH + "\n")
    for words in PEERS[name].installs:
        pip = [str(python_of(name)), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
        subprocess.run([*pip, *words.split()], check=True)
    complete(name).touch()


def python_of(name: str) -> Path:
    return FOLDER / name / "bin" / "python"


def complete(name: str) -> Path:
    """A file that is there when the environment of a peer is whole."""
    return FOLDER / name / "complete"


def contestants(given: argparse.Namespace, job: Job) -> list[Contestant]:
    return [*plain_loops(given.compute, job), *ours(given), *others(given)]


def plain_loops(compute: str, job: Job) -> Iterable[Contestant]:
    """What one would write by hand; on a GPU in one process, on the CPU in each way that makes sense."""
    if compute != "cpu":
        yield Contestant("plain loop, 1 process", "plain.py", ("--compute", compute), plain=True)
        return
    team = min(cores(), job.per_round)
    for processes, threads in dict.fromkeys(((team, 1), (1, 1), (1, cores()))):
        title = f"plain loop, {counted(processes, 'process')} x {counted(threads, 'thread')}"
        options = ("--procs", str(processes), "--threads", str(threads))
        yield Contestant(title, "plain.py", options, plain=True)


def ours(given: argparse.Namespace) -> Iterable[Contestant]:
    for engine in dict.fromkeys(given.engine):
        title, options = f"shoal, engine {engine}", ("--engine", engine, "--compute", given.compute)
        if given.threads:
            title, options = f"{title}, {counted(given.threads, 'thread')}", (*options, "--threads", str(given.threads))
        yield Contestant(title, "ours.py", options)
        if given.eval_every:
            every = str(given.eval_every)
            yield Contestant(f"{title}, evaluated every {every}", "ours.py", (*options, "--eval-every", every))
        if given.seeds:
            yield Contestant(f"{title}, {given.seeds} seeds", "ours.py", (*options, "--seeds", str(given.seeds)))


def others(given: argparse.Namespace) -> Iterable[Contestant]:
    for name in given.peers:
        peer = PEERS[name]
        absent = "" if complete(name).exists() else "not installed"
        absent = absent if given.compute == "cpu" else "on the CPU only"
        yield Contestant(peer.title, peer.script, python=(str(python_of(name)), *peer.launch), absent=absent)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"

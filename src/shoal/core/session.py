"""A run between two rounds, and the only place where a round is opened, trained, closed and committed.

Command line, comparisons, real devices, the smoke run, laws and tests all play rounds here.
"""

from collections.abc import Sequence
from time import perf_counter

from shoal.core.device_host import DeviceHost
from shoal.core.ledger import Row
from shoal.core.model.net import Net
from shoal.core.phases import in_phase
from shoal.core.round import Loop, PendingRound
from shoal.core.server_state import ServerState
from shoal.core.task import Engine, JobResult, Task, TaskResult
from shoal.core.types import Job, Outcome


class Session:
    """Plays the rounds of a run one after the other, from `number` on; a round counts once it is committed.

    `net` is the model before the first round: what parts made of the recipe's.
    """

    def __init__(self, loop: Loop, net: Net, server_state: ServerState | None = None, number: int = 0):
        self.loop, self.net, self.server_state, self.number = loop, net, server_state, number
        self.pending: PendingRound | None = None
        self.outcomes: list[Outcome] = []

    @in_phase("pack")
    def open_round(self) -> None:
        """Select the devices of the next round and pack what they are sent."""
        self.server_state = self.server_state or self.loop.start(self.net)
        self.pending, self.outcomes = self.loop.open_round(self.server_state, self.number), []

    def make_tasks(self) -> list[Task]:
        """What an engine has to train before the round can be closed."""
        return self.loop.host.make_tasks(self.get_pending().jobs_to_train)

    def store_results(self, results: Sequence[TaskResult]) -> None:
        """Take what the engine made of the round's tasks, in their order."""
        self.outcomes = store_task_results(self.loop.host, self.get_pending().jobs_to_train, results)

    def close_round(self, wall: float) -> Row:
        """Make the new model of what came back, and commit the round; `wall` is the seconds that training took."""
        server_state, row = self.loop.close_round(self.get_pending(), self.outcomes, wall)
        self.commit_round(server_state, row)
        return row

    def commit_round(self, server_state: ServerState, row: Row) -> None:
        """Let a round count: its model, what devices remember of it, and a model that it has pruned."""
        before = self.get_pending().server_state
        self.loop.host.commit_round(self.number, kept=not row.get("void"))
        self.loop.follow_pruning(before, server_state)
        self.server_state, self.number, self.pending = server_state, self.number + 1, None

    def get_pending(self) -> PendingRound:
        assert self.pending is not None, "the round is not open"
        return self.pending


def play_round_of_each(sessions: Sequence[Session], engine: Engine) -> list[Row]:
    """One round of each session, all their devices trained in one call; wall time is divided by numbers of devices."""
    for session in sessions:
        session.open_round()
    start = perf_counter()
    counts = train_opened_rounds(sessions, engine)
    wall, total = perf_counter() - start, max(1, sum(counts))
    return [session.close_round(wall * count / total) for session, count in zip(sessions, counts)]


@in_phase("train")
def train_opened_rounds(sessions: Sequence[Session], engine: Engine) -> list[int]:
    """Train the devices of all sessions, whose rounds are open, in one call; how many devices each session has."""
    tasks = [session.make_tasks() for session in sessions]
    results = iter(engine.train([task for tasks_of_session in tasks for task in tasks_of_session]))
    for session, tasks_of_session in zip(sessions, tasks):
        session.store_results([next(results) for _ in tasks_of_session])
    return [len(tasks_of_session) for tasks_of_session in tasks]


def play_round(session: Session) -> Row:
    """One round of a session, trained by its host's own engine."""
    return play_round_of_each([session], session.loop.host.engine)[0]


def train_jobs(host: DeviceHost, jobs: Sequence[Job]) -> list[Outcome]:
    """The outcomes of these jobs, trained by the host's own engine; nothing is committed."""
    return store_task_results(host, jobs, host.engine.train(host.make_tasks(jobs)))


def store_task_results(host: DeviceHost, jobs: Sequence[Job], results: Sequence[TaskResult]) -> list[Outcome]:
    """The outcomes of jobs; what devices remember is kept by the host until the round is committed."""
    return host.store_results([JobResult(job, *result) for job, result in zip(jobs, results, strict=True)])

"""An engine whose programs can be looked at after a run."""

from shoal.engines.batched.engine import BatchedEngine


class OpenEngine(BatchedEngine):
    """Keeps its programs at the end of a run."""

    def close(self) -> None:
        pass

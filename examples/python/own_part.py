"""A method of your own as an object: the server takes a share of every step."""

from dataclasses import dataclass

import shoal
from shoal.parts import FedProx


@dataclass(frozen=True)
class Damp(shoal.Part):
    """Takes a share of every step of the server: x <- a + f (x - a)."""

    factor: float = 0.5

    def serve(self, params, state, round):
        return {k: round.anchor[k] + self.factor * (v - round.anchor[k]) for k, v in params.items()}, state


print(shoal.run([FedProx(0.1), Damp(0.8)], rounds=5))

"""The model of the best validation metric so far, kept in the run's folder beside the checkpoint.

Which round it is of follows from the history. Its file is written before the checkpoint that needs it, and older ones
are removed after that, so that a run which is killed at any moment still has the file of its checkpoint.
"""

from dataclasses import dataclass

from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.ledger import Row
from shoal.core.model import tree
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params
from shoal.core.server_state import ServerState
from shoal.core.short_repr import make_short_repr
from shoal.runs.build import Assembly
from shoal.runs.checkpoint import describe_cuts
from shoal.runs.headline import is_improvement
from shoal.runs.history import History
from shoal.runs.store import RunFolder
from shoal.runs.watching import make_trained_module
from shoal.storage.files import damaged_file_error, read_tree


@dataclass(frozen=True, eq=False)
class BestModel:
    """The model that was judged best on validation samples."""

    rounds: int
    """After how many rounds."""
    value: float
    """Its validation metric then."""
    net: Net
    params: Params
    cuts: tuple[Plan, ...] = ()

    def __repr__(self) -> str:
        return make_short_repr(self)

    def module(self) -> nn.Module:
        """The model as an ordinary module, with frozen tensors of its own."""
        return make_trained_module(self.net, self.params)


class BestModelKeeper:
    """Holds the server state of the best round of a run whose recipe says `keep_best`, and writes its model."""

    def __init__(self, assembly: Assembly, history: History, folder: RunFolder | None):
        self.assembly, self.history, self.folder = assembly, history, folder
        self.is_on = assembly.recipe.keep_best
        best = history.find_best_round() if self.is_on else None
        self.rounds = 0 if best is None else best + 1
        self.value = history.best if best is not None else None
        self.server_state: ServerState | None = None
        """Of the best round; None before there is one, and where its file is already written."""

    def consider(self, server_state: ServerState, row: Row) -> None:
        """Take the model of a round that was just committed if it is better than all before it."""
        value = row.get(self.history.headline)
        if self.is_on and value is not None and is_improvement(value, self.value, self.history.better):
            self.rounds, self.value, self.server_state = row["round"] + 1, value, server_state

    def save(self) -> None:
        """Write the best model into the folder, unless it is there."""
        if self.folder and self.server_state:
            model = self.get_model()
            assert model
            content = {"params": model.params, "cuts": describe_cuts(model.cuts), "model_digest": model.net.digest}
            self.folder.write_best_model(model.rounds, content)
            self.server_state = None

    def remove_former(self) -> None:
        """Remove files of models that are no longer the best."""
        if self.folder and self.is_on:
            self.folder.remove_best_models(but=self.rounds)

    def get_model(self) -> BestModel | None:
        """The best model so far, from memory or from its file; None where none is kept."""
        if not self.is_on or self.value is None:
            return None
        if self.server_state is None:
            return read_best_model(self.folder, self.history, self.assembly.net) if self.folder else None
        state = self.server_state
        params = self.assembly.loop.make_final_params(state, self.rounds)
        return BestModel(self.rounds, self.value, state.net, params, state.cuts)


def read_best_model(folder: RunFolder, history: History, net: Net) -> BestModel | None:
    """The best model of a folder by this history; None where it has no file. `net` is that before all prunings."""
    best = history.find_best_round()
    if best is None or not (file := folder.get_best_file(best + 1)).is_file():
        return None
    content = read_tree(file)
    try:
        cuts = tuple(Plan(cut["kept"], cut["masks"]) for cut in content["cuts"])
        for cut in cuts:
            net = net.cut(cut)
        params = tree.map_tensors(lambda t: t.to(net.place), content["params"])
        digest = content["model_digest"]
        if {k: v.shape for k, v in params.items()} != {k: v.shape for k, v in net.initial.items()}:
            raise ValueError("its tensors are not those of the model")
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        raise damaged_file_error(file, error) from error
    if digest != net.digest:
        problem = f"{file} was trained on other frozen tensors than those of the model now."
        raise ShoalError("other-recipe", problem, "Give the model the same backbone as then.")
    value = history.best
    assert value is not None
    return BestModel(best + 1, value, net, params, cuts)

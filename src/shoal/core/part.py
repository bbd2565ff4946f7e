"""A part of a method: a frozen dataclass that acts at some of the named points of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from shoal.core.batch import BatchScore, GradientFunction, Samples, Scorer
from shoal.core.extras import Declaration
from shoal.core.metric import Metric
from shoal.core.model.net import Net
from shoal.core.model.plan import Plan
from shoal.core.model.tree import Params, Tree
from shoal.core.types import Device, Local, Reply, Round, Work
from shoal.core.wire import CodecLink, Message


@dataclass(frozen=True)
class Neutral:
    """The values of a part's fields at which it changes nothing, and the condition under which that holds."""

    settings: Mapping[str, Any]
    rounds: int | None = None
    """For how many rounds it holds (None: for all)."""
    equal_devices: bool = False
    """Whether it holds only when all devices make the same number of steps on the same number of samples."""


@dataclass(frozen=True)
class Part:
    """One method of a part per point of a round, each the identity: a part overrides those it needs. It holds no state.

    once     model, enrol
    server   select -> plan -> send -> encode ------------------------------------------> (downlink)
    device   decode -> data -> begin -> (mask -> objective -> gradient -> step)* -> end -> measure -> encode -> (uplink)
    server                  decode -> sift -> weigh -> combine -> serve -> prune -> observe -> evaluate
    a device's own model    personal -> finetune
    """

    sets: ClassVar[frozenset[str]] = frozenset()
    """Those of select, plan and weigh whose value this part sets rather than scales; a method has one setter each."""
    replaces_loss: ClassVar[bool] = False
    """Whether `objective` ignores the loss it is given; a method has at most one such part, and it is the innermost."""
    replaces_gradient: ClassVar[bool] = False
    """Whether `gradient` gets a gradient of its own; a method has at most one such part, and it is the innermost."""
    perturbs_gradient: ClassVar[bool] = False
    """Whether `gradient` is taken at shifted parameters (as in SAM); a method has at most one such part."""
    needs_whole: ClassVar[bool] = False
    """Whether every reply must cover the whole model; it is refused with parts that leave some of it out."""
    makes_features: ClassVar[bool] = False
    """Whether `model` changes what the features are; such a part changes the model before the others."""
    stage: ClassVar[str] = ""
    """For codecs: rows, sparsify, quantise or pack, in the order they run; a method has at most one of each."""
    directions: ClassVar[frozenset[str]] = frozenset({"up"})
    """For codecs: the directions they code, of up and down."""
    codes_delta: ClassVar[bool] = True
    """For codecs: whether what they code must be a delta (they may leave out what is near 0)."""
    carries: ClassVar[str] = "delta"
    """Whether replies must carry a "delta" to what was received, or plain "values"."""
    corrects_steps: ClassVar[bool] = False
    """Whether it corrects local steps by what other devices did (SCAFFOLD); a method has at most one such part."""
    reads: ClassVar[frozenset[str]] = frozenset()
    """What it reads on the server about single devices: updates, extras, cards, sizes, outcomes."""
    renamed_options: ClassVar[Mapping[str, str]] = {}
    """Names that its fields once had -> those of now; expressions may use both."""
    neutral: ClassVar[Neutral | None] = None
    """The setting at which a run equals FedAvg; None when there is none."""
    assumes_sgd: ClassVar[bool] = False
    """Whether it takes the way of a device for lr times its gradients, which is wrong with Adam and its like."""
    assumes_constant_lr: ClassVar[bool] = False
    """Whether it is wrong where the learning rate changes over the local steps of a round."""
    mixes_batch: ClassVar[bool] = False
    """Whether its loss of a batch, or what it puts into `aux`, is not a mean over samples."""
    keeps_layers: ClassVar[str] = ""
    """Which layers of the model stay on devices by its `model`: "head", "body" or "norms".

    A method has at most one part that divides head and body; all are refused with parts that say `needs_server_model`.
    """
    freezes_rest: ClassVar[bool] = False
    """Whether its `model` freezes all that it does not choose, before other parts add to the model.

    A method has at most one such part. Only parts that keep norms on devices change the model before it.
    """
    needs_server_model: ClassVar[bool] = False
    """Whether it runs the model on the server, or makes layers there, for which the server must have all of it."""
    needs_class_logits: ClassVar[bool] = False
    """Whether it needs targets that are classes and a logit for each; it is refused with tasks that have none."""
    keeps_slots: ClassVar[bool] = False
    """Whether devices remember the optimiser's state (momentum, moments) from round to round."""
    needs_part: ClassVar[str] = ""
    """The part without which it has nothing to work on; runs in miniature list it before."""
    needs_positions: ClassVar[bool] = False
    """Whether it works on models with positions (tokens of a text, patches) only; runs in miniature have one such."""
    cite: ClassVar[tuple[str, ...]] = ()
    """The papers it comes from, by their BibTeX keys in `report/bibliography.py`; empty when it comes from none."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """The numbers that it tells by `round.tell`, or that its `measure` reports under the same names."""

    # state --------------------------------------------------------------------------------------------------------
    def init_server(self, round: Round) -> Tree:
        """The part's state on the server before the first round."""
        return {}

    def init_device(self, params: Params) -> Tree:
        """The part's memory on a device before its first round."""
        return {}

    # once ---------------------------------------------------------------------------------------------------------
    def model(self, net: Net) -> Net:
        """The model that is trained, made from the recipe's."""
        return net

    def enrol(self, card: dict[str, Tensor], samples: Samples, net: Net) -> dict[str, Tensor]:
        """The enrolment card of a device, with what this part needs to know about it added; runs on the device."""
        return card

    def declare_card(self, net: Net) -> Declaration | None:
        """What `enrol` adds to the card, by name; None: not declared, and the part cannot be used with real devices."""
        return None

    def taps(self, net: Net) -> tuple[str, ...]:
        """The modules whose outputs, or `into NAME` whose inputs, `objective` and `step` want in `BatchScore.taps`."""
        return ()

    # server, before training --------------------------------------------------------------------------------------
    def select(self, devices: Sequence[int], state: Tree, round: Round) -> tuple[Sequence[int], Tree]:
        """The cohort: devices that train in this round, out of `round.eligible`."""
        return devices, state

    def plan(self, plans: Mapping[int, Plan], state: Tree, round: Round) -> tuple[Mapping[int, Plan], Tree]:
        """By device of the cohort: which part of the model it is sent and trains."""
        return plans, state

    def send(self, state: Tree, round: Round) -> tuple[dict[int, dict], Tree]:
        """What travels to each device beside its slice: tensors, requests, and trees, which are cut by the plan."""
        return {}, state

    # device -------------------------------------------------------------------------------------------------------
    def data(self, samples: Samples, memory: Tree, device: Device) -> Samples:
        """The samples that a device trains on in this round: at least one."""
        return samples

    def begin(self, params: Params, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """The parameters that training starts from, and the part's state during it."""
        return params, {}

    def draw(self, generator: torch.Generator, device: Device, step: int) -> dict[str, Tensor]:
        """Random tensors for one local step, which reads them in `Local.draws`."""
        return {}

    def pad_extras(self, got: dict[str, Any], net: Net) -> dict[str, Any]:
        """What `send` put beside the model, padded to shapes that are the same on all devices, where they were not.

        Devices can then train in one call. Steps find it in `Local.got` instead, and must come to the same numbers.
        """
        return got

    def mask(self, local: Local) -> Params:
        """By tensor, 1 where this local step trains and 0 where it does not; tensors that it trains whole are left out.

        What a step does not train has no gradient, no momentum and no decay in it.
        """
        return {}

    def objective(self, inner: Scorer, local: Local) -> Scorer:
        """The local objective, made from that of the parts listed after this one."""
        return inner

    def gradient(self, inner: GradientFunction, local: Local) -> GradientFunction:
        """Another way to get the gradient of the local objective, made from that of the parts listed after this one.

        `inner` may be called several times in a step; dropout layers draw the same numbers each time.
        """
        return inner

    def step(self, update: Params, state: Tree, scored: BatchScore, local: Local) -> tuple[Params, Tree]:
        """The update of one local step (the parameters lose lr times it), and the part's new state."""
        return update, state

    def end(self, params: Params, state: Tree, memory: Tree, device: Device) -> tuple[Params, Tree]:
        """The parameters returned, and the part's memory for the device's next round."""
        return params, memory

    def measure(self, params: Params, state: Tree, device: Device) -> dict:
        """What the part reports beside the update: tensors, and trees, which are cut by the plan."""
        return {}

    def declare_extras(self, net: Net, plan: Plan) -> Declaration | None:
        """What `measure` returns under a plan, by name; None: not declared, and only simulations can use the part."""
        return None

    # wire ---------------------------------------------------------------------------------------------------------
    def encode(self, message: Message, memory: Tree, link: CodecLink) -> tuple[Message, Tree]:
        """For codecs: the smaller message, and the codec's memory (on the server: its state)."""
        return message, memory

    def decode(self, message: Message, link: CodecLink) -> Message:
        """For codecs: the message as it was before `encode`, or as near to it as `error` says."""
        return message

    def outline(self, shapes: dict[str, torch.Size], message: Message) -> dict[str, torch.Size]:
        """For codecs: the shapes of the values after `encode`, from the shapes before it and the coded message."""
        return shapes

    def error(self, value: Tensor) -> Tensor:
        """For codecs: how far each element may lie from `value` after `encode` and `decode`."""
        return torch.zeros_like(value)

    # server, after training ---------------------------------------------------------------------------------------
    def sift(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Sequence[Reply], Tree]:
        """The replies that go on, as they are or with another delta; the others count no more in this round."""
        return replies, state

    def weigh(self, weights: Tensor, state: Tree, round: Round) -> tuple[Tensor, Tree]:
        """One weight from 0 up for each of `round.replies`; they are normalised to sum to 1 afterwards."""
        return weights, state

    def combine(self, replies: Sequence[Reply], state: Tree, round: Round) -> tuple[Params, Tree]:
        """The aggregate of the replies: new parameters. A method has at most one part that acts here.

        Without one, each coordinate is the weighted mean over the replies that cover it.
        """
        raise NotImplementedError("only the part that owns it is asked to combine")

    def serve(self, params: Params, state: Tree, round: Round) -> tuple[Params, Tree]:
        """The new global model, made from the aggregate: a server optimiser, for example."""
        return params, state

    def prune(self, plan: Plan, state: Tree, round: Round) -> tuple[Plan, Tree]:
        """What of the model is kept from now on; the whole of it unless a part says otherwise."""
        return plan, state

    def observe(self, judged: Params, state: Tree, round: Round) -> Tree:
        """The part's new state, from the model that the parts listed before this one would have evaluated as ""."""
        return state

    def evaluate(self, judged: dict[str, Params], state: Tree, round: Round) -> dict[str, Params]:
        """The models that are evaluated, by name: "" is the global model, others get columns of their own."""
        return judged

    # a device's own model ------------------------------------------------------------------------------------------
    def personal(self, params: Params, memory: Tree, device: Device) -> Params:
        """The model that a device uses itself, from the shared tensors of now and what it remembers."""
        return params

    def finetune(self, work: Work) -> Work:
        """How long a device trains its own model before it uses it, made from its work in a round.

        It trains without parts, and nothing of it is kept; without a part that acts here it does not train. A method
        has at most one such part.
        """
        return work

    # the part as a value ------------------------------------------------------------------------------------------
    @classmethod
    def name(cls) -> str:
        """The name in expressions: the class name in lower case."""
        return cls.__name__.lower()

    def acts_at(self, point: str) -> bool:
        """Whether this part overrides a point."""
        return getattr(type(self), point) is not getattr(Part, point)

    def __str__(self) -> str:
        """The expression that makes this part; fields at their defaults are left out."""
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        default = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        shown = ", ".join(f"{k}={v!r}" for k, v in given if k not in default or default[k] != v)
        return f"{self.name()}({shown})" if shown else self.name()


POINTS = (
    "model enrol select plan send data begin draw mask objective gradient step end measure encode decode sift weigh "
    "combine serve prune observe evaluate personal finetune"
).split()

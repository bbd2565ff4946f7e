"""The forward pass of models with convolutions on a processor: traced once, with kernels of our own, on several cores.

An evaluation of LeNet takes two fifths of the time that it takes as the module is written, on one core.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn

from shoal.core.measures.forward_pass import run_model
from shoal.core.model.inputs import Inputs
from shoal.core.model.net import Net
from shoal.core.model.tree import Params
from shoal.core.streams import seed_generator
from shoal.engines.batched.fx_cse import share_subexpressions
from shoal.engines.batched.fx_passes import fuse_biases, remove_no_ops
from shoal.engines.batched.fx_trace import trace_function
from shoal.engines.batched.graph import pick_fastest_call
from shoal.engines.batched.native_ops import use_native_kernels
from shoal.engines.batched.torchscript import optimized_execution

log = logging.getLogger("shoal")
ROWS = 64
"""Samples in one call: what they make fits into the caches of a core."""

ForwardProgram = Callable[..., tuple[list[Tensor], Tensor]]
"""Tensors of the model and images -> outputs, in the form of a step's program."""


class NativeForwardPass:
    """Outputs by traced programs in so many threads; by the model as it is where that cannot be traced.

    The samples are divided alike whatever the number of threads, so that it changes no bit.
    """

    def __init__(self, threads: int = 1):
        self.threads = threads
        self.programs: WeakKeyDictionary[Net, dict[torch.Size, ForwardProgram | None]] = WeakKeyDictionary()
        """By model and shape of the images, its program; None where it has to be run as it is."""

    def __call__(self, net: Net, params: Params, inputs: Inputs) -> Tensor:
        if not is_traceable(net, inputs):
            return run_model(net, params, inputs)
        assert isinstance(inputs, Tensor)
        pieces = inputs.split(ROWS)
        own = [params[name] for name in net.initial]  # in one order, whatever that of the parameters
        tensors = [put_channels_last(t) for t in (*own, *net.frozen.values())]
        programs = [self.find_program(net, tensors, piece) for piece in pieces]

        def run_piece(program: ForwardProgram, piece: Tensor) -> Tensor:
            with torch.no_grad(), optimized_execution(False):  # both are settings of a thread
                return program(*tensors, piece)[0][0]

        sound = [program for program in programs if program is not None]
        if len(sound) < len(programs):
            return run_model(net, params, inputs)
        if self.threads == 1 or len(pieces) == 1:
            return torch.cat([run_piece(*pair) for pair in zip(sound, pieces)])
        with ThreadPoolExecutor(self.threads) as pool:
            return torch.cat(list(pool.map(run_piece, sound, pieces)))

    def find_program(self, net: Net, tensors: Sequence[Tensor], images: Tensor) -> ForwardProgram | None:
        """The program for images of this shape, traced at the first call and compared with the model itself."""
        programs = self.programs.setdefault(net, {})
        if images.shape not in programs:
            try:
                with seed_generator(0, net.place):  # a trace of layers that draw takes no numbers from the evaluation
                    programs[images.shape] = trace_forward(net, tensors, images)
            except Exception as error:
                log.debug("the model is evaluated as it is written: %s", error)
                programs[images.shape] = None
            finally:
                net.reset_slots()
        return programs[images.shape]


def is_traceable(net: Net, inputs: Inputs) -> bool:
    """Whether a model is one of images with convolutions, on a processor with one thread for each operation."""
    if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not len(inputs) or net.half:
        return False
    plain = net.place.type == "cpu" and inputs.is_floating_point() and torch.get_num_threads() == 1
    return plain and any(isinstance(layer, nn.Conv2d) for layer in net.module.modules())


def trace_forward(net: Net, tensors: Sequence[Tensor], images: Tensor) -> ForwardProgram:
    """The program of a forward pass of a net's own and frozen tensors.

    Raises where it cannot be traced, draws random numbers, normalises over the batch, or gives other outputs than the
    model for half of other images at a time: a model whose outputs depend on what else is in a call must not be called
    in pieces. That comparison alone sees nothing while the last layer is all zeros.
    """
    names = list(net.initial)

    def run_forward(*flat: Tensor) -> tuple[list[Tensor], Tensor]:
        params, frozen = dict(zip(names, flat)), flat[len(names) : -1]
        with net.substitute_frozen(frozen):
            outputs = run_model(net, params, put_channels_last(flat[-1]))
        return [outputs], outputs.new_zeros(())

    module = trace_function(run_forward, [*tensors, images], False)
    if module is None:
        raise ValueError("torch cannot trace")
    remove_no_ops(module.graph)
    graph = share_subexpressions(module.graph)
    refuse_random_numbers(graph)
    refuse_batch_statistics(graph)
    fuse_biases(graph)
    use_native_kernels(graph)
    module.graph = graph
    program = pick_fastest_call(module)
    with torch.no_grad(), optimized_execution(False):
        others = put_channels_last(images.flip(0) / 2)  # what the trace has of these images is wrong for others
        found = program(*tensors, others)[0][0]
        halves = others.split(-(-len(images) // 2))
        wanted = torch.cat([run_model(net, dict(zip(names, tensors)), half) for half in halves])
    tolerance = 1e-3 if wanted.dtype == torch.float32 else 1e-9
    if found.shape != wanted.shape or not torch.allclose(found, wanted, tolerance, tolerance, equal_nan=True):
        raise ValueError("its program gives other outputs")
    return program


def refuse_random_numbers(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise ValueError(f"it draws random numbers ({node.target})")


def refuse_batch_statistics(graph: fx.Graph) -> None:
    """Refuse batch norm that takes mean and variance from the batch.

    Instance norm is traced as batch norm of a single row, which has all samples beside each other as channels.
    """
    for node in graph.nodes:
        if normalises_by_batch(node) and len(node.args[0].meta["val"]) > 1:
            raise ValueError(f"it normalises over the batch ({node.target})")


def normalises_by_batch(node: fx.Node) -> bool:
    """Whether an operation is batch norm in training mode."""
    if not isinstance(node.target, torch._ops.OpOverload) or "batch_norm" not in node.target.name():
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    values = dict(zip(names, node.args)) | node.kwargs
    return "with_update" in node.target.name() or bool(values.get("training"))


def put_channels_last(tensor: Tensor) -> Tensor:
    """Images or filters with their channels last, the form that the kernels read; other tensors in the ordinary one."""
    images = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last if images else torch.contiguous_format)

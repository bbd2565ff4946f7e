"""Single convolutions of many devices in every form: microseconds of the output and of each gradient.

`large_models.py` runs it. On a GPU ten calls are one CUDA graph, which is replayed. "Separate" is a plain convolution
with channels last for each device; "bare" forms are given their operands as they want them and leave their results so:
what a form would cost if all that is around it came for nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from gpu_clock import OutOfTime, measure_microseconds, print_row
from torch import Tensor

from shoal.engines.batched import gpu_conv
from shoal.engines.batched.conv_products import find_both_windows, flatten_filters, flatten_rows, unfold_patches

aten = torch.ops.aten
Call = Callable[[], Any]
CHANNELS_LAST = {"memory_format": torch.channels_last}


class Layer(NamedTuple):
    """A convolution of one device."""

    name: str
    channels: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1
    padding: int = 0


RESNET18 = (
    Layer("resnet18 stem", 3, 64, 32, 7, 2, 3),
    Layer("resnet18 layer1", 64, 64, 8, 3, 1, 1),
    Layer("resnet18 layer4", 512, 512, 1, 3, 1, 1),
    Layer("resnet18 layer3", 256, 256, 2, 3, 1, 1),
    Layer("resnet18 layer2", 128, 128, 4, 3, 1, 1),
    Layer("resnet18 layer2 first", 64, 128, 8, 3, 2, 1),
    Layer("resnet18 layer2 short", 64, 128, 8, 1, 2),
    Layer("resnet18 layer3 first", 128, 256, 4, 3, 2, 1),
    Layer("resnet18 layer4 first", 256, 512, 2, 3, 2, 1),
    Layer("resnet18 layer4 short", 256, 512, 2, 1, 2),
)
VGG11 = (
    Layer("vgg11 conv1", 3, 64, 32, 3, 1, 1),
    Layer("vgg11 conv2", 64, 128, 16, 3, 1, 1),
    Layer("vgg11 conv4", 256, 256, 8, 3, 1, 1),
    Layer("vgg11 conv6", 512, 512, 4, 3, 1, 1),
    Layer("vgg11 conv7", 512, 512, 2, 3, 1, 1),
)
SMALL = (
    Layer("lenet conv1", 3, 6, 32, 5),
    Layer("lenet conv2", 6, 16, 14, 5),
    Layer("cnn conv1", 3, 32, 32, 3),
    Layer("cnn conv2", 32, 64, 15, 3),
    Layer("cnn conv3", 64, 64, 6, 3),
)
WANTED = ("output", "input gradient", "filter gradient")
FORMS = ("grouped", "channels last", "product", "fold", "separate")
BARE = ("separate bare", "4 streams", "bmm alone")


def convolve_separately(x: Tensor, filters: Tensor, *geometry: Any) -> Tensor:
    made = [
        aten.convolution(own.contiguous(**CHANNELS_LAST), its.contiguous(**CHANNELS_LAST), None, *geometry[:-1], 1)
        for own, its in zip(x.chunk(geometry[-1], 1), filters.chunk(geometry[-1]))
    ]
    return torch.cat(made, 1).contiguous()


def backpropagate_separately(mask: list[bool], grad: Tensor, x: Tensor, filters: Tensor, *geometry: Any) -> Tensor:
    groups, wanted = geometry[-1], mask.index(True)
    pieces = zip(grad.chunk(groups, 1), x.chunk(groups, 1), filters.chunk(groups))
    made = [
        aten.convolution_backward(*(t.contiguous(**CHANNELS_LAST) for t in own), None, *geometry[:-1], 1, mask)[wanted]
        for own in pieces
    ]
    return torch.cat(made, 1 - wanted).contiguous()


def add_separate_forms() -> None:
    """Let rules name the form `separate`, too."""
    gpu_conv.OUTPUT_FORMS["separate"] = convolve_separately
    gpu_conv.INPUT_GRADIENT_FORMS["separate"] = lambda *given: backpropagate_separately(gpu_conv.OF_INPUT, *given)
    gpu_conv.FILTER_GRADIENT_FORMS["separate"] = lambda *given: backpropagate_separately(gpu_conv.OF_FILTERS, *given)


class Operands:
    """The tensors of a convolution of several devices, and its calls in every form."""

    def __init__(self, layer: Layer, devices: int, batch: int, dtype: torch.dtype, place: torch.device):
        self.devices, self.batch = devices, batch
        self.geometry = ([layer.stride] * 2, [layer.padding] * 2, [1, 1], False, [0, 0], devices)
        draw = lambda *shape: torch.randn(*shape, device=place).to(dtype)  # noqa: E731
        self.x = draw(batch, devices * layer.channels, layer.size, layer.size)
        self.filters = draw(devices * layer.outputs, layer.channels, layer.kernel, layer.kernel)
        self.grad = draw(*aten.convolution(self.x, self.filters, None, *self.geometry).shape)

    def make_call(self, wanted: str, form: str) -> Call | None:
        """None where there is no such form."""
        if form in BARE:
            return self.make_product(wanted) if form == "bmm alone" else self.make_bare(wanted, form == "4 streams")
        forms = (gpu_conv.OUTPUT_FORMS, gpu_conv.INPUT_GRADIENT_FORMS, gpu_conv.FILTER_GRADIENT_FORMS)
        function = forms[WANTED.index(wanted)].get(form)
        given = (self.x, self.filters) if wanted == "output" else (self.grad, self.x, self.filters)
        return function and (lambda: function(*given, *self.geometry).contiguous())

    def make_bare(self, wanted: str, in_streams: bool) -> Call:
        """A plain convolution for each device, on its own tensors with channels last."""
        pieces = [
            [own.contiguous(**CHANNELS_LAST) for own in t.chunk(self.devices, along)]
            for t, along in ((self.grad, 1), (self.x, 1), (self.filters, 0))
        ]
        geometry, mask = (*self.geometry[:-1], 1), [wanted == name for name in WANTED[1:]] + [False]

        def compute(grad: Tensor, x: Tensor, filters: Tensor) -> Any:
            if wanted == "output":
                return aten.convolution(x, filters, None, *geometry)
            return aten.convolution_backward(grad, x, filters, None, *geometry, mask)

        if not in_streams or not self.x.is_cuda:
            return lambda: [compute(*own) for own in zip(*pieces)]
        streams = [torch.cuda.Stream() for _ in range(4)]

        def compute_in_streams() -> list[Any]:
            here, made = torch.cuda.current_stream(), []
            for stream in streams:
                stream.wait_stream(here)
            for number, own in enumerate(zip(*pieces)):
                with torch.cuda.stream(streams[number % len(streams)]):
                    made.append(compute(*own))
            for stream in streams:
                here.wait_stream(stream)
            return made

        return compute_in_streams

    def make_product(self, wanted: str) -> Call:
        """The matrix product alone."""
        windows = find_both_windows(self.x.shape, self.filters.shape, *self.geometry[:2])
        patches = unfold_patches(self.x, *windows, self.devices)
        filters, rows = flatten_filters(self.filters, *windows, self.devices), flatten_rows(self.grad, self.devices)
        pairs = {"output": (patches, filters.mT), "input gradient": (rows, filters)}
        left, right = (*pairs.values(), (rows.mT, patches))[WANTED.index(wanted)]
        return lambda: torch.bmm(left, right)


def list_cases(place: torch.device) -> Iterator[tuple[Layer, int, int]]:
    """Layers with numbers of devices and batches; on a processor a few small ones."""
    if place.type == "cpu":
        yield from ((layer, 3, 2) for layer in (*SMALL[:2], RESNET18[1], RESNET18[6]))
        return
    yield from ((layer, 10, 50) for layer in (*RESNET18, *VGG11))
    yield from ((layer, devices, 10) for devices in (100, 10, 30) for layer in SMALL)


def measure_convolutions(place: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Print the table of single convolutions."""
    forms = (*FORMS, *BARE)
    print_row("layer", "devices x batch", "dtype", "of", *forms)
    print_row(*["---"] * 4, *["--:"] * len(forms))
    for dtype in dtypes:
        for layer, devices, batch in list_cases(place):
            operands = Operands(layer, devices, batch, dtype, place)
            for wanted in WANTED:
                cells = [measure_cell(operands, wanted, form, place) for form in forms]
                print_row(layer.name, f"{devices} x {batch}", str(dtype)[6:], wanted, *cells)


def measure_cell(operands: Operands, wanted: str, form: str, place: torch.device) -> str:
    try:
        call = operands.make_call(wanted, form)
        return f"{measure_microseconds(call, place):.0f}" if call else ""
    except OutOfTime:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:40]}".replace("\n", " ")


def measure_compiled(place: torch.device) -> None:
    """Print what output and both gradients cost together where they are one compiled program."""
    print_row("layer", "devices x batch", "form", "us, output and both gradients, compiled")
    print_row("---", "---", "---", "--:")
    layers = (SMALL[1],) if place.type == "cpu" else (RESNET18[1], RESNET18[4], RESNET18[5], RESNET18[2])
    devices, batch = (3, 2) if place.type == "cpu" else (10, 50)
    for layer in layers:
        operands = Operands(layer, devices, batch, torch.float32, place)
        for form in ("grouped", "product", "fold"):
            of_others = "product" if form == "fold" else form

            def compute(x: Tensor, filters: Tensor, grad: Tensor, form=form, of_others=of_others, operands=operands):
                geometry = operands.geometry
                made = gpu_conv.convolve(x, filters, None, *geometry, form=of_others)
                both = gpu_conv.backpropagate(
                    grad, x, filters, [0], *geometry, [True, True, False], forms=(form, of_others)
                )
                return made, *both[:2]

            compiled = torch.compile(compute, dynamic=False)
            try:
                call = lambda compiled=compiled, own=operands: compiled(own.x, own.filters, own.grad)  # noqa: E731
                cell = f"{measure_microseconds(call, place):.0f}"
            except OutOfTime:
                raise
            except Exception as error:
                cell = f"{type(error).__name__}: {str(error)[:60]}".replace("\n", " ")
            print_row(layer.name, f"{devices} x {batch}", form, cell)

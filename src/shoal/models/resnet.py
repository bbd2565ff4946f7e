"""ResNet18 in the forms that papers count (He et al., 2016); tensors have the names that torchvision gives them."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from shoal.core.model.net import Net
from shoal.core.model.plan import Axis, Block, Cut, make_output_rows
from shoal.models.image_input import check_image_shape

Norm = Callable[[int], nn.Module]


class Basic(nn.Module):
    """A basic block: two convolutions, and a shortcut around them that is added."""

    def __init__(self, inputs: int, outputs: int, stride: int, bias: bool, norm: Norm):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=bias)
        self.bn1 = norm(outputs)
        self.relu = nn.ReLU()
        self.inner = nn.Identity()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=bias)
        self.bn2 = norm(outputs)
        self.downsample = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=bias), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(self.relu(self.bn1(self.conv1(x))))
        return self.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


def resnet18(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """ResNet18 with a 3x3 stem and a bias in every convolution (11,276,232 parameters with 200 classes)."""
    return build_resnet(input_shape, classes, width, bias=True)


def resnet18_nobias(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """ResNet18 with a 3x3 stem and no bias in its convolutions (11,173,962 parameters with 10 classes)."""
    return build_resnet(input_shape, classes, width)


def resnet18_imagenet(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """ResNet18 with torchvision's 7x7 stem and pooling (11,181,642 parameters with 10 classes)."""
    return build_resnet(input_shape, classes, width, small=False)


def resnet18_gn(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """resnet18 with GroupNorm(2) in place of BatchNorm, as FedMLB has it; no axes."""
    return build_resnet(input_shape, classes, width, bias=True, norm=group_norm)


def resnet18_nobias_gn(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """resnet18-nobias with GroupNorm(2) in place of BatchNorm, as FedMLB has it; no axes."""
    return build_resnet(input_shape, classes, width, norm=group_norm)


def resnet18_imagenet_gn(input_shape: tuple[int, ...], classes: int, width: int = 64) -> Net:
    """resnet18-imagenet with GroupNorm(2) in place of BatchNorm, as FedMLB has it; no axes."""
    return build_resnet(input_shape, classes, width, small=False, norm=group_norm)


group_norm: Norm = partial(nn.GroupNorm, 2)


def build_resnet(
    input_shape: tuple[int, ...],
    classes: int,
    width: int,
    small: bool = True,
    bias: bool = False,
    norm: Norm = nn.BatchNorm2d,
) -> Net:
    """A stem for small or large images, four stages of two basic blocks, the mean over positions, one linear layer."""
    channels, _, _ = check_image_shape(input_shape, "ResNet18")
    stem: list[tuple[str, nn.Module]] = [
        ("conv1", nn.Conv2d(channels, width, *((3, 1, 1) if small else (7, 2, 3)), bias=bias)),
        ("bn1", norm(width)),
        ("relu", nn.ReLU()),
        *([] if small else [("maxpool", nn.MaxPool2d(3, 2, 1))]),
    ]
    stages: list[tuple[str, nn.Module]] = []
    inputs = width
    for stage in range(4):
        outputs = width << stage
        first, second = Basic(inputs, outputs, 1 + (stage > 0), bias, norm), Basic(outputs, outputs, 1, bias, norm)
        stages.append((f"layer{stage + 1}", nn.Sequential(first, second)))
        inputs = outputs
    head = [("avgpool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("fc", nn.Linear(inputs, classes))]
    module = nn.Sequential(OrderedDict((*stem, *stages, *head)))
    blocks = (
        Block("stem", tuple(name for name, _ in stem)),
        *(Block(name, (name,)) for name, _ in stages),
        Block("head", tuple(name for name, _ in head)),
    )
    return Net(
        module, input_shape, classes, find_inner_channels(module), blocks, rows=(make_output_rows("fc", classes),)
    )


def find_inner_channels(module: nn.Module) -> tuple[Axis, ...]:
    """The channels between the two convolutions of each basic block.

    The others meet in a sum, and a GroupNorm makes channels depend on each other: a group without some of its channels
    has another mean than one where they are zero.
    """
    axes = []
    for name, layer in module.named_modules():
        if isinstance(layer, Basic) and isinstance(layer.bn1, nn.BatchNorm2d):
            own = [f"{name}.conv1.{key}" for key, value in layer.conv1.named_parameters()]
            own += [f"{name}.bn1.{key}" for key, value in layer.bn1.state_dict().items() if value.dim()]
            cuts = (*(Cut(tensor, 0) for tensor in own), Cut(f"{name}.conv2.weight", 1, reads=True))
            axes.append(Axis(name, layer.conv1.out_channels, cuts, f"{name}.inner"))
    return tuple(axes)

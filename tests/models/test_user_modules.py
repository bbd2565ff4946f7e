"""Modules of the kinds that torchvision, timm and transformers have: alike on every engine, counted, tried."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal
from shoal.core.model import tree
from shoal.engines.batched.engine import BatchedEngine
from shoal.engines.serial import SerialEngine
from shoal.engines.workers.fork import PoolEngine
from shoal.runs.build import assemble_run
from shoal.runs.model_check import check_model
from shoal.runs.recipe import Recipe
from shoal.testing.rounds import play_rounds


class ResidualBlock(nn.Module):
    """As in torchvision: two convolutions with batch norm, added to what came in through a 1 x 1 convolution."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += self.downsample(x)
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self, num_classes: int):
        super().__init__()
        self.layer1 = ResidualBlock(1, 4, 1)
        self.layer2 = ResidualBlock(4, 6, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.avgpool(self.layer2(self.layer1(x))), 1))


class SqueezeExcite(nn.Module):
    """As in MobileNetV3 and EfficientNet: channels are scaled by what their means say."""

    def __init__(self, channels: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, 2, 1), nn.Conv2d(2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.fc2(nn.functional.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


class Depthwise(nn.Module):
    """An inverted residual with a depthwise convolution, squeeze and excitation, and dropout before the head."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Hardswish())
        self.expand, self.depthwise = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.excite, self.project = SqueezeExcite(8), nn.Conv2d(8, 4, 1)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.project(self.excite(nn.functional.silu(self.depthwise(self.expand(x)))))
        return self.classifier(x.mean((2, 3)))


class SmallViT(nn.Module):
    """As in timm: a class token, learnt positions, LayerScale, torch's fused attention."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.patch_embed = nn.Conv2d(1, 8, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(0.02 * torch.randn(1, 5, 8))
        self.norm1, self.qkv, self.proj = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.gamma = nn.Parameter(1e-2 * torch.ones(8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), 1) + self.pos_embed
        q, k, v = self.qkv(self.norm1(x)).reshape(x.shape[0], 5, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        out = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape[0], 5, 8)
        return self.head(self.norm(x + self.gamma * self.proj(out))[:, 0])


class TorchEncoder(nn.Module):
    """torch's own encoder layer, with `nn.MultiheadAttention` in it."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x[:, 0])).mean(1))


class SmallUNet(nn.Module):
    """Down, up, and a skip that is concatenated; the answer is a number for each image."""

    def __init__(self, outputs: int):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.up, self.merge = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 4, 3, padding=1)
        self.norm, self.out = nn.GroupNorm(2, 4), nn.Linear(4, outputs)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x).relu()
        second = self.down2(nn.functional.max_pool2d(first, 2)).relu()
        merged = self.norm(self.merge(torch.cat((self.up(second), first), 1))).relu()
        return self.out(merged.mean((2, 3)))


class TiedAutoencoder(nn.Module):
    """The decoder's weight is the encoder's, transposed; the answer is the image itself."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(6, 64))
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        code = nn.functional.linear(x.flatten(1), self.weight, self.bias1).tanh()
        return nn.functional.linear(code, self.weight.t(), self.bias2)


class TiedWords(nn.Module):
    """A tensor that two layers hold, a buffer that travels, and one that does not."""

    scale: Tensor
    mask: Tensor

    def __init__(self, num_classes: int):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((64,), 0.5))
        self.register_buffer("mask", (torch.arange(64) % 2).float(), persistent=False)
        self.head = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.second(self.first(x.flatten(1) * self.mask).relu()) * self.scale).relu())


class TwoInputs(nn.Module):
    """An image and a row of a table; the answer is a dict."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.conv, self.table = nn.Conv2d(1, 3, 3), nn.Linear(5, 4)
        self.head = nn.Linear(7, num_classes)

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        seen = self.conv(inputs["image"]).relu().mean((2, 3))
        return {"logits": self.head(torch.cat((seen, self.table(inputs["table"]).relu()), 1)), "features": seen}


class Positive(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.softplus(weight)


class Parametrised(nn.Module):
    """A parametrised layer: its weight is computed from another tensor whenever it is read."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.first = nn.Linear(64, 6)
        nn.utils.parametrize.register_parametrization(self.first, "weight", Positive())
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.flatten(1)).relu())


class FrozenBackbone(nn.Module):
    """A backbone that is not trained, with batch norm, and a head that is."""

    def __init__(self, num_classes: int):
        super().__init__()
        self.backbone = SmallResNet(6).requires_grad_(False)
        self.head = nn.Linear(6, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def make_images(count: int = 60) -> Tensor:
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def make_data(kind: str) -> Any:
    x = make_images()
    labels = torch.arange(len(x)) % 3
    if kind == "two":
        return {"image": x, "table": x.flatten(1)[:, :5].contiguous()}, labels
    if kind == "number":
        return x, x.flatten(1).sum(1)
    return (x, x.flatten(1)) if kind == "itself" else (x, labels)


MODULES: dict[str, tuple[nn.Module, str, dict[str, Any]]] = {
    "resnet": (SmallResNet(3), "labels", {"method": "fedprox"}),
    "depthwise": (Depthwise(3), "labels", {"optimiser": "adamw", "lr": 0.01}),
    "vit": (SmallViT(3), "labels", {"method": "scaffold"}),
    "encoder": (TorchEncoder(3), "labels", {}),
    "unet": (SmallUNet(1), "number", {"lr": 0.001}),
    "autoencoder": (TiedAutoencoder(), "itself", {"method": "feddyn"}),
    "tied": (TiedWords(3), "labels", {"method": "topk(ratio=0.5)"}),
    "parametrised": (Parametrised(3), "labels", {"method": "scaffold"}),
    "two inputs": (TwoInputs(3), "two", {"method": "fedavgm"}),
    "frozen": (FrozenBackbone(3), "labels", {"lr_groups": "head.weight=2"}),
}


def assemble(name: str) -> Any:
    module, kind, settings = MODULES[name]
    given = shoal.hand_over_objects({"data": make_data(kind), "model": module})
    small = {"devices": 4, "sample": 4, "rounds": 2, "batch": 8, "split": "quantity:0.9", "precision": "float64"}
    return assemble_run(Recipe().with_values(**small | given | settings))


def play(name: str, engine: Any) -> tuple[Any, list[float]]:
    assembly = assemble(name)
    assembly.loop.host.engine = engine
    state, rows = play_rounds(assembly.loop, assembly.loop.start(assembly.net), 0, 2)
    return state.params, [row["train_loss"] for row in rows]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_trains_alike_on_every_engine(name):
    expected, losses = play(name, SerialEngine())
    batched = BatchedEngine(4)
    pool = [PoolEngine(2, 4, lambda: batched)] if hasattr(os, "fork") else []
    for engine in (batched, *pool):
        found, other = play(name, engine)
        if engine is not batched:
            engine.close()
        pairs = zip(tree.collect_tensors(found), tree.collect_tensors(expected), strict=True)
        assert max(float((a.double() - b.double()).abs().max()) for a, b in pairs) <= 1e-9
        assert other == pytest.approx(losses, abs=1e-9)
    assert not batched.unvectorisable, "it should train many devices in one call"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_tried_and_counted(name):
    module, kind, _ = MODULES[name]
    given = shoal.hand_over_objects({"data": make_data(kind), "model": module})
    methods = ["fedavg", "scaffold", "fjord", "mixup", "fedlc", "fedbr"]
    check = check_model(Recipe().with_values(**given), methods)
    trained = {id(p): p.numel() for p in module.parameters() if p.requires_grad}
    assert check.parameters == sum(trained.values()) and check.is_vectorised and check.macs > 0
    assert set(check.step_seconds) == {"serial", "batched"} and min(check.step_seconds.values()) > 0
    trials = {trial.method: trial for trial in check.methods}
    assert trials["fedavg"].trains and trials["fedavg"].vectorised and trials["scaffold"].trains
    assert trials["fjord"].trains == bool(check.axes)
    assert ("blocks of a model" if check.task == "classify" else "task regress") in trials["fedbr"].reason
    assert trials["mixup"].trains == (kind != "two")
    assert trials["fedlc"].trains == (check.task == "classify")
    assert not [trial.reason for trial in check.methods if trial.kind == "bug"]
    assert (check.frozen > 0) == (name == "frozen") and (check.tied == {"second.weight": "first.weight"}) == (
        name == "tied"
    )
    assert check.mixes_batch == (name == "resnet") and check.has_dropout == (name == "depthwise")

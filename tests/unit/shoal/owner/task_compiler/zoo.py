"""Models that people bring to federated learning, at the sizes that they have: a torch module, a loss and samples each.

A family of layers is here once for each form that torch traces differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # torch's usual name
from torch.nn.utils.parametrizations import weight_norm

Entry = Callable[[], tuple]
"""Returns (model, loss, example, kind) as `shoal-fleet task compile FILE:NAME` expects it."""


def classes(*shape, n=5):
    """Return an example of random x of ``shape`` and labels below ``n``."""
    return lambda size: (torch.randn(size, *shape), torch.randint(0, n, (size,)))


def numbers(*shape, out=(1,)):
    """Return an example of random x of ``shape`` and numbers of shape ``out``."""
    return lambda size: (torch.randn(size, *shape), torch.randn(size, *out))


def tokens(length=12, vocabulary=40, labels="next"):
    """Return an example of token sequences, with a label for each token or for each sequence."""

    def example(size):
        x = torch.randint(0, vocabulary, (size, length))
        return x, (x.roll(-1, 1) if labels == "next" else torch.randint(0, 4, (size,)))

    return example


def classify(model, *shape, n=5, loss=F.cross_entropy):
    """Return an entry that classifies ``shape`` into ``n``."""
    return model, loss, classes(*shape, n=n), "classification"


def mlp(act, *, inputs=20, hidden=64, out=5):
    return nn.Sequential(nn.Linear(inputs, hidden), act, nn.Linear(hidden, hidden), act, nn.Linear(hidden, out))


def pooled(*layers, width, n=5):
    """Return a network of 2-D layers, a global mean and a linear head."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, n))


class Lambda(nn.Module):
    """A linear layer, and then a function."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.function = nn.Linear(4, 3), function

    def forward(self, x):
        return self.function(self.fc(x))


class Over(nn.Module):
    """Apply ``body`` to x, take what ``pick`` says of its result, and then ``head``."""

    def __init__(self, body, head, pick=lambda result: result):
        super().__init__()
        self.body, self.head, self.pick = body, head, pick

    def forward(self, x):
        return self.head(self.pick(self.body(x)))


# ------------------------------------------------------------------------------------------------ losses of their own


def focal(outputs, y):
    log = F.log_softmax(outputs, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    return (-((1 - log.exp()) ** 2) * log).mean()


def pinball(outputs, y):
    levels = torch.tensor([0.1, 0.5, 0.9])
    error = y - outputs
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def hinge(outputs, y):
    return F.multi_margin_loss(outputs, y)


def token_loss(outputs, y):
    return F.cross_entropy(outputs.reshape(-1, outputs.shape[-1]), y.reshape(-1))


def per_sample_weights(outputs, y):
    weights = torch.tensor([1.0, 2.0, 5.0, 1.0, 1.0])
    return (F.cross_entropy(outputs, y, reduction="none") * weights[y]).mean()


# ---------------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """Multi-head attention over time, by torch's layer or by its function."""

    def __init__(self, width=32, heads=4, *, causal=False, functional=False):
        super().__init__()
        self.inside, self.heads, self.causal = nn.Linear(16, width), heads, causal
        self.layer = None if functional else nn.MultiheadAttention(width, heads, batch_first=True)
        self.qkv = nn.Linear(width, 3 * width) if functional else None
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.inside(x)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        if self.layer is not None:
            x, _ = self.layer(x, x, x, attn_mask=mask, need_weights=False)
        else:
            n, t, w = x.shape
            q, k, v = (p.reshape(n, t, self.heads, w // self.heads).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
            x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(n, t, w)
        return self.head(x.mean(1))


def encoder(*, norm_first=False, layers=1, activation="relu"):
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, activation=activation, batch_first=True, norm_first=norm_first)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers > 1 else layer
    return Over(nn.Sequential(nn.Linear(16, 32), body), nn.Linear(32, 5), lambda h: h.mean(1))


class LanguageModel(nn.Module):
    """A causal transformer over tokens; ``tied`` uses the embedding as the last layer."""

    def __init__(self, vocabulary=40, width=32, length=12, *, tied=False):
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.zeros(length, width))
        self.block = nn.TransformerEncoderLayer(width, 4, 64, 0.0, batch_first=True, norm_first=True)
        self.last = None if tied else nn.Linear(width, vocabulary)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.block(self.embed(x) + self.place, src_mask=mask)
        return h @ self.embed.weight.T if self.last is None else self.last(h)


def sequence(model):
    return model, token_loss, tokens(), "sequence"


# ---------------------------------------------------------------------------------------------------------- recurrent


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.body = kind(8, 16, batch_first=True, **options)
        self.head = nn.Linear(16 * (2 if options.get("bidirectional") else 1), 5)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Forecast(nn.Module):
    """An LSTM whose last states begin another one, with a number for each of the steps to come."""

    def __init__(self):
        super().__init__()
        self.past, self.future = (nn.LSTM(4, 16, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        _, states = self.past(x[:, :20])
        return self.head(self.future(x[:, 19:-1], states)[0])


class OwnLoop(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, 16), nn.Linear(16, 5)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


# ------------------------------------------------------------------------------------------------------ convolutional


def group_norm(channels):
    return nn.GroupNorm(8, channels)


class Residual(nn.Module):
    def __init__(self, channels, out, stride=1, norm=group_norm):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), norm(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), norm(out)
        self.short = nn.Identity()
        if stride != 1 or channels != out:
            self.short = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), norm(out))

    def forward(self, x):
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))) + self.short(x))


def resnet18(norm=group_norm):
    """Return ResNet-18 (He et al. 2015) with ``norm`` in place of batch norm, ten classes."""
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for channels, out, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Residual(channels, out, stride, norm), Residual(out, out, 1, norm)]
    return pooled(*layers, width=512, n=10)


class Next(nn.Module):
    """ConvNeXt's block (Liu et al. 2022)."""

    def __init__(self, channels):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(channels, channels, 7, padding=3, groups=channels), nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)

    def forward(self, x):
        h = self.norm(self.deep(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(h))).permute(0, 3, 1, 2)


class UNet(nn.Module):
    """One step down, ``up`` again, and the first features beside it."""

    def __init__(self, up, width):
        super().__init__()
        self.first, self.deep = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up, self.last = up, nn.Sequential(nn.Conv2d(8 + width, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 1))

    def forward(self, x):
        h = F.relu(self.first(x))
        return self.last(torch.cat([h, self.up(F.relu(self.deep(F.max_pool2d(h, 2))))], 1))


def segment(up, width):
    def example(n):
        return torch.randn(n, 3, 16, 16), (torch.rand(n, 1, 16, 16) > 0.5).float()

    return UNet(up, width), nn.BCEWithLogitsLoss(), example, "regression"


class Vision(nn.Module):
    """A small vision transformer with a class token (Dosovitskiy et al. 2020)."""

    def __init__(self, width=48):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.patches, self.body = nn.Conv2d(3, width, 8, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token, self.place = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 5)

    def forward(self, x):
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), self.patches(x).flatten(2).transpose(1, 2)], 1)
        return self.head(self.norm(self.body(h + self.place))[:, 0])


class Causal(nn.Module):
    """A temporal convolution that sees the past alone, with weight norm (Bai et al. 2018)."""

    def __init__(self, channels, out, dilation):
        super().__init__()
        self.pad, self.conv = 2 * dilation, weight_norm(nn.Conv1d(channels, out, 3, dilation=dilation))

    def forward(self, x):
        return F.relu(self.conv(F.pad(x, (self.pad, 0))))


class Fire(nn.Module):
    def __init__(self, channels, squeeze, expand):
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeeze, 1)
        self.one, self.three = nn.Conv2d(squeeze, expand, 1), nn.Conv2d(squeeze, expand, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.squeeze(x))
        return torch.cat([F.relu(self.one(x)), F.relu(self.three(x))], 1)


def squeezenet():
    """Return SqueezeNet 1.1 (Iandola et al. 2016) without dropout, five classes."""
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, 2), nn.ReLU(), pool(), Fire(64, 16, 64), Fire(128, 16, 64), pool(),
        Fire(128, 32, 128), Fire(256, 32, 128), pool(), Fire(256, 48, 192), Fire(384, 48, 192),
        Fire(384, 64, 256), Fire(512, 64, 256), nn.Conv2d(512, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    )  # fmt: skip


class SqueezeExcite(nn.Module):
    def __init__(self, channels, squeeze):
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, squeeze, 1), nn.Conv2d(squeeze, channels, 1)

    def forward(self, x):
        return x * F.hardsigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))))


class Inverted(nn.Module):
    """MobileNet's inverted residual block, with batch norm as it is used after training."""

    def __init__(self, channels, kernel, wide, out, squeeze, act, stride):
        super().__init__()
        middle = [SqueezeExcite(wide, max(8, -(-wide // 32) * 8))] if squeeze else []
        deep = nn.Conv2d(wide, wide, kernel, stride, kernel // 2, groups=wide, bias=False)
        first = [nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), act()] if wide != channels else []
        last = [nn.Conv2d(wide, out, 1, bias=False), nn.BatchNorm2d(out)]
        self.body = nn.Sequential(*first, deep, nn.BatchNorm2d(wide), act(), *middle, *last)
        self.short = stride == 1 and channels == out

    def forward(self, x):
        return x + self.body(x) if self.short else self.body(x)


def efficientnet_b0():
    """Return EfficientNet-B0 (Tan and Le 2019) in eval mode without dropout, five classes; its squeezes end in a hard sigmoid."""
    rows = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )  # fmt: skip
    layers, channels = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.SiLU()], 32
    for expand, kernel, stride, out, count in rows:
        for at in range(count):
            step = 1 if at else stride
            layers.append(Inverted(channels, kernel, expand * channels, out, True, nn.SiLU, step))
            channels = out
    return pooled(*layers, nn.Conv2d(320, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.SiLU(), width=1280).eval()


def mobilenet_v3_small():
    """Return MobileNetV3 small (Howard et al. 2019) in eval mode, five classes."""
    rows = (
        (16, 3, 16, 16, True, nn.ReLU, 2), (16, 3, 72, 24, False, nn.ReLU, 2), (24, 3, 88, 24, False, nn.ReLU, 1),
        (24, 5, 96, 40, True, nn.Hardswish, 2), (40, 5, 240, 40, True, nn.Hardswish, 1),
        (40, 5, 240, 40, True, nn.Hardswish, 1), (40, 5, 120, 48, True, nn.Hardswish, 1),
        (48, 5, 144, 48, True, nn.Hardswish, 1), (48, 5, 288, 96, True, nn.Hardswish, 2),
        (96, 5, 576, 96, True, nn.Hardswish, 1), (96, 5, 576, 96, True, nn.Hardswish, 1),
    )  # fmt: skip
    blocks = [Inverted(*row) for row in rows]
    first = [nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.Hardswish()]
    last = [
        nn.Conv2d(96, 576, 1, bias=False),
        nn.BatchNorm2d(576),
        nn.Hardswish(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ]
    head = [nn.Linear(576, 1024), nn.Hardswish(), nn.Linear(1024, 5)]
    return nn.Sequential(*first, *blocks, *last, *head).eval()


def small_cnn(*, act=nn.ReLU, norm=lambda c: nn.GroupNorm(4, c), pool=lambda: nn.MaxPool2d(2)):
    return pooled(
        nn.Conv2d(3, 16, 3, padding=1),
        norm(16),
        act(),
        pool(),
        nn.Conv2d(16, 32, 3, padding=1),
        norm(32),
        act(),
        width=32,
    )


def depthwise():
    return pooled(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU6(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU6(),
        nn.Conv2d(16, 24, 1), nn.Conv2d(24, 24, 5, 2, 2, groups=4), nn.SiLU(), width=24,
    )  # fmt: skip


def over_time(*layers):
    """Return 1-D layers with 16 channels, a mean over time and a linear head."""
    return Over(nn.Sequential(*layers), nn.Linear(16, 5), lambda h: h.mean(-1))


# ------------------------------------------------------------------------------------------------------------- frozen


def frozen_backbone():
    model = small_cnn(norm=nn.BatchNorm2d)
    model[:7].requires_grad_(False).eval()
    return model


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank term (LoRA, Hu et al. 2021)."""

    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(rank, inputs) * 0.01), nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        return self.linear(x) + x @ self.down.T @ self.up.T


# -------------------------------------------------------------------------------------------------------- other forms


class Mixed(nn.Module):
    """Numbers and categories in one x: the last column is a category."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(7, 4), mlp(nn.ReLU(), inputs=12)

    def forward(self, x):
        category = x[:, -1].clamp(0, 6).long()
        return self.body(torch.cat([x[:, :-1], self.embed(category)], 1))


class Gated(nn.Module):
    """A language model of today: rotated positions, RMS norm, gated feed-forward part, and the mask as a buffer."""

    def __init__(self, width=32, heads=4, length=12):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(40, width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        angle = torch.outer(torch.arange(length), 100.0 ** -torch.linspace(0, 1, width // heads // 2)).repeat(1, 2)
        self.heads = heads
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())
        self.register_buffer("mask", torch.ones(length, length).tril().bool())

    def turned(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def forward(self, x):
        h = self.embed(x)
        n, t, w = h.shape
        q, k, v = (p.view(n, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norms[0](h)).chunk(3, -1))
        seen = (self.turned(q) @ self.turned(k).transpose(-1, -2) / 8**0.5).masked_fill(~self.mask, float("-inf"))
        h = h + self.out((seen.softmax(-1) @ v).transpose(1, 2).reshape(n, t, w))
        h = h + self.down(F.silu(self.gate(self.norms[1](h))) * self.up(self.norms[1](h)))
        return self.norms[2](h) @ self.embed.weight.T


class Pair(nn.Module):
    """One encoder for both halves of x, which are to be near each other or not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return F.cosine_similarity(self.body(x[:, :10]), self.body(x[:, 10:]), dim=1).unsqueeze(1)


class Heads(nn.Module):
    """Two heads on one body, side by side in one output."""

    def __init__(self):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(20, 32), nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return torch.cat([self.a(h), self.b(h)], 1)


def autoencoder():
    def example(n):
        x = torch.randn(n, 32)
        return x, x

    return nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 32)), nn.MSELoss(), example, "regression"


def picture_autoencoder():
    def example(n):
        x = torch.rand(n, 1, 28, 28)
        return x, x

    layers = [nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.ReLU()]
    layers += [nn.ConvTranspose2d(4, 8, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 3, 2, 1, 1), nn.Sigmoid()]
    return nn.Sequential(*layers), nn.MSELoss(), example, "regression"


def twice(layer):
    return nn.Sequential(nn.Linear(20, 16), layer, nn.ReLU(), layer, nn.Linear(16, 5))


def multilabel():
    def example(n):
        return torch.randn(n, 20), (torch.rand(n, 4) > 0.5).float()

    return mlp(nn.ReLU(), out=4), nn.BCEWithLogitsLoss(), example, "regression"


def binary():
    def example(n):
        return torch.randn(n, 20), (torch.rand(n, 1) > 0.5).float()

    return nn.Sequential(mlp(nn.ReLU(), out=1), nn.Sigmoid()), nn.BCELoss(), example, "regression"


def regress(model, *shape, out=(1,), loss=F.mse_loss):
    return model, loss, numbers(*shape, out=out), "regression"


ACTS = {
    "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "elu": nn.ELU, "leaky": nn.LeakyReLU, "prelu": nn.PReLU,
    "hardswish": nn.Hardswish, "tanh": nn.Tanh, "mish": nn.Mish, "softplus": nn.Softplus,
}  # fmt: skip
LOSSES = {
    "nll": lambda o, y: F.nll_loss(F.log_softmax(o, -1), y),
    "hinge": hinge,
    "focal": focal,
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "class-weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 20.0, 1.0, 2.0])),
    "sample-weights": per_sample_weights,
}

ZOO: dict[str, Entry] = {
    "linear regression": lambda: regress(nn.Linear(20, 1), 20),
    "softmax regression": lambda: classify(nn.Linear(784, 10), 784, n=10),
    **{f"mlp {name}": lambda act=act: classify(mlp(act()), 20) for name, act in ACTS.items()},
    **{f"loss {name}": lambda loss=loss: classify(mlp(nn.ReLU()), 20, loss=loss) for name, loss in LOSSES.items()},
    "huber": lambda: regress(mlp(nn.ReLU(), out=1), 20, loss=nn.HuberLoss()),
    "l1": lambda: regress(mlp(nn.ReLU(), out=1), 20, loss=nn.L1Loss()),
    "poisson": lambda: regress(mlp(nn.ReLU(), out=1), 20, loss=lambda o, y: F.poisson_nll_loss(o, y.abs())),
    "several outputs": lambda: regress(mlp(nn.ReLU(), out=6), 20, out=(6,)),
    "quantiles": lambda: regress(mlp(nn.ReLU(), out=3), 20, out=(3,), loss=pinball),
    "multi-label": multilabel,
    "binary": binary,
    "two heads": lambda: regress(Heads(), 20, out=(3,)),
    "autoencoder": autoencoder,
    "layer norm": lambda: classify(nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5)), 20),
    "rms norm": lambda: classify(nn.Sequential(nn.Linear(20, 64), nn.RMSNorm(64), nn.Linear(64, 5)), 20),
    "weight norm": lambda: classify(nn.Sequential(weight_norm(nn.Linear(20, 32)), nn.ReLU(), nn.Linear(32, 5)), 20),
    "a layer twice": lambda: classify(twice(nn.Linear(16, 16)), 20),
    "siamese": lambda: regress(Pair(), 20),
    "bilinear": lambda: classify(Over(nn.Linear(20, 16), nn.Linear(16, 5), lambda h: h * torch.sigmoid(h)), 20),
    "numbers and categories": lambda: classify(Mixed(), 9),
    "mlp of 5 million": lambda: classify(mlp(nn.ReLU(), inputs=784, hidden=1850, out=10), 784, n=10),
    "mlp of 20 million": lambda: classify(mlp(nn.ReLU(), inputs=784, hidden=4096, out=10), 784, n=10),
    # images
    "cnn": lambda: classify(small_cnn(), 3, 32, 32),
    "cnn average pool": lambda: classify(small_cnn(pool=lambda: nn.AvgPool2d(2)), 3, 32, 32),
    "cnn silu": lambda: classify(small_cnn(act=nn.SiLU), 3, 32, 32),
    "cnn instance norm": lambda: classify(small_cnn(norm=nn.InstanceNorm2d), 3, 32, 32),
    "cnn frozen batch norm": lambda: classify(small_cnn(norm=nn.BatchNorm2d).eval(), 3, 32, 32),
    "cnn dropout off": lambda: classify(nn.Sequential(small_cnn(), nn.Dropout(0.5)).eval(), 3, 32, 32),
    "cnn stride and dilation": lambda: classify(
        pooled(nn.Conv2d(3, 16, 5, 2, 2), nn.ReLU(), nn.Conv2d(16, 24, 3, dilation=2), nn.ReLU(), width=24), 3, 32, 32
    ),
    "cnn padding modes": lambda: classify(
        pooled(nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect"), nn.ReLU(), width=16), 3, 16, 16
    ),
    "depthwise": lambda: classify(depthwise(), 3, 32, 32),
    "residual group norm": lambda: classify(pooled(nn.Conv2d(3, 16, 3), Residual(16, 16), width=16), 3, 24, 24),
    "squeeze and excite": lambda: classify(pooled(nn.Conv2d(3, 16, 3), SqueezeExcite(16, 8), width=16), 3, 24, 24),
    "upsample nearest": lambda: regress(
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1)),
        3, 16, 16, out=(3, 16, 16),
    ),
    "upsample bilinear": lambda: regress(
        nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(8, 3, 1)),
        3, 16, 16, out=(3, 16, 16),
    ),
    "conv3d": lambda: classify(
        Over(nn.Sequential(nn.Conv3d(1, 8, 3), nn.ReLU()), nn.Linear(8, 5), lambda h: h.mean((2, 3, 4))), 1, 8, 12, 12
    ),
    "squeezenet 1.1": lambda: classify(squeezenet().eval(), 3, 64, 64),
    "mobilenet v3 small": lambda: classify(mobilenet_v3_small(), 3, 64, 64),
    "resnet18 group norm": lambda: classify(resnet18(), 3, 32, 32, n=10),
    "resnet18 frozen batch norm": lambda: classify(resnet18(nn.BatchNorm2d).eval(), 3, 32, 32, n=10),
    "efficientnet b0": lambda: classify(efficientnet_b0(), 3, 64, 64),
    "convnext": lambda: classify(pooled(nn.Conv2d(3, 16, 4, 4), Next(16), Next(16), width=16), 3, 32, 32),
    "vision transformer": lambda: classify(Vision(), 3, 32, 32),
    "u-net bilinear": lambda: segment(nn.Upsample(scale_factor=2, mode="bilinear"), 16),
    "u-net transposed": lambda: segment(nn.ConvTranspose2d(16, 8, 2, 2), 8),
    "picture autoencoder": picture_autoencoder,
    "adaptive max pool": lambda: classify(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(32, 5)), 3, 16, 16
    ),
    "pixel shuffle": lambda: regress(
        nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(3, 3, 3, padding=1)),
        3, 8, 8, out=(3, 16, 16),
    ),
    "patches": lambda: classify(
        Over(nn.Conv2d(3, 32, 8, 8), nn.Linear(32, 5), lambda h: torch.tanh(h.flatten(2).transpose(1, 2)).mean(1)), 3, 32, 32
    ),
    # sensors
    **{
        f"conv1d {name}": lambda layers=layers: classify(over_time(*layers()), 6, 64)
        for name, layers in {
            "mean": lambda: [nn.Conv1d(6, 16, 5), nn.ReLU()],
            "max pool": lambda: [nn.Conv1d(6, 16, 5), nn.ReLU(), nn.MaxPool1d(2)],
            "average pool": lambda: [nn.Conv1d(6, 16, 5), nn.ReLU(), nn.AvgPool1d(2)],
            "stride": lambda: [nn.Conv1d(6, 16, 5, stride=2), nn.ReLU()],
            "dilation": lambda: [nn.Conv1d(6, 16, 3, dilation=4), nn.ReLU()],
            "depthwise": lambda: [nn.Conv1d(6, 6, 5, groups=6), nn.Conv1d(6, 16, 1), nn.ReLU()],
        }.items()
    },
    "causal convolutions": lambda: classify(over_time(Causal(6, 16, 1), Causal(16, 16, 2), Causal(16, 16, 4)), 6, 64),
    "linear over time": lambda: classify(Over(nn.Linear(20, 32), nn.Linear(32, 5), lambda h: F.relu(h).mean(1)), 11, 20),
    "two linears over time": lambda: classify(
        Over(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 5), lambda h: h.amax(1)), 11, 20
    ),
    "attention layer": lambda: classify(Attention(), 12, 16),
    "attention layer causal": lambda: classify(Attention(causal=True), 12, 16),
    "attention function": lambda: classify(Attention(functional=True), 12, 16),
    "attention function causal": lambda: classify(Attention(functional=True, causal=True), 12, 16),
    "encoder layer": lambda: classify(encoder(), 12, 16),
    "encoder layer norm first": lambda: classify(encoder(norm_first=True), 12, 16),
    "encoder layer gelu": lambda: classify(encoder(activation="gelu"), 12, 16),
    "encoder of two layers": lambda: classify(encoder(layers=2), 12, 16),
    "encoder in eval": lambda: classify(encoder().eval(), 12, 16),
    # text
    "embedding and mean": lambda: (
        Over(nn.Embedding(40, 16), nn.Linear(16, 4), lambda h: h.mean(1)),
        F.cross_entropy, tokens(labels="one"), "classification",
    ),
    "embedding per token": lambda: sequence(Over(nn.Embedding(40, 16), nn.Linear(16, 40), torch.tanh)),
    "causal language model": lambda: sequence(LanguageModel()),
    "tied language model": lambda: sequence(LanguageModel(tied=True)),
    "gated language model": lambda: sequence(Gated()),
    "tagger": lambda: sequence(
        Over(
            nn.Embedding(40, 16, padding_idx=0),
            Over(nn.LSTM(16, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 40), lambda result: result[0]),
        )
    ),
    # recurrent
    "lstm 200 steps, two directions": lambda: classify(Recurrent(nn.LSTM, bidirectional=True), 200, 8),
    "gru 200 steps, two layers, two directions": lambda: classify(Recurrent(nn.GRU, num_layers=2, bidirectional=True), 200, 8),
    "lstm forecast": lambda: regress(Forecast(), 30, 4, out=(10, 4)),
    "convolution and gru": lambda: classify(
        Over(nn.Sequential(nn.Conv1d(6, 8, 5, 2), nn.GELU()), Recurrent(nn.GRU), lambda h: h.transpose(1, 2)), 6, 64
    ),
    "loop over a gru cell": lambda: classify(OwnLoop(), 10, 8),
    "lstm 30 steps": lambda: classify(Recurrent(nn.LSTM), 30, 8),
    "gru 30 steps": lambda: classify(Recurrent(nn.GRU), 30, 8),
    "rnn 30 steps": lambda: classify(Recurrent(nn.RNN), 30, 8),
    "lstm of two layers": lambda: classify(Recurrent(nn.LSTM, num_layers=2), 12, 8),
    "lstm of two directions": lambda: classify(Recurrent(nn.LSTM, bidirectional=True), 12, 8),
    # parts that are not trained
    "frozen backbone": lambda: classify(frozen_backbone(), 3, 32, 32),
    "frozen layer": lambda: classify(
        nn.Sequential(nn.Linear(20, 32).requires_grad_(False), nn.ReLU(), nn.Linear(32, 5)), 20
    ),
    "lora": lambda: classify(nn.Sequential(Adapter(20, 32), nn.ReLU(), Adapter(32, 5)), 20),
}  # fmt: skip

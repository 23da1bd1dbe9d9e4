"""The tasks of the examples: data sets that come with installed packages, and a small model for each."""

import math
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_sample_images
from torch import Tensor, nn

CONTEXT = 128  # bytes of the transformer's context
PATCH = 16  # pixels of a patch of a photograph, in each direction


def loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy in nats of logits (..., classes) and targets (...)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), reduction=reduction)


@dataclass(frozen=True)
class Task:
    """Data, model, and metric."""

    train: tuple[Tensor, Tensor]  # inputs and targets, one example per row
    test: tuple[Tensor, Tensor]
    model: Callable[[], nn.Module]
    score: Callable[[Tensor, Tensor], Tensor]  # outputs, targets -> scores, whose mean the report shows
    metric: str
    style: str  # format of the metric
    unit: str  # of a target; the throughput counts targets
    steps: int  # this and the next two are defaults of the options
    batch_size: int
    lr: float
    criterion: Callable[[Tensor, Tensor], Tensor] = loss
    higher_is_better: bool = True  # for the score


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.argmax(-1) == targets


def bits(logits: Tensor, targets: Tensor) -> Tensor:
    return loss(logits, targets, reduction="none") / math.log(2)


def digits() -> Task:
    """1,797 handwritten digits of 8 x 8 pixels; every fifth is held out."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return Task(
        train=(images[~held_out], labels[~held_out]),
        test=(images[held_out], labels[held_out]),
        model=digit_cnn,
        score=accuracy,
        metric="test accuracy",
        style="{:.2%}",
        unit="images",
        steps=400,
        batch_size=64,
        lr=2e-3,
    )


def digit_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def python_source() -> Task:
    """The standard library of the running Python, byte by byte; every tenth file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests"}
    files = [file for file in sorted(root.rglob("*.py")) if skip.isdisjoint(file.relative_to(root).parts)]
    if len(files) < 20:
        raise FileNotFoundError(f"{root} has only {len(files)} .py files: the sources of the library are not installed")
    inputs, targets = windows(files[::10])
    some = slice(None, None, math.ceil(len(inputs) / 256))  # few, from all held-out files
    return Task(
        train=windows([file for i, file in enumerate(files) if i % 10]),
        test=(inputs[some], targets[some]),
        model=ByteTransformer,
        score=bits,
        metric="test bits per byte",
        style="{:.3f}",
        unit="bytes",
        steps=300,
        batch_size=32,
        lr=4e-3,
        higher_is_better=False,
    )


def photographs() -> Task:
    """Denoising of patches of scikit-learn's two photographs; the right quarter of both is held out."""
    clean = torch.stack([torch.tensor(image) for image in load_sample_images().images]).permute(0, 3, 1, 2) / 255
    noisy = clean + 0.1 * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    border = clean.shape[-1] * 3 // 4
    return Task(
        train=(patches(noisy[..., :border]), patches(clean[..., :border])),
        test=(patches(noisy[..., border:]), patches(clean[..., border:])),
        model=Denoiser,
        score=psnr,
        metric="test PSNR, dB",
        style="{:.2f}",
        unit="colour values",
        steps=300,
        batch_size=64,
        lr=3e-3,
        criterion=F.mse_loss,
    )


def patches(images: Tensor) -> Tensor:
    """Cut images (images, channels, height, width) into patches (patches, channels, PATCH, PATCH)."""
    tiles = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)
    return tiles.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def psnr(images: Tensor, targets: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image in dB, for values from 0 to 1."""
    return -10 * (images - targets).square().flatten(1).mean(1).log10()


class Denoiser(nn.Module):
    """Estimates the noise, at half the resolution with four times the channels (Zhang, Zuo & Zhang 2018, FFDNet)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.noise = nn.Sequential(
            nn.PixelUnshuffle(2),
            nn.Conv2d(12, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 12, 3, padding=1),
            nn.PixelShuffle(2),
        )

    def forward(self, noisy: Tensor) -> Tensor:
        return noisy - self.noise(noisy)


def windows(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Return views of the concatenated files in rows of CONTEXT bytes, and of the same rows shifted by one byte."""
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[:-1].unfold(0, CONTEXT, CONTEXT), text[1:].unfold(0, CONTEXT, CONTEXT)


class ByteTransformer(nn.Module):
    """Predicts each byte from those before it: bytes (batch, time) -> logits (batch, time, 256)."""

    def __init__(self, width: int = 128, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        # Combines the last 4 bytes of each position; attention alone needs most of so short a run to learn this.
        self.nearby = nn.Conv1d(width, width, kernel_size=4)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    def forward(self, text: Tensor) -> Tensor:
        past = F.pad(self.byte(text.int()).transpose(1, 2), (3, 0))
        return self.head(self.blocks(self.nearby(past).transpose(1, 2) + self.position[: text.shape[1]]))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


TASKS: dict[str, Callable[[], Task]] = {
    "digits": digits,
    "python-source": python_source,
    "photographs": photographs,
}

"""The built-in workload: a small byte-level GPT, trained with AdamW on the source text of Python's standard library.

That text is real data that every machine has.
"""

import hashlib
import math
import os
import sysconfig
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from gradwire.errors import GradwireError, SpecError
from gradwire.spec import coerce

BYTES = 256
SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"})
"""Folders that do not belong to the library, or that hold tables of numbers."""
HELD_OUT_EVERY = 16
"""One file out of this many is held out for evaluation: whole files, so that no part of them is trained on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkloadSettings:
    """What is trained. The default model has 2.5M parameters, which is 10 MB of gradient per step."""

    layers: int = 3
    """Transformer blocks."""
    width: int = 256
    """Size of the residual stream; a multiple of `heads`."""
    heads: int = 4
    """Attention heads per block."""
    context: int = 64
    """Bytes that the model sees at once."""
    batch: int = 4
    """Windows of `context` bytes per rank and step."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with a momentum of 0.9."""
    learning_rate: float = 1e-3
    """Reached after `warmup_steps`."""
    warmup_steps: int = 10
    """Steps over which the learning rate rises linearly."""
    text_bytes: int = 8_000_000
    """The most text that is read."""
    eval_windows: int = 64
    """Windows of held-out text for the evaluation loss, on all ranks together."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "optimizer":
                coerce("workload: optimizer", value, Literal["adamw", "sgd"])
            elif not value > 0:
                raise SpecError(f"workload: {field.name} must be above 0, got {value!r}")
        if self.width % self.heads:
            raise SpecError(f"workload: width must be a multiple of heads ({self.heads}), got {self.width}")


class Block(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, time, width)."""
        x = x + self.attention_out(self._attend(self.attention_norm(x)))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, time, width)


class GPT(nn.Module):
    """Maps bytes to logits of the next byte."""

    def __init__(self, settings: WorkloadSettings) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, settings.width)
        self.places = nn.Embedding(settings.context, settings.width)
        self.blocks = nn.Sequential(*(Block(settings.width, settings.heads) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, BYTES, bias=False)
        for name, param in self.named_parameters():
            if param.dim() == 2:
                # The two matrices that write to the residual stream start smaller, so that depth adds no variance.
                shrink = math.sqrt(2 * settings.layers) if "_out" in name else 1.0
                nn.init.normal_(param, std=0.02 / shrink)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) int64 -> (batch, time, 256)."""
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class Workload:
    """Everything a training loop needs on one rank. It draws from (seed, rank, step), not from the global RNG."""

    def __init__(self, settings: WorkloadSettings, *, seed: int, rank: int, size: int) -> None:
        self.settings, self.seed, self.rank, self.size = settings, seed, rank, size
        self.text = library_text(settings.text_bytes)

    def model(self) -> GPT:
        """A fresh model; the same bits on every rank and at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return GPT(self.settings)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer that the settings name."""
        if self.settings.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.settings.learning_rate, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=self.settings.learning_rate, betas=(0.9, 0.95), fused=True)

    def learning_rate(self, step: int) -> float:
        """The learning rate rises linearly during warm-up and is constant after it."""
        return self.settings.learning_rate * min(1.0, (step + 1) / self.settings.warmup_steps)

    def batch(self, step: int) -> Tensor:
        """This rank's windows at `step`, (batch, context + 1) int64."""
        length = self.settings.context + 1
        return random_windows(self.text.train, self.settings.batch, length, self.seed, self.rank, step)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Cross-entropy of every next byte, in nats."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> tuple[float, int]:
        """The loss summed over this rank's share of the held-out windows, and the number of these windows."""
        windows = even_windows(self.text.held_out, self.settings.eval_windows, self.settings.context + 1)
        own = windows[self.rank :: self.size]
        parts = own.split(self.settings.batch) if len(own) else ()
        return sum(float(self.loss(model, part)) * len(part) for part in parts), len(own)


# -- the text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes to train on and bytes to evaluate on."""

    train: Tensor
    """uint8, one-dimensional."""
    held_out: Tensor
    """uint8, one-dimensional, from other files."""


def library_text(max_bytes: int, folder: Path | None = None) -> Text:
    """The library's *.py files in the order of their names, up to `max_bytes`. All ranks of a machine get the same."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    left = max_bytes
    for index, path in enumerate(_sources(root)):
        source = path.read_bytes()[:left]
        parts[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(source)
        left -= len(source)
        if left <= 0:
            break
    return Text(*(_tensor(b"".join(part)) for part in parts))


def random_windows(source: Tensor, count: int, length: int, *seed: int) -> Tensor:
    """`count` windows of `length` bytes as (count, length) int64, drawn from `seed` alone."""
    _check_length(source, length)
    generator = torch.Generator().manual_seed(_mix(seed))
    starts = torch.randint(source.numel() - length + 1, (count,), generator=generator)
    return _windows(source, starts, length)


def even_windows(source: Tensor, count: int, length: int) -> Tensor:
    """`count` windows of `length` bytes at equal distances, (count, length) int64."""
    _check_length(source, length)
    starts = torch.linspace(0, source.numel() - length, count, dtype=torch.float64).long()
    return _windows(source, starts, length)


def _sources(root: Path) -> list[Path]:
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = set(folders) - SKIPPED  # these are not entered at all
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _tensor(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def _windows(source: Tensor, starts: Tensor, length: int) -> Tensor:
    return source[starts[:, None] + torch.arange(length)].long()


def _check_length(source: Tensor, length: int) -> None:
    if source.numel() < length:
        raise GradwireError(
            f"the workload needs at least {length} bytes of the standard library's source, got {source.numel()}; "
            "raise text_bytes, or use a Python that was installed with its *.py files"
        )


def _mix(numbers: tuple[int, ...]) -> int:
    """One seed from several numbers, such that (0, 1) and (1, 0) give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")

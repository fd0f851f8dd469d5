"""Local training and PowerSGD at equal bytes: 4 simulated workers in one process, so that only the loss is measured.

    python benchmarks/simulated_workers.py sync local:H=7,codec=int2 local:H=7,topk=320,decay=0.95 power:rank=3 \\
        local:H=13,codec=int4,outer_lr=0.7,momentum=0.9 power:rank=3,whiten=0.1 power:rank=6,one_sided=1 --seeds 10 11

A way is `kind:option=number,...`. Bits are those per value and step, in units of an all-reduce in which every rank
sends its share twice, so that bf16 has 16. Deltas have error feedback on both roundings. The optimizer is AdamW (betas
0.9 and 0.95), written out here so that its second moment can be exchanged.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gradwire.tools.workload import Workload, WorkloadSettings, even_windows

WORKERS = 4
BETA1, BETA2, EPS, DECAY = 0.9, 0.95, 1e-8, 0.01
Options = dict[str, str]

LEVELS: dict[str, tuple[int, Sequence[float], Sequence[float]]] = {
    "sign": (128, (), (1.0,)),
    "int2": (64, (0.9816,), (0.4528, 1.5104)),
    "int3": (64, (0.5006, 1.05, 1.748), (0.2451, 0.756, 1.3439, 2.152)),
}
"""By codec: the block, the thresholds in units of the block's rms, and the levels."""
BITS = {"exact": 16.0, "sign": 1.125, "int2": 2.25, "int3": 3.25, "int4": 4.25}
EXACT_BITS = 4.25
"""What an exact step costs: int4 averages gradients so well that it stands for exact."""


def rounded(x_WN: Tensor, codec: str) -> Tensor:
    """Encode and decode, block by block."""
    if codec == "exact":
        return x_WN
    block, edges, levels = LEVELS.get(codec, (64, (), ()))
    blocks = in_blocks(x_WN, block)
    if codec == "int4":
        scale = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 7.5
        out = ((blocks / scale - 0.5).round().clamp(-8, 7) + 0.5) * scale
    else:
        size, rms = blocks.abs(), blocks.square().mean(-1, keepdim=True).sqrt()
        place = sum(((size > edge * rms).long() for edge in edges), torch.zeros_like(size, dtype=torch.long))
        code = torch.tensor(levels)[place]
        scale = (size * code).sum(-1, keepdim=True) / code.square().sum(-1, keepdim=True).clamp_min(1e-30)
        out = (code * scale).copysign(blocks)
    return out.reshape(*x_WN.shape[:-1], -1)[..., : x_WN.shape[-1]]


def largest(x_WN: Tensor, k: int, block: int = 4096) -> Tensor:
    """SparseLoCo's code: the k largest of each block, in 2 bits: the sign, and which of two magnitudes."""
    blocks = in_blocks(x_WN, block)
    place = blocks.abs().topk(k, dim=-1).indices
    value = blocks.gather(-1, place)
    size = value.abs()
    high = size > size.mean(-1, keepdim=True)
    large, small = ((size * of).sum(-1, keepdim=True) / of.sum(-1, keepdim=True).clamp_min(1) for of in (high, ~high))
    coded = torch.where(high, large, small).copysign(value)
    return torch.zeros_like(blocks).scatter_(-1, place, coded).reshape(*x_WN.shape[:-1], -1)[..., : x_WN.shape[-1]]


def in_blocks(x_WN: Tensor, block: int) -> Tensor:
    """(workers, values) -> (workers, blocks, block), padded with zeros."""
    return torch.nn.functional.pad(x_WN, (0, -x_WN.shape[-1] % block)).reshape(*x_WN.shape[:-1], -1, block)


class Task:
    """The built-in GPT with all its parameters in one flat tensor, and the data of every worker."""

    def __init__(self, args: argparse.Namespace, seed: int) -> None:
        names = ("layers", "width", "context", "batch", "text_bytes")
        shape = WorkloadSettings(**{name: getattr(args, name) for name in names})
        self.workers = [Workload(shape, seed=seed, rank=rank, size=WORKERS) for rank in range(WORKERS)]
        self.model, self.args = self.workers[0].model(), args
        params = list(self.model.parameters())
        self.values = torch.cat([param.detach().flatten() for param in params])
        self.grad = torch.zeros_like(self.values)
        self.shapes, at = [], 0
        for param in params:
            part = slice(at, at + param.numel())
            param.data, param.grad = self.values[part].view(param.shape), self.grad[part].view(param.shape)
            self.shapes.append((part, param.shape))
            at += param.numel()
        self.held_out = even_windows(self.workers[0].text.held_out, 512, args.context + 1)

    def lr(self, step: int) -> float:
        """Rises linearly for 15 steps and is constant after that."""
        return float(self.args.lr) * min(1.0, step / 15)

    def gradients(self, step: int, at_WN: Tensor | None = None) -> Tensor:
        """Of every worker, at its own parameters, or at the present ones."""
        rows = []
        for rank, worker in enumerate(self.workers):
            if at_WN is not None:
                self.values.copy_(at_WN[rank])
            self.grad.zero_()
            worker.loss(self.model, worker.batch(step)).backward()
            rows.append(self.grad.clone())
        return torch.stack(rows)

    @torch.no_grad()
    def loss(self) -> float:
        """On 512 windows of held-out text."""
        parts = self.held_out.split(64)
        return sum(float(self.workers[0].loss(self.model, part)) * len(part) for part in parts) / len(self.held_out)


class Adam:
    """The moments of one or of all workers."""

    def __init__(self, *shape: int) -> None:
        self.m, self.v = torch.zeros(shape), torch.zeros(shape)

    def update(self, grad: Tensor, step: int, moment_of: Tensor | None = None) -> Tensor:
        """What is subtracted, in units of the learning rate. `moment_of`: another gradient for the second moment."""
        squared = (grad if moment_of is None else moment_of).square()
        self.m.mul_(BETA1).add_(grad, alpha=1 - BETA1)
        self.v.mul_(BETA2).add_(squared, alpha=1 - BETA2)
        return (self.m / (1 - BETA1**step)) / ((self.v / (1 - BETA2**step)).sqrt() + EPS)


def sync(task: Task, options: Options) -> float:
    """Average exactly at every step."""
    adam = Adam(task.values.numel())
    for step in range(1, task.args.steps + 1):
        update = adam.update(task.gradients(step).mean(0), step)
        task.values.mul_(1 - task.lr(step) * DECAY).sub_(update, alpha=task.lr(step))
    return 16.0


def local(task: Task, options: Options) -> float:
    """LocalSGD: H steps of AdamW on each worker, then the mean of the deltas. With `momentum`, DiLoCo.

    `shared=1`: all workers divide by the second moment of the mean gradient of each step, which costs no bits here.
    """
    rounds, codec, topk = int(options["H"]), options.get("codec", "exact"), int(options.get("topk", 0))
    outer_lr, momentum = float(options.get("outer_lr", 1)), float(options.get("momentum", 0))
    decay, factor, shared = float(options.get("decay", 1)), float(options.get("lr", 1)), "shared" in options
    start, bits = task.values.clone(), 0.0
    own, adam = start.repeat(WORKERS, 1), Adam(WORKERS, start.numel())
    kept_W, kept, velocity = torch.zeros_like(own), torch.zeros_like(start), torch.zeros_like(start)
    for step in range(1, task.args.steps + 1):
        grads, lr = task.gradients(step, own), task.lr(step)
        update = adam.update(grads, step, grads.mean(0, keepdim=True) if shared else None)
        own.mul_(1 - lr * DECAY).sub_(update, alpha=factor * lr)
        if step % rounds and step != task.args.steps:
            continue
        due = start - own + decay * kept_W
        sent = largest(due, topk) if topk else rounded(due, codec)
        kept_W, mean = due - sent, sent.mean(0)
        if topk:
            bits += topk / 4096 * (12 + 2) * WORKERS / 2  # an all-gather sends every worker's values to all
        else:
            kept, mean = (total := mean + decay * kept) - (out := rounded(total, codec)), out
            bits += BITS[codec]
        velocity = momentum * velocity + mean
        start = start - outer_lr * (mean + momentum * velocity if momentum else mean)
        own = start.repeat(WORKERS, 1)
    task.values.copy_(start)
    return float(bits / task.args.steps)


def power(task: Task, options: Options) -> float:
    """PowerSGD with factors in 8 bits, after 10 exact steps.

    `one_sided=1`: only P or only Q travels, in turn. `whiten=floor`: of gradients divided by Adam's root, see `scale`.
    """
    matrix_rank, floor, one_sided = int(options["rank"]), options.get("whiten"), "one_sided" in options
    generator, bits = torch.Generator().manual_seed(0), 0.0
    matrices = [(part, shape) for part, shape in task.shapes if len(shape) == 2]
    factors: dict[int, list[Tensor | None]] = {
        part.start: [torch.linalg.qr(torch.randn(shape[1], matrix_rank, generator=generator))[0], None]
        for part, shape in matrices
    }
    adam, kept = Adam(task.values.numel()), torch.zeros(WORKERS, task.values.numel())
    for step in range(1, task.args.steps + 1):
        grads = task.gradients(step)
        mean = grads.mean(0)
        bits += EXACT_BITS if step <= 10 else 16 * (1 - sum(s.numel() for _, s in matrices) / mean.numel())
        for part, shape in matrices if step > 10 else ():
            by = 1.0 if floor is None else scale(adam.v[part] / (1 - BETA2 ** (step - 1)), float(floor))
            due = ((grads[:, part] + kept[:, part]) / by).view(WORKERS, *shape)
            side = step % 2 if one_sided else None
            approximation, own, sent = low_rank(due, factors[part.start], side)
            mean[part] = approximation.flatten() * by
            kept[:, part] = (due - own).reshape(WORKERS, -1) * by
            bits += 8.1 * sent / mean.numel()
        update = adam.update(mean, step)
        task.values.mul_(1 - task.lr(step) * DECAY).sub_(update, alpha=task.lr(step))
    return float(bits / task.args.steps)


def scale(v: Tensor, floor: float) -> Tensor:
    """Adam's divisor, with a floor relative to its rms, so that nothing is divided by nearly zero."""
    return (v + floor**2 * v.mean()).sqrt() + 1e-12


def low_rank(due: Tensor, factors: list[Tensor | None], side: int | None) -> tuple[Tensor, Tensor, int]:
    """The approximation of the mean, each worker's share of it, and how many values of factors travel.

    `factors` are Q and P of the step before; `side` is 1 to send P only, 0 to send Q only, None for both.
    """
    mean, (q, p) = due.mean(0), factors
    assert q is not None
    if side == 1:
        basis = torch.linalg.qr(q)[0]
        factors[1] = new = mean @ basis
        return new @ basis.T, (due @ basis) @ basis.T, new.numel()
    basis = torch.linalg.qr(p if side == 0 and p is not None else mean @ q)[0]
    factors[0] = new = mean.T @ basis
    sent = new.numel() + (basis.numel() if side is None else 0)
    return basis @ new.T, basis @ (basis.T @ due), sent


KINDS: dict[str, Callable[[Task, Options], float]] = {"sync": sync, "local": local, "power": power}


def main() -> None:
    """Train every way with every seed, one after the other; the gap is that to the first way."""
    args = parse_args()
    torch.set_num_threads(1)
    first: dict[int, float] = {}
    for way in args.ways:
        for seed in args.seeds:
            kind, _, rest = way.partition(":")
            options = dict(option.split("=") for option in rest.split(",") if option)
            began, task = time.perf_counter(), Task(args, seed)
            bits, loss = KINDS[kind](task, options), task.loss()
            gap = loss / first.setdefault(seed, loss) - 1
            print(
                f"{way:<50} seed {seed}: {bits:6.3f} bits, loss {loss:.4f} ({gap:+.1%}), "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )


def parse_args(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[10])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--text-bytes", type=int, default=8_000_000)
    return parser.parse_args(given)


if __name__ == "__main__":
    main()

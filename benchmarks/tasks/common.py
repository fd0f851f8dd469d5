r"""What the tasks share: their options, the ways to communicate, and the loop. Each task is an ordinary script.

gradwire compare --hooks exact int8 int4 sign --steps 500 --metric val_loss --nproc 2 benchmarks/tasks/gpt.py
gradwire compare --hooks exact --variant "local=--local sgd" --variant "diloco=--local diloco" --steps 500 \
    --metric val_loss --nproc 2 benchmarks/tasks/gpt.py

The seeds are set through torch's global generator, so that every repeat of `gradwire compare` is another training.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.optim import DiLoCo, LocalSGD, OneBitAdamW
from gradwire.tools.workload import even_windows, library_text

Loss = Callable[[nn.Module], Tensor]


def options(description: str | None, *, optimizer: str, lr: float, steps: int = 500) -> argparse.Namespace:
    """The command line of a task, with its defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default=optimizer)
    parser.add_argument("--lr", type=float, default=None, help="default: that of the optimizer")
    parser.add_argument("--register", metavar="SPEC", help="a hook that needs the optimizer, registered by the script")
    parser.add_argument("--local", choices=("sgd", "diloco"), help="average parameters now and then, without DDP")
    parser.add_argument("--sync-every", type=int, default=10)
    parser.add_argument("--exchange", default="bf16", help="for --local: how changes are averaged")
    args = parser.parse_args()
    args.lr = (lr if args.optimizer == optimizer else RATES[args.optimizer]) if args.lr is None else args.lr
    return args


RATES = {"adamw": 1e-3, "onebit": 1e-3, "sgd": 0.1, "muon": 0.01}
"""Learning rates of optimizers that are not a task's own."""


def _muon(module: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Muon for the matrices between the first and the last layer, AdamW for the rest, as its authors advise."""
    matrices = [param for name, param in module.named_parameters() if param.dim() == 2 and "blocks" in name]
    chosen = {id(param) for param in matrices}
    rest = [param for param in module.parameters() if id(param) not in chosen]
    return Both([torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95))])


class Both(torch.optim.Optimizer):
    """Two optimizers as one, so that schedules see the groups of both."""

    def __init__(self, parts: list[torch.optim.Optimizer]) -> None:
        super().__init__([param for part in parts for group in part.param_groups for param in group["params"]], {})
        self.parts, self.param_groups = parts, [group for part in parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self.parts:
            part.step()


OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "adamw": lambda module, lr: torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.95)),
    "sgd": lambda module, lr: torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9),
    "muon": _muon,
    "onebit": lambda module, lr: OneBitAdamW(module.parameters(), lr=lr, betas=(0.9, 0.95)),
}


def run(args: argparse.Namespace, make: Callable[[], nn.Module], loss_of: Loss, held_out: Loss) -> None:
    """Train, with a linear warm-up and a linear decay to a tenth, and log the loss on held-out data at the end.

    `make` draws the parameters, the same on all ranks; `loss_of` draws a batch of this rank's own, and has its loss.
    """
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = make()
    optimizer = OPTIMIZERS[args.optimizer](module, args.lr)
    averages_itself = args.local or args.optimizer == "onebit"
    model = module if averages_itself else DistributedDataParallel(module)
    if args.register:
        gradwire.register(model, args.register, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, args.steps))
    torch.manual_seed(1000 + dist.get_rank())
    with _rounds(args, module, optimizer):
        for _ in range(args.steps):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()
            schedule.step()
    module.eval()
    with torch.no_grad():
        gradwire.log("val_loss", held_out(module))
    dist.barrier()
    dist.destroy_process_group()


def run_on_text(args: argparse.Namespace, make: Callable[[], nn.Module], batch: int, length: int) -> None:
    """`run` on the source of Python's standard library: a model of bytes predicts each next one.

    A batch has this number of windows of `length` bytes, of which the last one is only predicted.
    """
    text, offsets = library_text(4_000_000), torch.arange(length)

    def of(model: nn.Module, windows: Tensor) -> Tensor:
        return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())

    def on_a_batch(model: nn.Module) -> Tensor:
        starts = torch.randint(text.train.numel() - length, (batch,))
        return of(model, text.train[starts[:, None] + offsets].long())

    held_out = even_windows(text.held_out, 256, length)
    run(args, make, on_a_batch, lambda model: of(model, held_out))


def _rate(step: int, steps: int) -> float:
    return min((step + 1) / 20, max(0.1, 1 - 0.9 * step / steps))


def _rounds(args: argparse.Namespace, module: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    if args.local is None:
        return nullcontext()
    kind = LocalSGD if args.local == "sgd" else DiLoCo
    return kind(module, optimizer, sync_every=args.sync_every, exchange=args.exchange)

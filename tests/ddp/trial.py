"""A hooked model whose every step is compared with the mean that plain all-reduces in float64 give."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire

from .kit import Ranks

Grads = Sequence[Tensor | None]
Vectors = dict[torch.dtype, Tensor]
"""All values of the parameters of one type, as real float64 numbers in a row."""


class Trial:
    """`step` trains on some batches, and compares gradients and replicas. `twin` works out the local gradients."""

    def __init__(
        self,
        ranks: Ranks,
        module: nn.Module,
        *,
        model: nn.Module | None = None,
        group: dist.ProcessGroup | None = None,
        register: dict[str, Any] | None = None,
        lr: float = 1e-3,
        **ddp: Any,
    ) -> None:
        """`model` is DDP over the module, where it is there already; `register` are options of the hook."""
        self.group = group or ranks.group
        self.twin = copy.deepcopy(module)
        self.model = model or ranks.wrap(module, process_group=self.group, **ddp)
        self.hook = ranks.register(self.model, **(register or {}))
        self.optimizer = torch.optim.SGD(self.params, lr=lr)
        self.rms: dict[torch.dtype, float] = {}
        self.sums: tuple[Vectors, Vectors] = ({}, {})

    @property
    def params(self) -> list[Tensor]:
        return [param for param in self.model.parameters() if param.requires_grad]

    def step(self, *batches: Any) -> None:
        """Accumulate over the batches without synchronising, all but the last, and compare the outcome."""
        local = self.local(*batches)
        self.backward(*batches)
        self.compare(local)
        self.optimizer.step()
        if self.hook.exchange.lanes:
            same_everywhere(self.params, self.group)

    def backward(self, *batches: Any) -> None:
        self.optimizer.zero_grad()
        for number, batch in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.model.no_sync():
                loss(self.model(batch)).backward()

    def local(self, *batches: Any) -> Grads:
        """This rank's own gradients, worked out beside DDP."""
        self.twin.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(self.twin.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs)
        for batch in batches:
            loss(self.twin(batch)).backward()
        return [param.grad for param in self.twin.parameters() if param.requires_grad]

    def grads(self) -> Grads:
        return [param.grad for param in self.params]

    def compare(self, local: Grads) -> None:
        """The model's gradients are what the exchange promises for these local ones."""
        self._compare_none(local)
        got, mine = vectors(self.params, self.grads()), vectors(self.params, local)
        if not self.hook.exchange.lanes:
            return assert_equal(got, mine)
        for dtype, (mean, rms) in mean_and_rms(mine, self.group).items():
            self.rms[dtype] = max(self.rms.get(dtype, 0.0), rms)
            assert_near(got[dtype], mean, self._tolerance(dtype) * self.rms[dtype], f"{dtype} gradients")
            for sums, value in zip(self.sums, (got[dtype], mean), strict=True):
                sums[dtype] = sums.get(dtype, 0.0) + value

    def _tolerance(self, dtype: torch.dtype) -> float:
        """With feedback a step emits its own mean, more what the last one lost, less what this one loses."""
        exchange, size = self.hook.exchange, self.group.size()
        factor = 3 if exchange.takes_residual and self.hook.steps > 1 else 1
        return factor * (exchange.bound(size) + size * torch.finfo(dtype).eps)

    def _compare_none(self, local: Grads) -> None:
        """A gradient is None where no rank has one, like in DDP without a hook."""
        used = torch.tensor([grad is not None for grad in local], dtype=torch.int32)
        dist.all_reduce(used, group=self.group)
        got = [grad is not None for grad in self.grads()]
        assert got == [bool(count) for count in used], f"gradients present: {got}, used on ranks: {used.tolist()}"


def loss(out: Tensor) -> Tensor:
    return out.float().square().sum() if not out.is_complex() else out.abs().square().sum()


def vectors(params: Sequence[Tensor], values: Grads) -> Vectors:
    parts: dict[torch.dtype, list[Tensor]] = {}
    for param, value in zip(params, values, strict=True):
        parts.setdefault(param.dtype, []).append(_real64(torch.zeros_like(param) if value is None else value))
    return {dtype: torch.cat(parts[dtype]) for dtype in sorted(parts, key=str)}


def mean_and_rms(mine: Vectors, group: dist.ProcessGroup) -> dict[torch.dtype, tuple[Tensor, float]]:
    """The exact mean over the ranks, and the rms over the ranks of the norms, which bounds are relative to."""
    return {dtype: _mean_and_rms(value, group) for dtype, value in mine.items()}


def _mean_and_rms(value: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, float]:
    packed = torch.cat([value, value.square().sum().reshape(1)])
    dist.all_reduce(packed, group=group)
    packed /= group.size()
    return packed[:-1], math.sqrt(packed[-1])


def _real64(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return (torch.view_as_real(dense) if dense.is_complex() else dense).double().reshape(-1)


def assert_near(got: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    error = float((got - expected).norm())
    assert error <= allowed, (
        f"{what}: error {error:.3g}, allowed {allowed:.3g}\ngot      {got[:8].tolist()}\nexpected {expected[:8].tolist()}"
    )


def assert_equal(got: Vectors, expected: Vectors) -> None:
    assert got.keys() == expected.keys()
    for dtype, value in got.items():
        assert torch.equal(value, expected[dtype]), f"{dtype}: {value[:8].tolist()} is not {expected[dtype][:8].tolist()}"


def same_everywhere(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """All ranks hold the same bits."""
    values = [torch.view_as_real(t.detach()) if t.is_complex() else t.detach() for t in tensors]
    bits = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in values])
    root = bits.clone()
    dist.broadcast(root, group_src=0, group=group)
    differ = int((bits != root).sum())
    assert differ == 0, f"{differ} of {bits.numel()} bytes differ from those of the group's rank 0"


def train(model: nn.Module, batches: Iterable[Any], lr: float = 1e-3) -> None:
    """Plain training, nothing compared."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        loss(model(batch)).backward()
        optimizer.step()


def raised(kind: type[BaseException] | tuple[type[BaseException], ...], run: Callable[[], object]) -> str:
    """The text of the error that `run` must raise."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} was raised")


def residuals(hook: gradwire.Hook) -> dict[str, Tensor]:
    """What error feedback keeps, by parameter."""
    return hook.state_dict()["residuals"]  # type: ignore[no-any-return]

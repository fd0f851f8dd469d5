"""A model with a hook. Every step is compared with the mean of all ranks' local gradients in float64."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire

from .models import WIDTH, batch
from .ranks import Ranks

Grads = Sequence[Tensor | None]


class Trial:
    """Trains, and compares gradients and replicas. A copy of the model, `twin`, computes the local gradients."""

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
        self.rank = ranks.rank
        self.group = group or ranks.group
        self.twin = copy.deepcopy(module)
        self.model = model or ranks.wrap(module, process_group=self.group, **ddp)
        self.forward: Callable[..., Tensor] = self.model
        self.hook = ranks.register(self.model, **(register or {}))
        self.optimizer = torch.optim.SGD(self.params, lr=lr)
        self.rms: dict[torch.dtype, float] = {}
        self.pending = 0.0  # a bound for the residual that an exchange before the present one has left
        self.emitted: list[Tensor] = []
        self.means: list[Tensor] = []

    @property
    def params(self) -> list[Tensor]:
        return [param for param in self.model.parameters() if param.requires_grad]

    @property
    def grads(self) -> Grads:
        return [param.grad for param in self.params]

    def steps(self, count: int, *, first: int = 0, width: int = WIDTH) -> Trial:
        """Train on this rank's own batches of some steps, and count the steps."""
        before = self.hook.steps
        for step in range(first, first + count):
            self.step(batch(self.rank, step, width))
        assert self.hook.steps == before + count
        return self

    def step(self, *batches: Any) -> None:
        """Train on batches, of which only the last one is synchronised, and compare the gradients."""
        local = self.local(*batches)
        self.backward(*batches)
        self.compare(local)
        self.optimizer.step()

    def backward(self, *batches: Any) -> None:
        self.optimizer.zero_grad()
        for number, inputs in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else self.model.no_sync():
                loss(self.forward(inputs)).backward()

    def local(self, *batches: Any) -> Grads:
        """This rank's own gradients, computed without DDP."""
        self.twin.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(self.twin.parameters(), self.model.parameters(), strict=True):
                mine.copy_(theirs)
        for inputs in batches:
            loss(self.twin(inputs)).backward()
        return [param.grad for param in self.twin.parameters() if param.requires_grad]

    def compare(self, local: Grads) -> None:
        """Compare the model's gradients with the mean of these local ones, and between ranks."""
        params, grads = self.params, self.grads
        dtypes = sorted({param.dtype for param in params}, key=str)
        used = torch.tensor([grad is not None for grad in local]).double()
        parts = [used, *(vector(params, values, dtype) for dtype in dtypes for values in (grads, local))]
        used_RP, *rows = gather(torch.cat(parts), self.group).split([part.numel() for part in parts], dim=1)
        present = [grad is not None for grad in grads]
        assert present == used_RP.any(0).tolist(), f"gradients present: {present}, used by rank: {used_RP.tolist()}"
        for dtype, got_RN, local_RN in zip(dtypes, rows[::2], rows[1::2], strict=True):
            self._compare_values(dtype, got_RN, local_RN)

    def _compare_values(self, dtype: torch.dtype, got_RN: Tensor, local_RN: Tensor) -> None:
        got, mean = got_RN[self.group.rank()], local_RN.mean(0)
        if not self.hook.exchange.lanes:
            assert torch.equal(got, local_RN[self.group.rank()]), f"noop changed {dtype} gradients"
            return
        differ = (bits(got_RN) != bits(got_RN[0])).any(1).nonzero().flatten().tolist()
        assert not differ, f"ranks {differ} hold other {dtype} gradients than rank 0"
        rms = float(local_RN.square().sum(1).mean().sqrt())
        self.rms[dtype] = max(self.rms.get(dtype, 0.0), rms)
        assert_near(got, mean, self._tolerance(dtype) * self.rms[dtype], f"{dtype} gradients")
        self.emitted.append(got)
        self.means.append(mean)

    def _tolerance(self, dtype: torch.dtype) -> float:
        """With feedback, the residual of the step before is added, and that of this step is kept back."""
        exchange, size = self.hook.exchange, self.group.size()
        factor = 3 if exchange.takes_residual and self.hook.steps > 1 else 1
        return factor * (exchange.bound(size) + size * torch.finfo(dtype).eps) + self.pending


def loss(out: Tensor) -> Tensor:
    return out.abs().square().sum() if out.is_complex() else out.float().square().sum()


def vector(params: Sequence[Tensor], values: Grads, dtype: torch.dtype) -> Tensor:
    """The values of all parameters of a type in a row, as real float64 numbers; zero where there is no gradient."""
    chosen = [
        real(torch.zeros_like(param) if value is None else value)
        for param, value in zip(params, values, strict=True)
        if param.dtype == dtype
    ]
    return torch.cat([value.double().reshape(-1) for value in chosen])


def real(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int64)


def gather(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(n,) on each rank -> (ranks, n)."""
    rows = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(rows, values.contiguous(), group=group)
    return torch.stack(rows)


def assert_near(got: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    error = float((got - expected).norm())
    first = f"got      {got[:8].tolist()}\nexpected {expected[:8].tolist()}"
    assert error <= allowed, f"{what}: error {error:.3g}, allowed {allowed:.3g}\n{first}"


def same_everywhere(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """All ranks hold the same bits."""
    rows = gather(torch.cat([real(tensor).double().reshape(-1) for tensor in tensors]), group)
    differ = int((bits(rows) != bits(rows[0])).any(0).sum())
    assert differ == 0, f"{differ} of {rows.shape[1]} values are not the same on all ranks"


def through_a_file(value: Any) -> Any:
    """Save and load with torch's defaults, which load only tensors, numbers, text and what is registered as safe."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def train(model: nn.Module, batches: Iterable[Any], lr: float = 1e-3) -> None:
    """Train without comparing anything."""
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=lr)
    for inputs in batches:
        optimizer.zero_grad()
        loss(model(inputs)).backward()
        optimizer.step()


def raised(kind: type[BaseException] | tuple[type[BaseException], ...], run: Callable[[], object]) -> str:
    """The text of the error that `run` must raise."""
    try:
        run()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} was raised")


def residuals(hook: gradwire.Hook) -> dict[str, Tensor]:
    """What error feedback keeps, for each parameter."""
    return hook.state_dict()["residuals"]  # type: ignore[no-any-return]

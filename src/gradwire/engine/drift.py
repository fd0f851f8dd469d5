"""The drift guard: every so many steps, do all ranks still hold the same parameters?

When a step begins, each rank computes one number from all its parameters, and the ranks exchange it beside the backward
pass. The next step compares. Only if the numbers differ do the ranks look for the parameters that do.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.futures import Future

from gradwire.engine.fingerprint import fingerprint
from gradwire.engine.observers import Observer
from gradwire.engine.runner import Runner
from gradwire.errors import ExchangeError, SpecError, VerifyError
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket

SMALL = 4096
"""Parameters of fewer values are looked at together."""


class Watched(Protocol):
    """What the guard uses of a Hook."""

    runner: Runner
    size: int
    device: torch.device
    replicated: Callable[[], Iterable[tuple[str, Tensor]]]

    @property
    def steps(self) -> int:
        """Steps averaged so far, the present one included."""

    def gather(self, values: Tensor) -> Tensor:
        """(n,) on each rank -> (size, n)."""


def check_interval(name: str, every: object) -> None:
    """Raise SpecError unless `every`, the argument of this name, is a number of steps."""
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise SpecError(f"{name} must be a whole number of steps of at least 1, or None; got {every!r}")


class DriftGuard(Observer):
    """Compares the parameters of all ranks every so many steps, and raises VerifyError on all ranks if they differ."""

    def __init__(self, hook: Watched, every: int) -> None:
        self._hook, self._every = hook, every
        self._asked: tuple[int, Tensor, Future[Tensor]] | None = None
        self._same_at = 0
        """The last step before which all ranks held the same parameters."""

    def before_mean(self, bucket: Bucket, first: bool) -> None:
        """Only the beginning of a step matters."""
        if first:
            self.on_step()

    def on_step(self) -> None:
        """Compare what was exchanged in the step before, and exchange again if it is time."""
        if self._asked is not None:
            self._compare(*self._asked)
            self._asked = None
        step = self._hook.steps
        if step % self._every == 0:
            own = digest([param for _, param in self._hook.replicated()]).view(1)
            rows = torch.empty(self._hook.size, dtype=own.dtype, device=own.device)
            self._asked = step, rows, self._hook.runner.submit([_gathering(own, rows)], rows, counted=False)

    def _compare(self, step: int, rows: Tensor, done: Future[Tensor]) -> None:
        try:
            done.wait()
        except RuntimeError as error:
            raise ExchangeError(f"comparing the parameters of step {step} failed: {error}") from error
        if bool((rows == rows[0]).all()):
            self._same_at = step
            return
        usual = Counter(rows.tolist()).most_common(1)[0][0]
        others = [rank for rank, value in enumerate(rows.tolist()) if value != usual]
        raise VerifyError(
            f"the ranks hold different parameters at the beginning of step {step}: rank {', '.join(map(str, others))} "
            f"differs from the others in {self._named()}. At step {self._same_at} they were the same. Something "
            "besides the hook has changed them (a step on some ranks only, or a fault of memory). Go on from a "
            "checkpoint of before"
        )

    def _named(self) -> str:
        params = list(self._hook.replicated())
        names = different(self._hook.gather, params)
        return f"{len(names)} of {len(params)} parameters, first {names[0]!r}" if names else "values that changed since"


def different(gather: Callable[[Tensor], Tensor], params: Sequence[tuple[str, Tensor]]) -> list[str]:
    """The names of the parameters that are not the same on all ranks. All ranks together."""
    if not params:
        return []
    everyone = gather(torch.stack([fingerprint(param) for _, param in params]))
    differs = (everyone != everyone[0]).any(0).tolist()
    return [name for (name, _), differ in zip(params, differs, strict=True) if differ]


def digest(tensors: Sequence[Tensor]) -> Tensor:
    """A fingerprint of all tensors. Small ones are joined first, as thousands of calls would take long."""
    small: dict[torch.dtype, list[Tensor]] = {}
    prints = []
    for tensor in tensors:
        if tensor.numel() < SMALL:
            small.setdefault(tensor.dtype, []).append(tensor.detach().reshape(-1))
        else:
            prints.append(fingerprint(tensor))
    prints += [fingerprint(torch.cat(parts)) for parts in small.values()]
    return fingerprint(torch.stack(prints)) if prints else torch.zeros((), dtype=torch.int64)


def _gathering(own: Tensor, rows: Tensor) -> Callable[[Comm], None]:
    def run(comm: Comm) -> None:
        rows.copy_(comm.all_gather(own).view(-1))

    return run

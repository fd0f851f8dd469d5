"""Watch: how far the averaged gradients are from the exact mean while the model trains.

In every `every`-th step a part of the gradients is averaged exactly as well. That part is every 31st value of each
bucket, with another first value each time, so that a watched step sends about 1 bit per value more. The optimizer gets
what the hook has averaged, as in every other step. All ranks compute the same numbers.
"""

import dataclasses
import math
import threading
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradwire.engine.runner import Job
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket

STRIDE = 31
"""One value out of this many is averaged exactly. It is a prime, so that all columns of a matrix have their turn."""
USUAL_STEPS = 1000
USUAL_RECORDS = 5
"""The range that counts as usual is that of the first steps, and of at least this many records."""
MOST_RECORDS = 10_000
SMALL = 0.01
"""An error below this is never worth a warning."""
SQUARES = ("max_exp_avg_sq", "exp_avg_sq", "square_avg", "sum")
"""Where the optimizers of torch keep mean squared gradients, by whose root they divide: Adam, RMSprop, Adagrad."""


@dataclass(frozen=True, slots=True)
class Watched:
    """How one averaged gradient compares with the exact mean x of the ranks' gradients; r is the hook's result."""

    step: int
    error: float
    """|r - x| / |x|. With error feedback, later steps make up for a part of it."""
    cosine: float
    """The cosine of the angle between r and x."""
    update_error: float | None = None
    """The error where the optimizer divides each value by d, as Adam does: |(r - x) / d| / |x / d|. None if the
    optimizer is not known, keeps no mean squared gradients, or has not stepped yet."""

    def as_dict(self) -> dict[str, int | float | None]:
        """A plain mapping, for logging."""
        return asdict(self)


class Watch:
    """Compares some steps of a hook with the exact mean, and warns once when the error leaves its usual range."""

    def __init__(self, every: int, optimizer: Optimizer | None = None) -> None:
        self.every = every
        self.optimizer = optimizer
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget everything, for another exchange."""
        self.records: deque[Watched] = deque(maxlen=MOST_RECORDS)
        self._usual: list[Watched] = []
        self._first_step: int | None = None
        self._warned = False
        self._step = 0
        self._sums: list[Tensor] = []

    def begin(self, step: int, hook: str) -> None:
        """A step begins: the one before is complete. Only the thread that runs backward calls this."""
        self.finish(hook)
        self._first_step = step if self._first_step is None else self._first_step
        self._step = step if step % self.every == 0 else 0

    @property
    def due(self) -> bool:
        """Whether this step is compared."""
        return self._step > 0

    def add(
        self, bucket: Bucket, jobs: Sequence[Job], after: Callable[[], None] | None
    ) -> tuple[list[Job], Callable[[], None], Tensor]:
        """The jobs of a bucket and one that averages the sample; what to do when all are done; the sample."""
        sampled = slice(self._step // self.every % STRIDE % bucket.flat.numel(), None, STRIDE)
        sample = bucket.flat[sampled].to(torch.promote_types(bucket.flat.dtype, torch.float32), copy=True).contiguous()

        def average(comm: Comm) -> None:
            comm.all_reduce_(sample).div_(comm.size)

        def compare() -> None:
            sums = _sums(bucket.flat[sampled].double(), sample.double(), self._divisor(bucket, sampled))
            with self._lock:
                self._sums.append(sums)
            if after is not None:
                after()

        return [*jobs, average], compare, sample

    def finish(self, hook: str) -> None:
        """Record the watched step that has ended, unless its gradients were not finite."""
        sums, self._sums = self._sums, []
        if not sums:
            return
        lost2, exact2, result2, product, lost_update2, update2 = torch.stack(sums).sum(0).tolist()
        if not (exact2 > 0 and math.isfinite(lost2 + exact2 + result2)):
            return
        cosine = product / math.sqrt(exact2 * result2) if result2 > 0 else 0.0
        update = math.sqrt(lost_update2 / update2) if update2 > 0 and math.isfinite(lost_update2 + update2) else None
        self.records.append(Watched(self._step, math.sqrt(lost2 / exact2), cosine, update))
        self._judge(hook)

    def _divisor(self, bucket: Bucket, sampled: slice) -> Tensor | None:
        """What the optimizer divides the sampled values by; inf for parameters without state. None: it is not known."""
        states = [{} if self.optimizer is None else self.optimizer.state.get(param, {}) for param in bucket.params]
        squares = [next((state[key] for key in SQUARES if key in state), None) for state in states]
        if all(square is None or square.is_complex() for square in squares):
            return None
        divisor = dataclasses.replace(bucket, flat=torch.full_like(bucket.flat, math.inf, dtype=torch.float32))
        for view, square in zip(divisor.grads, squares, strict=True):
            if square is not None and square.shape == view.shape and not square.is_complex():
                view.copy_(square).sqrt_().add_(1e-12)
        return divisor.flat[sampled].double()

    def _judge(self, hook: str) -> None:
        """Warn once, when the last two records are above the usual range."""
        latest = self.records[-1]
        assert self._first_step is not None
        if latest.step < self._first_step + USUAL_STEPS or len(self._usual) < USUAL_RECORDS:
            self._usual.append(latest)
            return
        for key, what in (("error", "averaged gradient"), ("update_error", "optimizer's update")):
            usual = [value for record in self._usual if (value := getattr(record, key)) is not None]
            last = [getattr(record, key) for record in list(self.records)[-2:]]
            if usual and not self._warned and None not in last and min(last) > _limit(usual):
                self._warned = True
                warnings.warn(_warning(hook, what, usual, latest.step, last[-1]), stacklevel=2)


def _sums(result: Tensor, exact: Tensor, divisor: Tensor | None) -> Tensor:
    lost = result - exact
    pairs = [(lost, lost), (exact, exact), (result, result), (exact, result)]
    if divisor is not None:
        pairs += [(lost / divisor, lost / divisor), (exact / divisor, exact / divisor)]
    sums = torch.stack([a.dot(b) for a, b in pairs])
    return torch.nn.functional.pad(sums, (0, 6 - len(pairs)))


def _limit(usual: Sequence[float]) -> float:
    """The upper end of the range, by its own width or a quarter higher: the largest of a few is exceeded by chance."""
    high = max(usual)
    return max(high + (high - min(usual)), 1.25 * high, SMALL)


def _warning(hook: str, what: str, usual: Sequence[float], step: int, error: float) -> str:
    return (
        f"{hook}: the error of the {what} is {error:.3g} of its size at step {step}, the second watched step in a row "
        f"above its usual range; in the first steps it was {min(usual):.3g} to {max(usual):.3g}. The model may train "
        "worse from here on: compare its loss with an exact run, or use more bits, such as hook.switch('int8') on all "
        "ranks"
    )

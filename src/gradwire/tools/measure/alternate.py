"""Steps with and without communication, by turns, in a training that stays what it was, bit for bit.

DDP calls a hook for every bucket of gradients while the backward pass still runs, and waits for the answers at its
end. In a step *with* communication the hook answers as DDP alone would: it starts an all-reduce at once. In a step
*without* it puts the bucket aside. When the backward pass is through, the clock is stopped, the buckets put aside are
averaged by the very same all-reduces, and the clock runs on. So every step trains on the same gradients, no copy of
the model is needed, and what is timed is the user's whole step: data, forward, backward and optimizer.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch import GradBucket
from gradwire._torch.ddp import in_join
from gradwire._torch.optim import at_end_of_backward
from gradwire.engine.stream import new_future
from gradwire.errors import RegisterError
from gradwire.exchanges import Exact
from gradwire.models.ddp import from_ddp, make_hook
from gradwire.models.uncopied import Uncopied
from gradwire.tools.launch.link import emulate

ORDER = (True, False, False, True)
"""Whether a step of a round communicates: a machine that grows slower does so for both kinds alike."""
WARM_UP = 6
"""Steps before the first timed one: DDP cuts its buckets anew, memory is first touched, caches fill."""
LET_GO_S = 5.0
"""How long a thread of the backend may hold a tensor after its collective has ended: microseconds, on a free core."""

Mean = Callable[[Any], Future[Tensor]]


class Backward(NamedTuple):
    """A backward pass without communication, from the first bucket on."""

    backward_s: float
    """When it ended."""
    came_s: Mapping[str, float]
    """When the gradient of each parameter was there."""


UNSEEN = Backward(0.0, {})

Publish = Callable[[list[float], Backward], None]


def communicates(at: int) -> bool:
    """Whether the timed step with this number does.

    Every other round, and every other pair of rounds, and so on, is the other way round: what a script does every 2, 4
    or 8 steps, such as stepping an optimizer after some backward passes, hits both kinds alike.
    """
    turned, place = divmod(at, len(ORDER))
    return ORDER[place] != (turned.bit_count() % 2 == 1)


class Clock:
    """Times whole steps and says which kind the current one is. One for all models of a process.

    A step lasts from the first bucket of one backward pass to the first of the next: nothing is left out, wherever a
    script begins its loop. `publish` gets all times so far, the slowest rank's of each step, whenever a round of ORDER
    is complete on all ranks, and this rank's median backward pass without communication.
    """

    def __init__(self, steps: int, publish: Publish) -> None:
        self.communicates = True
        self._steps, self._publish = -(-steps // len(ORDER)) * len(ORDER), publish
        self._lead: Alternating | None = None
        self._begun = 0
        self._since_s = self._stopped_s = 0.0
        self._times: list[float] = []
        self._came_s: dict[str, float] | None = None
        self._passes: list[Backward] = []

    def begin_step(self, model: "Alternating", group: dist.ProcessGroup, device: torch.device) -> None:
        """The first bucket of a model is there. Of several models the first to train counts the steps."""
        self._lead = self._lead or model
        if model is not self._lead or len(self._times) == self._steps:
            return
        took_s = now(device) - self._since_s - self._stopped_s
        if self._begun > WARM_UP:
            self._times.append(took_s)
            self._agree(group, device)
        done = len(self._times)
        self.communicates = self._begun < WARM_UP or done == self._steps or communicates(done)
        self._begun += 1
        self._came_s = None if self.communicates else {}
        self._stopped_s, self._since_s = 0.0, now(device)

    def came(self, model: "Alternating", names: Iterable[str], device: torch.device) -> None:
        """Gradients are there. The first time in a step counts, and only in one without communication."""
        if model is self._lead and self._came_s is not None:
            came_s = now(device) - self._since_s
            for name in names:
                self._came_s.setdefault(name, came_s)

    def ended(self, model: "Alternating", device: torch.device) -> None:
        """A backward pass without communication is through."""
        if model is self._lead and self._came_s is not None:
            self._passes.append(Backward(now(device) - self._since_s, self._came_s))
            self._came_s = None

    def stopped(self, seconds: float) -> None:
        """The step has been held up by so much."""
        self._stopped_s += seconds

    def _agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """At the end of a round: each step took as long as on the slowest rank."""
        if len(self._times) % len(ORDER) == 0:
            latest = torch.tensor(self._times[-len(ORDER) :], dtype=torch.float64, device=device)
            dist.all_reduce(latest, dist.ReduceOp.MAX, group=group)
            self._times[-len(ORDER) :] = latest.tolist()
            passes = sorted(self._passes, key=lambda each: each.backward_s)
            self._publish(self._times, passes[len(passes) // 2] if passes else UNSEEN)


class Alternating(Uncopied):
    """The state of the hook of one model."""

    def __init__(self, model: DistributedDataParallel, clock: Clock, link: str | None) -> None:
        self._model, self._clock = weakref.ref(model), clock
        self._group, self._device = model.process_group, next(model.parameters()).device
        self._names = {param: name for name, param in model.module.named_parameters()}
        self._mean = self._all_reduce if link is None else self._emulated(link)
        self._waiter = ThreadPoolExecutor(1, "gradwire-waiter")
        self._last_index = -1
        self._communicates = True
        self._aside: list[tuple[Any, Future[Tensor]]] = []
        self._sent: list[weakref.ref[Tensor]] = []
        """What collectives work at, or have just ended with: aliases of buckets, held by nobody else."""
        weakref.finalize(self, _wait_let_go, self._sent)
        if self._device.type == "cpu":  # elsewhere a look at the clock would hold up the device
            for param in self._names:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self._note)

    def average(self, bucket: Any) -> Future[Tensor]:
        """What DDP gets for a bucket: its mean over the ranks, now or at the end of the backward pass."""
        self._check(bucket)
        first, self._last_index = bucket.index() <= self._last_index or self._last_index < 0, bucket.index()
        if first:
            self._clock.begin_step(self, self._group, self._device)
            self._communicates = self._clock.communicates
        ours = from_ddp(bucket, lambda param: self._names[param])
        return self._mean(ours) if self._communicates else self._put_aside(ours)

    def _note(self, param: Tensor) -> None:
        self._clock.came(self, (self._names[param],), self._device)

    def _put_aside(self, bucket: Any) -> Future[Tensor]:
        if not self._aside:  # runs at the end of the backward pass, before DDP looks for answers
            at_end_of_backward(self._make_up)
        future = new_future(self._device)
        self._aside.append((bucket, future))
        self._clock.came(self, bucket.names, self._device)
        return future

    def _make_up(self) -> None:
        """Average what was put aside, off the clock."""
        began_s = now(self._device)
        self._clock.ended(self, self._device)
        aside, self._aside = self._aside, []
        means = [self._mean(bucket) for bucket, _ in aside]
        for mean, (_, future) in zip(means, aside, strict=True):
            future.set_result(mean.wait())
        self._clock.stopped(now(self._device) - began_s)

    def _all_reduce(self, bucket: Any) -> Future[Tensor]:
        """As DDP without a hook does it: the same operations on the same buffer, so the same bits.

        One case is out of reach: on 3, 5, 6, 7... ranks DDP divides gradients that it finds in its buckets
        (`gradient_as_bucket_view` and `zero_grad(set_to_none=False)`), and multiplies all others by 1 / ranks.
        """
        flat = bucket.flat
        flat.mul_(1.0 / self._group.size())
        if self._device.type != "cpu":
            work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            return cast(Future[Tensor], work.get_future().then(lambda _: flat))
        sent, future = flat.detach(), new_future(self._device)
        self._sent[:] = [each for each in self._sent if each() is not None] + [weakref.ref(sent)]
        self._waiter.submit(_settle, dist.all_reduce(sent, group=self._group, async_op=True), flat, future)
        return future

    def _emulated(self, link: str) -> Mean:
        with emulate(link):
            hook = make_hook(Exact(), self._group, self._device)
        return hook.mean

    def _check(self, bucket: Any) -> None:
        model = self._model()
        if isinstance(bucket, tuple):
            raise RegisterError("headroom cannot time DDP's compiled reducer: run the script without torch.compile")
        if model is not None and in_join(model):
            raise RegisterError(
                "headroom cannot time steps inside Join, as ranks that have run out of inputs take part in no step; "
                "give all ranks the same number of batches"
            )


def _settle(work: Any, flat: Tensor, future: Future[Tensor]) -> None:
    """Answer when the collective is through.

    In a thread that Python waits for at its end: a callback on the collective's own future runs in one of the backend,
    and aborts a process that leaves while it is not quite through.
    """
    try:
        work.wait()
    except RuntimeError as error:
        future.set_exception(error)  # type: ignore[arg-type]  # as torch has it in its stubs
    else:
        future.set_result(flat)


def _wait_let_go(sent: list[weakref.ref[Tensor]]) -> None:
    """At the end of the process: the thread of the backend that lets go of a tensor needs the interpreter for it."""
    until_s = time.monotonic() + LET_GO_S
    while any(each() is not None for each in sent) and time.monotonic() < until_s:
        time.sleep(0.001)


def alternating_hook(state: Alternating, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for every bucket."""
    return state.average(bucket)


def now(device: torch.device) -> float:
    """Seconds, once the device has done all it was asked to."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()

"""Times steps with and without communication in turns, in a training that stays the same, bit for bit.

DDP calls a hook for every bucket of gradients while the backward pass still runs, and waits for the results at its end.
In a step *with* communication the hook does what DDP alone would do: it starts an all-reduce at once. In a step
*without* communication it keeps the bucket. When the backward pass is over, the clock is stopped, the kept buckets are
averaged by the same all-reduces, and the clock continues. So every step trains on the same gradients, no copy of the
model is needed, and the timed step is the user's whole step: data, forward, backward and optimizer. On an accelerator
the clock is a row of events on the stream that computes, which are read at the end of a round.
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
from gradwire.engine.events import Moment, each_seconds, now, seconds
from gradwire.engine.stream import new_future
from gradwire.errors import RegisterError
from gradwire.exchanges import Exact
from gradwire.exchanges.bucket import Steps
from gradwire.models.ddp import from_ddp, make_hook
from gradwire.models.uncopied import Uncopied
from gradwire.tools.launch.link import EmulatedLink, emulate
from gradwire.tools.measure.crowd import Crowd

ORDER = (True, False, False, True)
"""Whether a step of a round communicates. A machine that gets slower slows down both kinds equally."""
WARM_UP = 6
"""Steps before the first timed one: DDP rebuilds its buckets, memory is first touched, caches fill."""
RELEASE_S = 5.0
"""The longest time that a thread of the backend holds a tensor after its collective: microseconds, on a free core."""

Mean = Callable[[Any], Future[Tensor]]


class Backward(NamedTuple):
    """A backward pass without communication, in seconds from the first bucket on."""

    backward_s: float
    """When it ended."""
    came_s: Mapping[str, float]
    """When the gradient of each parameter was ready."""
    crowd: float = 1.0
    """How many times as long it took because the cores were in use by others (`crowd.py`)."""


UNSEEN = Backward(0.0, {})

Publish = Callable[[list[float], Backward], None]
Span = tuple[Moment, Moment]


def communicates(at: int) -> bool:
    """Whether the timed step with this number communicates.

    Every other round, every other pair of rounds, and so on, has the opposite order. So work that a script does every
    2, 4 or 8 steps, such as an optimizer step after several backward passes, affects both kinds equally.
    """
    round_number, place = divmod(at, len(ORDER))
    return ORDER[place] != (round_number.bit_count() % 2 == 1)


class Clock:
    """Times whole steps and decides the kind of the current one. All models of a process share one clock.

    A step lasts from the first bucket of one backward pass to the first bucket of the next, so nothing is left out.
    Whenever a round of ORDER is complete on all ranks, `publish` gets all times so far, those of the slowest rank, and
    this rank's median backward pass without communication.
    """

    def __init__(self, steps: int, publish: Publish) -> None:
        self.communicates = True
        self.more_groups: tuple[dist.ProcessGroup, ...] = ()
        """Further groups of ranks that are timed together, such as replicas."""
        self._steps, self._publish = -(-steps // len(ORDER)) * len(ORDER), publish
        self._lead: object = None
        self._begun = 0
        self._since: Moment = 0.0
        self._stopped: list[Span] = []
        self._round: list[tuple[Span, list[Span]]] = []
        """The steps of the round so far, each with the spans in which the clock was stopped."""
        self._times: list[float] = []
        self._came: dict[str, Moment] | None = None
        self._round_passes: list[tuple[Span, dict[str, Moment]]] = []
        self._passes: list[Backward] = []
        self._crowd = Crowd()
        self._sent: list[weakref.ref[Tensor]] = []
        """The last message to the other ranks. Only the backend holds it."""
        weakref.finalize(self, _wait_for_release, self._sent)

    def begin_step(self, model: object, group: dist.ProcessGroup, device: torch.device) -> None:
        """The first bucket of a model has arrived. Of several models the first one to train counts the steps."""
        self._lead = self._lead or model
        if model is not self._lead or len(self._times) == self._steps:
            return
        if self._begun > WARM_UP:
            self._end()
            self._round.append(((self._since, now(device)), self._stopped))
            self._agree(group, device)
        done = len(self._times) + len(self._round)
        self._start(None if self._begun < WARM_UP or done == self._steps else done)
        self._begun += 1
        self._stopped, self._since = [], now(device)

    def _start(self, at: int | None) -> None:
        """A step begins; `at` is its number if it is timed."""
        self.communicates = at is None or communicates(at)
        self._came = None if self.communicates else {}
        if not self.communicates:
            self._crowd.begin()

    def _end(self) -> None:
        """A timed step is over."""

    def came(self, model: "Alternating", names: Iterable[str], device: torch.device) -> None:
        """Gradients are ready. The first time in a step counts, and only in a step without communication."""
        if model is self._lead and self._came is not None:
            came = now(device)
            for name in names:
                self._came.setdefault(name, came)

    def ended(self, model: "Alternating", device: torch.device) -> None:
        """A backward pass without communication is over."""
        if model is self._lead and self._came is not None:
            self._round_passes.append(((self._since, now(device)), self._came))
            self._came = None
            self._crowd.end()

    def stopped(self, began: Moment, ended: Moment) -> None:
        """Do not count this part of the step."""
        self._stopped.append((began, ended))

    def _agree(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """At the end of a round: read its times, and use those of the slowest rank."""
        if len(self._round) == len(ORDER):
            took = each_seconds([step for step, _ in self._round])
            took = [time_s - sum(each_seconds(stopped)) for time_s, (_, stopped) in zip(took, self._round, strict=True)]
            self._passes += [_backward(*each) for each in self._round_passes]
            self._round, self._round_passes = [], []
            latest = torch.tensor(took, dtype=torch.float64, device=device)
            sent = latest.detach()
            self._sent[:] = [weakref.ref(sent)]
            for each in (group, *self.more_groups):
                dist.all_reduce(sent, dist.ReduceOp.MAX, group=each)
            del sent
            self._times += latest.tolist()
            passes = sorted(self._passes, key=lambda each: each.backward_s)
            typical = passes[len(passes) // 2] if passes else UNSEEN
            self._publish(self._times, typical._replace(crowd=self._crowd.factor))


def _backward(whole: Span, came: Mapping[str, Moment]) -> Backward:
    return Backward(seconds(*whole), {name: seconds(whole[0], moment) for name, moment in came.items()})


class Alternating(Uncopied):
    """The state of the hook of one model."""

    def __init__(self, model: DistributedDataParallel, clock: Clock, link: EmulatedLink | str | None) -> None:
        self._model, self._clock = weakref.ref(model), clock
        self._group, self._device = model.process_group, next(model.parameters()).device
        self._names = {param: name for name, param in model.module.named_parameters()}
        self._mean = self._all_reduce if link is None else self._emulated(link)
        self._waiter = ThreadPoolExecutor(1, "gradwire-waiter")
        self._steps = Steps()
        self._communicates = True
        self._kept: list[tuple[Any, Future[Tensor]]] = []
        self._sent: list[weakref.ref[Tensor]] = []
        """Aliases of the buckets that collectives use or have just used. Only the backend holds them."""
        weakref.finalize(self, _wait_for_release, self._sent)
        if self._device.type == "cpu":  # elsewhere there would be an event for every parameter
            for param in self._names:
                if param.requires_grad:
                    param.register_post_accumulate_grad_hook(self._note)

    def average(self, bucket: Any) -> Future[Tensor]:
        """The result for DDP: the mean of a bucket over the ranks, started now or at the end of the backward pass."""
        self._check(bucket)
        if self._steps.add(bucket.index()):
            self._clock.begin_step(self, self._group, self._device)
            self._communicates = self._clock.communicates
        ours = from_ddp(bucket, lambda param: self._names[param])
        return self._mean(ours) if self._communicates else self._keep(ours)

    def _note(self, param: Tensor) -> None:
        self._clock.came(self, (self._names[param],), self._device)

    def _keep(self, bucket: Any) -> Future[Tensor]:
        if not self._kept:  # runs at the end of the backward pass, before DDP waits for results
            at_end_of_backward(self._average_kept)
        future = new_future(self._device)
        self._kept.append((bucket, future))
        self._clock.came(self, bucket.names, self._device)
        return future

    def _average_kept(self) -> None:
        """Average the kept buckets while the clock is stopped."""
        began = now(self._device)
        self._clock.ended(self, self._device)
        kept, self._kept = self._kept, []
        means = [self._mean(bucket) for bucket, _ in kept]
        for mean, (_, future) in zip(means, kept, strict=True):
            future.set_result(mean.wait())
        self._clock.stopped(began, now(self._device))

    def _all_reduce(self, bucket: Any) -> Future[Tensor]:
        """Average as DDP without a hook does: the same operations on the same buffer, so the same bits.

        There is one exception: on 3, 5, 6, 7... ranks DDP divides gradients that are already in its buckets
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

    def _emulated(self, link: EmulatedLink | str) -> Mean:
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
    """Complete the future when the collective is over.

    This runs in a thread that Python waits for at exit. A callback on the collective's own future would run in a thread
    of the backend, and abort a process that exits before it has returned.
    """
    try:
        work.wait()
    except RuntimeError as error:
        future.set_exception(error)  # type: ignore[arg-type]  # as torch has it in its stubs
    else:
        future.set_result(flat)


def _wait_for_release(sent: list[weakref.ref[Tensor]]) -> None:
    """At the end of the process: the thread of the backend that releases a tensor needs the interpreter for that."""
    until_s = time.monotonic() + RELEASE_S
    while any(each() is not None for each in sent) and time.monotonic() < until_s:
        time.sleep(0.001)


def alternating_hook(state: Alternating, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for every bucket."""
    return state.average(bucket)

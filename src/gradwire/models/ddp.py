"""A hook on a DistributedDataParallel model: what DDP calls for every bucket, and the Future that it gets."""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire._torch import GradBucket
from gradwire._torch.ddp import (
    divides_by_all_ranks,
    has_python_reducer,
    in_join,
    on_shadowed_backward,
    shadow_backward,
)
from gradwire._torch.distributed import backend_of, store_of, timeout_of
from gradwire._torch.traced import plain_name, uncompiled
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import Lanes, slow_link
from gradwire.engine.runner import LaneRunner, Runner
from gradwire.engine.stream import StreamRunner
from gradwire.engine.watch import Watch
from gradwire.errors import ExchangeError, GradwireError, RegisterError, SpecError
from gradwire.exchanges import Exchange
from gradwire.exchanges.base import DEFAULT_BUCKETS, Comm
from gradwire.exchanges.bucket import Bucket, Segment, segments_of
from gradwire.exchanges.whiten import SecondMoments
from gradwire.models.buckets import check_bucket_mb, rebucket
from gradwire.models.checks import check_group, check_model, check_parameters
from gradwire.models.compiled import traced_mean
from gradwire.models.uncopied import Uncopied

log = logging.getLogger("gradwire")

HOST_BLOCKING = ("gloo", "mpi", "ucc")
"""Backends that block the host, so that their collectives need lanes. gradwire's lanes are always gloo."""

_engines_made: "weakref.WeakKeyDictionary[Any, Iterable[int]]" = weakref.WeakKeyDictionary()


def attach(
    model: DistributedDataParallel,
    exchange: Exchange,
    *,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
    bucket_mb: float | None = None,
    requested: str | None = None,
    watch: Watch | None = None,
    optimizer: object = None,
) -> Hook:
    """Give `model` a hook that averages over `group`, by default the model's own group. See `gradwire.register`."""
    model = uncompiled(model)
    check_model(model, requested or str(exchange))
    check_group(group)
    params, replicated = _named_parameters(model), _named_parameters(model, frozen=True)
    check_parameters(model, params())
    check_chunk_bytes(chunk_bytes)
    check_bucket_mb(bucket_mb)
    traced = has_python_reducer(model)
    if traced and requested is not None:
        raise RegisterError(f"{requested} counts steps, which DDP's compiled reducer hides; name a hook instead")
    if traced and watch is not None:
        raise RegisterError("watch counts steps, which DDP's compiled reducer hides; leave it out")
    if watch is not None and not exchange.averages:
        raise SpecError(f"{exchange} does not average, so that watch has nothing to compare; leave it out")
    group = group or model.process_group
    moments = _moments(optimizer, exchange, dict(params()))
    how = {"requested": requested, "traced": traced, "unused": model.find_unused_parameters, "moments": moments}
    hook = make_hook(exchange, group, params()[0][1].device, chunk_bytes, params, **how)
    hook.replicated, hook.watch = replicated, watch
    try:
        if hook.size > 1:
            hook.agree("bucket_mb", "default" if bucket_mb is None else str(float(bucket_mb)))
            hook.agree("settings of DDP", _settings(model))
            hook.agree_on_model(replicated())
            hook.agree("watch", str(watch and watch.every))
        buckets = exchange.buckets if requested is None else DEFAULT_BUCKETS
        rebucket(model, [param for _, param in params()], bucket_mb, buckets)
        model.register_comm_hook(_Carried(hook, model, group), gradwire_hook)
    except BaseException as error:
        hook.close()
        if isinstance(error, RuntimeError) and not isinstance(error, GradwireError):
            raise RegisterError(f"DDP refused the hook: {error}") from error
        raise
    return hook


def _moments(optimizer: object, exchange: Exchange, params: dict[str, Tensor]) -> SecondMoments | None:
    """The second moments of the optimizer; None if it has none and the exchange needs none. `watch` takes any."""
    if optimizer is None:
        return None
    try:
        return SecondMoments(optimizer, params)
    except RegisterError:
        if exchange.reads_optimizer or not isinstance(optimizer, Optimizer):
            raise
        return None


def check_chunk_bytes(chunk_bytes: object) -> None:
    """Raise SpecError unless `chunk_bytes` is None or a size that chunks can have."""
    if chunk_bytes is not None and (not isinstance(chunk_bytes, int) or chunk_bytes < 1024):
        raise SpecError(f"chunk_bytes must be a whole number of at least 1024, got {chunk_bytes!r}")


def make_hook(
    exchange: Exchange,
    group: dist.ProcessGroup,
    device: torch.device,
    chunk_bytes: int | None = None,
    params: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    *,
    requested: str | None = None,
    traced: bool = False,
    unused: bool = False,
    moments: SecondMoments | None = None,
) -> Hook:
    """A hook over a process group, not tied to any model. All ranks of the group together. See `Hook`."""
    runner = make_runner(group, device)
    try:
        return Hook(
            exchange,
            runner,
            rank=group.rank(),
            size=group.size(),
            device=device,
            chunk_bytes=chunk_bytes,
            params=params,
            requested=requested,
            traced=traced,
            unused=unused,
            moments=moments,
        )
    except BaseException:
        runner.close()
        raise


def gradwire_hook(state: "_Carried", bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """What DDP calls for every bucket."""
    return state.average(bucket)


def from_ddp(
    bucket: Any, name_of: Callable[[Tensor], str], known: dict[int, tuple[Segment, ...]] | None = None
) -> Bucket:
    """A bucket over the memory of DDP's `GradBucket`. A sparse gradient comes as it is.

    `known` keeps the segments of each bucket, as making thousands of them takes longer than to see that they still fit.
    """
    params, flat = bucket.parameters(), bucket.buffer()
    if flat.is_complex():  # seen in torch 2.9.1; torch 2.13.0 passes two real values for each
        reason = f"DDP of torch {torch.__version__} passes complex gradients"
        raise RegisterError(f"{reason}; use torch 2.13, or real parameters")
    known, index = {} if known is None else known, bucket.index()
    segments = known.get(index, ())
    if len(segments) != len(params) or not all(s.param is param for s, param in zip(segments, params, strict=True)):
        segments = known[index] = segments_of(params, [name_of(param) for param in params])
    return Bucket(index, flat, segments, bucket.is_last())


class _Carried(Uncopied):
    """The state that DDP passes to the hook. It refers to the model weakly, so that both can be garbage-collected."""

    def __init__(self, hook: Hook, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self.hook = hook
        self.group = group
        self._model = weakref.ref(model)
        self._names = {param: plain_name(name) for name, param in model.module.named_parameters()}
        self._segments: dict[int, tuple[Segment, ...]] = {}
        self._live = True
        self._scale: Callable[[], float] | None = None
        self._watch_join(model)

    def belongs_to(self, model: object) -> bool:
        """Whether `model` is the one that was registered, and not a copy, whose reducer does not call the hook."""
        return self._model() is model

    def average(self, bucket: Any) -> Future[Tensor]:
        """Average one bucket, or the (gradient, parameter) pair of DDP's compiled reducer."""
        if isinstance(bucket, tuple):
            return traced_mean(self.hook.exchange, self.group, *bucket)  # type: ignore[no-any-return]
        try:
            return self._average(bucket)
        except KeyboardInterrupt:
            self._refuse_next_step()
            raise

    def _refuse_next_step(self) -> None:
        """After an interruption DDP waits for buckets that never come, and its own message does not say so."""
        if (model := self._model()) is not None:
            model.register_forward_pre_hook(_interrupted)

    def _average(self, bucket: Any) -> Future[Tensor]:
        ours = from_ddp(bucket, lambda param: self._names[param], self._segments)
        pilot = self.hook.pilot
        if pilot is not None and self.hook.opens_step(ours):
            pilot.on_step()
        if self.hook.begin(ours):
            self._scale = self._count_live()
        if pilot is not None:
            pilot.on_bucket(ours)
        return self.hook.mean(ours, self._scale)

    def _watch_join(self, model: DistributedDataParallel) -> None:
        """Notice when this rank has run out of inputs and takes part in the others' steps with zeros (`Join`)."""
        on_shadowed_backward(model, _Shadow(self, model))

    def _count_live(self) -> Callable[[], float] | None:
        """With `Join(divide_by_initial_world_size=False)`: the factor from a mean over all to one over live ranks."""
        model = self._model()
        if model is None or not in_join(model) or divides_by_all_ranks(model):
            return None
        if self.hook.exchange.lanes == 0:
            return None
        live = torch.tensor([float(self._live)], device=self.hook.device)
        counted = self.hook.runner.submit([lambda comm: _sum_(comm, live)], live, counted=False)
        return lambda: self.hook.size / max(float(counted.wait()), 1.0)


class _Shadow(Uncopied):
    """DDP calls it for a step of the other ranks when this rank has run out of inputs."""

    def __init__(self, carried: _Carried, model: DistributedDataParallel) -> None:
        self._carried, self._model = weakref.ref(carried), weakref.ref(model)

    def __call__(self) -> None:
        state, ddp = self._carried(), self._model()
        if state is not None and ddp is not None:
            state._live = False
            try:
                shadow_backward(ddp)
            finally:
                state._live = True


def _interrupted(module: Any, inputs: Any) -> None:
    raise ExchangeError(
        "a backward pass of this model was interrupted while its gradients were being averaged, and DDP cannot go on "
        "from there; to go on with the same weights, wrap copy.deepcopy(model.module) in DistributedDataParallel, "
        "register the hook again and build a new optimizer"
    )


def _sum_(comm: Comm, values: Tensor) -> None:
    comm.all_reduce_(values)


def make_runner(group: dist.ProcessGroup, device: torch.device) -> Runner:
    """An engine over a process group. All ranks of the group together."""
    if group.size() == 1:
        return StreamRunner(group, torch.device("cpu"))
    if device.type != "cpu" and backend_name(group, device) not in HOST_BLOCKING:
        if slow_link.get() is not None:
            raise RegisterError(f"an emulated link slows down CPU models only, and this one is on {device.type!r}")
        return StreamRunner(group, device)
    counter = _engines_made.setdefault(group, itertools.count())
    try:
        timeout = timeout_of(group, device)
    except RuntimeError as error:  # such as torch's "threaded", for tests with ranks in one process
        raise RegisterError(f"gradwire needs a process group with gloo or NCCL, not this one: {error}") from None
    lanes = Lanes(store_of(group), group.rank(), group.size(), timeout, name=str(next(counter)))  # type: ignore[call-overload]
    return LaneRunner(lanes)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend of a group that moves tensors of `device`, in lower case."""
    return str(backend_of(group, device).name()).lower()


def _settings(model: DistributedDataParallel) -> str:
    """What decides into which buckets DDP cuts the gradients, and which of them it uses."""
    return f"bucket_cap_mb={model.bucket_bytes_cap / 2**20:g}, static_graph={model.static_graph}"


def _named_parameters(
    model: DistributedDataParallel, *, frozen: bool = False
) -> Callable[[], list[tuple[str, Tensor]]]:
    """The parameters that DDP averages now, or all that it was built with, by name, without keeping the model alive."""
    module, ignored = weakref.ref(model.module), set(model.parameters_to_ignore)

    def params() -> list[tuple[str, Tensor]]:
        named = [] if (alive := module()) is None else alive.named_parameters()
        return [
            (plain_name(name), param)
            for name, param in named
            if (frozen or param.requires_grad) and name not in ignored
        ]

    return params

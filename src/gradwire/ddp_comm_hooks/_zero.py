"""The step of a ZeroRedundancyOptimizer as jobs of an engine: who owns which parameter, the step, and its spreading.

1. DDP's buckets are final after its first backward pass; the next one only writes down what is in them.
2. Every parameter gets an owner, the only rank that keeps optimizer state for it.
3. From then on a bucket is a job: wait for its mean, step the parameters this rank owns, spread every owner's values.
   Jobs are submitted in the order of the buckets, so all ranks spread in the same order whatever their threads do.

torch's own bookkeeping of step 2 mixes up ranks of the world with ranks of the group, cannot cut some buckets, and
rearranges the memory of parameters under DDP. So all of it is done here, and torch is only asked to make its local
optimizer and to step it.
"""

from __future__ import annotations

import dataclasses
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.ddp import has_rebuilt_buckets
from gradwire._torch.optim import zero_device, zero_start, zero_step
from gradwire.engine.runner import Job
from gradwire.errors import ExchangeError
from gradwire.exchanges import Exact
from gradwire.exchanges.base import Comm
from gradwire.exchanges.bucket import Bucket, make_bucket
from gradwire.kernels.memory import empty
from gradwire.models.ddp import make_hook

Params = list[Tensor]


class ZeroStep:
    """One optimizer, stepped bucket by bucket. All ranks of the model's group make it together."""

    def __init__(self, ddp: DistributedDataParallel, zero: Any, shard_buckets: bool, variant: str) -> None:
        self._ddp = weakref.ref(ddp)
        self._zero = zero
        self._shard_buckets = shard_buckets
        self._seen: list[Params] = []
        self._used: set[Tensor] = set()
        self._owner: dict[Tensor, int] = {}
        self._stepping = threading.Lock()
        self._engine = make_hook(Exact(), ddp.process_group, zero_device(zero))
        self._engine.agree("ZeRO hook", f"{variant}(shard_buckets={shard_buckets})")

    def ready(self, bucket: Bucket) -> bool:
        """Whether to step this bucket. False in the first two backward passes, or three with a static graph."""
        if self._owner:
            return True
        model = self._ddp()
        if model is None or not has_rebuilt_buckets(model):
            return False
        if bucket.index == 0 and self._seen:
            self._start(model.static_graph)
            return True
        self._seen.append(list(bucket.params))
        self._used.update(param for param in bucket.params if param.grad is not None)
        return False

    def submit(self, pairs: Sequence[tuple[Bucket, Future[Tensor]]]) -> Future[Tensor]:
        """Step and spread these buckets, each when its mean is there; the value is the last one's mean.

        After an error the future fails, and nothing is raised here: the backward pass must go on to hand over all its
        buckets, or other models that average through the same engine would fall out of step.
        """
        last = pairs[-1][1]
        jobs = [self._job(bucket, mean) for bucket, mean in pairs]
        try:
            done = self._engine.runner.submit(jobs, pairs[-1][0].flat, lambda *_: None)
        except ExchangeError as error:
            return last.then(partial(_raise, error))
        return done.then(lambda ended: (ended.value(), last.value())[1])

    # -- once --------------------------------------------------------------------------------------------------

    def _start(self, static_graph: bool) -> None:
        """Share out the parameters, and have torch make the optimizer of this rank's part."""
        zero, buckets = self._zero, self._seen
        owners = shared_out(buckets, zero.world_size) if self._shard_buckets else whole(buckets, zero.world_size)
        params = [param for bucket in buckets for param in bucket]
        per_rank = [[param for param in params if owners[param] == rank] for rank in range(zero.world_size)]
        self._used = self._used_anywhere(params) if static_graph else set(params)
        zero_start(zero, buckets, per_rank, owners)
        self._owner = owners

    def _used_anywhere(self, params: Params) -> set[Tensor]:
        """A static graph may leave out parameters; DDP leaves their gradients alone, so they must not be stepped."""
        flags = torch.tensor([float(param in self._used) for param in params], device=self._engine.device)
        shares = self._engine.mean(make_bucket([flags])).wait().tolist()
        return {param for param, share in zip(params, shares, strict=True) if share}

    # -- every step --------------------------------------------------------------------------------------------

    def _job(self, bucket: Bucket, mean: Future[Tensor]) -> Job:
        def job(comm: Comm) -> None:
            self._step(bucket, mean.wait())
            if comm.size > 1:
                spread_(self._by_owner(bucket.params, comm.size), comm)

        return job

    def _step(self, bucket: Bucket, mean: Tensor) -> None:
        """Step what this rank owns of a bucket, with what the hook returned: that need not be the bucket's memory."""
        rank = self._zero.rank
        pairs = zip(bucket.params, _grads(bucket, mean), strict=True)
        own = {param: grad for param, grad in pairs if param in self._used and self._owner[param] == rank}
        if own:
            with self._stepping:  # jobs of several buckets run at once, and an optimizer is not made for that
                _follow_schedule(self._zero)
                _step_only(self._zero, own)

    def _by_owner(self, params: Iterable[Tensor], size: int) -> list[Params]:
        by_owner: list[Params] = [[] for _ in range(size)]
        for param in params:
            if param in self._used:
                by_owner[self._owner[param]].append(param)
        return by_owner


def whole(buckets: Sequence[Params], size: int) -> dict[Tensor, int]:
    """Owners by bucket: bucket i belongs to rank i modulo the ranks."""
    return {param: index % size for index, params in enumerate(buckets) for param in params}


def shared_out(buckets: Sequence[Params], size: int) -> dict[Tensor, int]:
    """Owners by parameter: bucket after bucket, the largest first, to the rank that has least so far."""
    owners: dict[Tensor, int] = {}
    loads = [0] * size
    for params in buckets:
        for param in sorted(params, key=Tensor.numel, reverse=True):
            owners[param] = loads.index(min(loads))
            loads[owners[param]] += param.numel()
    return owners


def spread_(by_owner: Sequence[Params], comm: Comm) -> None:
    """Give every rank the owner's values of each parameter, bit for bit, in one collective.

    The parameters are of one type. Even parts are gathered, which sends every value once. Uneven ones are summed as
    whole numbers, with zeros from everyone but the owner: no more than an average of gradients moves, and it cannot
    round.
    """
    sizes = [sum(param.numel() for param in params) for params in by_owner]
    if sum(sizes) == 0:
        return
    spread = _gathered if max(sizes) * comm.size <= 2 * sum(sizes) else _summed
    parts = spread(by_owner, sizes, comm)
    for rank, params in enumerate(by_owner):
        if rank != comm.rank:
            _unpack_(params, parts[rank])


def _gathered(by_owner: Sequence[Params], sizes: Sequence[int], comm: Comm) -> Sequence[Tensor]:
    """Everyone sends [ own values ][ padding to the largest part ]."""
    row = _zeros(max(sizes), by_owner)
    _pack_(row, by_owner[comm.rank])
    rows = comm.all_gather(row.view(torch.uint8)).view(row.dtype)
    return [part[:size] for part, size in zip(rows, sizes, strict=True)]


def _summed(by_owner: Sequence[Params], sizes: Sequence[int], comm: Comm) -> Sequence[Tensor]:
    """Everyone sends [ part of rank 0 ][ part of rank 1 ]..., all zeros but for its own part."""
    values = _zeros(sum(sizes), by_owner)
    parts: Sequence[Tensor] = values.split(list(sizes))
    _pack_(parts[comm.rank], by_owner[comm.rank])
    comm.all_reduce_(values.view(torch.int32 if values.dtype.itemsize % 4 == 0 else torch.uint8))
    return parts


def _zeros(numel: int, by_owner: Sequence[Params]) -> Tensor:
    like = next(param for params in by_owner for param in params)
    return empty((numel,), like.dtype, like.device).zero_()


def _pack_(part: Tensor, params: Params) -> None:
    for piece, param in _pieces(part, params):
        piece.copy_(param.detach())


@torch.no_grad()
def _unpack_(params: Params, part: Tensor) -> None:
    for piece, param in _pieces(part, params):
        param.copy_(piece)


def _pieces(part: Tensor, params: Params) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter's values in a part, in its shape. Its strides do not matter: ranks may differ in them."""
    at = 0
    for param in params:
        yield part[at : at + param.numel()].view(param.shape), param
        at += param.numel()


def _grads(bucket: Bucket, mean: Tensor) -> Sequence[Tensor]:
    """The gradients of a bucket's parameters, out of what its hook returned."""
    if mean.is_sparse:
        return (mean,)
    return dataclasses.replace(bucket, flat=mean.reshape(-1).to(bucket.flat.dtype)).grads


def _follow_schedule(zero: Any) -> None:
    """torch's functional optimizers step with the settings they were made with: hand them those of today."""
    today, made_with = zero.param_groups[0], getattr(zero.optim, "defaults", {})
    if "betas" in today:
        today = {**today, "beta1": today["betas"][0], "beta2": today["betas"][1]}
    for name in made_with.keys() & today.keys():
        made_with[name] = float(today[name])


def _step_only(zero: Any, grads: Mapping[Tensor, Tensor]) -> None:
    """Step these parameters as if there were no others: not all of torch's optimizers know gradients of None."""
    group = zero.optim.param_groups[0]
    everything, group["params"] = group["params"], list(grads)
    try:
        zero_step(zero, list(grads.values()))
    finally:
        group["params"] = everything


def _raise(error: ExchangeError, _: Future[Tensor]) -> NoReturn:
    raise error

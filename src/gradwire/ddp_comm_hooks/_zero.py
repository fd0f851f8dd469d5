"""The step of a ZeroRedundancyOptimizer as jobs of an engine: owners, the local step, and sharing the new values.

1. DDP's buckets are final after its first backward pass. The next pass only records their parameters.
2. Every parameter gets an owner, the only rank that keeps optimizer state for it.
3. From then on a bucket is a job: wait for its mean, step the parameters that this rank owns, then send every owner's
   values to all ranks. Jobs are submitted in the order of the buckets, so all ranks communicate in the same order.

torch's own version of step 2 confuses ranks of the world with ranks of the group, cannot split some buckets, and moves
the memory of parameters under DDP. So this module does all of it, and torch only makes and steps the local optimizer.
"""

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
from gradwire.ddp_comm_hooks._group import grads_in
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
        """Step these buckets, each when its mean is complete, and share the values. The result is the last mean.

        After an error the future fails and nothing is raised here: DDP must pass all buckets of the backward pass, or
        other models that use the same engine would communicate in another order.
        """
        last = pairs[-1][1]
        jobs = [self._job(bucket, mean) for bucket, mean in pairs]
        try:
            done = self._engine.runner.submit(jobs, pairs[-1][0].flat, lambda *_: None)
        except ExchangeError as error:
            return last.then(partial(_raise, error))
        return done.then(lambda ended: (ended.value(), last.value())[1])

    # -- once ------------------------------------------------------------------------------------------------------

    def _start(self, static_graph: bool) -> None:
        """Give every parameter an owner, and let torch make the optimizer for this rank's parameters."""
        zero, buckets = self._zero, self._seen
        owners_of = shared_out if self._shard_buckets else whole
        owners = owners_of(buckets, zero.world_size)
        params = [param for bucket in buckets for param in bucket]
        per_rank = [[param for param in params if owners[param] == rank] for rank in range(zero.world_size)]
        self._used = self._used_anywhere(params) if static_graph else set(params)
        zero_start(zero, buckets, per_rank, owners)
        self._owner = owners

    def _used_anywhere(self, params: Params) -> set[Tensor]:
        """A static graph may leave parameters unused; DDP sets no gradients for them, so they must not be stepped."""
        flags = torch.tensor([float(param in self._used) for param in params], device=self._engine.device)
        shares = self._engine.mean(make_bucket([flags])).wait().tolist()
        return {param for param, share in zip(params, shares, strict=True) if share}

    # -- in every step ---------------------------------------------------------------------------------------------

    def _job(self, bucket: Bucket, mean: Future[Tensor]) -> Job:
        def job(comm: Comm) -> None:
            self._step(bucket, mean.wait())
            if comm.size > 1:
                spread_(self._by_owner(bucket.params, comm.size), comm)

        return job

    def _step(self, bucket: Bucket, mean: Tensor) -> None:
        """Step this rank's parameters with the hook's result, which may be in other memory than the bucket."""
        rank = self._zero.rank
        pairs = zip(bucket.params, grads_in(bucket, mean), strict=True)
        own = {param: grad for param, grad in pairs if param in self._used and self._owner[param] == rank}
        if own:
            with self._stepping:  # jobs of several buckets run at once, and optimizers are not thread-safe
                _follow_schedule(self._zero)
                _step_only(self._zero, own)

    def _by_owner(self, params: Iterable[Tensor], size: int) -> list[Params]:
        by_owner: list[Params] = [[] for _ in range(size)]
        for param in params:
            if param in self._used:
                by_owner[self._owner[param]].append(param)
        return by_owner


def whole(buckets: Sequence[Params], size: int) -> dict[Tensor, int]:
    """All parameters of bucket i belong to rank i modulo the number of ranks."""
    return {param: index % size for index, params in enumerate(buckets) for param in params}


def shared_out(buckets: Sequence[Params], size: int) -> dict[Tensor, int]:
    """Each parameter goes to the rank with the smallest total so far, bucket by bucket, the largest first."""
    owners: dict[Tensor, int] = {}
    loads = [0] * size
    for params in buckets:
        for param in sorted(params, key=Tensor.numel, reverse=True):
            owners[param] = loads.index(min(loads))
            loads[owners[param]] += param.numel()
    return owners


def spread_(by_owner: Sequence[Params], comm: Comm) -> None:
    """Give every rank the owner's values of each parameter, bit for bit, in one collective.

    The parameters have one type. Parts of similar size are gathered, which sends every value once. Uneven parts are
    summed as integers, with zeros from all ranks but the owner: this sends as much as an average of gradients, and
    integers do not round.
    """
    sizes = [sum(param.numel() for param in params) for params in by_owner]
    if sum(sizes) == 0:
        return
    collect = _gathered if max(sizes) * comm.size <= 2 * sum(sizes) else _summed
    parts = collect(by_owner, sizes, comm)
    for rank, params in enumerate(by_owner):
        if rank != comm.rank:
            _unpack_(params, parts[rank])


def _gathered(by_owner: Sequence[Params], sizes: Sequence[int], comm: Comm) -> Sequence[Tensor]:
    """Each rank sends [ own values ][ padding to the largest part ]."""
    row = _zeros(max(sizes), by_owner)
    _pack_(row, by_owner[comm.rank])
    rows = comm.all_gather(row.view(torch.uint8)).view(row.dtype)
    return [part[:size] for part, size in zip(rows, sizes, strict=True)]


def _summed(by_owner: Sequence[Params], sizes: Sequence[int], comm: Comm) -> Sequence[Tensor]:
    """Each rank sends [ part of rank 0 ][ part of rank 1 ]..., where only its own part is not zero."""
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
    """Each parameter's values in a part, in its shape but not its strides, in which ranks may differ."""
    at = 0
    for param in params:
        yield part[at : at + param.numel()].view(param.shape), param
        at += param.numel()


def _follow_schedule(zero: Any) -> None:
    """Copy the present settings into torch's functional optimizer, which would use those it was made with."""
    present, used = zero.param_groups[0], getattr(zero.optim, "defaults", {})
    if "betas" in present:
        present = {**present, "beta1": present["betas"][0], "beta2": present["betas"][1]}
    for name in used.keys() & present.keys():
        used[name] = float(present[name])


def _step_only(zero: Any, grads: Mapping[Tensor, Tensor]) -> None:
    """Step only these parameters: not all of torch's functional optimizers accept gradients that are None."""
    group = zero.optim.param_groups[0]
    all_params, group["params"] = group["params"], list(grads)
    try:
        zero_step(zero, list(grads.values()))
    finally:
        group["params"] = all_params


def _raise(error: ExchangeError, _: Future[Tensor]) -> NoReturn:
    raise error

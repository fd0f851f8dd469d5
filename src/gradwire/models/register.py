"""register(): one call for every kind of model. The only place that looks at the model's type."""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire._torch.traced import uncompiled
from gradwire.auto.pilot import Pilot
from gradwire.auto.settings import auto
from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges import Exact, Exchange, exchange
from gradwire.models.ddp import attach, check_chunk_bytes
from gradwire.models.fsdp import attach_sharded
from gradwire.models.sharded_checks import is_sharded


def register(
    model: nn.Module,
    spec: str | Exchange,
    *,
    gather: str | Exchange | None = None,
    replicas: str | Exchange | None = None,
    mesh: Any = None,
    chunk_bytes: int | None = None,
    bucket_mb: float | None = None,
    **options: object,
) -> Hook:
    """Communicate the gradients of a model through a hook. Call it once, on all ranks, before training.

    Args:
        model: A model wrapped in DistributedDataParallel, or one on which `fully_shard` (FSDP2) was called.
        spec: The hook, such as `"int8"` or `"int4:block=32"`, or an exchange object. For DDP, `"auto"` tries several
            hooks while the model trains and continues with the best one.
        gather: For `fully_shard`: how parameters travel when they are gathered, such as `"bf16"` or `"int8"`. By
            default `"exact"`.
        replicas: For `fully_shard` on the shards of a 2-D mesh: how gradients are averaged across the replicas.
        mesh: With `replicas`: the 2-D mesh of (replicas, shards).
        chunk_bytes: How many bytes of gradient travel at a time. The default suits nearly all models.
        bucket_mb: For DDP: the size of the buckets that it fills, in MiB. By default a CPU model that was built without
            a `bucket_cap_mb` gets smaller buckets than DDP's 25 MB, so that more of the communication is hidden.
        options: Options of the spec as keywords.

    Returns:
        The hook at work: `stats()`, `verify()`, `switch()`, `state_dict()`, `close()`.

    Raises:
        SpecError: If a spec names an unknown hook or option, or gives an option a value that it cannot take.
        RegisterError: If the model cannot carry the hook, or if the ranks do not request the same one.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> hook = gradwire.register(model, "int8")

        >>> fully_shard(model)
        >>> hook = gradwire.register(model, "int8", gather="bf16")
    """
    check_chunk_bytes(chunk_bytes)
    plain = uncompiled(model)
    if isinstance(plain, DistributedDataParallel) or not is_sharded(plain):
        _refuse("a model without fully_shard", gather=gather, replicas=replicas, mesh=mesh)
        return _register_ddp(model, spec, chunk_bytes, bucket_mb, **options)
    _refuse("a model with fully_shard", bucket_mb=bucket_mb)
    if auto(spec, **options) is not None:
        raise RegisterError("auto chooses among the hooks of a DDP model; with fully_shard name one, such as 'int8'")
    return attach_sharded(
        plain,
        exchange(spec, **options),
        exchange("exact" if gather is None else gather),
        None if replicas is None else exchange(replicas),
        mesh=mesh,
        chunk_bytes=chunk_bytes,
    )


def _register_ddp(
    model: Any, spec: str | Exchange, chunk_bytes: int | None, bucket_mb: float | None, **options: object
) -> Hook:
    if (settings := auto(spec, **options)) is not None:
        hook = attach(model, Exact(), chunk_bytes=chunk_bytes, bucket_mb=bucket_mb, requested=str(settings))
        hook.pilot = Pilot(hook, settings) if hook.size > 1 else None
        return hook
    return attach(model, exchange(spec, **options), chunk_bytes=chunk_bytes, bucket_mb=bucket_mb)


def _refuse(what: str, **given: object) -> None:
    """Raise SpecError for arguments that do nothing for this kind of model."""
    if wrong := [name for name, value in given.items() if value is not None]:
        raise SpecError(f"{what} has no use for {', '.join(wrong)}; leave it out")

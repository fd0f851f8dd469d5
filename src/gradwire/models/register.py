"""register(): one call for every kind of model. The only place that looks at the model's type."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire._torch.traced import uncompiled
from gradwire.auto.pilot import Pilot
from gradwire.auto.settings import Auto, auto
from gradwire.auto.sharded import GATHERS, ShardedPilot, pairs
from gradwire.engine.drift import DriftGuard, check_interval
from gradwire.engine.hook import Hook
from gradwire.engine.watch import Watch
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges import Exact, Exchange, exchange
from gradwire.exchanges.sharded import check_gathers, check_scatters
from gradwire.models.ddp import attach, check_chunk_bytes
from gradwire.models.fsdp import attach_sharded
from gradwire.models.sharded_checks import check_mesh, checked_parts, gathers_of, is_sharded

NO_AUTO = "auto is not available together with replicas: name the hook for the shards, such as exact"

ON_FAILURE = (
    "on_failure is not an option of register(): the process group of DDP and of fully_shard has a fixed set of ranks, "
    "so that none can leave or come back. To train on when a rank fails, use gradwire.optim.Synchronous, LocalSGD or "
    "DiLoCo with the plain module (see docs/elastic.md)"
)


def register(
    model: nn.Module,
    spec: str | Exchange,
    *,
    gather: str | Exchange | None = None,
    replicas: str | Exchange | None = None,
    mesh: Any = None,
    optimizer: Optimizer | None = None,
    chunk_bytes: int | None = None,
    bucket_mb: float | None = None,
    check_every: int | None = None,
    watch: int | None = None,
    **options: object,
) -> Hook:
    """Communicate the gradients of a model through a hook. Call it once, on all ranks, before training.

    Args:
        model: A model wrapped in DistributedDataParallel, or one on which `fully_shard` (FSDP2) was called.
        spec: The hook, such as `"int8"` or `"int4:block=32"`, or an exchange object. `"auto"` tries several hooks
            while the model trains and continues with the best one.
        gather: For `fully_shard`: how parameters travel when they are gathered, such as `"bf16"` or `"int8"`. By
            default `"exact"`; `"auto"` tries `"exact"` and `"bf16"`, unless you name one.
        replicas: For `fully_shard` on the shards of a 2-D mesh: how gradients are averaged across the replicas.
        mesh: With `replicas`: the 2-D mesh of (replicas, shards).
        optimizer: The optimizer of the model. Hooks with `whiten=true` use its second moment (with `fully_shard`, those
            are hooks for `replicas`), and `watch` measures the error of its updates too.
        chunk_bytes: How many bytes of gradient travel at a time. The default suits nearly all models.
        bucket_mb: For DDP: the size of the buckets that it fills, in MiB. By default a CPU model that was built without
            a `bucket_cap_mb` gets smaller buckets than DDP's 25 MB, so that more of the communication is hidden.
        check_every: For DDP: every so many steps, compare the parameters of all ranks, and raise VerifyError with the
            name of the first one that differs.
        watch: For DDP: in every step whose number is a multiple of this, 100 for instance, average a part of the
            gradients exactly as well. `hook.watched()` then has the errors, and a warning is issued when they leave the
            range of the first 1,000 steps. The training itself stays the same, bit for bit.
        options: Options of the spec as keywords.

    Returns:
        The hook at work: `stats()`, `verify()`, `switch()`, `state_dict()`, `close()`.

    Raises:
        SpecError: If a spec names an unknown hook or option, or gives an option a value that it cannot take.
        RegisterError: If the model cannot carry the hook, or if the ranks do not request the same one.

    Examples:
        >>> model = DistributedDataParallel(model)
        >>> hook = gradwire.register(model, "int8")

        >>> fully_shard(model)
        >>> hook = gradwire.register(model, "int8", gather="bf16")
    """
    check_chunk_bytes(chunk_bytes)
    if "on_failure" in options:
        raise RegisterError(ON_FAILURE)
    if check_every is not None:
        check_interval("check_every", check_every)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise SpecError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    plain = uncompiled(model)
    if isinstance(plain, DistributedDataParallel) or not is_sharded(plain):
        _refuse("a model without fully_shard", gather=gather, replicas=replicas, mesh=mesh)
        common = {"chunk_bytes": chunk_bytes, "bucket_mb": bucket_mb, "optimizer": optimizer}
        hook = _register_ddp(model, spec, options, watch=_watch(watch, optimizer), **common)
        return hook if check_every is None else _guarded(hook, check_every)
    given = {"bucket_mb": bucket_mb, "check_every": check_every, "watch": watch}
    _refuse("a model with fully_shard", **given)
    if (settings := auto(_not_a_pair(spec), **options)) is not None:
        if replicas is not None or mesh is not None:
            raise SpecError(NO_AUTO)
        return _register_auto(plain, settings, gather, chunk_bytes)
    return attach_sharded(
        plain,
        exchange(spec, **options),
        exchange("exact" if gather is None else gather),
        None if replicas is None else exchange(replicas),
        mesh=mesh,
        chunk_bytes=chunk_bytes,
        optimizer=optimizer,
    )


def hsdp(
    model: nn.Module,
    mesh: Any,
    spec: str | Exchange = "exact",
    *,
    units: Iterable[nn.Module] = (),
    gather: str | Exchange = "exact",
    replicas: str | Exchange = "int8",
    chunk_bytes: int | None = None,
    **options: Any,
) -> Hook:
    """Shard a model over one dimension of a 2-D mesh, and average its gradients across the other through a hook.

    FSDP2's own HSDP (`fully_shard` with a 2-D mesh) has a fixed all-reduce across replicas. This is the same training
    with `fully_shard` on the mesh of the shards alone. On a mesh of 1-rank shards it is data-parallel training without
    DDP.

    Args:
        model: The model, not sharded yet.
        mesh: A 2-D mesh of (replicas, shards) with names, such as
            `init_device_mesh("cuda", (nodes, gpus), mesh_dim_names=("replicate", "shard"))`.
        spec: How gradients are reduce-scattered over the shards.
        units: The modules that are gathered and reduced by themselves, such as `model.layers`, before the rest.
        gather: How parameters travel when they are gathered.
        replicas: How the shards of the gradients are averaged across replicas; any hook, `powersgd` too.
        chunk_bytes: As for `register`.
        options: Those of `fully_shard`, such as `mp_policy` or `reshard_after_forward`.

    Returns:
        The hook, as of `register`.

    Raises:
        SpecError: If a spec is not valid, if `mesh` is not a 2-D mesh with names, or if `units` are not modules of the
            model. The model is as it was.
        RegisterError: If the model cannot carry the hook.

    Examples:
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        >>> hook = gradwire.hsdp(model, mesh, units=model.layers, replicas="int4")
    """
    check_mesh(mesh)
    if not mesh.mesh_dim_names:
        raise SpecError("the dimensions of the mesh need names, as in mesh_dim_names=('replicate', 'shard')")
    parts = checked_parts(model, units)
    _check_before_sharding(spec, gather, replicas, chunk_bytes)
    from torch.distributed.fsdp import fully_shard  # takes long to import, and DDP models do not need it

    shards = mesh[mesh.mesh_dim_names[1]]
    for unit in (*parts, model):
        fully_shard(unit, mesh=shards, **options)
    return register(model, spec, gather=gather, replicas=replicas, mesh=mesh, chunk_bytes=chunk_bytes)


def _check_before_sharding(spec: Any, gather: Any, replicas: Any, chunk_bytes: int | None) -> None:
    """Raise what `register` would raise later, while the model is still as it was."""
    if auto(_not_a_pair(spec)) is not None:
        raise SpecError(NO_AUTO)
    check_scatters(exchange(spec))
    check_gathers(exchange(gather))
    exchange(replicas)
    check_chunk_bytes(chunk_bytes)


def _not_a_pair(spec: Any) -> Any:
    """SpecError if the spec is a pair, as the commands of gradwire write it."""
    if isinstance(spec, str) and "/" in spec:
        first, _, second = spec.partition("/")
        raise SpecError(f'{spec!r} is a hook and a gather: write register(model, "{first}", gather="{second}")')
    return spec


def _register_ddp(model: Any, spec: str | Exchange, options: dict[str, Any], **common: Any) -> Hook:
    if (settings := auto(spec, **options)) is not None:
        hook = attach(model, Exact(), requested=str(settings), **common)
        hook.pilot = Pilot(hook, settings) if hook.size > 1 else None
        return hook
    return attach(model, exchange(spec, **options), **common)


def _watch(every: int | None, optimizer: Optimizer | None) -> Watch | None:
    if every is None:
        return None
    check_interval("watch", every)
    return Watch(every, optimizer)


def _guarded(hook: Hook, check_every: int) -> Hook:
    """The hook, with a drift guard."""
    try:
        if hook.traced or not hook.exchange.averages:
            why = "DDP's compiled reducer hides the steps" if hook.traced else "the ranks differ on purpose"
            raise RegisterError(f"check_every does not go with {hook.exchange} here: {why}; leave it out")
        if hook.size > 1:
            hook.agree("check_every", str(check_every))
            hook.observers.append(DriftGuard(hook, check_every))
    except BaseException:
        hook.close()
        raise
    return hook


def _register_auto(model: nn.Module, settings: Auto, gather: str | Exchange | None, chunk_bytes: int | None) -> Hook:
    """`auto` for a model with `fully_shard`. A given `gather` is used as it is."""
    gathers = gathers_of(model, GATHERS if gather is None else [str(exchange(gather))])
    names = pairs(settings, gathers)
    requested = f"{settings}, gather={'|'.join(gathers)}"
    hook = attach_sharded(model, Exact(), exchange(gathers[0]), chunk_bytes=chunk_bytes, requested=requested)
    hook.pilot = ShardedPilot(hook, settings, names=names) if hook.size > 1 else None
    return hook


def _refuse(what: str, **given: object) -> None:
    """Raise SpecError for arguments that do nothing for this kind of model."""
    if wrong := [name for name, value in given.items() if value is not None]:
        raise SpecError(f"{what} has no use for {', '.join(wrong)}; leave it out")

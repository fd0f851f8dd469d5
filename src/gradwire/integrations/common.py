"""What the integrations share: checks at set-up, metrics, and the states of all ranks in a checkpoint."""

import io
import logging
import os
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradwire._torch.traced import uncompiled
from gradwire.engine.hook import Hook
from gradwire.errors import RegisterError, SpecError
from gradwire.exchanges import Exchange
from gradwire.models.register import register
from gradwire.models.sharded_checks import is_sharded

log = logging.getLogger("gradwire")

LOGGED = ("sent_bytes", "wait_s", "encode_s", "wire_s", "decode_s")
"""What the integrations log: fields of `Stats`, under the names that `gradwire.metrics` has for them too."""


def metrics(hook: Hook) -> dict[str, float]:
    """What the hook does in a step, on average, under the names that the integrations log.

    The names are those of `gradwire.metrics`, with `gradwire/` before them. The values are means over all steps since
    registration, as in `Hook.stats()`.

    Args:
        hook: What `gradwire.register` has returned.

    Returns:
        `gradwire/sent_bytes`, the bytes that this rank sends; `gradwire/wait_s`, the seconds that the optimizer waits
        for communication; and `gradwire/encode_s`, `gradwire/wire_s` and `gradwire/decode_s`, the seconds of encoding,
        sending and decoding, which overlap with the backward pass.

    Raises:
        SpecError: If `hook` is something else.

    Examples:
        >>> accelerator.log(gradwire.integrations.metrics(hook), step=step)
    """
    if not isinstance(hook, Hook):
        raise SpecError(f"metrics takes the hook that gradwire.register has returned, got {type(hook).__name__}")
    stats = hook.stats()
    return {f"gradwire/{name}": float(getattr(stats, name)) for name in LOGGED}


# -- set-up ----------------------------------------------------------------------------------------------------


def require(minimum: str, *packages: str) -> None:
    """Raise ImportError unless the first of these packages that is installed has at least this version."""
    for package in packages:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        if _numbers(version) < _numbers(minimum):
            raise ImportError(
                f"gradwire needs {package} {minimum} or newer, and {version} is installed; pip install -U {package}"
            )
        return
    raise ImportError(f"{packages[0]} is not installed: pip install '{packages[0]}>={minimum}'")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def attach(
    framework: str, model: Any, spec: str | Exchange, optimizers: Sequence[object], options: dict[str, Any]
) -> Hook:
    """`gradwire.register` for the model that a framework has wrapped. All ranks together, before the first step.

    A single optimizer is passed on, for hooks and options that read its state.

    Raises:
        RegisterError: If there is one process only, or if the model cannot carry the hook.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        raise RegisterError(
            f"{framework} runs one process, so that there are no gradients to average: start several, as in "
            "`torchrun --nproc-per-node 2 train.py`, or leave gradwire out"
        )
    plain = uncompiled(model)
    if not isinstance(plain, DistributedDataParallel) and not is_sharded(plain):
        raise RegisterError(
            f"{framework} has made a {type(plain).__name__}, and gradwire needs a model in DistributedDataParallel or "
            "with fully_shard (FSDP2): choose one of these strategies, or leave gradwire out"
        )
    if len(optimizers) == 1 and isinstance(optimizers[0], Optimizer):
        options = {"optimizer": optimizers[0], **options}
    return register(model, spec, **options)


# -- checkpoints -----------------------------------------------------------------------------------------------


def gathered(hook: Hook) -> list[Any]:
    """The states of all ranks on rank 0, and nothing elsewhere: for a checkpoint in one file. All ranks together."""
    own = io.BytesIO()
    torch.save(hook.state_dict(), own)
    is_first = dist.get_rank() == 0
    parts: list[Any] | None = [None] * dist.get_world_size() if is_first else None
    dist.gather_object(own.getvalue(), parts)
    return [_read(io.BytesIO(part)) for part in parts or ()]


def save(hook: Hook, folder: str | os.PathLike[str]) -> None:
    """Write the state of this rank into a checkpoint folder. Each rank calls it."""
    target = _file(folder, dist.get_rank())
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_suffix(".tmp")
    torch.save(hook.state_dict(), unfinished)
    unfinished.replace(target)


def load(hook: Hook, folder: str | os.PathLike[str]) -> None:
    """Continue from a folder that `save` was called for. All ranks together.

    On another number of ranks than then, every rank reads the files of all. A folder without any, from a training
    without gradwire, only causes a warning.

    Raises:
        RegisterError: If some ranks find the state and others do not.
        StateError: If the state is damaged or belongs to another model.
    """
    own, first = _file(folder, dist.get_rank()), _file(folder, 0)
    found = own if own.exists() else first
    is_there = found.exists()
    hook.agree("checkpoint", f"{'with' if is_there else 'without'} state of gradwire")
    if not is_there:
        log.warning("%s has no state of gradwire: the hook starts anew", folder)
        return
    state = _read(found)
    if state["size"] != dist.get_world_size():
        state = [_read(_file(folder, rank)) for rank in range(state["size"])]
    hook.load_state_dict(state)


def _file(folder: str | os.PathLike[str], rank: int) -> Path:
    return Path(folder) / f"gradwire_{rank}.pt"


def _read(source: Any) -> Any:
    return torch.load(source, map_location="cpu", weights_only=True)

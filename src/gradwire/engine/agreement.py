"""Agreement: all ranks must request the same hook with the same options, or registration fails on all of them."""

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire._torch.distributed import store_of
from gradwire.errors import RegisterError
from gradwire.exchanges.base import Comm

MOST_BYTES = 255


def gather_texts(comm: Comm, text: str, device: torch.device) -> list[str]:
    """The texts of all ranks, in their order. Of a long text only the beginning and a checksum travel."""
    if len(text.encode()) > MOST_BYTES:  # the checksum shows a difference at the end
        start = text.encode()[: MOST_BYTES // 2].decode(errors="ignore")
        text = f"{start}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
    own = torch.frombuffer(bytearray(text.encode()[:MOST_BYTES].ljust(256, b"\0")), dtype=torch.uint8).to(device)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in comm.all_gather(own).cpu()]


Run = Callable[[Callable[[Comm], None]], None]
"""Runs a job and waits for it. All ranks together."""


_calls: "weakref.WeakKeyDictionary[Any, Iterator[int]]" = weakref.WeakKeyDictionary()


def texts_of(group: dist.ProcessGroup, text: str) -> list[str]:
    """The texts of all ranks, of any length, through the store of the group.

    Unlike `dist.all_gather_object` it unpickles nothing.
    """
    store, call = store_of(group), next(_calls.setdefault(group, itertools.count()))
    store.set(f"gradwire/texts/{call}/{group.rank()}", text)
    return [store.get(f"gradwire/texts/{call}/{rank}").decode(errors="replace") for rank in range(group.size())]


def agree(run: Run, what: str, text: str, device: torch.device) -> None:
    """Raise RegisterError unless all ranks pass the same text. All ranks call this together."""
    texts: list[str] = []
    run(lambda comm: texts.extend(gather_texts(comm, text, device)))
    if len(set(texts)) > 1:
        listed = ", ".join(f"rank {rank} {other!r}" for rank, other in enumerate(texts))
        raise RegisterError(f"all ranks must ask for the same {what}, got {listed}")


def agree_on_each(run: Run, what: str, texts: Sequence[str], device: torch.device) -> None:
    """As `agree`, for a list of texts. The error is about the first one that differs."""
    agree(run, f"number of {what}s", str(len(texts)), device)
    own = torch.tensor([_number_of(text) for text in texts], dtype=torch.int64, device=device)
    rows: list[torch.Tensor] = []
    run(lambda comm: rows.append(comm.all_gather(own.view(torch.uint8)).cpu().view(torch.int64)))
    differs = (rows[0] != rows[0][0]).any(0).nonzero().flatten().tolist()
    if differs:
        agree(run, f"{what} number {differs[0]}", texts[differs[0]], device)


def _number_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)

"""Runs the checks on one rank, whatever some of them do to the others."""

from __future__ import annotations

import json
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import api, bad, buckets, compiled, failures, groups, modes, odd, reference, state  # noqa: F401  importing one adds its checks
from .kit import CHECKS, GROUP_TIMEOUT_S, MAIN, SPECS, Check, Ranks

Case = tuple[int, str, str]
"""How many ranks, which check, which spec."""


def name(case: Case) -> str:
    """What a case is called in a test's name."""
    size, key, spec = case
    return f"{key.partition('.')[2]}-{size}-{spec}"


def cases(family: str) -> list[Any]:
    """Everything in a family, as parameters of a test."""
    return [
        pytest.param((size, key, spec), id=name((size, key, spec)), marks=_marks(size, spec))
        for key, made in CHECKS.items()
        if made.family == family
        for size in made.sizes
        for spec in made.specs
        if size == 2 or spec not in SPECS or _runs_everywhere(spec)
    ]


def _marks(size: int, spec: str) -> Any:
    """A few hooks stand for all, and 2 and 4 ranks for others: the exchanges' own tests see each by itself."""
    few = ("exact", "noop", "bf16", "int8", "fp16:feedback=true", "powersgd:rank=1,min_compression=0.5")
    return pytest.mark.thorough if size == 3 or (spec in SPECS and spec not in few) else ()


def _runs_everywhere(spec: str) -> bool:
    """Beyond 2 ranks `bf16:shots=two` is what bf16 does anyway."""
    return spec in MAIN and spec != "bf16:shots=two"


def run_checks(rank: int, size: int, folder: str, wanted: Sequence[tuple[str, str]]) -> None:
    """Run the checks. What comes of each is a line in this rank's file: check, spec, and nothing or a traceback."""
    store, group = world_on_a_socket(rank, size), None
    closer = ThreadPoolExecutor(1)  # closing a connection is mostly waiting: let it happen beside the next check
    with outcome_file(folder, size, rank).open("w", buffering=1) as file:
        for number, (key, spec) in enumerate(sorted(wanted, key=_last_things_last)):
            group = group or dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S))
            ranks = Ranks(rank, size, spec, group, Path(folder))
            text = _outcome(CHECKS[key], ranks)
            file.write(json.dumps([key, spec, text]) + "\n")
            closing = closer.submit(ranks.close)
            if _any_failed(store, f"checked/{number}", size, bool(text)):
                group = None  # who knows what is still on its way there
    closing.result()


def outcome_file(folder: str | Path, size: int, rank: int) -> Path:
    return Path(folder, f"outcomes-{size}-{rank}.jsonl")


def _last_things_last(pair: tuple[str, str]) -> bool:
    return ".zz_" in pair[0]


def world_on_a_socket(rank: int, size: int) -> dist.Store:
    """The world again, over a store on a socket: one on a file polls, which is slow where many groups are made."""
    found = c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        found.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(found.get("port")), size, wait_for_workers=False)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return store


def _outcome(made: Check, ranks: Ranks) -> str:
    try:
        with warnings.catch_warnings():  # one by one: torch's `Join` changes what becomes of warnings for good
            warnings.filterwarnings("error", module=r"gradwire\b")
            made.run(ranks)
        return ""
    except Exception as error:
        _give_up(ranks, error)
        return f"rank {ranks.rank} of {ranks.size}:\n{traceback.format_exc()}"


def _give_up(ranks: Ranks, error: Exception) -> None:
    """Let the other ranks not wait for this one on the hooks' lanes; on the check's own group they must time out."""
    for hook in ranks.hooks:
        with suppress(Exception):
            hook.runner.lanes.break_(error)


def _any_failed(store: dist.Store, key: str, size: int, failed: bool) -> bool:
    """Wait for all ranks, without a process group, for these may be broken; whether one of them failed."""
    store.add(f"{key}/failed", int(failed))
    if store.add(key, 1) == size:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timedelta(seconds=10 * GROUP_TIMEOUT_S))
    return store.add(f"{key}/failed", 0) > 0

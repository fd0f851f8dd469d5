"""Runs the checks on one rank, whatever some of them do to the others."""

from __future__ import annotations

import os
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import api, bad, compiled, failures, groups, modes, odd, reference, state  # noqa: F401  importing one adds its checks
from .kit import CHECKS, GROUP_TIMEOUT_S, Check, Ranks

Case = tuple[int, str, str]
"""How many ranks, which check, which spec."""


def name(case: Case) -> str:
    """What a case is called in a test's name."""
    size, key, spec = case
    return f"{key.partition('.')[2]}-{size}-{spec}"


def cases(family: str) -> list[Case]:
    """Everything in a family."""
    return [
        (size, key, spec)
        for key, made in CHECKS.items()
        if made.family == family
        for size in made.sizes
        for spec in made.specs
        if size == 2 or spec != "bf16:shots=two"  # elsewhere that is what bf16 does anyway
    ]


def run_checks(rank: int, size: int, folder: str, wanted: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What one rank makes of all the checks: {(check, spec): "" or a traceback}."""
    warnings.filterwarnings("error", module=r"gradwire\b")
    store = world_on_a_socket(rank, size)
    outcomes = {}
    for number, (key, spec) in enumerate(sorted(wanted, key=_last_things_last)):
        group = dist.new_group(timeout=timedelta(seconds=GROUP_TIMEOUT_S)) if dist.is_initialized() else None
        ranks = Ranks(rank, size, spec, group, Path(folder))
        began = time.perf_counter()
        outcomes[key, spec] = _outcome(CHECKS[key], ranks)
        if "GRADWIRE_TEST_TIMES" in os.environ and rank == 0:
            print(f"{time.perf_counter() - began:7.3f} s  {size} {key} {spec}", file=sys.stderr)
        _wait_for_all(store, f"checked/{number}", size)
        _clean_up(ranks)
    return outcomes


def _last_things_last(pair: tuple[str, str]) -> bool:
    return ".zz_" in pair[0]


def world_on_a_socket(rank: int, size: int) -> dist.Store:
    """The world again, over a store on a socket: one on a file polls, which is slow for a new group a check."""
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
        made.run(ranks)
        return ""
    except Exception:
        _clean_up(ranks)  # at once: the others must not wait for a rank that gave up
        return f"rank {ranks.rank} of {ranks.size}:\n{traceback.format_exc()}"


def _clean_up(ranks: Ranks) -> None:
    if ranks.group is not None and dist.is_initialized():
        with suppress(Exception):
            ranks.group._get_backend(torch.device("cpu")).shutdown()
            dist.destroy_process_group(ranks.group)
    ranks.group = None
    while ranks.hooks:
        ranks.hooks.pop().close()


def _wait_for_all(store: dist.Store, key: str, size: int) -> None:
    """A barrier that needs no process group, for these may be broken."""
    if store.add(key, 1) == size:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"], timedelta(seconds=20 * GROUP_TIMEOUT_S))

"""An error on one rank reaches all ranks, no rank waits for ever, and programs end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.engine.lanes import Lanes
from gradwire.exchanges.base import Comm
from gradwire.testing import RankFailed, spawn_ranks

from ..kit import models
from ..kit.failing import Failing
from ..kit.forked import run_programs
from ..kit.models import batch, seeded
from ..kit.ranks import Ranks, on_ranks
from ..kit.trial import raised, train
from . import forgetful

EXIT_CODE = 3


def run_into(ranks: Ranks, exchange: Failing, steps: int, **ddp: float) -> str:
    """Train until backward raises; the text. The other ranks must not have had to wait for their time limit."""
    model = ranks.wrap(seeded(models.Deep, 6), **ddp)
    hook = ranks.register(model, exchange)
    text = raised(RuntimeError, lambda: train(model, (batch(ranks.rank, step) for step in range(steps))))
    hook.close()
    assert "Timed out" not in text, text
    return text


def check_texts(ranks: Ranks, text: str, guilty: int) -> None:
    assert "ValueError" in text, text
    assert "boom" in text, text
    if ranks.rank != guilty:
        assert f"rank {guilty}" in text, text
        assert "another rank failed" in text, text


@on_ranks(2, 4, thorough=(3,))
def test_error_on_rank_1_reaches_all_ranks(ranks: Ranks) -> None:
    """At step 3; there is one bucket, so this is job 3."""
    check_texts(ranks, run_into(ranks, Failing(1, at=3), steps=5), guilty=1)


@on_ranks(2, thorough=(3,))
def test_error_on_rank_0_among_other_buckets_reaches_all_ranks(ranks: Ranks) -> None:
    check_texts(ranks, run_into(ranks, Failing(0, at=5), steps=5, bucket_cap_mb=0.002), guilty=0)


@on_ranks(2, thorough=(3,))
def test_training_continues_in_a_new_ddp_after_a_failure(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 3))
    ranks.register(model, Failing(1, at=2))
    raised(RuntimeError, lambda: train(model, (batch(ranks.rank, step) for step in range(3))))
    again = ranks.wrap(model.module)
    hook = ranks.register(again, "exact")
    train(again, (batch(ranks.rank, step) for step in range(3)))
    assert hook.steps == 3


class Greedy(Failing):
    """Issues more collectives than it declares."""

    def fail(self, comm: Comm) -> None:
        comm.all_reduce_(torch.zeros(1))


@on_ranks(2)
def test_more_collectives_than_lanes_raise(ranks: Ranks) -> None:
    model = ranks.wrap(seeded(models.Deep, 3))
    ranks.register(model, Greedy(ranks.rank, at=2))
    text = raised(RuntimeError, lambda: train(model, (batch(ranks.rank, step) for step in range(3))))
    assert "issued collective 2 but declares lanes=1" in text


class Dying(Failing):
    """Ends its process in the middle of a job, without an error."""

    def fail(self, comm: Comm) -> None:
        os._exit(EXIT_CODE)


def lose_a_rank(rank: int, size: int, folder: Path, guilty: int) -> None:
    """Rank `guilty` dies in its eighth job; with 0 the store dies too. The others write down what they saw."""
    serve_the_store_on_rank_0(rank, size)
    model = DDP(seeded(models.Deep, 6), bucket_cap_mb=0.002)
    hook = gradwire.register(model, Dying(guilty, at=8))
    text = raised(RuntimeError, lambda: train(model, (batch(rank, step) for step in range(20))))
    hook.close()
    Path(folder, f"{rank}.txt").write_text(text)
    assert dist.is_initialized()


def serve_the_store_on_rank_0(rank: int, size: int) -> None:
    """Make the world again, with its store where torchrun has it."""
    old = c10d._get_default_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        old.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(old.get("port")), size, wait_for_workers=False)
    dist.barrier()  # no rank is still connecting to the world that ends here
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


@pytest.mark.parametrize(("size", "guilty"), [(2, 0), pytest.param(3, 1, marks=pytest.mark.thorough)])
def test_rank_that_dies_ends_the_others(size: int, guilty: int, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        spawn_ranks(size, lose_a_rank, tmp_path, guilty, timeout_s=500)
    assert str(caught.value) == f"rank {guilty}: died with exit code {EXIT_CODE}"
    survivors = set(range(size)) - {guilty}
    assert {int(path.stem) for path in tmp_path.glob("*.txt")} == survivors
    for rank in survivors:
        text = Path(tmp_path, f"{rank}.txt").read_text()
        assert f"another rank failed (rank {guilty} left no message" in text
        assert re.search(r"so rank \d stops too, in all_reduce, step \d", text)


GLOOS = "[Gloo] Rank"
"""How the lines begin that gloo of torch 2.9 prints for every group that is made."""


@pytest.mark.parametrize("endings", [("nothing", "destroy"), ("raise", "in flight")], ids=" and ".join)
def test_program_that_does_not_close_its_hook_ends(endings: tuple[str, str], tmp_path: Path) -> None:
    """With its own exit code, and without any output of ours."""
    output = outputs(endings, tmp_path)
    own = [line for text in output for line in text.splitlines() if not line.startswith(GLOOS)]
    assert not own


@pytest.mark.parametrize("guilty", [0, 1])
def test_an_error_in_user_code_reaches_the_others(guilty: int, tmp_path: Path) -> None:
    endings = ("err", "go on") if guilty == 0 else ("go on", "err")
    text = outputs(endings, tmp_path)[1 - guilty]
    assert f"another rank failed (rank {guilty}: ValueError: my own mistake)" in text
    assert "step 4" in text


def outputs(endings: Sequence[str], folder: Path) -> list[str]:
    """What programs with these endings print, one rank each, after they have ended with the exit codes they should."""
    store = str(folder / "store")
    ended = run_programs(
        *([forgetful.__file__, str(rank), str(len(endings)), store, ending] for rank, ending in enumerate(endings))
    )
    assert [code for code, *_ in ended] == [forgetful.EXIT_CODES[ending] for ending in endings], ended
    return [out + err for _, out, err in ended]


def test_a_store_that_does_not_answer_is_given_up() -> None:
    """The store of a stopped process, or behind a cut link: torch waits for its answer without a limit."""
    script = (
        "import torch.distributed as d, time; s = d.TCPStore('localhost', 0, is_master=True, wait_for_workers=False)"
    )
    server = subprocess.Popen(
        [sys.executable, "-c", f"{script}; print(s.port, flush=True); time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        store = dist.TCPStore("localhost", int(server.stdout.readline()), timeout=timedelta(seconds=60))
        lanes = Lanes(store, 1, 3, timedelta(seconds=60), "cut")
        assert lanes.peer_error() == ""
        assert not lanes.cut_off
        server.send_signal(signal.SIGSTOP)
        os.waitpid(server.pid, os.WUNTRACED)  # until all of its threads have stopped
        assert lanes.peer_error() == ""
        assert lanes.missing(0.0) == [0, 2]
        assert lanes.cut_off
        lanes.publish_error("nobody will read this")
    finally:
        server.kill()
        server.wait()
        server.stdout.close()  # type: ignore[union-attr]

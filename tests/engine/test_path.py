"""docs/engine.md follows one gradient through the files: what it says must be what runs."""

from __future__ import annotations

import importlib
import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.testing import spawn_ranks

ROOT = Path(gradwire.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "engine.md"
MOST_FILES = 12


def documented() -> dict[str, list[str]]:
    """By file, in the order of the page, the names that the page mentions."""
    section = PAGE.read_text().partition("## The path of one gradient")[2].partition("\n## ")[0]
    items = re.findall(r"^\d+\. `([\w/]+\.py)`:(.*?)(?=^\d+\. |\Z)", section, flags=re.M | re.S)
    return {file: re.findall(r"`(\w+)`", text) for file, text in items}


def traced_step(rank: int, size: int, spec: str) -> list[tuple[str, str, str]]:
    """(thread, file, function) of every call into gradwire during one backward pass."""
    calls: list[tuple[str, str, str]] = []
    recording = threading.Event()

    def record(frame: FrameType, event: str, arg: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and recording.is_set() and file.is_relative_to(ROOT):
            calls.append((threading.current_thread().name, file.relative_to(ROOT).as_posix(), frame.f_code.co_name))

    threading.setprofile(record)  # before the threads of the engine start
    model = DDP(nn.Linear(256, 256))
    hook = gradwire.register(model, spec)
    for step in range(3):
        loss = model(torch.ones(4, 256)).sum()
        if step == 2:
            recording.set()
            sys.setprofile(record)
        loss.backward()
        sys.setprofile(None)
        recording.clear()
    threading.setprofile(None)
    hook.close()
    return calls


@pytest.fixture(scope="module")
def calls() -> list[tuple[str, str, str]]:
    return spawn_ranks(2, traced_step, "int8")[0]


def test_the_files_are_those_of_the_page_and_few(calls):
    files = {file for _, file, _ in calls}
    assert files == documented().keys()
    assert len(files) <= MOST_FILES


def test_every_name_of_the_page_exists_and_its_functions_run(calls):
    ran = {(file, function) for _, file, function in calls}
    for file, names in documented().items():
        module = importlib.import_module(
            f"gradwire.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
        )
        source = (ROOT / file).read_text()
        own = [name for name in names if re.search(rf"^\s*(?:def|class) {name}\b", source, flags=re.M)]
        assert own, f"the page names no function of {file}"
        for name in own:
            is_class = isinstance(getattr(module, name, None), type)
            assert is_class or (file, name) in ran, f"{file}: {name} did not run"


def test_the_page_lists_the_files_in_the_order_of_the_calls(calls):
    """First those of the thread that runs backward, until the jobs are queued; then those of the worker."""
    called = [(thread, file) for thread, file, function in calls if function not in READ_AHEAD]
    queued = next(place for place, call in enumerate(calls) if call[1:] == ("engine/runner.py", "submit"))
    backward = [file for thread, file, function in calls[: queued + 1] if function not in READ_AHEAD]
    worker = [file for thread, file in called if thread != calls[0][0]]
    assert list(dict.fromkeys([*backward, *worker])) == list(documented())


READ_AHEAD = {"lanes", "align", "chunk_bytes", "takes_residual", "is_random"}
"""Properties of exchanges and codecs that the engine reads before it calls them."""

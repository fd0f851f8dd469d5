"""The checkpoint example of torch's documentation: `torch.save` and `torch.load` of a hook with its state.

torch's documentation saves `{"state": state, "hook": powerSGD_hook}` and loads it with the defaults of `torch.load`,
which accept only what is registered as safe.
"""

import logging
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from gradwire.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook, quantization_hooks
from gradwire.ddp_comm_hooks import post_localSGD_hook as post_local

SAVED = "NOTE: Process group is not serializable and excluded from a saved state."
LOADED = (
    "NOTE: Process group will be set to a default group (i.e. the world size)."
    + " " * 16
    + "If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
)
LOST = "NOTE: this PowerSGDState was saved with a process group of its own: set state.process_group before training."

HOOKS = [
    default_hooks.allreduce_hook,
    default_hooks.fp16_compress_hook,
    default_hooks.bf16_compress_hook,
    debugging_hooks.noop_hook,
    quantization_hooks.quantization_pertensor_hook,
    quantization_hooks.quantization_perchannel_hook,
    powerSGD_hook.powerSGD_hook,
    powerSGD_hook.batched_powerSGD_hook,
    post_local.post_localSGD_hook,
]

LOAD = """
import importlib, sys
import torch
importlib.import_module(sys.argv[1])
saved = torch.load(sys.argv[2])
print(saved["hook"].__module__, saved["hook"].__qualname__, type(saved["state"]).__name__)
assert saved["hook"] is getattr(sys.modules[saved["hook"].__module__], saved["hook"].__qualname__)
for name, value in saved["settings"].items():
    assert getattr(saved["state"], name) == value, name
"""


def make_state(hook):
    """The state that a hook takes, and some of its settings."""
    if "powerSGD" in hook.__module__:
        settings = {"matrix_approximation_rank": 3, "start_powerSGD_iter": 7, "random_seed": 5}
        return powerSGD_hook.PowerSGDState(None, **settings), settings
    if "post_localSGD" in hook.__module__:
        state = post_local.PostLocalSGDState(None, None, 4, post_local_gradient_allreduce=False)
        state.iter = 9
        return state, {"start_localSGD_iter": 4, "post_local_gradient_allreduce": False, "iter": 9}
    return None, {}


def save(path, hook):
    state, settings = make_state(hook)
    torch.save({"state": state, "hook": hook, "settings": settings}, path)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__qualname__)
def test_torch_load_accepts_every_hook_and_state(hook, tmp_path):
    save(tmp_path / "checkpoint.pt", hook)
    loaded = torch.load(tmp_path / "checkpoint.pt")
    assert loaded["hook"] is hook
    for name, value in loaded["settings"].items():
        assert getattr(loaded["state"], name) == value


@pytest.mark.parametrize("hook", [powerSGD_hook.powerSGD_hook, post_local.post_localSGD_hook])
def test_a_new_process_needs_only_the_import_of_the_hook_s_module(hook, tmp_path):
    save(tmp_path / "checkpoint.pt", hook)
    command = [sys.executable, "-W", "error", "-c", LOAD, hook.__module__, str(tmp_path / "checkpoint.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [hook.__module__, hook.__qualname__, type(make_state(hook)[0]).__name__]


class Kept(logging.Handler):
    """Keeps the messages that reach it."""

    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


@pytest.fixture
def kept():
    """What reaches handlers of torch's and of gradwire's logger."""
    handlers = {name: Kept() for name in ("torch.distributed", "gradwire")}
    for name, handler in handlers.items():
        logging.getLogger(name).addHandler(handler)
    yield handlers
    for name, handler in handlers.items():
        logging.getLogger(name).removeHandler(handler)


def test_messages_reach_torch_s_logger_and_ours(kept, tmp_path):
    state = powerSGD_hook.PowerSGDState(None)
    torch.save(state, tmp_path / "state.pt")
    assert {name: handler.messages for name, handler in kept.items()} == {
        "torch.distributed": [SAVED],
        "gradwire": [SAVED],
    }
    torch.load(tmp_path / "state.pt")
    for handler in kept.values():
        assert handler.messages == [SAVED, LOADED]


def test_the_texts_are_torch_s(kept, tmp_path):
    """Word for word, as callers compare them."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for kind in (PowerSGDState, powerSGD_hook.PowerSGDState):
            torch.save(kind(None), tmp_path / "state.pt")
            torch.load(tmp_path / "state.pt", weights_only=False)
    finally:
        dist.destroy_process_group()
    messages = kept["torch.distributed"].messages
    assert messages[:2] == messages[2:] == [SAVED, LOADED]


def test_a_lost_group_is_a_message_of_its_own(kept, tmp_path):
    """torch would use the world in its place, and average over other ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.save(powerSGD_hook.PowerSGDState(dist.new_group([0])), tmp_path / "state.pt")
        torch.load(tmp_path / "state.pt")
    finally:
        dist.destroy_process_group()
    assert kept["torch.distributed"].messages == [SAVED, LOST]


def test_one_line_on_stderr_where_logging_is_not_set_up():
    text = "import pickle; from gradwire.ddp_comm_hooks.powerSGD_hook import PowerSGDState as S; pickle.dumps(S(None))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=540)
    assert done.returncode == 0
    assert done.stderr.count(SAVED) == 1

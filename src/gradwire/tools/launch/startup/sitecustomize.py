"""Runs at the start of every Python process below `gradwire run`, and patches DDP and FSDP2 when they are imported.

It must cost nothing in processes without torch, so it imports neither torch nor gradwire; gradwire is imported when a
model is built. Another `sitecustomize` on the path is run as well.
"""

import functools
import os
import signal
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

DDP_MODULE = "torch.nn.parallel.distributed"
FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"


def patch(ddp: Any) -> None:
    """Call `inside.built` with every DistributedDataParallel that is built from now on. A second call does nothing."""
    original = ddp.__init__
    if hasattr(original, "gradwire_original"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        from gradwire.tools.launch.inside import built

        built(self)

    init.gradwire_original = original  # type: ignore[attr-defined]
    ddp.__init__ = init


def patch_fsdp(module: ModuleType) -> None:
    """Call `inside.sharded` with the root of every model with `fully_shard`, when its first forward pass begins."""

    def first_forward(model: Any) -> None:
        from gradwire.tools.launch.inside import sharded

        sharded(model)

    from gradwire._torch.fsdp import on_root

    on_root(module.FSDPState, first_forward)


def patch_imported() -> None:
    """Patch what this process has imported already, and the rest when it is imported."""
    for name, change in PATCHES.items():
        if name in sys.modules:
            change(sys.modules[name])
    if not any(isinstance(finder, PatchOnImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, PatchOnImport())


PATCHES = {DDP_MODULE: lambda module: patch(module.DistributedDataParallel), FSDP_MODULE: patch_fsdp}


class PatchOnImport:
    """An import finder for the modules of PATCHES, which patches them as soon as they are loaded."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """None for every other module, which is left to the next finder."""
        spec = PathFinder.find_spec(name, path) if name in PATCHES else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            PATCHES[name](module)

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - mypy, methods are not attributes
        return spec


def end_quietly_until_ready() -> None:
    """A rank that gets Ctrl-C while it still imports torch ends at once, without a traceback: see `rank.py`."""
    if "GRADWIRE_PARENT" in os.environ and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def run_next() -> None:
    """Run the `sitecustomize` that Python would have found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    end_quietly_until_ready()
    sys.meta_path.insert(0, PatchOnImport())
    run_next()

"""Runs at the start of every Python process below `gradwire run`, and patches DDP and FSDP2 when they are imported.

It must cost nothing in processes without torch, so it imports neither torch nor gradwire; gradwire is imported when a
model is built. Another `sitecustomize` on the path is run as well.

If GRADWIRE_SEED is set, as `gradwire compare` does, the generators of `random`, numpy and torch start from that number,
and every seed that the script sets for them is moved by it: the script's own `manual_seed(0)` then gives another
training for every number, and the same one for the same number. With 0 the seeds of the script stay as they are.
"""

import functools
import os
import signal
import sys
import zlib
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

DDP_MODULE = "torch.nn.parallel.distributed"
FSDP_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_state"
SEED = "GRADWIRE_SEED"
"""The environment variable with the number of a repeat."""
APART = 0x9E3779B1
"""How far the seeds of one repeat are from those of the next."""


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


def moved(seed: Any, limit: int) -> Any:
    """The seed that stands for `seed` in this repeat: below `limit`, and the same for the same arguments."""
    number = int(os.environ.get(SEED, "0"))
    if number == 0 and seed is not None:
        return seed
    try:
        return (int(seed or 0) + APART * number) % limit
    except (TypeError, ValueError):  # texts and arrays
        return (zlib.crc32(repr(seed).encode()) + APART * number) % limit


def seed_with_number(module: Any, name: str, limit: int) -> None:
    """Move the seeds that are given to a function from now on, and seed once."""
    original = getattr(module, name)
    if hasattr(original, "gradwire_original") or SEED not in os.environ:
        return

    @functools.wraps(original)
    def seed(value: Any = None, *args: Any, **kwargs: Any) -> Any:
        return original(moved(value, limit), *args, **kwargs)

    seed.gradwire_original = original  # type: ignore[attr-defined]
    setattr(module, name, seed)


def patch_random(module: Any) -> None:
    """Python's own generator."""
    seed_with_number(module, "seed", 1 << 63)
    if SEED in os.environ:
        module.seed(0)


def patch_numpy(module: Any) -> None:
    """numpy's global generator."""
    seed_with_number(module, "seed", 1 << 32)
    if SEED in os.environ:
        module.seed(0)


def patch_torch(module: Any) -> None:
    """torch's global generators; those of accelerators are seeded when the script seeds them."""
    seed_with_number(module, "manual_seed", 1 << 63)
    if "torch" in sys.modules:  # it may have a copy of the function already
        sys.modules["torch"].manual_seed = module.manual_seed  # type: ignore[attr-defined]
    if SEED in os.environ:
        module.default_generator.manual_seed(moved(0, 1 << 63))


def patch_sampler(module: Any) -> None:
    """`DistributedSampler` shuffles by a seed of its own."""
    original = module.DistributedSampler.__init__
    if hasattr(original, "gradwire_original") or SEED not in os.environ:
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.seed = moved(self.seed, 1 << 31)

    init.gradwire_original = original  # type: ignore[attr-defined]
    module.DistributedSampler.__init__ = init


PATCHES = {
    DDP_MODULE: lambda module: patch(module.DistributedDataParallel),
    FSDP_MODULE: patch_fsdp,
    "random": patch_random,
    "numpy.random": patch_numpy,
    "torch.random": patch_torch,
    "torch.utils.data.distributed": patch_sampler,
}


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

"""Marks for tests of what older versions of torch do not have. `make compat` runs the tests on such versions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

VERSION = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _since(minor: int, what: str) -> Any:
    return pytest.mark.skipif((2, minor) > VERSION, reason=f"{what} needs torch 2.{minor}")


def ddp_option(name: str) -> Any:
    """For a test that builds DDP with this option."""
    known = name in inspect.signature(DistributedDataParallel).parameters
    return pytest.mark.skipif(not known, reason=f"DDP of torch {torch.__version__} has no {name}")


complex_gradients = _since(13, "averaging complex gradients")
compiled_codecs = _since(13, "compiled autograd through a codec")
sharded_models = _since(13, "replacing the collectives of fully_shard")

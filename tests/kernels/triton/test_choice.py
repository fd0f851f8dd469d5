"""When the Triton kernels are used, and what happens where they cannot be."""

import logging
import sys

import pytest
import torch

from gradwire import kernels
from gradwire.codecs import CODECS, Int4, Int8
from gradwire.exchanges.plan import Run, one_shot_, plan
from gradwire.kernels import triton
from gradwire.kernels.triton import launch
from gradwire.testing import interpreter

pytestmark = pytest.mark.triton
CPU = torch.device("cpu")


class Alone:
    """The collectives of a single rank."""

    rank, size = 0, 1

    def rows(self, numel, dtype, device):
        return torch.zeros((1, numel), dtype=dtype)

    def all_gather_(self, rows):
        return rows


@pytest.fixture
def fresh():
    """Nothing is known of triton yet, and afterwards again."""
    kernels._import_triton.cache_clear()
    yield
    kernels._import_triton.cache_clear()


def messages(caplog):
    return [record.getMessage() for record in caplog.records if record.name == "gradwire"]


def test_the_tensor_decides():
    values = torch.ones(8)
    assert kernels.pick("int8", values) is not triton.int8
    with interpreter.on("cpu"):
        assert kernels.in_use(CPU) == "triton"
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert kernels.pick("int8", values.to(dtype)) is triton.int8
        assert kernels.pick("int8", values.double()) is not triton.int8
        assert kernels.pick("int8", torch.ones(8, 2)[:, 0]) is not triton.int8
        assert kernels.pick("low_rank", values) is kernels._TORCH["low_rank"]
        assert all(codec().batch(values) is not None for codec in CODECS.values())
        assert Int4(block=512).batch(values) is None
        assert Int8().batch(values.double()) is None
    assert kernels.in_use(CPU) in ("numba", "torch")
    assert Int8().batch(values) is None


def test_a_missing_triton_is_logged_once(fresh, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "gradwire.kernels.triton", None)
    monkeypatch.delattr(kernels, "triton", raising=False)
    monkeypatch.setattr(kernels, "TRITON_DEVICES", {"cpu"})
    monkeypatch.setattr(kernels, "_numba", None)
    with caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(2):
            assert kernels.pick("int8", torch.ones(8)) is kernels._TORCH["int8"]
    assert kernels.in_use(CPU) == "torch"
    (message,) = messages(caplog)
    assert "triton cannot be imported" in message
    assert "torch kernels" in message


@pytest.mark.parametrize(("version", "used"), [("3.2.0", False), ("3.3.0+git123", True), ("3.10.1", True)])
def test_old_versions_are_not_used(version, used, fresh, monkeypatch, caplog):
    monkeypatch.setattr(triton, "version", lambda: version)
    with caplog.at_level(logging.WARNING, "gradwire"):
        assert (kernels.load_triton() is not None) == used
    assert [version in message and triton.OLDEST in message for message in messages(caplog)] == [True] * (not used)


@pytest.mark.parametrize("broken", ["reduce", "total"])
def test_a_kernel_that_does_not_compile(broken, may_fail, monkeypatch, caplog):
    """The torch kernels take over in the middle of an exchange, with the same result and one warning."""
    codec, flat = Int8(), torch.randn(1000)
    whole = plan((Run(700, False), Run(300, True)), 1, codec)
    wanted = flat.clone()
    one_shot_(wanted, whole, codec, Alone())

    class Broken:
        def __getitem__(self, grid):
            raise RuntimeError("ptxas fatal: out of registers\nand much more")

    monkeypatch.setattr(triton.calls.passes, broken, Broken())
    with interpreter.on("cpu"), caplog.at_level(logging.WARNING, "gradwire"):
        for _ in range(2):
            got = flat.clone()
            one_shot_(got, whole, codec, Alone())
            assert torch.equal(got, wanted)
        assert kernels.in_use(CPU) == "torch"
        assert torch.equal(triton.int8.encode_(codec.new_wire(flat), flat, 256), codec.encode(flat))
    (message,) = messages(caplog)
    assert "RuntimeError: ptxas fatal: out of registers)" in message
    assert "torch kernels from now on" in message


def test_a_single_tensor_falls_back_too(may_fail, monkeypatch):
    monkeypatch.setattr(triton.calls, "launch", lambda *args, **kwargs: 1 / 0)
    flat = torch.randn(300)
    wanted = Int8().encode(flat)
    assert torch.equal(triton.int8.encode_(Int8().new_wire(flat), flat, 256), wanted)
    assert launch.failed == ["ZeroDivisionError: division by zero"]

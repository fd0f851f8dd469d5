"""The Triton kernels on the test device: one launch per pass, and the weights of the CPU engine.

The kernels run in Triton's interpreter, each as one launch on the device's stream.
"""

import torch
from torch import Tensor

from gradwire import kernels
from gradwire.exchanges.bucket import make_bucket
from gradwire.testing import device, interpreter

from ..kit.ranks import Ranks
from .kit import on_device, same_bits, trained

SPECS = ("int8", "int8:rounding=stochastic,feedback=true", "int4", "int2:feedback=true", "sign", "fp16", "bf16", "topk")
MOST_LAUNCHES = {"int8:exempt=auto": 3, "int4:exempt=none": 3, "bf16": 3, "fp16": 5}


def with_triton(ranks: Ranks, place: str) -> dict[str, Tensor]:
    if place == "cpu":
        return trained(ranks, place)
    with interpreter.on(place):
        assert kernels.in_use(torch.device(place)) == "triton"
        return trained(ranks, place)


@on_device(2, 3, specs=SPECS)
def test_weights_are_those_of_the_cpu_engine(ranks: Ranks) -> None:
    interpreter.load()
    same_bits(ranks, lambda place: with_triton(ranks, place), schedules=("lazy", "eager_sides"))


@on_device(3, specs=tuple(MOST_LAUNCHES))
def test_launches_of_a_two_shot_bucket(ranks: Ranks) -> None:
    """Encode, reduce, decode: exempt tensors are in the same launches. fp16 must find its scale first, twice."""
    interpreter.load()
    with interpreter.on(device.DEVICE):
        hook = ranks.register(ranks.wrap(torch.nn.Linear(8, 8).to(device.DEVICE)))
        sizes = (3000,), (10,), (700, 3), (5,)
        for _ in range(2):  # the first time also copies tables to the device
            bucket = make_bucket([torch.ones(size, device=device.DEVICE) for size in sizes])
            before = device.counters()
            mean = hook.mean(bucket)
            after = device.counters()
        assert after.launches - before.launches <= MOST_LAUNCHES[ranks.spec]
        assert after.host_syncs == before.host_syncs
        torch.testing.assert_close(mean.wait().cpu(), torch.ones(5115), rtol=0.1, atol=0)
        hook.close()


@on_device(3, specs=("int8",))
def test_without_triton_a_bucket_takes_many_launches(ranks: Ranks) -> None:
    """The counter counts."""
    hook = ranks.register(ranks.wrap(torch.nn.Linear(8, 8).to(device.DEVICE)))
    before = device.counters().launches
    hook.mean(make_bucket([torch.ones(5000, device=device.DEVICE)])).wait()
    assert device.counters().launches - before > 30
    hook.close()

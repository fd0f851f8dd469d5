"""Every exchange on the device: after several steps the weights and residuals are those of the CPU engine."""

from gradwire.exchanges import registered

from ..kit.ranks import Ranks
from .kit import on_device, same_bits, trained

OPTIONS = (
    "fp16:accumulate=wire",
    "fp16:feedback=true",
    "bf16:shots=two",
    "int8:feedback=true,exempt=none",
    "int8:rounding=stochastic",
    "int4:exempt=none",
    "int4:feedback=true",
    "int2:feedback=true,exempt=none",
    "topk:ratio=0.1,feedback=true",
    "two_level:node=1",
)
POWER_SGD = ("powersgd:rank=1,min_compression=0.5", "powersgd:rank=1,min_compression=0.5,sides=one")
SPECS = tuple(name for name in registered() if name not in ("powersgd", "two_level")) + OPTIONS


@on_device(1, 2, 3, 4, specs=SPECS)
def test_weights_are_those_of_the_cpu_engine(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place))


@on_device(4, specs=("two_level:node=2", "two_level(inside=bf16,across=int4,node=2)"))
def test_two_levels(ranks: Ranks) -> None:
    same_bits(ranks, lambda place: trained(ranks, place))

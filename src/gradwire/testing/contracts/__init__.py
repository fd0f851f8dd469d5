"""The laws that every codec and every exchange must keep, as checks that raise AssertionError.

Authors of plug-ins run all of them with `gradwire.testing.check_codec(codec)` and `check_exchange(exchange)`, or one
test per contract with `pytest.mark.parametrize("check", CODEC_CHECKS)`.
"""

from gradwire.testing.contracts.codecs import CODEC_CHECKS, check_codec, gaussian, heavy_tailed, layered
from gradwire.testing.contracts.exchanges import EXCHANGE_CHECKS, check_exchange

__all__ = ["CODEC_CHECKS", "EXCHANGE_CHECKS", "check_codec", "check_exchange", "gaussian", "heavy_tailed", "layered"]

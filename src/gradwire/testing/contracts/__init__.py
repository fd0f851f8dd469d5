"""The laws that every codec and every exchange must keep, as checks that raise AssertionError.

Plug-in authors can run them over their own: `for check in CODEC_CHECKS: check(codec)`.
"""

from gradwire.testing.contracts.codecs import CODEC_CHECKS, gaussian
from gradwire.testing.contracts.exchanges import EXCHANGE_CHECKS

__all__ = ["CODEC_CHECKS", "EXCHANGE_CHECKS", "gaussian"]

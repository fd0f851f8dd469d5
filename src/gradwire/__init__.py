"""gradwire: averages gradients across ranks with fewer bytes on the wire, through DDP's communication-hook slot."""

from gradwire.bucket import Bucket, make_bucket
from gradwire.codecs import Codec, codec
from gradwire.ddp import register
from gradwire.errors import ExchangeError, GradwireError, RegisterError, SpecError, StateError, VerifyError
from gradwire.exchanges import Exchange, exchange
from gradwire.hook import Hook
from gradwire.stats import Stats
from gradwire.verify import Verification
from gradwire.version import __version__

__all__ = [
    "Bucket",
    "Codec",
    "Exchange",
    "ExchangeError",
    "GradwireError",
    "Hook",
    "RegisterError",
    "SpecError",
    "StateError",
    "Stats",
    "Verification",
    "VerifyError",
    "__version__",
    "codec",
    "exchange",
    "make_bucket",
    "register",
]

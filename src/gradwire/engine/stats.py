"""Stats: what a hook has done so far, as averages per step."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Stats:
    """Averages per step since registration, the last `switch` or the last `reset_stats`.

    Times of chunks overlap with each other and with the backward pass, so `encode_s + wire_s + decode_s` is work done,
    not time lost. Time lost is `wait_s`. On an accelerator the times come from events on its streams, and are means
    over the steps that it has finished; they are NaN as long as it has finished none.
    """

    hook: str
    """The spec."""
    steps: int
    buckets: float
    sent_bytes: float
    """Sent by this rank per step, payload only."""
    received_bytes: float
    encode_s: float
    """From the start of a chunk to its first collective."""
    wire_s: float
    """From issuing a collective to its end, summed over the chunks."""
    decode_s: float
    """Everything after the first collective that is not wire: summing, encoding the mean, decoding."""
    wait_s: float
    """From the last bucket's arrival to the end of the last job: what the optimizer had to wait for."""
    reason: str = ""
    """Under `auto`: why it is this hook."""
    timed_steps: int = 0
    """The number of steps that the times are from: on an accelerator the last ones may not be finished yet."""
    kernels: str = ""
    """The kernels in use on the model's device, such as `numba` or `torch`."""
    peak_bytes: int = 0
    """The most memory that the hook has held at once in this process, besides residuals: encoded messages and, of a
    model with `fully_shard`, the gradients of units whose reduction was under way. Not counted on an accelerator, whose
    allocator has statistics of its own."""

    def as_dict(self) -> dict[str, str | int | float]:
        """A plain mapping, for logging."""
        return asdict(self)

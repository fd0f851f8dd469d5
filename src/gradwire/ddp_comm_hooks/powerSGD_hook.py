"""Drop-in for torch's `powerSGD_hook`: low-rank averaging, on every backend.

State is kept by parameter, so that DDP may cut its buckets anew at any time; a step with inf or NaN leaves it alone;
and what a rank owes does not pile up for ever. `gradwire.register(model, "powersgd:rank=4")` does the same with names
of parameters instead of numbers, and with more options.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradwire._torch import GradBucket
from gradwire.ddp_comm_hooks._group import found, group_of, pickled
from gradwire.engine.checkpoint import MERGED
from gradwire.engine.hook import Hook
from gradwire.errors import ExchangeError, SpecError
from gradwire.exchanges import LowRank
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.low_rank.power_sgd import Wire
from gradwire.models.ddp import from_ddp, make_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)

_SETTINGS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "random_seed",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)
_COUNTERS = ("total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_WIRES: dict[torch.dtype, Wire] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class PowerSGDState:
    """The settings and the memory of one model's PowerSGD. `torch.save` takes it, `torch.load` by its defaults too.

    `orthogonalization_epsilon` and `batch_tensors_with_same_shape` are there for compatibility: vanishing gradients
    need no epsilon here, and matrices of one shape always share a product. Settings may be changed between steps.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                "because PowerSGD can only be applied after the first two iterations in DDP. That holds for torch's; "
                "gradwire.register(model, 'powersgd:rank=1') starts with the first step."
            )
        if orthogonalization_epsilon < 0:
            raise ValueError(f"orthogonalization_epsilon must not be negative, got {orthogonalization_epsilon}")
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self._begin({})
        self._exchange(torch.float32, batched=False)  # bad settings are refused here
        logger.info("PowerSGD config: %s", "; ".join(f"{key} = {getattr(self, key)}" for key in _SETTINGS))

    def _begin(self, saved: dict[str, Any]) -> None:
        """Nothing done yet, but for what `saved` tells."""
        self.total_numel_before_compression = self.total_numel_after_compression = self.next_stats_report = 0
        self.hook: Hook | None = None
        """The engine, from the first bucket on; `hook.state_dict(merged=True)` is a checkpoint for all ranks."""
        self._saved = saved
        self._names: Any = WeakIdKeyDictionary()
        self._start_at(int(saved.get("step", 0)))

    def _start_at(self, step: int) -> None:
        self._first_step = step
        self._steps: dict[str, int] = {}
        """How often each parameter has been averaged: the models that share a state each count for themselves."""

    @property
    def iter(self) -> int:
        """Steps averaged so far; those of one model, where several share the state."""
        return self._first_step if self.hook is None else self.hook.steps

    @iter.setter
    def iter(self, step: int) -> None:
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"iter must be a whole number of at least 0, got {step!r}")
        self._start_at(step)
        if self.hook is not None:
            self.hook.steps = step
        elif self._saved:
            self._saved = {**self._saved, "step": step}

    @property
    def error_dict(self) -> Mapping[str, Tensor]:
        """What is owed to each parameter, by its number in the order of the first backward pass. A copy, to read."""
        return MappingProxyType(self._state().get("residuals", {}))

    @property
    def q_memory_dict(self) -> Mapping[str, Tensor]:
        """The directions of each matrix, (rank, columns), by the number of its parameter. A copy, to read."""
        memory = self._state().get("memory", {})
        return MappingProxyType({name: next(iter(kept.values())) for name, kept in memory.items()})

    @property
    def p_memory_dict(self) -> Mapping[str, Tensor]:
        """Empty: P is made anew at every step."""
        return MappingProxyType({})

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """For those who call it: the engine counts by itself."""

    def compression_stats(self) -> tuple[float, int, int]:
        """(compression rate, values before, values after), over all steps that were compressed."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        group = pickled(self.process_group)
        if group is not None:
            logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        settings = {key: getattr(self, key) for key in (*_SETTINGS, *_COUNTERS)}
        return settings | {"hook": self._state(), "process_group": group}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A process group of its own is not part of it, and must be set before training."""
        self.process_group = state.get("process_group")
        self._begin(state["hook"])
        for key in (*_SETTINGS, *_COUNTERS):
            setattr(self, key, state[key])

    # -- machinery ---------------------------------------------------------------------------------------------

    def average(self, bucket: Any, *, batched: bool) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket."""
        if isinstance(bucket, tuple):
            raise ExchangeError(
                "PowerSGD keeps state between steps, which DDP's compiled reducer has no place for; set "
                "torch._dynamo.config.optimize_ddp = 'ddp_optimizer', or use fp16_compress_hook"
            )
        ours = from_ddp(bucket, self._name)
        hook, step = self._engine(ours, batched), self._step_of(ours)
        if step >= hook.steps:
            self._follow_settings(hook, ours, batched)
        hook.begin(ours, step >= hook.steps)
        self._count(hook.exchange, ours, step)
        return hook.mean(ours, step=step)

    def _name(self, param: Tensor) -> str:
        return self._names.setdefault(param, str(len(self._names)))  # type: ignore[no-any-return]

    def _step_of(self, bucket: Bucket) -> int:
        """How many steps a bucket has seen, and that this is one more."""
        step = max((self._steps.get(name, self._first_step) for name in bucket.names), default=self.iter)
        self._steps.update(dict.fromkeys(bucket.names, step + 1))
        return step

    def _engine(self, bucket: Bucket, batched: bool) -> Hook:
        if self.hook is None or self.hook.closed:
            self._saved = self._state()
            group = group_of(found(self, "process_group"))
            self.hook = make_hook(self._exchange(bucket.flat.dtype, batched), group, bucket.flat.device)
            self._resume(self.hook)
        return self.hook

    def _follow_settings(self, hook: Hook, bucket: Bucket, batched: bool) -> None:
        wanted = self._exchange(bucket.flat.dtype, batched)
        if wanted != hook.exchange:
            hook.switch(wanted)
        if hook.steps == self.start_powerSGD_iter:
            logger.info("Start to apply PowerSGD after %s iterations.", self.start_powerSGD_iter)

    def _exchange(self, dtype: torch.dtype, batched: bool) -> LowRank:
        return LowRank(
            rank=self.matrix_approximation_rank,
            warmup=self.start_powerSGD_iter,
            feedback=self.use_error_feedback,
            warm_start=self.warm_start,
            min_compression=self.min_compression_rate,
            seed=self.random_seed,
            batched=batched,
            wire=_WIRES.get(dtype, "fp32"),  # under the wrappers P and Q are to travel in 16 bits
        )

    def _resume(self, hook: Hook) -> None:
        """Go on from a checkpoint. One rank's file has that rank's memory alone: on all ranks it must not multiply."""
        saved = self._saved
        if not saved:
            hook.steps = self._first_step
            return
        if saved["rank"] not in (hook.rank, MERGED) and saved["size"] == hook.size and saved["residuals"]:
            logger.warning(
                "this PowerSGDState was saved by rank %s: what rank %s owed is lost. Save on every rank, or save "
                "state.hook.state_dict(merged=True)",
                saved["rank"],
                hook.rank,
            )
            saved = {**saved, "residuals": {}}
        hook.load_state_dict(saved)
        self._saved = {}

    def _state(self) -> dict[str, Any]:
        return self._saved if self.hook is None else self.hook.state_dict()

    def _count(self, exchange: Any, bucket: Bucket, step: int) -> None:
        if step < self.start_powerSGD_iter:
            return
        self.total_numel_before_compression += bucket.flat.numel()
        self.total_numel_after_compression += exchange.lay_out(bucket).values
        if bucket.is_last and self.iter >= self.next_stats_report:
            self.next_stats_report = self.iter + self.compression_stats_logging_frequency
            rate, before, after = self.compression_stats()
            logger.info(
                "Compression stats: iter %s, total before compression %s, total after compression %s, rate %s",
                self.iter,
                before,
                after,
                rate,
            )


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average each matrix by two thin ones, and everything else exactly; exactly until `start_powerSGD_iter`."""
    return _checked(state).average(bucket, batched=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the whole bucket as one matrix: faster, and less accurate."""
    return _checked(state).average(bucket, batched=True)


def _checked(state: Any) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise SpecError(f"powerSGD_hook needs a PowerSGDState as its state, got {type(state).__name__}")
    return state


# A checkpoint must load before any state is made, so this cannot wait. What loads is plain numbers and tensors.
torch.serialization.add_safe_globals([PowerSGDState])

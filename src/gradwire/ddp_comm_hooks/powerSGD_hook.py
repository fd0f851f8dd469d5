"""Drop-in for torch's `powerSGD_hook`: low-rank averaging, on every backend.

State is kept per parameter, so DDP may change its buckets at any time. A step with inf or NaN leaves the state as it
was, and the error memory stays bounded. `gradwire.register(model, "powersgd:rank=4")` does the same with the names of
the parameters instead of numbers, and with more options.
"""

# DDP reads the annotations of a hook as objects, so this module must not postpone their evaluation.

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from gradwire._torch import GradBucket
from gradwire.ddp_comm_hooks._group import Log, check_bucket, group_or_world, pickled_group, usable_group
from gradwire.engine.checkpoint import MERGED
from gradwire.engine.fingerprint import sealed
from gradwire.engine.hook import Hook
from gradwire.errors import SpecError
from gradwire.exchanges import LowRank
from gradwire.exchanges.bucket import Bucket
from gradwire.exchanges.low_rank.power_sgd import Wire
from gradwire.models.ddp import from_ddp, make_hook

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = Log("powerSGD_hook")

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
_WORLD_NOTE = "NOTE: Process group will be set to a default group (i.e. the world size).\
                If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
"""torch's message, with the spaces in the middle."""
_LOST_NOTE = (
    "NOTE: this PowerSGDState was saved with a process group of its own: set state.process_group before training."
)
_COUNTERS = ("total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_WIRES: dict[torch.dtype, Wire] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class PowerSGDState:
    """The settings and the memory of one model's PowerSGD. `torch.save` and `torch.load` take it with their defaults.

    The arguments are torch's. `orthogonalization_epsilon` and `batch_tensors_with_same_shape` have no effect: vanishing
    gradients need no epsilon here, and matrices of one shape always share a product. Settings may be changed between
    steps.
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
        self._exchange(torch.float32, batched=False)  # raises for bad settings
        logger.info("PowerSGD config: %s", "; ".join(f"{key} = {getattr(self, key)}" for key in _SETTINGS))

    def _begin(self, saved: dict[str, Any]) -> None:
        """Start from a checkpoint of the engine, or from nothing if `saved` is empty."""
        self.total_numel_before_compression = self.total_numel_after_compression = self.next_stats_report = 0
        self.hook: Hook | None = None
        """The engine, which exists from the first bucket on. `hook.state_dict(merged=True)` holds all ranks' state."""
        self._saved = saved
        self._names: Any = WeakIdKeyDictionary()
        self._start_at(int(saved.get("step", 0)))

    def _start_at(self, step: int) -> None:
        self._first_step = step
        self._steps: dict[str, int] = {}
        """How often each parameter has been averaged. Models that share a state are counted separately this way."""

    @property
    def iter(self) -> int:
        """The number of steps averaged so far, of one model if several share the state."""
        return self._first_step if self.hook is None else self.hook.steps

    @iter.setter
    def iter(self, step: int) -> None:
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"iter must be a whole number of at least 0, got {step!r}")
        self._start_at(step)
        if self.hook is not None:
            self.hook.steps = step
        elif self._saved:
            self._saved = sealed({**self._saved, "step": step})

    @property
    def error_dict(self) -> Mapping[str, Tensor]:
        """A copy of the error memory of each parameter, by the parameter's number in the first backward pass."""
        return MappingProxyType(self._state().get("residuals", {}))

    @property
    def q_memory_dict(self) -> Mapping[str, Tensor]:
        """A copy of the Q of each matrix, (rank, columns), by the number of its parameter."""
        memory = self._state().get("memory", {})
        return MappingProxyType({name: next(iter(kept.values())) for name, kept in memory.items()})

    @property
    def p_memory_dict(self) -> Mapping[str, Tensor]:
        """Empty, as P is computed in every step."""
        return MappingProxyType({})

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Does nothing: the engine counts the steps."""

    def compression_stats(self) -> tuple[float, int, int]:
        """(compression rate, values before, values after), over all compressed steps."""
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        settings = {key: getattr(self, key) for key in (*_SETTINGS, *_COUNTERS)}
        return settings | {"hook": self._state(), "process_group": pickled_group(self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore everything but the process group: a group other than the world must be set before training."""
        self.process_group = state.get("process_group")
        logger.warning(_WORLD_NOTE if self.process_group is None else _LOST_NOTE)
        self._begin(state["hook"])
        for key in (*_SETTINGS, *_COUNTERS):
            setattr(self, key, state[key])

    # -- machinery ---------------------------------------------------------------------------------------------

    def average(self, bucket: Any, *, batched: bool) -> torch.futures.Future[torch.Tensor]:
        """Average one bucket."""
        check_bucket(bucket, "powerSGD_hook keeps state between steps", "fp16_compress_hook")
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
        """The number of steps before this one in which the bucket's parameters were averaged. Counts this one."""
        step = max((self._steps.get(name, self._first_step) for name in bucket.names), default=self.iter)
        self._steps.update(dict.fromkeys(bucket.names, step + 1))
        return step

    def _engine(self, bucket: Bucket, batched: bool) -> Hook:
        if self.hook is None or self.hook.closed:
            self._saved = self._state()
            group = group_or_world(usable_group(self.process_group, "PowerSGDState.process_group"))
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
            wire=_WIRES.get(dtype, "fp32"),  # the wrappers send P and Q in 16 bits
        )

    def _resume(self, hook: Hook) -> None:
        """Continue from a checkpoint. The residuals of another rank's file are dropped, so that none counts twice."""
        saved = self._saved
        if not saved:
            hook.steps = self._first_step
            return
        if saved["rank"] not in (hook.rank, MERGED) and saved["size"] == hook.size and saved["residuals"]:
            logger.warning(
                "this PowerSGDState was saved by rank %s: the error memory of rank %s is lost. Save on every rank, or "
                "save state.hook.state_dict(merged=True)",
                saved["rank"],
                hook.rank,
            )
            saved = sealed({**saved, "residuals": {}})
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
    """Average each matrix as a product of two thin ones, and everything else exactly.

    The first `start_powerSGD_iter` steps are exact.
    """
    return _checked(state).average(bucket, batched=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the whole bucket as one matrix, which is faster and less accurate."""
    return _checked(state).average(bucket, batched=True)


def _checked(state: Any) -> PowerSGDState:
    if not isinstance(state, PowerSGDState):
        raise SpecError(f"powerSGD_hook needs a PowerSGDState as its state, got {type(state).__name__}")
    return state

"""ElasticRounds: local training that goes on when ranks fail, and takes in ranks that come.

Averages are committed: the mean of a fragment is applied by all members, or by none of them. When a commit fails, those
who are left form a new group, and send the same deltas again, with the residuals that they had before. So nothing is
lost but the steps of a failed rank since it last sent, and its residual. Survivors keep their residuals and a newcomer
starts without any, so that their sum stays what it was.

Newcomers are admitted after an average, when nothing is under way. They take over all state from rank 0.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from gradwire import kernels
from gradwire._torch import HashStore, PrefixStore, Store
from gradwire.engine.fingerprint import sealed
from gradwire.engine.gloo import new_group
from gradwire.engine.hook import Hook
from gradwire.engine.lanes import Lanes
from gradwire.engine.runner import LaneRunner
from gradwire.errors import ExchangeError, GradwireError, RegisterError, SpecError, StateError
from gradwire.exchanges import Exchange
from gradwire.exchanges.bucket import Memory
from gradwire.optim.handover import byte_count, packed, send, unpacked
from gradwire.optim.members import FAILED, GROW, Members, Shrink
from gradwire.optim.outside import PROBE_S, in_time
from gradwire.optim.rounds import Rounds, Transfer
from gradwire.version import __version__

log = logging.getLogger("gradwire")

T = TypeVar("T")

ATTEMPTS = 5
"""How often in a row a new group may fail before this rank gives up."""
MOST_TIMEOUTS = 4
"""How many time limits one after the other it can take until a group of ranks is made, or fails."""


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """What it takes to send a fragment again."""

    delta: Tensor
    step: int
    residuals: dict[str, Tensor]
    memory: Memory


class ElasticRounds(Rounds):
    """Rounds over the members of an epoch, if there is a membership; else over a process group."""

    members: Members | None = None
    """Who trains together, with `on_failure="shrink"`."""
    _admits = False
    """Whether somebody waits to join."""
    _model: nn.Module
    _optimizer: torch.optim.Optimizer

    def _prepare(self, settings: Shrink, exchange: Exchange, device: torch.device, model: str) -> None:
        """Be alone until `_regroup` is called."""
        if device.type != "cpu":
            raise RegisterError(f"on_failure='shrink' is for models on the CPU so far, and this one is on {device}")
        uses = "numba" if kernels.load() else "torch"
        versions = f"gradwire {__version__}, torch {torch.__version__}, kernels of {uses}"
        trains = f"{self}, exchange {exchange}, {type(self._optimizer).__name__}, {model}, {versions}"
        self._exchange, self._device = exchange, device
        self._context = contextvars.copy_context()  # an emulated link is set in it
        self._sent: dict[Transfer, Sent] = {}
        self.hook = self._new_hook(HashStore(), 0, 1, "")
        self.members = Members(settings, trains)

    def _new_hook(self, store: Store, rank: int, size: int, name: str) -> Hook:
        lanes = Lanes(store, rank, size, timedelta(seconds=self._timeout_s), name)
        lanes.patience_s = 0.0  # it does not matter who is to blame
        runner = LaneRunner(lanes)
        try:
            params = self.named_globals
            return Hook(self._exchange, runner, rank=rank, size=size, device=self._device, params=params)
        except BaseException:
            runner.give_up(ExchangeError("no group"))
            runner.close()
            raise

    @property
    def _crew(self) -> Members:
        assert self.members is not None
        return self.members

    @property
    def _timeout_s(self) -> float:
        return 1.0 if self.members is None else self.members.settings.timeout_s

    # -- an average ----------------------------------------------------------------------------------------------

    def _submit(self, transfer: Transfer) -> None:
        if self.members is None:
            super()._submit(transfer)
        else:
            kept = self.hook.kept_of(transfer.fragment.names)
            self._sent[transfer] = Sent(transfer.mean.clone(), max(self.hook.steps - 1, 0), *kept)
            self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        bucket = transfer.fragment.bucket(transfer.mean)
        try:
            transfer.future = self.hook.mean(bucket, step=self._sent[transfer].step)
        except ExchangeError as error:  # another fragment under way has failed already
            failed: Future[Any] = Future()
            failed.set_exception(error)
            transfer.future = failed

    def _settle(self, transfer: Transfer) -> bool:
        """Wait until all members have the mean; False if this rank was left out, and has started anew meanwhile."""
        if self.members is None:
            return super()._settle(transfer)
        what = f"{self.steps}.{transfer.fragment.index}"
        if not self._until_committed(partial(self._arrived, transfer), what):
            return False
        transfer.future = None
        del self._sent[transfer]
        return True

    def _until_committed(self, attempt: Callable[[], bool], what: str) -> bool:
        """Try until all members have succeeded; False if this rank was left out, and has started anew meanwhile."""
        joins = self._crew.joins
        for _ in range(ATTEMPTS):
            decision = self._crew.commit(attempt(), what)
            if decision != FAILED:
                self._admits |= decision == GROW
                return True
            self._regroup()
            if self._crew.joins != joins:
                return False
        raise ExchangeError(
            f"an average has failed {ATTEMPTS} times, though the ranks could form groups; do all of them take the same "
            f"steps, and is timeout_s ({self._timeout_s:g} s) long enough for it?"
        )

    def _arrived(self, transfer: Transfer) -> bool:
        """Whether the exchange has succeeded here. It is ended if a member is gone, or it takes too long."""
        assert transfer.future is not None
        done, until_s = threading.Event(), time.monotonic() + 2 * self._timeout_s
        transfer.future.add_done_callback(lambda _: done.set())
        while not done.wait(PROBE_S):
            if time.monotonic() > until_s or self._crew.any_gone():
                return False
        try:
            transfer.future.wait()
        except RuntimeError:
            return False
        return True

    # -- another group -------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """Wait for the others, and start from their state, if they have one."""
        if not self.loaded:
            for fragment, values in zip(self.fragments, self.globals, strict=True):
                fragment.copy_(values, fragment.params)
        try:
            self._regroup(new=True)
        except BaseException:  # the others do not wait for a rank that is gone
            self._drop_hook()
            self._crew.leave()
            raise
        if self._crew.holders == 0 and self._crew.epoch > 1:
            log.warning("all ranks that were there before are gone: the training starts from step %d", self.steps)

    def _admit(self) -> None:
        """Let in the ranks that wait. All members are at the same step."""
        self._apply(self.transfers)
        if self._admits:
            self._regroup(admit=True)

    def _apply(self, transfers: Sequence[Transfer]) -> None:
        """Apply means when they are there."""
        raise NotImplementedError

    def _regroup(self, *, admit: bool = False, new: bool = False) -> None:
        """Form the next group with all who are left, and send again what was under way."""
        before, began_s, error, self._admits = self.hook.size, time.monotonic(), None, False
        for _ in range(ATTEMPTS):
            self._drop_hook()
            if new or not self._crew.vote(admit=admit):
                self._sent, self.transfers = {}, []
                self._crew.join(self.steps)
            error = self._form()
            if self._crew.commit_epoch(error is None) != FAILED:
                self._report(before, time.monotonic() - began_s)
                return
            new, admit = self._crew.rank >= self._crew.holders, False
        raise ExchangeError(
            f"the ranks could not form a group in {ATTEMPTS} attempts; can they all reach each other, and is timeout_s "
            f"({self._timeout_s:g} s) long enough? The last error: {error}"
        ) from error

    def _report(self, before: int, seconds: float) -> None:
        now, level = self.hook.size, logging.WARNING if self.hook.size < before else logging.INFO
        log.log(level, "step %d: %d ranks, before %d; that took %.2f s", self.steps, now, before, seconds)

    def _drop_hook(self) -> None:
        self.hook.runner.give_up(ExchangeError("the ranks form another group"))
        self.hook.close()

    def _form(self) -> Exception | None:
        """Connect to the other members; the error if that fails."""
        rank, size, meter = self._crew.rank, self._crew.size, self.hook.runner.meter
        state = {**self._exchange_state(), "rank": rank, "size": size}
        name = f"epoch/{self._crew.epoch}"
        try:
            self.hook = self._in_time(partial(self._new_hook, self._crew.store.lanes, rank, size, name))
            self._load_hook([{"exchange": state}], self.last_sent)
            self._hand_over()
            self._in_time(self._check_same)
            self.hook.runner.meter = meter
            for transfer in self.transfers:
                transfer.mean = self._sent[transfer].delta.clone()
                self._start(transfer)
        except (GradwireError, RuntimeError) as error:
            return error
        return None

    def _in_time(self, call: Callable[[], T]) -> T:
        late = "the ranks did not connect in time, or one of them has failed meanwhile"
        whole_s, run = MOST_TIMEOUTS * self._timeout_s, partial(contextvars.Context.run, self._context.copy(), call)
        return in_time(run, whole_s, late, stop=self._crew.is_in_vain)

    # -- state ---------------------------------------------------------------------------------------------------

    def _exchange_state(self) -> dict[str, Any]:
        """The state of the exchange on this rank, before anything that is under way was sent."""
        state = self.hook.state_dict()
        for transfer, sent in self._sent.items():
            for key, kept in (("residuals", sent.residuals), ("memory", sent.memory)):
                others = {name: value for name, value in state[key].items() if name not in transfer.fragment.names}
                state[key] = {**others, **kept}
        return sealed(state)

    def _pack(self, merged: bool) -> dict[str, Any]:
        if self.members is None:
            return super()._pack(merged)
        if not merged:
            return self._packed([], self._exchange_state())
        if self.transfers:
            raise RegisterError("averages are under way: call sync() before state_dict(merged=True)")
        return self._packed([], self._merged())

    def _merged(self) -> dict[str, Any]:
        states: list[dict[str, Any]] = []

        def attempt() -> bool:
            try:
                states.append(self.hook.state_dict(merged=True))
            except ExchangeError:
                return False
            return True

        if not self._until_committed(attempt, f"{self.steps}.merged"):
            raise ExchangeError("the other ranks went on without this one while it saved; they have the state")
        return states[-1]

    def _hand_over(self) -> None:
        """All state of rank 0, to those who have none."""
        rank, size, first = self._crew.rank, self._crew.size, max(self._crew.holders, 1)
        if self._crew.holders == 0:
            self._start_from_globals()
        if size == first or 0 < rank < first:
            return
        place, count = max(rank - first + 1, 0), size - first + 1
        state = self._in_time(partial(self._sent_state, place, count))
        if rank > 0:
            self._take(state)

    def _sent_state(self, place: int, count: int) -> Any:
        store = PrefixStore(f"handover/{self._crew.epoch}", self._crew.store.lanes)
        if place == 0:
            text, octets = self._whole_state()
            store.set("text", text)
        else:
            text = store.get("text").decode()
            octets = torch.zeros(byte_count(text), dtype=torch.uint8)
        send(new_group(store, place, count, timedelta(seconds=self._timeout_s)), octets)
        return unpacked(text, octets) if place else None

    def _whole_state(self) -> tuple[str, Tensor]:
        rounds = self._packed([], sealed({**self._exchange_state(), "residuals": {}}))
        state = {"rounds": rounds, "buffers": dict(self._model.named_buffers())}
        try:
            return packed({**state, "optimizer": self._optimizer.state_dict()})
        except StateError as error:
            log.warning("a rank joins without the state of %s: %s", type(self._optimizer).__name__, error)
            return packed({**state, "optimizer": None})

    @torch.no_grad()
    def _take(self, state: Any) -> None:
        self._load([state["rounds"]])
        self.sent_at = list(state["rounds"]["sent_at"])
        for name, buffer in self._model.named_buffers():
            buffer.copy_(state["buffers"][name])
        if state["optimizer"] is not None:
            self._optimizer.load_state_dict(state["optimizer"])


def shrinking(on_failure: object, group: dist.ProcessGroup | None) -> Shrink | None:
    """The settings of a membership, or None if a failure is to be raised."""
    if on_failure == "raise":
        return None
    settings = Shrink() if on_failure == "shrink" else on_failure
    if not isinstance(settings, Shrink):
        raise SpecError(f"on_failure must be 'raise', 'shrink' or gradwire.optim.Shrink(...), got {on_failure!r}")
    if group is not None:
        raise RegisterError("on_failure='shrink' makes groups of its own, as the ranks change; leave out process_group")
    return settings

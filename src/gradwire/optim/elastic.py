"""ElasticRounds: local training that goes on when ranks fail, and takes in ranks that come.

Averages are committed: the mean of a fragment is applied by all members, or by none of them. When a commit fails, those
who are left form a new group, and send the same deltas again, with the residuals that they had before. So nothing is
lost but the steps of a failed rank since it last sent, and its residual. Survivors keep their residuals and a newcomer
starts without any, so that their sum stays what it was.

Newcomers are admitted after an average, when nothing is under way. They take over all state from rank 0.

Groups are formed beside training where that is possible, as nobody needs the group until parameters are sent again:
when ranks are admitted, and when an average with a delay has failed. It is then applied when the next one is sent. A
newcomer starts at the step which the others have reached meanwhile.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from gradwire.optim.outside import PROBE_S, in_time, leave_behind
from gradwire.optim.rounds import Rounds, Transfer
from gradwire.version import __version__

log = logging.getLogger("gradwire")

T = TypeVar("T")

Packed = tuple[str, Tensor]
"""A state for the handover."""
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


class Forming:
    """The next group, which is formed in a thread beside training."""

    def __init__(self, form: Callable[[], bool | None], before: int) -> None:
        self.trainer = threading.get_ident()
        """The thread that trains, and that must wait before it uses the group."""
        self.before = before
        """The size of the group before."""
        self._form = form
        self._formed: bool | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="gradwire-forming", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._formed = self._form()
        except BaseException as error:
            self._error = error

    def result(self) -> bool | None:
        """Wait. Whether the group was formed; None if it was formed without this rank."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._formed


class ElasticRounds(Rounds):
    """Rounds over the members of an epoch, if there is a membership; else over a process group."""

    members: Members | None = None
    """Who trains together, with `on_failure="shrink"`."""
    _forming: Forming | None = None
    _hook: Hook
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
            return Hook(
                self._exchange,
                runner,
                rank=rank,
                size=size,
                device=self._device,
                params=self.named_globals,
                agreed=True,  # members have compared it all: see `_prepare`
            )
        except BaseException:
            runner.give_up(ExchangeError("no group"))
            runner.close()
            raise

    @property
    def hook(self) -> Hook:
        """What averages over the present group. If that is being formed, this waits for it."""
        if self._forming is not None and self._forming.trainer == threading.get_ident():
            self._await_group()
        return self._hook

    @hook.setter
    def hook(self, hook: Hook) -> None:
        self._hook = hook

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

    def _settle(self, transfer: Transfer, *, may_postpone: bool = False) -> bool:
        """Wait until all members have the mean. False if there is none now: this rank was left out, and has started
        anew meanwhile; or the average has failed, and is made again beside the next steps.
        """
        if self.members is None:
            return super()._settle(transfer)
        if not self._await_group():
            return False
        what, arrived = f"{self.steps}.{transfer.fragment.index}", partial(self._arrived, transfer)
        if may_postpone and transfer.at_start and not transfer.postponed:
            if not self._committed(arrived, what):
                self._postpone()
                return False
        elif not self._until_committed(arrived, what):
            return False
        transfer.future = None
        del self._sent[transfer]
        return True

    def _until_committed(self, attempt: Callable[[], bool], what: str) -> bool:
        """Try until all members have succeeded; False if this rank was left out, and has started anew meanwhile."""
        joins = self._crew.joins
        for _ in range(ATTEMPTS):
            if self._committed(attempt, what):
                return True
            self._regroup()
            if self._crew.joins != joins:
                return False
        raise ExchangeError(
            f"an average has failed {ATTEMPTS} times, though the ranks could form groups; do all of them take the same "
            f"steps, and is timeout_s ({self._timeout_s:g} s) long enough for it?"
        )

    def _committed(self, attempt: Callable[[], bool], what: str) -> bool:
        decision = self._crew.commit(attempt(), what)
        self._admits |= decision == GROW
        return decision != FAILED

    def _postpone(self) -> None:
        """Apply what should be applied now when something is sent again, and form another group until then."""
        for transfer in self.transfers:
            if transfer.arrives_at <= self.steps:
                transfer.arrives_at, transfer.postponed = self._next_send(), True
        self._regroup_beside()

    def _next_send(self) -> int:
        """The next step at which a fragment is sent."""
        raise NotImplementedError

    def _ready(self) -> bool:
        """Before something is sent: have a group, and apply what was postponed until now. False if this rank was left
        out, and has started anew meanwhile.
        """
        if self.members is None:
            return True
        joins = self.members.joins
        if self._await_group():
            self._apply([transfer for transfer in self.transfers if transfer.postponed])
        return self.members.joins == joins

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
            self._regroup_beside(admit=True)

    def _apply(self, transfers: Sequence[Transfer], *, may_postpone: bool = False) -> None:
        """Apply means when they are there."""
        raise NotImplementedError

    def _regroup_beside(self, *, admit: bool = False) -> None:
        """Form the next group with all who are left, while this thread trains on."""
        give = partial(_without_state)
        if admit and self._crew.rank == 0:
            give = partial(_given, self._whole_state())
        self._admits = False
        self._forming = Forming(partial(self._form_next, give, self.steps, admit), self._hook.size)
        self._forming.start()

    def _form_next(self, give: Callable[[], Packed], step: int, admit: bool) -> bool | None:
        self._drop_hook()
        if not self._crew.vote(admit=admit):
            return None
        error = self._form(give, step)
        return self._crew.commit_epoch(error is None) != FAILED

    def _await_group(self) -> bool:
        """Wait for a group that is formed beside training, or for the next one, if it has failed. False if this rank
        was left out, and has started anew meanwhile.
        """
        forming, self._forming = self._forming, None
        if forming is None:
            return True
        began_s, joins = time.monotonic(), self._crew.joins
        formed = forming.result()
        if formed:
            self._report(forming.before, time.monotonic() - began_s)
        else:
            self._regroup(new=formed is None)
        return self._crew.joins == joins

    def _regroup(self, *, new: bool = False) -> None:
        """Form the next group with all who are left, and send again what was under way."""
        before, began_s, error, self._admits = self._hook.size, time.monotonic(), None, False
        for _ in range(ATTEMPTS):
            self._drop_hook()
            if new or not self._crew.vote(admit=False):
                self._sent, self.transfers, before = {}, [], 0
                self._crew.join(self.steps)
            error = self._form(self._whole_state)
            if self._crew.commit_epoch(error is None) != FAILED:
                self._catch_up()
                self._report(before, time.monotonic() - began_s)
                return
            new = self._crew.rank >= self._crew.holders
        raise ExchangeError(
            f"the ranks could not form a group in {ATTEMPTS} attempts; can they all reach each other, and is timeout_s "
            f"({self._timeout_s:g} s) long enough? The last error: {error}"
        ) from error

    def _catch_up(self) -> None:
        """Start after the step which the others have reached since the state was taken that this rank has now: they
        are in the middle of the next one, and would wait for a rank that is later.
        """
        if self._crew.rank >= self._crew.holders > 0:
            step = int(self._crew.store.find(f"{self._crew.epoch}/step") or 0)
            self.steps = max(self.steps, min(step + 1, self._next_send() - 1))

    def _report(self, before: int, seconds: float) -> None:
        now, level = self._hook.size, logging.WARNING if self._hook.size < before else logging.INFO
        if before:
            log.log(level, "step %d: %d ranks, before %d; training waited %.2f s", self.steps, now, before, seconds)
        else:
            log.info("step %d: one of %d ranks; joining took %.2f s", self.steps, now, seconds)

    def _give_up(self, error: BaseException) -> None:
        """An error of the user's ends the training on this rank."""
        if self._forming is None:
            self.hook.runner.give_up(error)

    def _leave(self) -> None:
        """End threads and connections."""
        if self._forming is not None:
            self._crew.leave()  # so that the others do not wait for this rank, nor this rank for them
            with suppress(Exception):
                self._forming.result()
            self._forming = None
        self.transfers = []
        self.hook.close()
        if self.members is not None:
            self.members.leave()

    def _drop_hook(self) -> None:
        self.hook.runner.give_up(ExchangeError("the ranks form another group"))
        leave_behind(self.hook.close)  # a collective that has begun may take until its time limit to end

    def _form(self, give: Callable[[], Packed], step: int | None = None) -> Exception | None:
        """Connect to the other members; the error if that fails.

        `give` returns the state for newcomers, on rank 0. `step` is that of the members, if they are training on.
        """
        rank, size, meter = self._crew.rank, self._crew.size, self.hook.runner.meter
        name = f"epoch/{self._crew.epoch}"
        try:
            state = {**self._exchange_state(), "rank": rank, "size": size}
            store = self._crew.store.for_group()
            self.hook = self._in_time(partial(self._new_hook, store, rank, size, name))
            self._load_hook([{"exchange": state}], self.last_sent)
            self._hand_over(give)
            self._in_time(partial(self._check_state, self.steps if step is None else step))
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

    def _check_state(self, step: int) -> None:
        if self.hook.size > 1:
            self.hook.agree("state", f"step {step}, global values {self._fingerprint()}")

    def _hand_over(self, give: Callable[[], Packed]) -> None:
        """All state of rank 0, to those who have none."""
        rank, size, first = self._crew.rank, self._crew.size, max(self._crew.holders, 1)
        if self._crew.holders == 0:
            self._start_from_globals()
        if size == first or 0 < rank < first:
            return
        place, count = max(rank - first + 1, 0), size - first + 1
        state = self._in_time(partial(self._sent_state, give, place, count))
        if rank > 0:
            self._take(state)
        else:
            self._crew.store.set(f"{self._crew.epoch}/step", str(self.steps))  # for `_catch_up`

    def _sent_state(self, give: Callable[[], Packed], place: int, count: int) -> Any:
        store = PrefixStore(f"handover/{self._crew.epoch}", self._crew.store.for_group())
        if place == 0:
            text, octets = give()
            store.set("text", text)
        else:
            text = store.get("text").decode()
            octets = torch.zeros(byte_count(text), dtype=torch.uint8)
        send(new_group(store, place, count, timedelta(seconds=self._timeout_s)), octets)
        return unpacked(text, octets) if place else None

    def _whole_state(self) -> Packed:
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


def _given(state: Packed) -> Packed:
    return state


def _without_state() -> Packed:
    raise ExchangeError("rank 0, which should have handed over its state, is gone")


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

"""Members: which ranks train together, if ranks may fail, come back and come anew. The store decides, once and for all.

1. Epochs are numbered. The record of an epoch says which processes belong to it, in the order of their ranks. It is
   written once, by whoever comes first, and everybody reads what was written: there are never two opinions.
2. Within an epoch, everything that the ranks do together is committed: it counts if all ranks report success, and for
   nobody if one of them fails, is gone, or is late. That decision too is written once.
3. After a failure, every member that is left votes for the next epoch. It begins when all have voted who are not gone,
   or when the time is up, with those who have voted.
4. A newcomer applies for the next epoch. The members find the application when they commit, and vote.
5. Who is not in the record of the latest epoch is out, whatever it believes. Nobody listens to it: connections, votes
   and decisions belong to one epoch. It applies like a newcomer.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
import uuid
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradwire.errors import ExchangeError, RegisterError, SpecError
from gradwire.optim.fragments import whole
from gradwire.optim.outside import PROBE_S, Door, OutsideStore, is_gone, wait_for_left_behind

log = logging.getLogger("gradwire")

STORE = "GRADWIRE_STORE"
"""The environment variable with the address of the store."""
GO, GROW, FAILED = "go", "grow", "failed"
"""Decisions: it counts; it counts, and somebody wants to join; it does not count."""
POLL_S = 0.002
SLOWEST_POLL_S = 0.05
FIRST_PROBE_S = 0.02


@dataclass(frozen=True)
class Shrink:
    """Train on with the ranks that are left when one fails: `LocalSGD(..., on_failure=Shrink("host:29400"))`.

    No process group is needed. Each rank is a process of its own, which may be started again at any time.
    """

    store: str = ""
    """host:port of a store that outlives the ranks: `gradwire store`. By default that of GRADWIRE_STORE."""
    ranks: int = 1
    """How many ranks to wait for at the start. Later ones join at the next average."""
    timeout_s: float = 60.0
    """How much later than the others a living rank may come to an average; then they go on without it. Also how long
    the start waits for `ranks`, and how long the store may take to answer."""
    join_timeout_s: float = 1800.0
    """How long a rank that joins waits for the others to come to an average."""
    job: str = "0"
    """Trainings with different names can use one store."""

    def __post_init__(self) -> None:
        whole("ranks", self.ranks, 1)
        for name in ("timeout_s", "join_timeout_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise SpecError(f"{name} must be a finite number of seconds above 0, got {value!r}")

    def host_port(self) -> tuple[str, int]:
        """Where the store is."""
        address = self.store or os.environ.get(STORE, "")
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit():
            raise RegisterError(
                f"on_failure='shrink' needs a store that outlives the ranks, as host:port, got {address!r}; start one "
                f"with 'gradwire store', and set {STORE} or pass on_failure=Shrink(store='host:port')"
            )
        return host.strip("[]"), int(port)


class Member(NamedTuple):
    """A process of a record."""

    id: str
    door: str
    """See `Door.address`."""


class Members:
    """This process among the others. `rank` and `size` are those of the present epoch."""

    def __init__(self, settings: Shrink, text: str) -> None:
        """`text` describes what must be the same on all ranks."""
        self.settings = settings
        self.store = OutsideStore(*settings.host_port(), settings.job, settings.timeout_s)
        self.joins = 0
        """How often this process has become a member."""
        self.epoch, self.rank, self.size = 0, 0, 1
        self.holders = 0
        """The number of ranks that bring the state of the training to this epoch, which are the first ones."""
        self._door = Door(*settings.host_port(), settings.timeout_s)
        self._me = Member(uuid.uuid4().hex, self._door.address)
        self._text = text
        self._members: list[Member] = []
        self._commits = 0
        self._last_commit: tuple[str, ...] = ()

    # -- within an epoch ---------------------------------------------------------------------------------------

    def commit(self, success: bool, what: str) -> str:
        """Whether what all members have just done counts: the decision. All members of the epoch call it together.

        `what` names it, and must be the same on all of them.
        """
        key, before = f"{self.epoch}/commit/{self._commits}", self._last_commit
        self._commits, self._last_commit = self._commits + 1, (key, f"{key}/{what}")
        decision = self._decide(key, success, what)
        if decision != FAILED and self.rank == 0 and before:
            self.store.drop(*before)  # all members have come to this commit, so that nobody asks for the one before
        return decision

    def commit_epoch(self, success: bool) -> str:
        """The same for the epoch itself. If it fails, newcomers are no members of it when it comes to vote."""
        decision = self._decide(f"{self.epoch}/formed", success, "formed")
        if decision == FAILED:
            self._members = self._members[: self.holders]
        return decision

    def _decide(self, key: str, success: bool, what: str) -> str:
        self._door.clear()
        if not success:
            return self.store.claim(key, FAILED)
        if self.store.add(f"{key}/{what}", 1) == self.size:
            wanted = self.store.add(f"{self.epoch + 1}/applications", 0)
            return self.store.claim(key, GROW if wanted else GO)
        poll = _Poll(self.settings.timeout_s)
        while not (decision := self.store.find(key)):
            if poll.over or (poll.is_time_to_probe() and self.any_gone()):
                return self.store.claim(key, FAILED)
            poll.pause()
        return decision

    def any_gone(self) -> bool:
        """Whether the process of some member has ended for certain."""
        return any(is_gone(member.door) for member in self._members if member != self._me)

    def is_in_vain(self) -> bool:
        """Whether it is clear already that the epoch, which is being formed, fails."""
        return self.any_gone() or self.store.find(f"{self.epoch}/formed") == FAILED

    # -- from one epoch to the next ----------------------------------------------------------------------------

    def vote(self, *, admit: bool) -> bool:
        """As a member, for the next epoch, with newcomers if `admit`; False if it has begun without this process."""
        number, poll = self.epoch + 1, _Poll(self.settings.timeout_s)
        self.store.set(f"{number}/vote/{self._me.id}", "")
        while not self.store.find(f"{number}/record"):
            found = self.store.found([f"{number}/vote/{member.id}" for member in self._members])
            voted = [member for member, has in zip(self._members, found, strict=True) if has]
            if poll.over or len(voted) == len(self._members) or (poll.is_time_to_probe() and self._rest_gone(voted)):
                self._begin(number, voted, admit)
            poll.pause()
        return self._enter(number)

    def join(self, steps: int) -> None:
        """As a newcomer: apply until an epoch begins with this process. `steps`: how far its own state has come."""
        wait, start, applied = _Poll(self.settings.join_timeout_s), _Poll(self.settings.timeout_s), 0
        while not wait.over:
            latest = self._latest()
            if latest and latest == applied and self._enter(latest):
                self.joins += 1
                return
            if applied <= latest:
                self._check_text(latest)
                applied = latest + 1
                self._apply_for(applied, steps)
            if wait.is_time_to_probe() and all(is_gone(member.door) for member in self._voters(latest)):
                self._check_not_ended()  # whoever ends says so before it goes
                if start.over or self.store.add(f"{applied}/applications", 0) >= self.settings.ranks:
                    self._begin(applied, [], admit=True)
            wait.pause()
        raise ExchangeError(
            f"no rank admitted this one within join_timeout_s ({self.settings.join_timeout_s:g} s); they do so when "
            "they average. Are they stopped, or is join_timeout_s shorter than a round?"
        )

    def leave(self, *, ended: int | None = None) -> None:
        """This process counts as gone from now on. `ended`: the training is complete, at this step."""
        if ended is not None:
            self.store.set("ended", str(ended))
        self._door.close()
        wait_for_left_behind(self.settings.timeout_s)

    def _begin(self, number: int, voted: list[Member], admit: bool) -> None:
        """Write the record of the next epoch, unless somebody has."""
        newcomers = self._applicants(number) if admit else []
        record = {"text": self._text, "holders": len(voted), "members": [*voted, *newcomers]}
        self.store.claim(f"{number}/record", json.dumps(record))
        self.store.set("latest", str(number))  # only a hint: a late process may write an earlier number

    def _enter(self, number: int) -> bool:
        """Take the place that the record gives to this process, if it gives it any."""
        record = self._record(number)
        members = [Member(*member) for member in record["members"]]
        if self._me not in members:
            return False
        self._members, self.holders, self._commits, self._last_commit = members, record["holders"], 0, ()
        self.epoch, self.rank, self.size = number, members.index(self._me), len(members)
        return True

    def _apply_for(self, number: int, steps: int) -> None:
        place = self.store.add(f"{number}/places", 1)
        application = {"member": self._me, "steps": steps, "text": self._text}
        self.store.set(f"{number}/application/{place}", json.dumps(application))
        self.store.add(f"{number}/applications", 1)

    def _applicants(self, number: int) -> list[Member]:
        """Those who apply, and exist, and train the same; those who have come farthest first."""
        places = range(1, self.store.add(f"{number}/places", 0) + 1)
        texts = [self.store.find(f"{number}/application/{place}") for place in places]
        given = [json.loads(text) for text in texts if text]
        fitting = [one for one in given if one["text"] == self._text and not is_gone(one["member"][1])]
        return [Member(*one["member"]) for one in sorted(fitting, key=lambda one: -int(one["steps"]))]

    def _rest_gone(self, voted: list[Member]) -> bool:
        return all(is_gone(member.door) for member in self._members if member not in voted)

    def _voters(self, number: int) -> list[Member]:
        """Who decides about the epoch after this one."""
        if number == 0:
            return []
        record = self._record(number)
        failed = self.store.find(f"{number}/formed") == FAILED
        return [Member(*member) for member in record["members"][: record["holders"] if failed else None]]

    def _latest(self) -> int:
        number = int(self.store.find("latest") or 0)
        while self.store.find(f"{number + 1}/record"):
            number += 1
        return number

    def _record(self, number: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.find(f"{number}/record") or "{}")
        return found

    def _check_text(self, number: int) -> None:
        theirs = self._record(number)["text"] if number else self._text
        if theirs != self._text:
            raise RegisterError(f"all ranks must train the same; this rank asks for {self._text}, the others {theirs}")

    def _check_not_ended(self) -> None:
        ended = self.store.find("ended")
        if ended is not None:
            raise RegisterError(
                f"the training of job {self.settings.job!r} has ended at step {ended}, so there is nothing to join; "
                "start another one under another name with Shrink(job=...), or with a new store"
            )


class _Poll:
    """Waits in short pauses that grow."""

    def __init__(self, timeout_s: float) -> None:
        now = time.monotonic()
        self._until_s, self._probe_s, self._pause_s = now + timeout_s, now, POLL_S
        self._between_probes_s = FIRST_PROBE_S

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() > self._until_s

    def is_time_to_probe(self) -> bool:
        """True at first, then soon again, and later once in PROBE_S."""
        if time.monotonic() < self._probe_s:
            return False
        self._probe_s = time.monotonic() + self._between_probes_s
        self._between_probes_s = min(2 * self._between_probes_s, PROBE_S)
        return True

    def pause(self) -> None:
        time.sleep(self._pause_s)
        self._pause_s = min(1.5 * self._pause_s, SLOWEST_POLL_S)

"""Synchronous: gradients are averaged in every step, as under DDP, and training goes on when ranks fail.

1. Every rank computes the gradients of its batch, and calls `average()`.
2. The gradients are sent in one flat tensor, of which each rank keeps a copy. The mean counts for all ranks, or for
   none of them.
3. If it does not count, those who are left form a new group, and send the same gradients again with the residuals that
   they had before. So no step of theirs is lost.
4. Newcomers are admitted before the next gradients are sent, with the state of rank 0 after the step before.

DDP itself cannot do this. Its own process group has a fixed set of ranks, which it uses in its constructor, when it
orders its buckets after the first step, and for buffers: a rank that comes back has no way in. It also overwrites the
gradients of a bucket by their mean, so that a step that fails half-way could only be dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradwire.errors import RegisterError
from gradwire.exchanges import Exchange
from gradwire.optim.elastic import Packed, shrinking
from gradwire.optim.local_sgd import LocalSGD
from gradwire.optim.members import Shrink
from gradwire.optim.rounds import State, Transfer


class Synchronous(LocalSGD):
    """A context manager around an ordinary training loop with a plain module, in which ranks may fail, and may join.

    Call `average()` between `backward()` and `optimizer.step()`, in every step and on every rank. All ranks hold the
    same bits at any time. Gradients are sent after the backward pass, not beside it. A parameter without a gradient
    takes part with zeros.

    Args:
        model: The module, not wrapped in DDP.
        optimizer: Steps the module's parameters.
        exchange: How gradients travel: any spec of gradwire that needs no optimizer.
        on_failure: "shrink", or `Shrink(...)` with its settings: see docs/elastic.md.

    Examples:
        with Synchronous(model, optimizer, exchange="int8") as training:
            while training.steps < 10_000:
                optimizer.zero_grad()
                loss(model, batch(training.steps)).backward()
                if training.average():
                    optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        exchange: str | Exchange = "exact",
        on_failure: str | Shrink = "shrink",
    ) -> None:
        if shrinking(on_failure, None) is None:
            raise RegisterError("Synchronous is for ranks that may fail; without that use DDP and gradwire.register()")
        super().__init__(model, optimizer, sync_every=1, exchange=exchange, on_failure=on_failure)
        self._averaged = False

    def average(self) -> bool:
        """Replace the gradients by their mean over all ranks, and count a step. All ranks together.

        Returns:
            False if the others went on without this rank, which was too late. It has their state now and no gradients:
            leave out `optimizer.step()`, and go on with step `steps`.

        Raises:
            ExchangeError: If the store does not answer, or no group of ranks can be formed.
        """
        if self._counter is None:
            raise RegisterError("average() is for the body of the 'with' statement")
        joins = self._crew.joins
        if self._admits:
            self._regroup_beside(admit=True)
        if self._await_group():
            self._average()
        self._averaged = True
        if self._crew.joins == joins:
            self.steps += 1
            return True
        for param in self.fragments[0].params:
            param.grad = None
        return False

    @torch.no_grad()
    def _average(self) -> None:
        fragment = self.fragments[0]
        flat = fragment.flat()
        for view, param in zip(fragment.views(flat), fragment.params, strict=True):
            if param.grad is not None:
                view.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
        self.hook.begin(fragment.bucket(flat))
        transfer = Transfer(fragment, self.steps, flat, None, [])
        self._submit(transfer)
        self.transfers.append(transfer)
        self.last_sent = fragment.index
        if self._settle(transfer):
            self.transfers.remove(transfer)
            for view, param in zip(fragment.views(transfer.mean), fragment.params, strict=True):
                if param.grad is None or param.grad.is_sparse:
                    param.grad = torch.empty_like(param)
                param.grad.copy_(view)

    def sync(self) -> None:
        """Nothing to do: the ranks are equal after every step."""

    def _count(self) -> None:
        """After `optimizer.step()`."""
        if not self._averaged:
            raise RegisterError(
                "optimizer.step() without average(): this rank has changed its parameters by gradients of its own; "
                "call average() after backward(), once in every step"
            )
        self._averaged = False

    # The parameters themselves are what all ranks agree on. They are read when somebody asks.

    def _form(self, give: Callable[[], Packed], step: int | None = None) -> Exception | None:
        self._read_values()
        return super()._form(give, step)

    def _packed(self, transfers: Sequence[Transfer], exchange: State) -> dict[str, Any]:
        self._read_values()
        return super()._packed(transfers, exchange)

    def _read_values(self) -> None:
        for fragment, values in zip(self.fragments, self.globals, strict=True):
            fragment.copy_(values, fragment.params)

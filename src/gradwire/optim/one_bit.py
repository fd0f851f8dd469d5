"""OneBitAdamW: AdamW that averages by itself, with little more than one bit per value and step.

The successor of DeepSpeed's 1-bit Adam and 0/1 Adam. All ranks hold the same momentum m and second moment v.

    gradient step   g = mean of the ranks' gradients, as `int2:whiten=true` sends them (exactly in the first 15 steps)
                    m = beta1 m + (1 - beta1) g,   v = beta2^k v + (1 - beta2^k) g^2,   k steps after the last one
    momentum step   m = mean of (beta1 m + (1 - beta1) g_i), by its signs with error feedback on both sides; v stays
    both            update = clamp(m / sqrt(v)), then the weights decay and move as AdamW moves them

Training begins with gradient steps (`warmup`). After that a gradient step comes every `refresh` steps. 1-bit Adam fails
where v is frozen or old: so v is refreshed often, with two bits, rather than rarely with many; more often while the
scale of gradients drifts and more rarely when it is stable. If the update grows suddenly, gradient steps come back for
a while.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradwire.engine.hook import Hook
from gradwire.engine.stats import Stats
from gradwire.engine.verify import Verification
from gradwire.errors import SpecError, StateError
from gradwire.exchanges import Exchange, exchange
from gradwire.exchanges.exact import Noop
from gradwire.exchanges.feedback import all_finite
from gradwire.exchanges.whiten import SecondMoments, floor_of
from gradwire.kernels.torch.whiten import root
from gradwire.models.ddp import attach, make_hook
from gradwire.optim.fragments import Fragment, check_parameters, digest, own_group, wait_for, whole

Kind = Literal["gradient", "momentum"]
FLOOR = 2.0**-4
"""The least second moment, relative to the floor of whitening: 0.00006 to 0.0001 of a tensor's mean."""
BLOCK = 256
"""Drift is measured by the means of so many values."""
DRIFTED = 4.0
"""A block has drifted if its mean squared gradient differs from its second moment by more than this factor."""
OFTEN, RARELY = 0.5, 0.25
"""If a larger share of the blocks than the first has drifted, v is refreshed twice as often; if a smaller one than the
second, more rarely."""
MOST_RARELY = 4
"""The interval between gradient steps grows to at most so many times `refresh`."""
JUMP = 1.5
"""Gradient steps come back when the update of a momentum step is larger than usual by this factor."""
GUARD_STEPS = 10
"""For so many steps."""


class Part:
    """The parameters of one group and type: their momentum and second moment as flat tensors."""

    def __init__(self, fragment: Fragment, group: dict[str, Any]) -> None:
        self.fragment, self.group = fragment, group
        self.momentum, self.moment = fragment.flat(), fragment.flat()

    def gradient(self, scale: float = 1.0) -> Tensor:
        """This rank's gradients in a new flat tensor, divided by the loss scale; zeros where there are none."""
        flat = self.fragment.flat()
        for view, param in zip(self.fragment.views(flat), self.fragment.params, strict=True):
            if param.grad is not None:
                view.copy_(param.grad)
        return flat if scale == 1.0 else flat.div_(scale)

    def message(self, kind: Kind, gradient: Tensor) -> Tensor:
        """What the ranks average in a step of this kind. It may overwrite the gradient."""
        if kind == "gradient":
            return gradient
        return gradient.mul_(1.0 - self.group["betas"][0]).add_(self.momentum, alpha=self.group["betas"][0])

    def take(self, kind: Kind, mean: Tensor, passed: int) -> None:
        """Update the moments, `passed` steps after the last gradient step."""
        beta1, beta2 = self.group["betas"]
        if kind == "momentum":
            self.momentum.copy_(mean)
            return
        self.momentum.mul_(beta1).add_(mean, alpha=1.0 - beta1)
        self.moment.mul_(beta2**passed).addcmul_(mean, mean, value=1.0 - beta2**passed)

    def drifted(self, mean: Tensor, seen: int) -> tuple[int, int]:
        """How many blocks of the averaged gradient have another scale than v, and how many there are."""
        whole = mean.numel() // BLOCK * BLOCK
        now, before = (x[:whole].view(-1, BLOCK).mean(1) for x in (mean.square(), self.moment))
        before = before / (1.0 - self.group["betas"][1] ** seen)
        return int(((now > before * DRIFTED) | (now * DRIFTED < before)).sum()), len(now)

    def update(self, step: int, seen: int) -> Tensor:
        """The update of AdamW, neither clamped nor multiplied by the learning rate. `v` is from step `seen`."""
        beta1, beta2 = self.group["betas"]
        moment = self.moment / (1.0 - beta2**seen)
        divisor = torch.empty_like(moment)
        sizes = [segment.numel for segment in self.fragment.segments]
        for out, part in zip(divisor.split(sizes), moment.split(sizes), strict=True):
            out.copy_(root(part, floor_of(part) * FLOOR))
        return torch.div(self.momentum, divisor.add_(self.group["eps"])).div_(1.0 - beta1**step)

    def apply(self, update: Tensor) -> None:
        """Decay and move the parameters."""
        rate, decay = float(self.group["lr"]), self.group["weight_decay"]
        for param, move in zip(self.fragment.params, self.fragment.views(update), strict=True):
            param.mul_(1.0 - rate * decay).add_(move.to(param.dtype), alpha=-rate)


class OneBitAdamW(torch.optim.Optimizer):
    """AdamW whose `step()` averages over the ranks, with 1.4 bits per value. It replaces `torch.optim.AdamW`.

    Call `backward()` without averaging gradients: on a plain module, or on a DDP model that is passed as `model`, which
    then leaves the gradients of each rank alone. Call `step()` on all ranks. Schedulers, parameter groups and
    `GradScaler` work as usual; a rank whose gradients are not finite makes all ranks skip the step.
    `clip_grad_norm_` before `step()` clips the gradient of each rank by its own norm. A parameter without a gradient
    counts as one with a gradient of zeros.

    Args:
        params: Parameters or parameter groups, the same on all ranks.
        lr: The learning rate.
        betas: The decay of the momentum and of the second moment.
        eps: Added to the divisor.
        weight_decay: As of AdamW.
        warmup: The number of first steps that send gradients, with 2.1 bits per value: about as many as the learning
            rate needs to reach its peak.
        refresh: A gradient step comes about every so many steps; less often when gradients are stable.
        clamp: The largest update of a value, in units of the learning rate.
        model: The DDP model of the parameters, if there is one. It must not have a communication hook.
        process_group: The ranks; by default those of the model, or all.
        gradient: How gradients are sent, if not as described above.
        momentum: The same for the momentum.

    Raises:
        SpecError: For settings that make no sense.
        RegisterError: If the model has a hook already, or if the ranks' parameters differ.

    Examples:
        >>> optimizer = gradwire.optim.OneBitAdamW(model.parameters(), lr=1e-3, warmup=200)
        >>> loss.backward()
        >>> optimizer.step()
    """

    _step_supports_amp_scaling = True
    """GradScaler then calls `step()` on all ranks, whichever of them has found an inf."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        warmup: int = 100,
        refresh: int = 4,
        clamp: float = 1.0,
        model: DistributedDataParallel | None = None,
        process_group: dist.ProcessGroup | None = None,
        gradient: str | Exchange = "int2:whiten=true",
        momentum: str | Exchange = "sign:feedback=true",
    ) -> None:
        _check(float(lr), betas, eps, weight_decay, clamp)
        self.warmup, self.refresh, self.clamp = whole("warmup", warmup, 1), whole("refresh", refresh, 1), clamp
        self._exchanges: dict[Kind, Exchange] = {"gradient": exchange(gradient), "momentum": exchange(momentum)}
        self._parts: list[Part] | None = None
        self._hooks: dict[Kind, Hook] = {}
        self._loaded: dict[Kind, list[Any]] = {}
        self._count, self._refreshed, self._interval, self._guard_until, self._usual = 0, 0, refresh, 0, 0.0
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        if model is not None:
            if not isinstance(model, DistributedDataParallel):
                raise SpecError(
                    f"OneBitAdamW: model must be a DistributedDataParallel or None, got {type(model).__name__}"
                )
            process_group = process_group or model.process_group
            self._noop = attach(model, Noop())
        self._group = process_group

    # -- a step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Average, and update the parameters. All ranks together."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        kind = self.next_kind
        means = self._average(kind)
        if all(map(all_finite, means)):  # the same on all ranks
            self._take(kind, means)
        return loss

    @property
    def next_kind(self) -> Kind:
        """What the next step sends."""
        count = self._count
        early = count < self.warmup or count < self._guard_until
        return "gradient" if early or count - self._refreshed >= self._interval - 1 else "momentum"

    def _average(self, kind: Kind) -> list[Tensor]:
        """The means of the ranks' messages, one for each part."""
        scale = getattr(self, "grad_scale", None)
        parts, hook, pending = self.parts(), self._hook(kind), []
        for part in parts:
            flat = part.message(kind, part.gradient(1.0 if scale is None else float(scale)))
            bucket = part.fragment.bucket(flat)
            hook.begin(bucket)
            pending.append(hook.mean(bucket, step=self._count))
        return [wait_for(future, f"averaging the {kind} of step {self._count}") for future in pending]

    def _take(self, kind: Kind, means: Sequence[Tensor]) -> None:
        parts, self._count = self.parts(), self._count + 1
        if kind == "gradient" and self._count > self.warmup:
            self._adapt([part.drifted(mean, self._refreshed) for part, mean in zip(parts, means, strict=True)])
        for part, mean in zip(parts, means, strict=True):
            part.take(kind, mean, self._count - self._refreshed)
        if kind == "gradient":
            self._refreshed = self._count
        updates = [part.update(self._count, self._refreshed).clamp_(-self.clamp, self.clamp) for part in parts]
        if kind == "momentum":
            self._guard(updates)
        for part, update in zip(parts, updates, strict=True):
            part.apply(update)
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.state:
                    self.state[param]["step"] = torch.tensor(float(self._count))

    def _adapt(self, drifts: Sequence[tuple[int, int]]) -> None:
        """Refresh more often if gradients have changed their scale since, or more rarely."""
        blocks = sum(blocks for _, blocks in drifts)
        share = sum(drifted for drifted, _ in drifts) / blocks if blocks else OFTEN
        if share > OFTEN:
            self._interval = max(self._interval // 2, 1)
        elif share < RARELY:
            self._interval = min(self._interval + 1, MOST_RARELY * self.refresh)

    def _guard(self, updates: Sequence[Tensor]) -> None:
        """Go back to gradient steps for a while if the update is larger than those of other momentum steps."""
        total = sum(float(update.square().sum(dtype=torch.float64)) for update in updates)
        size = math.sqrt(total / max(sum(update.numel() for update in updates), 1))
        if self._usual and size > JUMP * self._usual:
            self._guard_until = self._count + GUARD_STEPS
        self._usual = 0.9 * self._usual + 0.1 * size if self._usual else size

    # -- parts and hooks ---------------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """One part per group and type. Their tensors are the state of the parameters."""
        if self._parts is None:
            self._parts = []
            for number, group in enumerate(self.param_groups):
                by_type: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
                for place, param in enumerate(group["params"]):
                    if param.requires_grad:
                        by_type.setdefault(param.dtype, []).append((f"{number}.{place}", param))
                fragments = [Fragment(len(self._parts) + i, named) for i, named in enumerate(by_type.values())]
                self._parts += [Part(fragment, group) for fragment in fragments]
            for part in self._parts:
                self._bind(part)
        return self._parts

    def _bind(self, part: Part) -> None:
        """Make the tensors of a part the state of its parameters, with the values that are there already."""
        for key, flat in (("exp_avg", part.momentum), ("exp_avg_sq", part.moment)):
            for param, view in zip(part.fragment.params, part.fragment.views(flat), strict=True):
                if key in self.state[param]:
                    view.copy_(self.state[param][key])
                self.state[param][key] = view

    def _named(self) -> list[tuple[str, Tensor]]:
        return [pair for p in self.parts() for pair in zip(p.fragment.names, p.fragment.params, strict=True)]

    def _hook(self, kind: Kind) -> Hook:
        if kind not in self._hooks:
            named = self._named()
            device, moments = check_parameters(named), SecondMoments(self, dict(named))
            made = make_hook(self._exchanges[kind], own_group(self._group), device, params=self._named, moments=moments)
            made.replicated = self._named
            self._hooks[kind] = made
            if made.size > 1:
                made.agree("parameters", digest(named))
            if kind in self._loaded:
                made.load_state_dict(self._loaded.pop(kind))
        return self._hooks[kind]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of every optimizer; the state of the other groups is kept."""
        super().add_param_group(param_group)
        self._parts = None

    def stats(self) -> dict[Kind, Stats]:
        """`Hook.stats()` of gradient steps and of momentum steps."""
        return {kind: hook.stats() for kind, hook in self._hooks.items()}

    def verify(self) -> dict[Kind, Verification]:
        """`Hook.verify()` of both kinds of steps that there were. All ranks together, between steps."""
        return {kind: hook.verify() for kind, hook in self._hooks.items()}

    def close(self) -> None:
        """End threads and connections."""
        for hook in self._hooks.values():
            hook.close()

    # -- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank: moments and settings, and under "one_bit" counters and residuals. Save all ranks'."""
        self.parts()
        kept = {kind: [hook.state_dict()] for kind, hook in self._hooks.items()}
        counters = [self._count, self._refreshed, self._interval, self._guard_until, self._usual]
        return {**super().state_dict(), "one_bit": {"counters": counters, "hooks": {**kept, **self._loaded}}}

    def load_state_dict(self, state_dict: Any) -> None:
        """Continue from the state of this rank, or on another number of ranks from the list of all ranks' states.

        The residuals of all ranks are then added up and shared out, as only their sum matters.
        """
        states: list[Mapping[str, Any]] = [state_dict] if isinstance(state_dict, Mapping) else list(state_dict)
        if not states or any("one_bit" not in state for state in states):
            raise StateError("not a state of OneBitAdamW: pass what state_dict() returned, or a list of such")
        super().load_state_dict({key: states[0][key] for key in ("state", "param_groups")})
        self._restore(states[0]["state"])
        self._parts = None
        counters = states[0]["one_bit"]["counters"]
        self._count, self._refreshed, self._interval, self._guard_until, self._usual = counters
        kinds = states[0]["one_bit"]["hooks"]
        self._loaded = {kind: [part for state in states for part in state["one_bit"]["hooks"][kind]] for kind in kinds}
        for kind in self._hooks.keys() & self._loaded.keys():
            self._hooks[kind].load_state_dict(self._loaded.pop(kind))

    def _restore(self, saved: Mapping[int, Mapping[str, Any]]) -> None:
        """Take the moments as they were saved: torch has rounded them to the types of the parameters."""
        params = [param for group in self.param_groups for param in group["params"]]
        for place, state in saved.items():
            self.state[params[place]].update({key: state[key].clone() for key in state if key.startswith("exp_avg")})


def _check(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, clamp: float) -> None:
    if not (lr >= 0.0 and eps >= 0.0 and weight_decay >= 0.0 and clamp > 0.0):
        raise SpecError(
            f"OneBitAdamW: lr, eps and weight_decay must be at least 0 and clamp above 0, got lr={lr}, eps={eps}, "
            f"weight_decay={weight_decay}, clamp={clamp}"
        )
    if not all(0.0 <= beta < 1.0 for beta in betas):
        raise SpecError(f"OneBitAdamW: betas must be from 0 to below 1, got {betas}")

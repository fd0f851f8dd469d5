"""Auto: the settings of the hook that is chosen while the model trains; `pilot.py` does the choosing."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import SpecError, unknown
from gradwire.exchanges import EXCHANGES, POLICIES, exchange
from gradwire.spec import build, changed, read, write


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """What to choose from, and within which limit."""

    max_error: float = 0.02
    """Largest error of the mean that is allowed, relative to the mean, on the model's own gradients."""
    hooks: str = "exact;fp16;bf16;int8;int6;int5;int4"
    """The candidates, semicolons between them; between the options of one a plus: `int8;int4:block=32+exempt=none`."""
    recheck: int = 5000
    """Steps after which the trial starts again, if nothing else makes it."""

    def __post_init__(self) -> None:
        if not 0.0 < self.max_error < float("inf"):
            raise SpecError(f"auto: max_error must be above 0 and finite, got {self.max_error}")
        if self.recheck < 1:
            raise SpecError(f"auto: recheck must be at least 1, got {self.recheck}")
        for spec in self.specs:
            if exchange(spec).lanes == 0:
                raise SpecError(f"auto: {spec} does not average, so it cannot be a candidate")

    @property
    def specs(self) -> list[str]:
        """The candidates' specs; `exact` is always among them."""
        named = [str(exchange(spec.replace("+", ","))) for spec in self.hooks.split(";") if spec]
        return list(dict.fromkeys(["exact", *named]))

    def __str__(self) -> str:
        return write("auto", changed(self))


def auto(spec: object, **options: object) -> Auto | None:
    """The settings, if `spec` is text that names `auto`."""
    if not isinstance(spec, str):
        return None
    name, known = read(spec)[0], {**EXCHANGES, **POLICIES, "auto": Auto}
    if name not in known:
        raise SpecError(unknown("hook", name, known))
    return build("hook", spec, {"auto": Auto}, options) if name == "auto" else None

"""Auto: the settings of the hook that is chosen while the model trains; `pilot.py` chooses."""

from dataclasses import dataclass

from gradwire.errors import SpecError, unknown
from gradwire.exchanges import exchange, registered
from gradwire.spec import NestedSpec, build, changed, coerce, read, write


@dataclass(frozen=True, slots=True, kw_only=True)
class Auto:
    """The candidates, and the largest error that is allowed."""

    max_error: float = 0.02
    """Largest error of the mean that is allowed, relative to the mean, on the model's own gradients."""
    hooks: tuple[NestedSpec, ...] = tuple(map(NestedSpec, ("exact", "fp16", "bf16", "int8", "int6", "int5", "int4")))
    """The candidates, as in `auto(hooks=[int8, int4(block=32)])`; from Python any sequence of specs."""
    trusted: tuple[NestedSpec, ...] = ()
    """Candidates that are allowed whatever their error is, because they are known not to harm this training, as
    `gradwire compare` tells: `auto(trusted=[int4, powersgd(rank=8)])`."""
    recheck: int = 5000
    """Steps after which the trial starts again, if nothing else makes it."""

    def __post_init__(self) -> None:
        if not 0.0 < self.max_error < float("inf"):
            raise SpecError(f"auto: max_error must be above 0 and finite, got {self.max_error}")
        if self.recheck < 1:
            raise SpecError(f"auto: recheck must be at least 1, got {self.recheck}")
        for name in ("hooks", "trusted"):
            object.__setattr__(self, name, coerce(f"auto: {name}", getattr(self, name), tuple[NestedSpec, ...]))
        for spec in self.specs:
            if not exchange(spec).averages:
                raise SpecError(f"auto: {spec} does not average, so it cannot be a candidate")

    @property
    def specs(self) -> list[str]:
        """The candidates' specs; `exact` is always among them."""
        return list(dict.fromkeys(["exact", *(str(exchange(spec)) for spec in (*self.hooks, *self.trusted))]))

    def allows(self, spec: str, error: float) -> bool:
        """Whether a candidate with this error may be chosen."""
        return error <= self.max_error or spec in ("exact", *(str(exchange(each)) for each in self.trusted))

    def __str__(self) -> str:
        return write("auto", changed(self))


def auto(spec: object, **options: object) -> Auto | None:
    """The settings, if `spec` is text that names `auto`."""
    if not isinstance(spec, str):
        return None
    name, known = read(spec).name, {**registered(), "auto": Auto}
    if str(name) not in known:
        raise name.error(unknown("hook", name, known))
    return build("hook", spec, {"auto": Auto}, options) if name == "auto" else None

"""measure(): hooks and settings in, records out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES, exchange
from gradwire.tools.launch.local import run_ranks
from gradwire.tools.records.records import PLAIN, Record, Settings


def all_hooks() -> list[str]:
    """Every registered hook, with its default options."""
    return list(EXCHANGES)


def checked(hooks: Sequence[str]) -> list[str]:
    """The hooks as canonical specs, each once. SpecError for one that does not exist."""
    return list(dict.fromkeys(hook if hook == PLAIN else str(exchange(hook)) for hook in hooks))


def measure(
    hooks: Sequence[str],
    settings: Settings | None = None,
    *,
    report: Callable[[float, str], None] = lambda part, doing: None,
    prefixes: Sequence[Sequence[str]] = (),
    env: Mapping[str, str] | None = None,
) -> list[Record]:
    """Train under every hook (specs, or PLAIN), interleaved round by round, on local processes; a record each.

    `report` is told the part done and what is under way, at least ten times a second. `prefixes` and `env` place the
    ranks, for instance on hosts of their own: see `ranks.run_ranks`.
    """
    settings = settings or Settings()
    names = checked(hooks)
    if not names:
        raise SpecError(f"no hook to measure; available: {', '.join((PLAIN, *all_hooks()))}")
    results = run_ranks(
        "gradwire.tools.measure.train:run",
        settings.nproc,
        {"hooks": names, "settings": asdict(settings)},
        report=report,
        timeout_s=settings.timeout_s,
        prefixes=prefixes,
        env=env,
    )
    return [Record.from_dict(record) for record in results[0]]

"""Plug-ins: codecs and exchanges of other packages, found through their entry points.

A package declares, for instance,

    [project.entry-points."gradwire.codecs"]
    uint4 = "my_package:UInt4"

where `UInt4` is a subclass of `gradwire.Codec` whose `name` is `"uint4"`. A plug-in that cannot be used breaks nothing
but itself: the error, with the package and the entry point in it, is raised when a spec names the plug-in.
"""

import dataclasses
import functools
import inspect
import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

from gradwire.errors import SpecError

log = logging.getLogger("gradwire")


class Plugins(NamedTuple):
    """What the entry points of one group hold."""

    classes: dict[str, Any]
    problems: dict[str, str]
    """By the name of a plug-in that cannot be used, the reason."""

    def check(self, name: str) -> None:
        """Raise SpecError if `name` is a plug-in that cannot be used."""
        if name in self.problems:
            raise SpecError(self.problems[name])


@functools.cache
def load(group: str, base: type, reserved: frozenset[str] = frozenset()) -> Plugins:
    """Import the classes that a group's entry points name, once per process.

    Args:
        group: `gradwire.codecs` or `gradwire.exchanges`.
        base: The class that plug-ins must inherit from.
        reserved: The names of built-in hooks, which stay what they are. A plug-in that claims one is reported as an
            error in the log.
    """
    classes: dict[str, Any] = {}
    problems: dict[str, str] = {}
    origins: dict[str, str] = {}
    for point in entry_points(group=group):
        name, origin = point.name, _origin(point)
        if name in reserved:
            log.error("%s claims the name of the built-in hook %r and is ignored; rename it", origin, name)
        elif name in origins:
            classes.pop(name, None)
            problems[name] = f"{origin} and {origins[name]} claim the same name; uninstall one of the packages"
        elif problem := _load(point, base, classes):
            problems[name] = f"{origin} {problem}"
        origins.setdefault(name, origin)
    return Plugins(classes, problems)


def _origin(point: EntryPoint) -> str:
    package = point.dist.name if point.dist is not None else "an unknown package"
    return f"the entry point {point.name} = {point.value!r} ({point.group}) of the package {package!r}"


def _load(point: EntryPoint, base: type, classes: dict[str, Any]) -> str:
    """Add the class to `classes`, or return the reason why it cannot be used."""
    try:
        made = point.load()
    except Exception as error:  # whatever another package does when it is imported
        return f"cannot be imported: {type(error).__name__}: {error}"
    if not inspect.isclass(made) or not issubclass(made, base) or not dataclasses.is_dataclass(made):
        return f"is not a dataclass that inherits from gradwire.{base.__name__}"
    if inspect.isabstract(made):
        missing = ", ".join(sorted(made.__abstractmethods__))
        return f"does not implement {missing}; the docstring of gradwire.{base.__name__} says what is needed"
    if made.name != point.name:  # type: ignore[attr-defined]
        return f"names itself {made.name!r}; its `name` must be that of the entry point"  # type: ignore[attr-defined]
    classes[point.name] = made
    return ""

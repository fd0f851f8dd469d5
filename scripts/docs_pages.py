"""A hook of MkDocs: pages that are made from the sources, and the pages of benchmarks/results.

- `reference/*.md`: the public names of each public module, for mkdocstrings.
- `cli.md`: all commands, from the parser of the command line.
- `names.md`: an index of all public names, specs, options of specs and commands.
- `results/*.md`: the recorded measurements.

In the repository, pages link to each other by their paths, such as `../benchmarks/results/error.md`. These links are
changed to those of the documentation.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import pkgutil
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

RESULTS = Path("benchmarks", "results")
MOVED = {"docs/": "", "benchmarks/results/": "results/"}
"""By folder of the repository, the folder of the documentation."""
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")
MEMBERS = {
    "gradwire.Hook": "stats reset_stats watched grad_norm residual_norm steps verify switch state_dict "
    "load_state_dict scale_state close",
    **{f"gradwire.{name}": "" for name in ("codecs", "exchanges")},
}
"""By public class, or module of classes, the members that users need, where the class has others."""


# -- public names ------------------------------------------------------------------------------------------------------


def public_modules() -> list[str]:
    """All modules with public names: the packages that `gradwire` names, and the modules that these name in turn."""
    found = ["gradwire"]
    for module in found:
        loaded = importlib.import_module(module)
        inner = getattr(loaded, "SUBMODULES", ())
        if module == "gradwire.ddp_comm_hooks":  # torch's names
            inner = [each.name for each in pkgutil.iter_modules(loaded.__path__) if each.name[0] != "_"]
        found += [f"{module}.{name}" for name in inner]
    return found


def public_names() -> dict[str, Any]:
    """By full name, every public object; one that several modules have appears under the first of them."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for module in public_modules():
        loaded = importlib.import_module(module)
        own = [name for name, value in vars(loaded).items() if getattr(value, "__module__", "") == module]
        for name in getattr(loaded, "__all__", own):
            value = getattr(loaded, name)
            if id(value) not in seen and not name.startswith("_"):
                found[f"{module}.{name}"] = value
                seen.add(id(value))
    return found


# -- pages -------------------------------------------------------------------------------------------------------------


def pages() -> dict[str, str]:
    """By path, the text of every page that is made here."""
    return {**reference_pages(), "cli.md": cli_page(), "names.md": names_page()}


def reference_pages() -> dict[str, str]:
    """One page per public module; torch's names share one."""
    by_owner: dict[str, dict[str, Any]] = {}
    for name, value in public_names().items():
        by_owner.setdefault(".".join(name.split(".")[:-1][:2]), {})[name] = value
    return {f"reference/{owner.rpartition('.')[2]}.md": _reference(owner, names) for owner, names in by_owner.items()}


def _reference(owner: str, names: dict[str, Any]) -> str:
    ordered = sorted(names, key=lambda name: _importance(names[name]))
    entries = [f"::: {name}{_member_options(owner, name)}" for name in ordered]
    return "\n\n".join([f"# {owner}", _first_line(importlib.import_module(owner)), *entries]) + "\n"


def _importance(value: Any) -> int:
    """`register` first, then functions, then classes, errors last."""
    if inspect.isclass(value):
        return 3 if issubclass(value, Exception) else 2
    return 2 if not callable(value) else value.__name__ != "register"


def _member_options(owner: str, name: str) -> str:
    members = MEMBERS.get(name, MEMBERS.get(owner))
    if members is None:
        return ""
    listed = f"[{', '.join(members.split())}]" if members else "false"
    return f"\n    options: {{members: {listed}}}"


def cli_page() -> str:
    """Every command with its options, as `--help` has them."""
    from gradwire.tools.cli import parser

    top = parser()
    (verbs,) = (action for action in top._actions if isinstance(action, argparse._SubParsersAction))
    parts = [
        "# Commands",
        "Made from the parser of the command line: `gradwire COMMAND --help` prints the same. Conventions that all of "
        "them share are in [Run and headroom](run.md#conventions-of-all-commands).",
        "\n".join(f"- [`gradwire {each.dest}`](#gradwire-{each.dest}): {each.help}" for each in verbs._choices_actions),
        *(_command(name, command) for name, command in verbs.choices.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _command(name: str, command: argparse.ArgumentParser) -> str:
    shown = [action for action in command._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    rows = [f"| {_flags(action)} | {_cell(_help(action))} |" for action in shown]
    examples = inspect.cleandoc((command.epilog or "").removeprefix("examples:\n"))
    return "\n\n".join(
        [
            f"## gradwire {name}",
            " ".join((command.description or "").split()),
            "\n".join(["| option | meaning |", "|---|---|", *rows]),
            f"```\n{examples}\n```" if examples else "",
        ]
    ).strip()


def _flags(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        value = " or ".join(map(str, action.choices))
    takes_value = action.nargs != 0
    if not action.option_strings:
        return f"`{action.metavar or action.dest}`"
    return ", ".join(f"`{flag} {value}`" if takes_value else f"`{flag}`" for flag in action.option_strings)


def _help(action: argparse.Action) -> str:
    return (action.help or "passed on to torchrun") % {**vars(action), "prog": "gradwire"}


def _cell(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;")


def names_page() -> str:
    """The index."""
    entries = dict([*_python_entries(), *_spec_entries(), *_command_entries()])
    rows = [
        f"| {link} | {_cell(entries[key, link])} |" for key, link in sorted(entries, key=lambda each: each[0].lower())
    ]
    intro = "Every public name, spec, option of a spec and command, in alphabetical order."
    return "\n".join(["# Index of names", "", intro, "", "| name | what it is |", "|---|---|", *rows]) + "\n"


Entry = tuple[tuple[str, str], str]
"""What to sort by and the link, and a line about it."""


def _python_entries() -> Iterator[Entry]:
    for name, value in public_names().items():
        line = _first_line(value) if callable(value) else "a mapping of names to classes"
        yield (name.rpartition(".")[2], f"[`{name}`][{name}]"), line
        for member in MEMBERS.get(name, "").split():
            yield (member, f"[`Hook.{member}`][{name}.{member}]"), _first_line(getattr(value, member))


def _spec_entries() -> Iterator[Entry]:
    from gradwire import exchange
    from gradwire.exchanges import EXCHANGES, POLICIES, Coded

    specs_of: dict[str, list[str]] = {}
    shared = {field.name for field in dataclasses.fields(Coded)}
    for name in (*EXCHANGES, *POLICIES, "auto"):
        yield (name, f"[`{name}`](hooks.md)"), "a spec"
        made = exchange(name) if name in EXCHANGES else None
        for owner in (made, getattr(made, "codec", None)):
            for field in dataclasses.fields(owner) if owner is not None else ():
                specs_of.setdefault(field.name, []).append(name)
    for option in specs_of.keys() - {"codec", "name"}:
        of = "codecs; the page says of which" if option in shared else ", ".join(specs_of[option])
        yield (option, f"[`{option}=`](hooks.md)"), f"an option of {of}"


def _command_entries() -> Iterator[Entry]:
    from gradwire.tools.cli import VERBS

    for verb, line in VERBS.items():
        yield (verb, f"[`gradwire {verb}`](cli.md#gradwire-{verb})"), line


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n\n")[0].replace("\n", " ")


# -- what MkDocs calls -------------------------------------------------------------------------------------------------


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the reference into the navigation."""
    (reference,) = (item["Reference"] for item in config.nav or () if "Reference" in item)
    for path, text in reference_pages().items():
        reference.append({text.partition("\n")[0].removeprefix("# "): path})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made here, and the files of benchmarks/results under `results/`."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    folder = Path(config.config_file_path).parent / RESULTS
    for result in sorted(folder.iterdir()):
        files.append(File.generated(config, f"results/{result.name}", abs_src_path=str(result)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn the links of the repository into those of the documentation."""
    own = page.file.src_uri
    here = posixpath.dirname(f"benchmarks/{own}" if own.startswith("results/") else f"docs/{own}")

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[1]))
        for folder, new in MOVED.items():
            if target.startswith(folder):
                return f"]({os.path.relpath(new + target.removeprefix(folder), posixpath.dirname(own) or '.')}"
        return match[0]

    return LINK.sub(moved, markdown)

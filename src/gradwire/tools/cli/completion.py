"""`gradwire completion`: what the parser knows, as a script for a shell."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from gradwire.exchanges import EXCHANGES, POLICIES

SHELLS = ("bash", "zsh", "fish")
HOOKS = {"--hooks": (*EXCHANGES, *POLICIES), "--hook": (*EXCHANGES, *POLICIES, "auto")}
"""By option, the names that it takes. `auto` chooses among hooks, so it is not one to choose from."""
EXAMPLES = """\
examples:
  source <(gradwire completion bash)                                      for this shell
  gradwire completion bash > ~/.local/share/bash-completion/completions/gradwire
  gradwire completion zsh >> ~/.zshrc
  gradwire completion fish > ~/.config/fish/completions/gradwire.fish
"""


def add(verbs: Any, line: str) -> None:
    """The verb, in a line, and its options."""
    parser = verbs.add_parser(
        "completion",
        help=line,
        description="Print a script that completes verbs, options and names of hooks.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """Do it."""
    from gradwire.tools.cli import parser  # it knows all verbs, this one too

    print(script(args.shell, parser()), end="")


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """The script, from a parser with verbs."""
    verbs = _verbs(parser)
    if shell == "fish":
        return _fish(verbs)
    return ("autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "") + _bash(verbs)


def _verbs(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    actions = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next(actions).choices


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS]


def _words(parser: argparse.ArgumentParser) -> str:
    """All that may follow a verb by name: its options, and the choices of its arguments."""
    positional = [str(choice) for action in parser._actions if not action.option_strings for choice in _choices(action)]
    return " ".join([*positional, *(name for action in _options(parser) for name in action.option_strings)])


def _choices(action: argparse.Action) -> list[Any]:
    return list(action.choices or ())


def _bash(verbs: Mapping[str, argparse.ArgumentParser]) -> str:
    hooks = "\n".join(
        f'    {option}) COMPREPLY=($(compgen -W "{" ".join(names)}" -- "$current")); return ;;'
        for option, names in HOOKS.items()
    )
    cases = "\n".join(f'    {verb}) words="{_words(parser)}" ;;' for verb, parser in verbs.items())
    return f"""\
_gradwire() {{
  local words="" current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  COMPREPLY=()
  case "$previous" in
{hooks}
  esac
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then words="{" ".join(verbs)} --help --version"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _gradwire gradwire
"""


def _fish(verbs: Mapping[str, argparse.ArgumentParser]) -> str:
    lines = [f"complete -c gradwire -n __fish_use_subcommand -f -a '{verb}'" for verb in verbs]
    for verb, parser in verbs.items():
        seen = f"complete -c gradwire -n '__fish_seen_subcommand_from {verb}'"
        choices = [
            str(choice) for action in parser._actions if not action.option_strings for choice in _choices(action)
        ]
        lines += [f"{seen} -f -a '{' '.join(choices)}'"] if choices else []
        for action in _options(parser):
            long = next((name[2:] for name in action.option_strings if name.startswith("--")), None)
            flag = f"-l {long}" if long else f"-s {action.option_strings[0][1:]}"
            values = f" -x -a '{' '.join(HOOKS[f'--{long}'])}'" if f"--{long}" in HOOKS else ""
            lines.append(f"{seen} {flag}{values}")
    return "\n".join(lines) + "\n"

import shutil
import subprocess

import pytest

from gradwire.errors import GradwireError
from gradwire.tools.cli import VERBS, main, parser
from gradwire.tools.cli.completion import SHELLS, script, verbs_of

ASK = """
{script}
COMP_WORDS=(gradwire {typed} "{last}"); COMP_CWORD={at}
_shtab_gradwire; echo "${{COMPREPLY[@]}}"
"""


def completed(script, *typed):
    text = ASK.format(script=script, typed=" ".join(typed[:-1]), last=typed[-1], at=len(typed))
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.split()


def test_bash_completes_verbs_options_and_hooks(capsys):
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert completed(script, "he") == ["headroom"]
    assert completed(script, "run", "--ho") == ["--hook"]
    assert completed(script, "run", "--hook", "bf") == ["bf16"]
    assert completed(script, "run", "--hook", "au") == ["auto"]
    assert completed(script, "bench", "--hooks", "two") == ["two_level"]
    assert completed(script, "completion", "f") == ["fish"]
    assert set(completed(script, "")) == {*verbs_of(parser())}
    assert set(completed(script, "-")) == {"-h", "--help", "--version"}


@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_knows_every_verb(capsys, shell):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(verb in script for verb in verbs_of(parser()))
    assert "nproc" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, timeout=200, check=True)


def test_an_unknown_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err


def test_without_shtab_the_message_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GradwireError, match=r"completion needs the package shtab: pip install 'gradwire\[cli\]'"):
        script("bash", parser())


def test_every_verb_has_examples(capsys):
    verbs = list(verbs_of(parser()))
    assert len(verbs) == len(VERBS)
    for verb in verbs:
        assert main([verb, "--help"]) == 0
        text = capsys.readouterr().out
        assert "examples:\n" in text, verb
        assert f"gradwire {verb}" in text.partition("examples:\n")[2], verb


def test_every_verb_that_has_results_gives_them_as_json(capsys):
    for verb, options in verbs_of(parser()).items():
        if verb not in ("completion", "report", "store"):
            assert "--json" in options.format_help(), verb

"""README and the documentation: every sample runs, every command is accepted, every name and link exists."""

import argparse
import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.advisor import Link
from gradwire.testing import RankFailed
from gradwire.tools.cli import VERBS, parser
from gradwire.tools.records.jsonl import append

from .kit.ranks import pool
from .kit.samples import run_samples
from .tools.report.kit import runs

ROOT = Path(__file__).parent.parent
NAME = r"(?<!from )(?<!import )(?<!::: )(?<!-m )(?<![\w./-])gradwire(?:\.[A-Za-z_]\w*)+"
MODULES = {"gradwire.testing.contracts"}
"""Named as what to import."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
    *sorted(ROOT.glob("benchmarks/results/*.md")),
]
MADE = {"cli.md", "names.md"}
"""Pages that are made when the documentation is built."""
ELSEWHERE = {
    "elastic.md": "needs a store and ranks that join and leave: the tests of local training have them",
    "integrations.md": "needs Lightning, Accelerate and Transformers: `make integrations` runs them, but that for Ray",
    "test-device.md": "needs the compiled device: `make device` uses it in the same way",
    "CONTRIBUTING.md": "is a test of this repository: see below",
}
"""Pages whose samples are only compiled here, and why."""
SLOW = {"advisor.md", "extend.md"}
"""They measure a link, and run all contracts."""
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

RESOLVE = """
import json, pkgutil, sys
import gradwire
early = [name for name in gradwire.SUBMODULES if f"gradwire.{name}" in sys.modules]
missing = []
def check(act, name):
    try:
        act(name)
    except (AttributeError, ImportError) as error:
        missing.append(f"{name}: {error}")
names = json.load(sys.stdin)
for name in names["names"]:
    check(lambda name: eval(name, {"gradwire": gradwire}), name)
for line in names["imports"]:
    check(lambda line: exec(line, {}), line)
print(json.dumps({"early": early, "missing": missing, "dir": dir(gradwire)}))
"""


def script(name):
    """A module of scripts/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def found(pattern):
    return sorted({match for page in PAGES for match in re.findall(pattern, page.read_text(), re.MULTILINE)})


def blocks(page, *languages):
    """The fenced blocks of a page in these languages, without their indentation."""
    for indent, language, text in FENCE.findall(page.read_text()):
        if language in languages:
            yield re.sub(f"^{indent}", "", text, flags=re.MULTILINE)


def test_every_name_resolves_and_submodules_load_on_first_use():
    names = {
        "names": [name for name in found(NAME) if not any(name.startswith(module) for module in MODULES)],
        "imports": found(r"^(?:from gradwire[\w.]* import [^#(\n]+|import gradwire[\w.]*)"),
    }
    assert "gradwire.optim.step_in_backward" in names["names"]
    assert "from gradwire.advisor import Link, measure_compute, predict" in names["imports"]
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE], input=json.dumps(names), capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["early"], result["missing"]) == ([], [])
    assert {"advisor", "ddp_comm_hooks", "optim", "report", "testing"} < set(result["dir"])


WITH_SAMPLES = [
    pytest.param(page, id=page.name, marks=pytest.mark.thorough if page.name in SLOW else ())
    for page in PAGES
    if any(blocks(page, "python"))
]


@pytest.mark.parametrize("page", WITH_SAMPLES)
def test_every_sample_runs(page, tmp_path):
    samples = list(blocks(page, "python"))
    for sample in samples:
        compile(sample, page.name, "exec")
    if page.name in ELSEWHERE:
        return
    append(tmp_path / "records.jsonl", runs())
    quick = [sample for sample in samples if "Script(" not in sample]
    try:
        pool(2).run(run_samples, quick, tmp_path, timeout_s=400.0)
    except RankFailed as error:
        failure = str(error)
    else:
        return
    pytest.fail(failure, pytrace=False)  # outside of the handler, which would show every traceback twice


def test_the_sample_for_contributors_is_a_test_of_this_repository():
    tests = [path.read_text() for path in ROOT.glob("tests/**/test_*.py")]
    samples = list(blocks(ROOT / "CONTRIBUTING.md", "python"))
    assert samples
    for sample in samples:
        assert any(sample in text for text in tests), sample


@pytest.mark.thorough
def test_samples_that_start_a_script_run(tmp_path):
    samples = [sample for page in PAGES for sample in blocks(page, "python") if "Script(" in sample]
    assert samples
    steps = (ROOT / "examples" / "first_hook.py").read_text().replace("hook = gradwire.register(model, args.hook)", "")
    steps = steps.replace("checked, stats = hook.verify(), hook.stats()", "return").replace("default=50", "default=400")
    (tmp_path / "train.py").write_text(steps.replace("parse_args()", "parse_known_args()[0]"))
    for sample in samples:
        done = subprocess.run([sys.executable, "-c", sample], cwd=tmp_path, capture_output=True, text=True, timeout=540)
        assert done.returncode == 0, done.stderr


def commands():
    """(page, words) of every call of gradwire in a block that is not Python, and in the examples of `--help`."""
    texts = [(page.name, text) for page in PAGES for text in blocks(page, "", "console", "bash", "sh")]
    texts += [("--help", command.epilog or "") for command in verbs().choices.values()]
    for name, text in texts:
        for line in text.replace("\\\n", " ").splitlines():
            call = re.match(
                r"\s*(?:\$ )?(?:(?:torchrun|accelerate launch) .*-m gradwire(\.run)?|gradwire) (\S.*)", line
            )
            if call and not call[2].startswith(("run: ", "COMMAND")):
                words = shlex.split(re.sub(r" > \S+|   +\S.*", "", call[2]), comments=True)
                yield name, (["run", *words] if call[1] else words)


def verbs():
    (action,) = (each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    return action


def test_every_command_is_accepted(capsys):
    checked = list(commands())
    assert len(checked) > 60
    assert {words[0] for _, words in checked} == set(VERBS)
    top = parser()
    for name, words in checked:
        try:
            args = top.parse_args(words)
        except SystemExit:
            pytest.fail(f"{name}: gradwire {shlex.join(words)}: {capsys.readouterr().err}")
        for spec in [getattr(args, "hook", None), getattr(args, "gather", None), *(getattr(args, "hooks", None) or ())]:
            if spec not in (None, "auto", "plain", "SPEC"):
                [gradwire.exchange(part) for part in spec.split("/")]
        for link in [getattr(args, "link", None), *(getattr(args, "links", None) or ())]:
            assert link in (None, "none") or Link.parse(link)


def test_every_link_between_pages_has_a_target():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!http)([\w./-]*\.(?:md|svg))(?:#([\w-]+))?\)", page.read_text()):
            path = page.parent / target
            if path.name in MADE and path.parent.resolve() == ROOT / "docs":
                continue
            assert path.exists(), f"{page.name}: {target}"
            heads = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
            assert not anchor or anchor in anchors, f"{page.name}: {target}#{anchor}"


def test_pages_that_are_made_name_everything():
    made = script("docs_pages")
    pages, names = made.pages(), made.public_names()
    references = "".join(text for path, text in pages.items() if path.startswith("reference/"))
    for name in names:
        assert f"[`{name}`]" in pages["names.md"]
        assert re.search(rf"^::: {re.escape(name)}$", references, re.MULTILINE)
    for verb, command in verbs().choices.items():
        section = pages["cli.md"].split(f"\n## gradwire {verb}\n")[1].split("\n## ")[0]
        for action in command._actions:
            shown = action.help != argparse.SUPPRESS and action.dest != "help"
            assert not shown or all(f"`{option}" in section for option in action.option_strings)


def test_the_page_about_torch_has_all_its_names():
    page = (ROOT / "docs" / "migrate.md").read_text()
    names = [name.rpartition(".")[2] for name in script("docs_pages").public_names() if ".ddp_comm_hooks." in name]
    members = list(gradwire.ddp_comm_hooks.DDPCommHookType.__members__)
    assert len(names) > 14
    assert [name for name in [*names, *members] if f"`{name}`" not in page] == []


def test_pictures_are_those_of_the_recorded_data():
    pictures = script("docs_pictures")
    for make in pictures.PICTURES:
        assert (pictures.FOLDER / f"{make.__name__}.svg").read_text() == make(), "run scripts/docs_pictures.py"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150

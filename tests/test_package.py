"""Importing does nothing, and the public names are there."""

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradwire
from gradwire.errors import GradwireError, RegisterError, SpecError, StateError, VerifyError, unknown

from .test_docs import script

IMPORT = """
import os, sys, threading, warnings, logging
import torch, torch.distributed, torch.nn.parallel
from torch.distributed import _functional_collectives
before = (threading.active_count(), list(warnings.filters), torch.get_num_threads(), list(logging.getLogger().handlers))
reads = []
class Watched(dict):
    def __getitem__(self, key): reads.append(key); return super().__getitem__(key)
    def get(self, key, default=None): reads.append(key); return super().get(key, default)
os.environ = Watched(os.environ)
import gradwire, gradwire.ddp_comm_hooks, gradwire.testing
loaded = [getattr(gradwire, name) for name in gradwire.__all__]
after = (threading.active_count(), list(warnings.filters), torch.get_num_threads(), list(logging.getLogger().handlers))
assert before == after, (before, after)
assert not reads, reads
heavy = {"numba", "llvmlite", "triton", "rich", "jinja2", "shtab", "gradwire.tools.cli"} & set(sys.modules)
assert not heavy, heavy
"""


LIGHT = """
import sys
import gradwire
assert {name for name in sys.modules if name.startswith("gradwire")} == {"gradwire", "gradwire.version"}
assert not {"asyncio", "dataclasses", "inspect", "logging", "numpy", "torch"} & set(sys.modules)
import gradwire.tools.cli
assert "torch" not in sys.modules
assert {*gradwire.__all__, *gradwire.SUBMODULES} <= set(dir(gradwire))
assert not hasattr(gradwire, "regsiter")
assert "torch" not in sys.modules
from gradwire import SpecError
from gradwire import register
assert gradwire.register is register is vars(gradwire)["register"]
assert gradwire.optim.LocalSGD
assert gradwire.codecs.CODECS
"""

ANY_ORDER = """
import importlib, sys
import torch, torch.distributed, torch.nn.parallel
for name in sys.argv[1:]:
    for held in [held for held in sys.modules if held.partition(".")[0] == "gradwire"]:
        del sys.modules[held]
    importlib.import_module(f"gradwire.{name}")
"""


def python(text, *words):
    command = [sys.executable, "-W", "error", "-c", text, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_import_is_light_and_names_load_on_first_use():
    assert python(LIGHT) == ""


def test_every_module_can_be_imported_first():
    """No module leans on what `import gradwire` used to load before it."""
    others = [
        f"{package}.{module.name}"
        for package in ("auto", "engine", "models", "tools.launch")
        for module in pkgutil.iter_modules(importlib.import_module(f"gradwire.{package}").__path__)
    ]
    python(ANY_ORDER, *dict.fromkeys([*gradwire.HOMES.values(), *gradwire.SUBMODULES, *others]))


def test_help_has_the_public_names():
    text = python("import gradwire; help(gradwire)")
    assert "fewer bytes on the wire" in text
    assert "register(" in text
    assert "class Hook" in text


def test_import_does_nothing():
    """No threads, environment reads, warning filters or compilers."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", IMPORT], capture_output=True, text=True, timeout=540)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_public_names():
    assert {*gradwire.HOMES, "__version__"} == set(gradwire.__all__)
    for name, home in gradwire.HOMES.items():
        assert getattr(gradwire, name) is getattr(importlib.import_module(f"gradwire.{home}"), name)
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'regsiter'"):
        gradwire.regsiter  # noqa: B018
    for error in (SpecError, RegisterError, VerifyError, StateError):
        assert issubclass(error, GradwireError)
    assert issubclass(SpecError, ValueError)


def test_error_of_an_unknown_name_lists_what_exists():
    assert unknown("hook", "bf61", ["bf16", "exact"]) == (
        "unknown hook 'bf61'. Did you mean 'bf16'? Available: bf16, exact"
    )


ROOT = Path(__file__).parent.parent
FROZEN = ROOT / "tests" / "golden" / "public_names.txt"


def test_one_version_everywhere():
    assert f"\nversion: {gradwire.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {gradwire.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    minor = ".".join(gradwire.__version__.split(".")[:2])
    assert f"at present {minor}." in (ROOT / "SECURITY.md").read_text()


def test_public_names_are_those_that_were_agreed_on():
    """A name that is missing breaks somebody's program, and a new one is a promise: both must be meant.

    Then change tests/golden/public_names.txt and the changelog.
    """
    assert sorted(script("docs_pages").public_names()) == FROZEN.read_text().split()


def test_public_names_are_documented():
    """With arguments, results and an example. Results of functions are dataclasses, whose fields are documented."""
    lacking = []
    for name, value in script("docs_pages").public_names().items():
        text = inspect.getdoc(value) or ""
        plain = inspect.isclass(value) and (dataclasses.is_dataclass(value) or issubclass(value, Exception))
        if ".ddp_comm_hooks." in name or not callable(value) or plain:  # torch documents its own
            continue
        wanted = ["Examples:"]
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            wanted += ["Args:"] * bool(signature.parameters)
            wanted += ["Returns:"] * (signature.return_annotation not in (None, "None"))
        lacking += [f"{name}: {part}" for part in wanted if part not in text]
    assert lacking == []

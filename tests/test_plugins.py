"""Codecs and exchanges of other packages: installed, found by name, held to the contracts; broken ones harm nobody."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import gradwire
from gradwire import plugins
from gradwire.errors import SpecError

EXAMPLES = Path(__file__).parents[1] / "examples"
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "gradwire-example-plugins"
version = "1.0"
[tool.setuptools]
py-modules = ["custom_codec", "custom_exchange"]
[project.entry-points."gradwire.codecs"]
ternary = "custom_codec:Ternary"
[project.entry-points."gradwire.exchanges"]
wide = "custom_exchange:Wide"
"""
USES = """
import gradwire
assert str(gradwire.exchange("ternary:block=128,feedback=true")) == "ternary:block=128,feedback=true"
gradwire.testing.check_codec(gradwire.codec("ternary").inner)
gradwire.testing.check_exchange(gradwire.exchange("ternary"), sizes=(2,))
gradwire.testing.check_exchange(gradwire.exchange("wide"), sizes=(3,))
assert str(gradwire.exchange("two_level(across=ternary(block=32))").across) == "ternary:block=32"
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The examples as an installed package, in a folder of its own."""
    project, target = tmp_path / "project", tmp_path / "installed"
    project.mkdir()
    for name in ("custom_codec.py", "custom_exchange.py"):
        shutil.copy(EXAMPLES / name, project)
    (project / "pyproject.toml").write_text(PROJECT)
    offline = ("--no-index", "--no-build-isolation", "--no-deps", "--quiet", "--target", str(target))
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(project)], check=True, timeout=540)
    return target


@pytest.mark.timeout(900)
def test_the_examples_installed_as_a_package_keep_all_contracts(installed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=":")
    subprocess.run([sys.executable, "-W", "error", "-c", USES], check=True, timeout=540)


@pytest.mark.parametrize("name", ["custom_codec.py", "custom_exchange.py"])
def test_the_examples_are_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 60


class Package:
    """In place of the metadata of an installed package."""

    def __init__(self, name: str) -> None:
        self.name = name


@pytest.fixture
def entry_points(monkeypatch):
    """Pretend that packages declare entry points: a function of (group, name, value, package)."""
    declared: list[EntryPoint] = []

    def declare(group: str, name: str, value: str, package: str = "somebodys-codecs") -> None:
        point = EntryPoint(name, value, group)
        vars(point)["dist"] = Package(package)
        declared.append(point)

    monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in declared if point.group == group])
    plugins.load.cache_clear()
    yield declare
    plugins.load.cache_clear()


@pytest.mark.parametrize("group", ["gradwire.codecs", "gradwire.exchanges"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Thing", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.broken_plugins:Missing", "cannot be imported: AttributeError"),
        ("tests.broken_plugins_that_raise:Thing", "cannot be imported: ValueError: this module raises"),
        ("tests.broken_plugins:NotAClass", "is not a dataclass that inherits from gradwire."),
        ("tests.broken_plugins:Stranger", "is not a dataclass that inherits from gradwire."),
    ],
)
def test_a_broken_plug_in_is_named_and_the_others_keep_working(entry_points, group, value, message):
    entry_points(group, "theirs", value)
    with pytest.raises(SpecError, match="of the package 'somebodys-codecs'") as caught:
        gradwire.exchange("theirs:option=1")
    assert f"the entry point theirs = {value!r} ({group})" in str(caught.value)
    assert message in str(caught.value)
    assert str(gradwire.exchange("int8")) == "int8"
    with pytest.raises(SpecError, match="unknown hook 'nobodys'"):
        gradwire.exchange("nobodys")


def test_a_plug_in_that_misses_a_member_says_which(entry_points):
    entry_points("gradwire.codecs", "half", "tests.broken_plugins:HalfCodec")
    entry_points("gradwire.exchanges", "empty", "tests.broken_plugins:HalfExchange")
    with pytest.raises(SpecError, match="does not implement decode_, wire_bytes; the docstring"):
        gradwire.codec("half")
    with pytest.raises(SpecError, match="does not implement mean_; the docstring"):
        gradwire.exchange("empty")


def test_a_plug_in_must_have_the_name_of_its_entry_point(entry_points):
    entry_points("gradwire.exchanges", "other", "examples.custom_exchange:Wide")
    with pytest.raises(SpecError, match="names itself 'wide'; its `name` must be that of the entry point"):
        gradwire.exchange("other")


def test_a_built_in_hook_stays_what_it_is(entry_points, caplog):
    entry_points("gradwire.codecs", "int8", "tests.broken_plugins:HalfCodec")
    with caplog.at_level(logging.ERROR, "gradwire"):
        assert str(gradwire.exchange("int8:block=64")) == "int8:block=64"
    assert "of the package 'somebodys-codecs' claims the name of the built-in hook 'int8' and is ignored" in caplog.text


def test_two_packages_that_claim_one_name_are_both_named(entry_points):
    entry_points("gradwire.exchanges", "wide", "examples.custom_exchange:Wide", "first")
    entry_points("gradwire.exchanges", "wide", "examples.custom_exchange:Wide", "second")
    with pytest.raises(SpecError, match=r"'second'.*'first'.* claim the same name; uninstall one"):
        gradwire.exchange("wide")


def test_a_good_plug_in_is_a_hook_and_stands_in_the_list(entry_points):
    entry_points("gradwire.codecs", "ternary", "examples.custom_codec:Ternary")
    assert str(gradwire.exchange("ternary(block=32)")) == "ternary:block=32"
    with pytest.raises(SpecError, match=r"unknown hook 'ternery'. Did you mean 'ternary'\?"):
        gradwire.exchange("ternery")

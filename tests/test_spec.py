"""The grammar of specs: what can be written comes back, and every error points at the character."""

from __future__ import annotations

import dataclasses
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gradwire
from gradwire.auto.settings import auto
from gradwire.errors import SpecError
from gradwire.exchanges import EXCHANGES
from gradwire.spec import NestedSpec, SpecText, build, coerce, is_one_value, nested, read, write

NAMES = st.text(string.ascii_lowercase + string.digits + "_", min_size=1, max_size=8)
VALUES = st.text(string.ascii_letters + string.digits + "._|*^$+-{}[]()\\, ", min_size=1, max_size=12).filter(
    is_one_value
)
OPTIONS = st.dictionaries(NAMES, VALUES, max_size=4)


@given(NAMES, OPTIONS)
@settings(max_examples=300, deadline=None)
def test_what_is_written_is_read_back(name, options):
    parsed = read(write(name, options))
    assert (parsed.name, parsed.options) == (name, options)
    assert {key: str(text) for key, text in parsed.keys.items()} == {key: key for key in options}


@given(NAMES, OPTIONS)
@settings(max_examples=300, deadline=None)
def test_the_nested_form_means_the_same(name, options):
    parsed = read(nested(write(name, options)))
    assert (parsed.name, parsed.options) == (name, options)


@given(NAMES, NAMES, OPTIONS, NAMES.filter(lambda key: key != "on"))
@settings(max_examples=200, deadline=None)
def test_specs_nest_to_any_depth(outer, inner, options, key):
    text = write(inner, options)
    for _ in range(4):
        text = write(outer, {key: NestedSpec(text), "on": True})
    level = read(text)
    for _ in range(4):
        level = read(level.options[key])
    assert (level.name, level.options) == (inner, options)


@given(st.text(max_size=40))
@settings(max_examples=500, deadline=None)
def test_any_text_is_read_or_refused_with_a_pointer(text):
    try:
        parsed = read(text)
    except SpecError as error:
        points_into(error, text)
    else:
        assert parsed.name
        assert all(text[part.at :].startswith(part) or part in text for part in parsed.options.values())


@given(st.sampled_from([*EXCHANGES, "two_level", "auto"]), st.text("abint48=(),:[]exempt block", max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_options_make_a_hook_that_round_trips_or_a_clear_error(name, rest):
    text = name + rest
    try:
        made = auto(text) or gradwire.exchange(text)
    except SpecError:
        return
    again = auto(str(made)) or gradwire.exchange(str(made))
    assert again == made
    assert str(again) == str(made)


def points_into(error: SpecError, text: str) -> None:
    """The last two lines are the spec and a caret under one of its characters, or just behind the last one."""
    message, *lines = str(error).split("\n")
    assert message
    if text.isprintable():
        shown, caret = lines
        assert shown == f"  {text}"
        assert 0 <= caret.index("^") - 2 <= len(text)


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 0, "no name"),
        (":block=2", 0, "no name"),
        ("int9", 0, "unknown hook 'int9'. Did you mean"),
        ("int4:blok=32", 5, "unknown option 'blok'"),
        ("int4:block", 5, "not of the form option=value"),
        ("int4:block=", 5, "not of the form option=value"),
        ("int4:block=many", 11, "block must be a whole number, got 'many'"),
        ("int4:block=32,block=64", 14, "given twice"),
        ("int4(block=32", 4, "'(' is never closed"),
        ("int4(block=32]", 13, "']' does not close '('"),
        ("int4:block=32)", 13, "')' closes no bracket"),
        ("int4(block=32) ", 0, None),
        ("int4(block=32)x", 14, "nothing may follow"),
        ("int4[block=32]", 4, "cannot follow the name"),
        ("int4:block=32,,seed=1", 14, "nothing between two commas"),
        ("int4:block=32,", 13, "after the last one"),
        ("two_level(across=int4:block=32)", 21, "inside a spec, options go in brackets: int4(block=32)"),
        ("two_level(across=int9(block=32))", 17, "unknown hook 'int9'"),
        ("two_level(across=int4(blok=32))", 22, "unknown option 'blok'"),
        ("two_level(inside=exact, across=int4(block=x))", 42, "block must be a whole number"),
        ("auto(hooks=[int8, int9])", 18, "unknown hook 'int9'"),
        ("auto(hooks=[int8, int4(block=x)])", 29, "block must be a whole number"),
        ("auto(hooks=[int8)", 16, "')' does not close '['"),
    ],
)
def test_errors_point_at_the_character(text, at, message):
    def make():
        return auto(text) or gradwire.exchange(text)

    if message is None:
        assert make()
        return
    with pytest.raises(SpecError) as caught:
        make()
    assert message in str(caught.value)
    assert str(caught.value).endswith(f"\n  {text.strip() and text}\n  {' ' * at}^")


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("int4:block=32", "int4:block=32"),
        ("int4(block=32)", "int4:block=32"),
        (" int4 ( block = 32 , seed=1 ) ", "int4:block=32,seed=1"),
        ("two_level:inside=exact,across=int4(block=32)", "two_level(inside=exact, across=int4(block=32))"),
        ("two_level", "two_level(inside=exact, across=int8)"),
        ("int4:exempt=(norm|bias){1,2}", "int4:exempt=(norm|bias){1,2}"),
        (r"int4:exempt=layers\.0\(x\)", r"int4:exempt=layers\.0\(x\)"),
        ("auto", "auto"),
        ("auto:max_error=0.01", "auto:max_error=0.01"),
        ("auto(hooks=[int8, int4(block=32)])", "auto(hooks=[int8, int4(block=32)])"),
        ("auto(hooks=int8)", "auto(hooks=[int8])"),
    ],
)
def test_both_forms_have_one_canonical_text(text, canonical):
    made = auto(text) or gradwire.exchange(text)
    assert str(made) == canonical
    assert (auto(canonical) or gradwire.exchange(canonical)) == made


def test_keywords_take_precedence_over_the_text_and_are_checked_too():
    assert str(gradwire.exchange("int4:block=32", block=16)) == "int4:block=16"
    assert (
        str(gradwire.exchange("two_level", across="int4:block=32")) == "two_level(inside=exact, across=int4(block=32))"
    )
    with pytest.raises(SpecError, match="unknown option 'blok'"):
        gradwire.exchange("int4", blok=1)
    with pytest.raises(SpecError, match="across must be a spec"):
        gradwire.exchange("two_level", across=4)
    with pytest.raises(SpecError, match="hooks must be a list of specs"):
        auto("auto", hooks=4)


@pytest.mark.parametrize("wrong", [None, 4, b"int8", ["int8"]])
def test_a_spec_is_text(wrong):
    with pytest.raises(SpecError, match="a spec is text such as 'fp16'"):
        read(wrong)


@pytest.mark.parametrize("wrong", ["int8\n", "int8:\tblock=32", "int8\0"])
def test_a_spec_is_one_printable_line(wrong):
    with pytest.raises(SpecError, match="one line of printable characters"):
        read(wrong)


def test_errors_in_a_part_point_into_the_whole():
    whole = SpecText("outer(inner=word)")
    part = whole.part(12, 16)
    assert str(part.error("wrong")) == "wrong\n  outer(inner=word)\n  " + " " * 12 + "^"


@dataclasses.dataclass(frozen=True)
class Thing:
    count: int = 1
    ratio: float = 0.5
    on: bool = False
    text: str = "a"


@given(st.builds(Thing, st.integers(), st.floats(allow_nan=False), st.booleans(), VALUES))
@settings(max_examples=200, deadline=None)
def test_values_of_every_type_round_trip(thing):
    assert build("thing", write("thing", dataclasses.asdict(thing)), {"thing": Thing}) == thing


@pytest.mark.parametrize(
    ("value", "kind"), [("1.5", int), ("x", float), ("yes", bool), (1, bool), (1.5, int), (True, int), (1, str)]
)
def test_a_value_of_the_wrong_type_is_refused(value, kind):
    with pytest.raises(SpecError, match=r"option must be .*, got"):
        coerce("option", value, kind)

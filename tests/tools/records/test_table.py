from gradwire.tools.records.table import markdown_table, text_table


def test_columns_are_as_wide_as_their_longest_cell_and_two_blanks_apart():
    rows = [("hook", "ms", "note"), ("exact", "100.0", ""), ("powersgd:matrix_rank=4", "9.5", "<- use this")]
    assert text_table(rows, right={1}).split("\n") == [
        "hook                       ms  note",
        "exact                   100.0",
        "powersgd:matrix_rank=4    9.5  <- use this",
    ]


def test_a_header_alone_is_a_table():
    assert text_table([("a", "b")]) == "a  b"


def test_markdown_has_a_rule_that_aligns_and_escapes_bars():
    rows = [("hook", "ms"), ("a|b", "100.0"), ("powersgd", "9.5")]
    assert markdown_table(rows, right={1}).split("\n") == [
        "| hook     |    ms |",
        "| -------- | ----: |",
        "| a\\|b     | 100.0 |",
        "| powersgd |   9.5 |",
    ]
    assert markdown_table([("a", "b"), ("1", "2")]).split("\n")[1] == "| --- | --- |"

from gradwire.tools.records.table import text_table


def test_columns_are_as_wide_as_their_longest_cell_and_two_blanks_apart():
    rows = [("hook", "ms", "note"), ("exact", "100.0", ""), ("powersgd:matrix_rank=4", "9.5", "<- use this")]
    assert text_table(rows, right={1}).split("\n") == [
        "hook                       ms  note",
        "exact                   100.0",
        "powersgd:matrix_rank=4    9.5  <- use this",
    ]


def test_a_header_alone_is_a_table():
    assert text_table([("a", "b")]) == "a  b"

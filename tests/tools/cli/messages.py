"""What every error on the command line looks like."""


def is_short(err):
    """One line; for an error in a spec two more, which show the spec and point at the character."""
    lines = err.splitlines()
    return len(lines) == 1 or (len(lines) == 3 and lines[2].strip() == "^")

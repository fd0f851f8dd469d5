"""A module of another package that cannot be imported."""

raise ValueError("this module raises")

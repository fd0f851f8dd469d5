"""Runs a notebook without Jupyter: `python -m tests.kit.notebook examples/encoding.ipynb` renews its outputs."""

from __future__ import annotations

import ast
import io
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any


def run(path: Path) -> dict[str, Any]:
    """The notebook with the outputs of this run."""
    notebook: dict[str, Any] = json.loads(path.read_text())
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate((each for each in notebook["cells"] if each["cell_type"] == "code"), 1):
        printed, value = execute("".join(cell["source"]), names)
        cell["execution_count"] = number
        cell["outputs"] = [*as_stream(printed), *as_result(value, number)]
    return notebook


def execute(source: str, names: dict[str, Any]) -> tuple[str, Any]:
    """What a cell prints, and the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as out:
        exec(compile(tree, "cell", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None
    return out.getvalue(), value


def as_stream(printed: str) -> list[dict[str, Any]]:
    """The output of `print`."""
    return [{"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}] if printed else []


def as_result(value: Any, number: int) -> list[dict[str, Any]]:
    """A value as Jupyter stores it."""
    if value is None:
        return []
    data: dict[str, Any] = {"text/plain": [repr(value)]}
    if hasattr(value, "_repr_svg_"):
        data["image/svg+xml"] = value._repr_svg_().splitlines(keepends=True)
    return [{"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"}]


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(json.dumps(run(target), indent=1) + "\n")

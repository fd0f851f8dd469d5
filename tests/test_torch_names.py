"""Private names of torch are used in `gradwire._torch` and nowhere else in the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire

ROOT = Path(gradwire.__file__).parent
PRIVATE = ROOT / "_torch"
ASKS_BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}
SHARED = {"_timeout"}
"""Names of torch that the package also has for attributes of its own."""


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def is_own(value: ast.expr) -> bool:
    """`self`, `cls` and `super()`: what is defined in the class itself or in a base class."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in {"self", "cls"}


def attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private attributes that are read or written from outside, by dot or by `getattr`, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ASKS_BY_NAME:
            name = node.args[1].value if len(node.args) > 1 and isinstance(node.args[1], ast.Constant) else None
            if isinstance(name, str) and is_private(name) and not is_own(node.args[0]):
                yield node.lineno, name


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The private modules and names that are imported from torch, with their lines."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            top, *rest = name.split(".")
            if top == "torch" and any(map(is_private, rest)):
                yield node.lineno, name


def parse(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


def names_of_torch() -> set[str]:
    """Every private attribute that `gradwire._torch` uses. All objects it takes are torch's, so all are torch's."""
    return {name for path in PRIVATE.rglob("*.py") for _, name in attributes(parse(path))} - SHARED


def uses(tree: ast.AST, known: set[str]) -> list[tuple[int, str]]:
    """An import from torch that is private, an attribute of `known`, or any private attribute of torch's modules."""
    modules = {"torch", "dist", "c10d"}
    found = [(line, name) for line, name in attributes(tree) if name in known]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in modules:
                found.append((node.lineno, node.attr))
    return sorted({*found, *imports(tree)})


def test_private_names_of_torch_are_used_in_one_place() -> None:
    known = names_of_torch()
    paths = [path for path in ROOT.rglob("*.py") if PRIVATE not in path.parents]
    assert len(paths) > 100
    wrong = {str(path.relative_to(ROOT)): found for path in paths if (found := uses(parse(path), known))}
    assert not wrong, f"give these a function in gradwire._torch: {wrong}"


def test_the_list_of_names_is_that_of_the_package() -> None:
    """The names of all four files are found, those in `getattr` and in assignments among them."""
    known = names_of_torch()
    assert {"_comm_hooks", "_lazy_init_ran", "_use_python_reducer", "_get_backend", "_version"} <= known
    assert {"_optimizer_step_post_hooks", "_in_backward_optimizers", "_overlap_info", "_execution_engine"} <= known


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._C._distributed_c10d import GradBucket", "torch._C._distributed_c10d.GradBucket"),
        ("from torch.distributed import _functional_collectives as f", "torch.distributed._functional_collectives"),
        ("from torch.distributed.utils import _free_storage", "torch.distributed.utils._free_storage"),
        ("if model._comm_hooks: pass", "_comm_hooks"),
        ("self.model._comm_hooks[0]", "_comm_hooks"),
        ("getattr(model, '_lazy_init_ran', True)", "_lazy_init_ran"),
        ("setattr(model, '_match_all_reduce_for_bwd_pass', f)", "_match_all_reduce_for_bwd_pass"),
        ("torch._C._something_new()", "_something_new"),
        ("dist._something_new()", "_something_new"),
        ("dist.distributed_c10d._something_new()", "_something_new"),
        ("model._has_rebuilt_buckets = False", "_has_rebuilt_buckets"),
    ],
)
def test_a_planted_use_is_found(source: str, name: str) -> None:
    assert name in [found for _, found in uses(ast.parse(source), names_of_torch())]


@pytest.mark.parametrize(
    "source",
    [
        "self._timeout = other._timeout",
        "self._comm_hooks",
        "super()._step_pre()",
        "import torch.distributed as dist",
        "from torch.nn.parallel import DistributedDataParallel",
        "from gradwire._torch.ddp import comm_hook_of",
        "torch.__version__",
        "os._exit(1)",
        "'call torch._dynamo.reset() first'",
    ],
)
def test_what_is_not_torch_or_not_private_is_left_alone(source: str) -> None:
    assert uses(ast.parse(source), names_of_torch()) == []

"""The house rules, read off the source: imports run downward, private torch stays in one file, files are documented.

`LAYERS` lists the house from the bottom up. A module may import from its own layer and from those below it. The longest
matching name decides, so `observe.decision` may stand lower than the rest of `observe`. `segue/__init__.py` and
`segue/__main__.py` are the front door: they belong to no layer, but to the core.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "segue"
LAYERS = (
    ("errors", "_compat", "cache", "compilers", "forks"),
    ("device",),
    ("shapes", "observe.decision", "observe.report"),
    ("graph", "inputs"),
    ("memory",),
    ("backends",),
    ("runners",),
    ("config", "observe", "check"),
    ("llm", "diffusion"),
    ("cli",),
)
ABOVE_CORE = ("llm", "diffusion", "cli", "serve")
CORE_MAY_IMPORT = ("torch", "segue")
OPTIONAL_EXTRAS = {"_compat": ("cuda",), "observe": ("matplotlib",)}
MAX_LINES = 500
FRONT_DOOR = ("", "__main__")

FILES = sorted(ROOT.rglob("*.py"))


def module_name(path: Path) -> str:
    """The dotted name below `segue`, empty for the package itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(name: str) -> int | None:
    """The index of the layer that `name` belongs to; the longest matching entry wins."""
    matches = [
        (len(entry), index)
        for index, layer in enumerate(LAYERS)
        for entry in layer
        if name == entry or name.startswith(entry + ".")
    ]
    return max(matches)[1] if matches else None


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything imported, wherever in the file, relative imports resolved."""
    package = ("segue", *path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def upward_imports(source: str, path: Path) -> list[str]:
    importer = module_name(path)
    layer = layer_of(importer)
    is_core = importer.split(".")[0] not in ABOVE_CORE
    faults = []
    for line, name in imports(ast.parse(source), path):
        if not name.startswith("segue."):
            continue
        target = name.removeprefix("segue.")
        is_above_core = target.split(".")[0] in ABOVE_CORE
        target_layer = layer_of(target)
        is_upward = layer is not None and target_layer is not None and target_layer > layer
        if is_upward or (is_core and is_above_core):
            faults.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which stands above it")
    return faults


def foreign_imports(source: str, path: Path) -> list[str]:
    importer = module_name(path)
    if importer.split(".")[0] in ABOVE_CORE:
        return []
    allowed = {*CORE_MAY_IMPORT, *sys.stdlib_module_names, *OPTIONAL_EXTRAS.get(importer.split(".")[0], ())}
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}; the core imports torch and the standard library only"
        for line, name in imports(ast.parse(source), path)
        if name.split(".")[0] not in allowed
    ]


def private_torch(source: str, path: Path) -> list[str]:
    if path.name == "_compat.py":
        return []
    tree = ast.parse(source)
    lines = [line for line, name in imports(tree, path) if name == "torch._C" or name.startswith("torch._C.")]
    lines += [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _is_torch_c(node)]
    return [f"{path.relative_to(ROOT)}:{line} uses torch._C outside _compat.py" for line in sorted(set(lines))]


def _is_torch_c(node: ast.Attribute) -> bool:
    return node.attr == "_C" and isinstance(node.value, ast.Name) and node.value.id == "torch"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_keeps_the_house_rules(path: Path) -> None:
    source = path.read_text()
    faults = upward_imports(source, path) + foreign_imports(source, path) + private_torch(source, path)
    if not ast.get_docstring(ast.parse(source)):
        faults.append(f"{path.relative_to(ROOT)} has no module docstring")
    if source.count("\n") > MAX_LINES:
        faults.append(f"{path.relative_to(ROOT)} has more than {MAX_LINES} lines")
    assert not faults, "\n".join(faults)


def test_every_folder_is_a_package_and_every_module_has_a_layer() -> None:
    folders = {path.parent for path in FILES}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    names = {module_name(path) for path in FILES} - set(FRONT_DOOR)
    assert [name for name in sorted(names) if layer_of(name) is None] == []


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("device/cpu.py", "from segue.graph.trace import Trace", "stands above"),
        ("device/cpu.py", "from segue import graph", "stands above"),
        ("device/cpu.py", "from ..graph import trace", "stands above"),
        ("device/cpu.py", "from segue.errors import SegueError", None),
        ("graph/trace.py", "from . import breaks", None),
        ("shapes/table.py", "from segue.observe.decision import Reason", None),
        ("shapes/table.py", "from segue.observe.metrics import count", "stands above"),
        ("runners/base.py", "def late():\n    from segue.llm import Engine", "stands above"),
        ("__init__.py", "from segue.cli import main", "stands above"),
        ("llm/engine.py", "import transformers\nfrom segue.runners.base import Runner", None),
        ("graph/trace.py", "import numpy as np", "standard library only"),
        ("device/cuda.py", "import torch\ntorch._C._cuda_endAllocateToPool", "torch._C"),
        ("device/cuda.py", "from torch._C import Graph", "torch._C"),
        ("_compat.py", "import torch\ntorch._C._cuda_endAllocateToPool", None),
    ],
)
def test_the_rules_find_what_they_forbid_and_nothing_else(file: str, line: str, fault: str | None) -> None:
    path = ROOT / file
    faults = upward_imports(line, path) + foreign_imports(line, path) + private_torch(line, path)
    assert (faults == []) if fault is None else (len(faults) == 1 and fault in faults[0])

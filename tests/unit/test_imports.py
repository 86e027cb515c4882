"""The front door: names are imported when asked for, and whichever module comes first, all find what they need."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import segue

SOURCE = Path(segue.__file__).parents[1]
EACH_FIRST = """
import os, sys, pkgutil, importlib
import torch
for name in ("transformers", "safetensors", "triton") if "segue.llm" in sys.argv else ():
    try:
        importlib.import_module(name)
    except ImportError:
        pass
failed = []
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
            import segue
            assert callable(segue.graph), "segue.graph is no function"
        except ModuleNotFoundError as error:
            os._exit(0 if error.name.partition(".")[0] != "segue" else 1)
        except BaseException as error:
            print(name, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1] != 0:
        failed.append(name)
print(*failed)
"""


def run(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr


@pytest.mark.parametrize("above", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["core", "llm and cli"])
def test_each_module_can_be_the_first_that_is_imported(above: bool) -> None:
    modules = [".".join(file.relative_to(SOURCE).with_suffix("").parts) for file in (SOURCE / "segue").rglob("*.py")]
    modules = sorted(module.removesuffix(".__init__") for module in modules if not module.endswith("__main__"))
    modules = [module for module in modules if module.startswith(("segue.llm", "segue.cli")) == above]
    assert len(modules) > 50
    assert run(EACH_FIRST, *modules) == ""


def test_importing_segue_imports_no_torch_and_a_name_brings_it() -> None:
    program = "import sys, segue; print('torch' in sys.modules); segue.SegueError; print('torch' in sys.modules);"
    assert run(program + "from segue import graph; print('torch' in sys.modules)").split() == ["False", "False", "True"]


@pytest.mark.parametrize(
    "first", ["import segue.graph.breaks", "from segue.graph import current", "import segue.llm.engine"]
)
def test_graph_is_the_function_whatever_was_imported_before(first: str) -> None:
    pytest.importorskip("transformers")
    assert run(f"{first}; import segue; print(segue.graph(len).__name__, type(segue.graph).__name__)") == "len function"


@pytest.mark.parametrize("package", ["segue", "segue.llm"])
def test_every_public_name_is_there_and_no_other(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__module__.startswith("segue.") and name in dir(module)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
    assert not hasattr(module, "nothing")

"""The README's examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_engine_example_answers(capsys: pytest.CaptureFixture[str]) -> None:
    from segue.errors import SegueError
    from segue.llm import default_model

    try:
        default_model()
    except SegueError as error:
        pytest.skip(str(error))
    exec(compile(BLOCKS[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "Paris" in printed
    assert printed.rstrip().endswith("{}")


def test_the_core_example_replays(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(BLOCKS[1], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "-> tensor([ 80., 120., 160., 200.])" in printed and "replays call[4 tokens, #0 4] (breakable)" in printed
    row = next(line for line in printed.splitlines() if line.startswith("call[4 tokens"))
    assert row.split()[4:6] == ["2", "1"], "segments and breaks"


def test_the_page_on_wrong_answers_finds_its_fault(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "debugging.md").read_text()
    block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    exec(compile(block, "debugging.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "operation 1, aten.mul.Tensor at debugging.md:9 in model, differs by up to 2" in printed


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"

"""The examples run, agree with eager, and replay; on a GPU each is faster than eager."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
EXAMPLES = ["speech_loop", "denoiser", "recommender"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_replays(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    factor = importlib.import_module(name).main("cpu")
    printed = capsys.readouterr().out
    assert factor > 0
    assert re.search(r"on cpu: eager [\d.]+ ms, graphs [\d.]+ ms", printed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_faster_than_eager_on_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    factor = importlib.import_module(name).main("cuda")
    with capsys.disabled():
        print(f"\n{name}: {factor:.2f} times eager")
    assert factor > 1

"""A workspace grows in warm-up, and says who asked for more once a recording depends on where it is (CASES F21)."""

from __future__ import annotations

import pytest
import torch

from segue.errors import WorkspaceError
from segue.memory.lane import Lane
from segue.memory.workspace import Workspace
from tests_support import churn, record, replay


def test_it_grows_until_it_is_locked(lane: Lane) -> None:
    scratch = Workspace("scratch", lane.device.device)
    assert scratch.get((4, 8)).shape == (4, 8)
    small = scratch.nbytes
    assert scratch.get((64, 64), torch.float64).dtype == torch.float64
    assert scratch.nbytes >= 64 * 64 * 8 > small
    scratch.lock()
    assert scratch.get((64, 128), torch.float32).numel() == 64 * 128
    with pytest.raises(WorkspaceError, match=r"scratch holds 32768 bytes.*test_workspace\.py.*asked for 65536 bytes"):
        scratch.get((64, 256))


def test_the_same_memory_comes_back(lane: Lane) -> None:
    scratch = Workspace("scratch", lane.device.device, nbytes=4096)
    assert scratch.get((16,)).data_ptr() == scratch.get((8, 8), torch.int32).data_ptr()


def test_a_recording_locks_it_and_growth_afterwards_is_refused(lane: Lane) -> None:
    scratch = Workspace("scratch", lane.device.device)
    x = torch.randn(8, device=lane.device.device)

    def forward() -> torch.Tensor:
        out = scratch.get((8,))
        torch.mul(x, 2, out=out)
        return out + 1

    run = record(lane, forward)
    assert scratch.is_locked
    with pytest.raises(WorkspaceError, match="a recording uses it"):
        scratch.get((4096,))
    for _ in range(3):
        x.normal_()
        churn(lane.device)
        torch.testing.assert_close(replay(lane, run), x * 2 + 1, rtol=0, atol=0)


def test_growth_inside_a_capture_is_refused_and_the_next_capture_works(lane: Lane) -> None:
    scratch = Workspace("scratch", lane.device.device, nbytes=512)
    x = torch.randn(8, device=lane.device.device)
    runs = 0

    def forward() -> torch.Tensor:
        nonlocal runs
        runs += 1
        return scratch.get((8,) if runs == 1 else (1024,))[:8].copy_(x) + 1

    with pytest.raises(WorkspaceError, match="a recording uses it"):
        record(lane, forward)
    torch.testing.assert_close(replay(lane, record(lane, lambda: x * 3)), x * 3, rtol=0, atol=0)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="nbytes is -1"):
        Workspace("scratch", "cpu", nbytes=-1)

"""Capturing several runners that share a lane, within a budget where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.memory.budget import Budget
from segue.observe.decision import Reason
from segue.runners.base import CaptureReport, Progress, Runner
from segue.shapes.key import ShapeKey


def capture_all(
    runners: Sequence[Runner[Any]], budget: Budget | None = None, progress: Progress | None = None
) -> dict[str, CaptureReport]:
    """The reports by phase. With a budget that may rebuild, shapes that made the pool too large are left out and the lane
    is made anew, until what is recorded lies in a pool that it needs.

    Raises:
        CaptureNotAllowed: a guard is closed.
        CaptureError: a shape failed, and its phase is configured to raise.
    """
    left_out: set[ShapeKey] = set()
    while True:
        reports: dict[str, CaptureReport] = {}
        for runner in runners:
            keys = runner.keys()
            for key in left_out.intersection(keys):
                runner.store.note_absent(key, Reason.OVER_BUDGET)
            reports[runner.phase] = runner.capture([key for key in keys if key not in left_out], progress)
        too_large = budget.too_large() - left_out if budget is not None and budget.may_rebuild else set()
        if budget is None or not too_large:
            return reports
        left_out |= too_large
        budget.refused.clear()
        with budget.lane.exclusive():
            for runner in runners:
                runner.store.close()
                runner.store.forget_absent()
            budget.lane.release()

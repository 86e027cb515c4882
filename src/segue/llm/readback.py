"""What a step chose, on its way to the host while the device goes on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Pending(NamedTuple):
    """A copy under way. `wait` blocks until it has arrived, and no longer: what was queued behind it goes on."""

    host: torch.Tensor
    event: Any

    def wait(self) -> list[list[int]]:
        if self.event is not None:
            self.event.synchronize()
        found: list[list[int]] = self.host.tolist()
        return found


class Readback:
    """Starts copies of ``[2, R]`` int64 tensors, R up to `max_rows`; two may be under way at once."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        with torch.inference_mode(False):
            self._hosts = [torch.empty(2 * max_rows, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(2)]
        self._events = [torch.cuda.Event() if self._is_cuda else None for _ in range(2)]
        self._turn = 0

    def start(self, chosen: torch.Tensor) -> Pending:
        """Queues the copy behind the current stream's work; `chosen` may be overwritten by what is queued after it."""
        turn = self._turn = 1 - self._turn
        host, event = self._hosts[turn][: chosen.numel()].view(chosen.shape), self._events[turn]
        host.copy_(chosen, non_blocking=self._is_cuda)
        if event is not None:
            event.record()
        return Pending(host, event)

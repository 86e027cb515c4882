"""Shared test set-up: few threads, no network, and tests that this machine cannot run are skipped, with the reason."""

from __future__ import annotations

import os
import shutil

# Before torch is imported: see the Makefile.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

MAX_THREADS = 2


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on the CPU, slowly
    torch.set_num_threads(min(MAX_THREADS, os.cpu_count() or 1))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a CUDA device"
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        missing["compiler"] = "needs a C++ compiler"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker) is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

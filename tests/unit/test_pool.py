"""The cpu device's pool against a simple model: live blocks never overlap, everything returns and merges, and the policy
is the CUDA caching allocator's."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from segue._compat import data_address
from segue.device.cpu_pool import CpuPool

MIB = 1 << 20


def block(pool: CpuPool, nbytes: int) -> torch.Tensor:
    return pool.allocate(torch.uint8, (nbytes,), (1,))


class Model:
    """Best fit over lists of free pieces, written from the policy's description alone; addresses are (chunk, offset)."""

    def __init__(self) -> None:
        self.chunks: list[int] = []
        self.free: set[tuple[int, int, int]] = set()  # (chunk, offset, bytes)

    def take(self, nbytes: int) -> tuple[int, int, int]:
        wanted = (nbytes + 511) // 512 * 512
        is_small = wanted <= MIB
        fitting = [p for p in self.free if p[2] >= wanted and (self.chunks[p[0]] == 2 * MIB) == is_small]
        if fitting:
            piece = min(fitting, key=lambda p: (p[2], p[0], p[1]))
            self.free.remove(piece)
        else:
            size = 2 * MIB if is_small else 20 * MIB if wanted < 10 * MIB else (wanted + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.chunks.append(size)
            piece = (len(self.chunks) - 1, 0, size)
        chunk, offset, size = piece
        rest = size - wanted
        if rest >= 512 if is_small else rest > MIB:
            self.free.add((chunk, offset + wanted, rest))
            size = wanted
        return chunk, offset, size

    def give(self, piece: tuple[int, int, int]) -> None:
        chunk, offset, size = piece
        for other in sorted(self.free):
            if other[0] == chunk and other[1] + other[2] == offset:
                self.free.remove(other)
                offset, size = other[1], size + other[2]
        for other in sorted(self.free):
            if other[0] == chunk and offset + size == other[1]:
                self.free.remove(other)
                size += other[2]
        self.free.add((chunk, offset, size))


SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, 3 * MIB), st.sampled_from([512, 513, MIB, MIB + 1, 10 * MIB, 12 * MIB])
)
STEPS = st.lists(st.one_of(SIZES, st.just(None)), max_size=40)


@given(steps=STEPS, choices=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_the_pool_does_what_the_policy_says(steps: list[int | None], choices: object) -> None:
    pool, model = CpuPool(), Model()
    held: list[tuple[torch.Tensor, tuple[int, int, int]]] = []
    for step in steps:
        if step is not None:
            held.append((block(pool, step), model.take(step)))
        elif held:
            tensor, piece = held.pop(choices.randrange(len(held)))  # type: ignore[attr-defined]
            del tensor
            model.give(piece)
        _check(pool, model, held)
    while held:
        model.give(held.pop()[1])
    _check(pool, model, held)
    assert model.free == {(i, 0, size) for i, size in enumerate(model.chunks)}
    assert sorted(n for n, _ in [*pool._free[0], *pool._free[1]]) == sorted(model.chunks)
    pool.close()


def _check(pool: CpuPool, model: Model, held: list[tuple[torch.Tensor, tuple[int, int, int]]]) -> None:
    live = pool.state().live
    assert pool.state().reserved_bytes == sum(model.chunks)
    assert sorted(live.values()) == sorted(piece[2] for _, piece in held)
    assert set(live) == {data_address(tensor) for tensor, _ in held}
    ends = 0
    for address, nbytes in sorted(live.items()):
        assert address >= ends and address % 512 == 0
        ends = address + nbytes
    spans = pool.state().segments
    for tensor, piece in held:  # which piece of which chunk, but for equal pieces in different chunks
        address = data_address(tensor)
        start = next(s for s, n in spans if s <= address < s + n)
        assert address + live[address] <= start + dict(spans)[start]
        assert dict(spans)[start] == model.chunks[piece[0]]


@pytest.mark.parametrize(
    ("nbytes", "chunk"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (21 * MIB + 1, 22 * MIB),
    ],
)
def test_chunks_come_in_the_allocators_sizes(nbytes: int, chunk: int) -> None:
    pool = CpuPool()
    tensor = block(pool, nbytes)
    assert [n for _, n in pool.state().segments] == [chunk]
    assert pool.state().reserved_bytes == chunk and data_address(tensor) % 512 == 0


def test_a_block_is_free_when_its_last_view_dies_and_reused_at_once() -> None:
    pool = CpuPool()
    tensor = pool.allocate(torch.float32, (4, 4), (4, 1))
    address = data_address(tensor)
    view = tensor.t()[1:]
    del tensor
    assert address in pool.state().live
    del view
    assert pool.state().live == {}
    assert data_address(block(pool, 100)) == address


def test_fresh_blocks_hold_poison() -> None:
    pool = CpuPool()
    assert pool.allocate(torch.float32, (3,), (1,)).isnan().all()
    assert pool.allocate(torch.bfloat16, (3,), (1,)).isnan().all()
    assert pool.allocate(torch.int64, (3,), (1,)).min() > 1 << 60
    assert pool.allocate(torch.bool, (3,), (1,)).all()


def test_strided_and_empty_tensors() -> None:
    pool = CpuPool()
    columns = pool.allocate(torch.float32, (3, 2), (1, 3))
    assert columns.stride() == (1, 3) and columns.untyped_storage().nbytes() == 24
    assert pool.allocate(torch.float32, (0, 3), (3, 1)).shape == (0, 3)
    assert len(pool.state().live) == 1


def test_a_view_of_the_tape_owns_nothing() -> None:
    pool = CpuPool()
    tensor = pool.allocate(torch.int32, (4,), (1,))
    tensor.copy_(torch.arange(4))
    view = pool.view(tensor[1:])
    assert view is not None and view.tolist() == [1, 2, 3]
    del tensor
    assert pool.state().live == {} and view.tolist() == [1, 2, 3]
    assert pool.view(torch.ones(3)) is None


def test_blocks_may_die_in_any_thread() -> None:
    pool = CpuPool()
    held = [block(pool, 1000) for _ in range(400)]

    def drop(share: list[torch.Tensor]) -> None:
        while share:
            share.pop()

    shares = [held[i::4] for i in range(4)]
    held.clear()
    threads = [threading.Thread(target=drop, args=(share,)) for share in shares]
    for thread in threads:
        thread.start()
    for _ in range(200):  # the owner goes on meanwhile
        block(pool, 700)
    for thread in threads:
        thread.join()
    gc.collect()
    assert pool.state().live == {}
    assert pool._free[0] == sorted((2 * MIB, start) for start, _ in pool.state().segments)


def test_what_outlives_a_closed_pool_does_no_harm() -> None:
    pool = CpuPool()
    tensor = block(pool, 64)
    pool.close()
    del tensor
    assert pool.state().live == {} and pool.state().reserved_bytes == 0

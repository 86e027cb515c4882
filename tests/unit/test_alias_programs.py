"""Random programs of views and writes, over arguments of random layouts and lasting tensors, beside eager: values, strides,
flags, which results are one object, and what shares memory with what."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import segue

STRIDES = ((4, 1), (1, 3), (8, 2), (0, 1), (1, 0), (2, 3), (1, 1), (5, 1))
SHAPE = (3, 4)
VIEWS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t.detach(),
    lambda t: t[:],
    lambda t: t.t(),
    lambda t: t[1:],
    lambda t: t[..., ::2],
    lambda t: t.unsqueeze(0),
    lambda t: t.conj(),
    lambda t: t.mH,
    lambda t: t.real,
    lambda t: t.imag,
    lambda t: t.expand(2, *t.shape),
    lambda t: t.reshape(-1),
    lambda t: t.contiguous(),
    torch.view_as_real,
    lambda t: t.squeeze(),
)
BREAKS = tuple(map(segue.eager_on_graph, (*VIEWS, lambda t: (t * 2)[:1], lambda t: (t * 2j).conj(), lambda t: t.mul_(2))))


def program(seed: int, lasting: list[torch.Tensor], has_breaks: bool) -> Callable[..., list[torch.Tensor]]:
    """What an operation refuses is passed over, as eager code may."""
    views = VIEWS + BREAKS if has_breaks else VIEWS

    def body(*args: torch.Tensor) -> list[torch.Tensor]:
        choose = random.Random(seed)
        known = [*args, *lasting]
        for _ in range(choose.randint(2, 8)):
            tensor, kind = choose.choice(known), choose.random()
            try:
                if kind < 0.5:
                    known.append(choose.choice(views)(tensor))
                elif kind < 0.75:
                    known.append(tensor * 2 + 1)
                elif kind < 0.95:
                    tensor.mul_(0.5)
                else:
                    known.append(tensor.sum())
            except (RuntimeError, IndexError):
                known.append(tensor)
        return [choose.choice(known) for _ in range(choose.randint(1, 4))]

    return body


class Side:
    """One of the two that are compared: lasting tensors and arguments of its own."""

    def __init__(self, wrap: Callable[[Any], Any], seed: int, has_breaks: bool) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.lasting = [torch.randn(SHAPE, generator=generator, dtype=t) for t in (torch.float32, torch.complex64)]
        self.step = wrap(program(seed, self.lasting, has_breaks))

    def call(self, bases: list[torch.Tensor], strides: list[tuple[int, int]]) -> tuple[list[Any], list[torch.Tensor]]:
        """What can be told of a call's results, also after each was written; and all memory."""
        args = [base.as_strided(SHAPE, stride) for base, stride in zip(bases, strides, strict=True)]
        results = self.step(*args)
        facts: list[Any] = [
            (
                [r is t for t in (*args, *self.lasting, *results)],
                [s for s, n in zip(r.stride(), r.shape, strict=True) if n > 1],
                (r.dtype, r.shape, r.is_conj(), r.is_neg(), r.requires_grad),
            )
            for r in results
        ]
        values = [r.resolve_conj().resolve_neg().clone() for r in results]
        for result in results:
            if 0 not in result.stride():
                result.add_(1)
        return facts, [*values, *bases, *self.lasting, *[r.resolve_conj().resolve_neg() for r in results]]


def check(seed: int, has_breaks: bool) -> int:
    choose = random.Random(seed)
    verify = choose.choice((None, None, "every:2"))
    ours, theirs = (Side(w, seed, has_breaks) for w in (lambda f: segue.graph(f, verify=verify), lambda f: f))
    kinds = [(choose.choice((torch.float32, torch.complex64)), choose.choice(STRIDES)) for _ in range(choose.randint(1, 3))]
    strides = [stride for _, stride in kinds]
    with torch.no_grad():
        for call in range(5):
            bases = [torch.randn(60, dtype=dtype, generator=torch.Generator().manual_seed(call)) for dtype, _ in kinds]
            (facts, tensors), (expected, others) = (
                side.call([b.clone() for b in bases], strides) for side in (ours, theirs)
            )
            assert facts == expected, (seed, call)
            for a, b in zip(tensors, others, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True, msg=f"program {seed}, call {call}")
    replays = ours.step.report().replays
    ours.step.close()
    return int(replays)


@pytest.mark.parametrize("has_breaks", [False, True])
def test_random_aliases_are_answered_as_in_eager(has_breaks: bool) -> None:
    assert sum(check(seed, has_breaks) for seed in range(150)) > 300


@pytest.mark.slow
@pytest.mark.parametrize("has_breaks", [False, True])
def test_more_random_aliases_are_answered_as_in_eager(has_breaks: bool) -> None:
    assert sum(check(seed, has_breaks) for seed in range(150, 2000)) > 4000

"""Arguments of every layout, beside eager: permuted, with gaps, expanded, overlapping; results to the last bit and stride,
what is written into the memory under them, and what is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import segue
from call_support import eager_reasons, same
from segue.device import Device
from segue.graph.tree import flatten

Layout = tuple[tuple[int, ...], tuple[int, ...]]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
    """What a call returns, with the strides of its tensors but for single dimensions; or what it raises."""
    try:
        result = call(*args)
    except RuntimeError as error:
        return type(error), str(error).splitlines()[0]
    tensors = [leaf for leaf in flatten(result)[0] if isinstance(leaf, torch.Tensor)]
    return result, [[s for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()] for t in tensors]


def check(step: Any, eager: Callable[..., Any], layouts: list[Layout], device: Device) -> None:
    """Each layout lies in a storage of its own; afterwards all of it must be as after an eager call."""
    for size, stride in layouts:
        ours = torch.randn(600, device=device.device)
        theirs = ours.clone()
        got, expected = (attempt(f, t.as_strided(size, stride, 16)) for f, t in ((step, ours), (eager, theirs)))
        same(got, expected)
        same(ours, theirs)


LAYOUTS: dict[str, Layout] = {
    "ordinary": ((4, 5), (5, 1)),
    "transposed": ((4, 5), (1, 4)),
    "rows apart": ((4, 5), (7, 1)),
    "columns apart": ((4, 5), (10, 2)),
    "far apart": ((4, 5), (100, 20)),
    "expanded rows": ((4, 5), (0, 1)),
    "expanded columns": ((4, 5), (1, 0)),
    "expanded with gaps": ((4, 5), (0, 3)),
    "one element": ((4, 5), (0, 0)),
    "windows": ((4, 5), (1, 1)),
    "windows with gaps": ((4, 5), (2, 4)),
    "interleaved": ((2, 2), (3, 2)),
    "one row": ((1, 5), (77, 2)),
    "one column": ((4, 1), (3, 50)),
    "of three": ((2, 3, 4), (40, 1, 5)),
    "none": ((0, 5), (7, 2)),
}


def written(x: torch.Tensor) -> Any:
    x.reshape(-1).add_(1)
    return x * 1


def _in_place(name: str, *args: Any) -> Callable[[torch.Tensor], Any]:
    def body(x: torch.Tensor) -> Any:
        getattr(x, name)(*args)
        return x + 0

    return body


BODIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "reads": lambda x: (x * 2, x.sum(), x.sum(-1), x.sum(0), x.reshape(-1).sum(), (x * 1.1).mean(0)),
    "strides": lambda x: (
        x * max([s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1], default=0),
        x.is_contiguous(),
        x.contiguous(),
        x.clone(),
        torch.empty_like(x).fill_(1),
    ),
    "views": lambda x: (x[0:], x.transpose(0, 1), x.view(-1) * 1),
    "reshape, written": written,
    "fill": _in_place("fill_", 3.0),
    "mul": _in_place("mul_", 2),
    "copy": _in_place("copy_", torch.tensor(5.0)),
    "product": lambda x: x.flatten(1) @ x.flatten(1).t(),
}


@pytest.mark.parametrize("min_hits", [1, 2])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_argument_of_any_layout_is_answered_as_in_eager(layout: str, body: str, min_hits: int, device: Device) -> None:
    step = segue.graph(BODIES[body], min_hits=min_hits)
    check(step, BODIES[body], [LAYOUTS[layout]] * 5, device)


@pytest.mark.parametrize("verify", [None, "every:2"])
@pytest.mark.parametrize("body", BODIES)
def test_layouts_in_turn_do_not_disturb_each_other(body: str, verify: str | None, device: Device) -> None:
    step = segue.graph(BODIES[body], verify=verify)
    layouts = [layout for layout in LAYOUTS.values() for _ in range(4)]
    random.Random(1).shuffle(layouts)
    check(step, BODIES[body], layouts, device)
    assert "mismatch" not in eager_reasons(step)


def test_layouts_share_a_recording_where_they_differ_in_single_dimensions_alone(device: Device) -> None:
    step = segue.graph(lambda x: x * 2)
    check(step, lambda x: x * 2, [((1, 5), (n, 2)) for n in (7, 9, 11, 13)], device)
    check(step, lambda x: x * 2, [((1, 5), (n, 1)) for n in (5, 9, 11, 13)], device)
    assert step.report().captures == 2 and step.report().replays == 4


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (2, 3, 1, 1), (1, 1, 4, 4)])
def test_a_convolution_answers_in_the_memory_format_of_its_argument(shape: tuple[int, ...], device: Device) -> None:
    layer = torch.nn.Conv2d(shape[1], 4, 1).to(device.device)
    step = segue.graph(layer, inference=True)
    for _ in range(3):
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.empty(shape, device=device.device, memory_format=memory_format).normal_()
            got, expected = step(x), layer(x)
            same(got, expected)
            assert got.stride() == expected.stride()


def test_an_argument_that_is_mostly_gaps_runs_eagerly(device: Device) -> None:
    step = segue.graph(lambda x: x * 2)
    base = torch.randn(1000, 1000, device=device.device)
    for _ in range(3):
        same(step(base[:, 1]), base[:, 1] * 2)
        same(step(base[:, ::8]), base[:, ::8] * 2)
    assert eager_reasons(step) == {"wide_gaps": 3, "first_seen": 2}
    assert "pass a copy" in step.explain(base[:, 1]).detail


def test_an_expanded_argument_needs_no_more_memory_than_it_has(device: Device) -> None:
    step = segue.graph(lambda x: x.sum())
    for _ in range(3):
        step(torch.randn(1, 8, device=device.device).expand(100_000, 8))
    assert next(iter(next(iter(step._dispatch.sites.values())).store.recorded.values())).static.nbytes == 32


@pytest.mark.parametrize("second", ["the same", "another part", "the base"])
def test_expanded_arguments_over_one_memory_are_answered_as_in_eager(second: str, device: Device) -> None:
    def body(x: torch.Tensor, y: torch.Tensor) -> Any:
        y.mul_(2)
        return x + 1, y + 1

    step = segue.graph(body)
    for _ in range(5):
        ours = torch.randn(8, device=device.device)
        theirs = ours.clone()
        answers = []
        for call, base in ((step, ours), (body, theirs)):
            x = base[:4].expand(3, 4)
            y = {"the same": x, "another part": base[4:], "the base": base[:4]}[second]
            answers.append((attempt(call, x, y), base))
        same(*answers)


@pytest.mark.parametrize("make", ["transposed", "rows apart", "expanded"])
def test_padded_arguments_of_other_layouts_are_answered_as_in_eager(make: str, device: Device) -> None:
    def body(x: torch.Tensor) -> Any:
        x.add_(1)
        return x * 2

    step = segue.graph(body, pad={"x": segue.Pad(ladder=[4, 8])})
    for rows in (3, 3, 4, 2, 5, 3, 5, 8):
        ours = torch.randn(90, device=device.device)
        theirs = ours.clone()
        stride = {"transposed": (1, rows), "rows apart": (11, 2), "expanded": (0, 1)}[make]
        got, expected = (attempt(f, t.as_strided((rows, 5), stride)) for f, t in ((step, ours), (body, theirs)))
        same(got[0], expected[0])
        same(ours, theirs)
    assert (step.report().replays > 0) == (make != "expanded")


def test_a_wide_padded_argument_is_recorded_since_its_buffer_is_dense(device: Device) -> None:
    step = segue.graph(lambda x: x * 2, pad={"x": segue.Pad(dim=1, ladder=[8])})
    base = torch.randn(64, 8192, device=device.device)
    for _ in range(3):
        same(step(base[:, :5]), base[:, :5] * 2)
    assert step.report().replays == 1


def test_random_layouts_are_answered_as_in_eager(device: Device) -> None:
    random_numbers = random.Random(7)
    steps = {name: segue.graph(body, max_graphs=64) for name, body in BODIES.items()}
    for _ in range(150):
        name = random_numbers.choice(list(BODIES))
        size = tuple(random_numbers.choice((1, 2, 3, 4)) for _ in range(random_numbers.choice((2, 3))))
        stride = tuple(random_numbers.choice((0, 1, 2, 3, 4, 12, 30)) for _ in size)
        check(steps[name], BODIES[name], [(size, stride)] * 4, device)


@pytest.mark.parametrize("is_expanded", [False, True])
def test_a_trained_argument_of_a_call_without_grad_leaves_its_buffer_plain(is_expanded: bool, device: Device) -> None:
    step = segue.graph(lambda x: F.relu(x) * 2, inference=True)
    x = torch.randn(3, 1, device=device.device, requires_grad=True)
    with torch.enable_grad():
        for _ in range(4):
            result = step(x.expand(3, 4) if is_expanded else x)
            assert not result.requires_grad
        same(result, (F.relu(x) * 2).expand(result.shape).detach())
    graph = next(iter(next(iter(step._dispatch.sites.values())).store.recorded.values()))
    assert not any(b.requires_grad for b in graph.static.buffers)


@pytest.mark.parametrize(
    "view", [lambda x: x[:, 0], lambda x: x.transpose(1, 2), lambda x: x[:]], ids=["row", "turned", "all"]
)
def test_a_view_of_the_last_row_of_ever_longer_arguments_is_one(view: Callable[..., Any], device: Device) -> None:
    step = segue.graph(view)
    for length in range(2, 7):
        x = torch.randn(1, length, 4, device=device.device)[:, -1:]
        got = step(x)
        same(got, view(x))
        got.add_(1)
        same(got, view(x))
    assert step.report().replays == 3


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("kind", ["transposed", "expanded", "channels last"])
def test_batch_norm_answers_whatever_the_layout(kind: str, is_training: bool, device: Device) -> None:
    layer = torch.nn.BatchNorm2d(4).to(device.device).train(is_training)
    eager = copy.deepcopy(layer)
    step = segue.graph(layer, inference=True)
    for _ in range(4):
        x = torch.randn(3, 4, 5, 5, device=device.device)
        x = {
            "transposed": x.transpose(2, 3),
            "expanded": x[..., :1].expand(3, 4, 5, 5),
            "channels last": x.contiguous(memory_format=torch.channels_last),
        }[kind]
        same(step(x), eager(x))
        same(layer.state_dict(), eager.state_dict())
    assert step.report().replays == 2


def test_a_break_that_is_given_one_tensor_twice_sees_one(device: Device) -> None:
    @segue.eager_on_graph
    def cut(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 1 if x is y else x + 2

    step = segue.graph(lambda x: cut(x * 2, x) + cut(x, x))
    for _ in range(4):
        x = torch.randn(3, device=device.device)
        same(step(x), (x * 2 + 2) + (x + 1))


@pytest.mark.parametrize("layout", ["rows apart", "expanded with gaps", "windows", "transposed"])
def test_what_lies_between_the_elements_of_an_argument_is_seen_as_in_eager(layout: str, device: Device) -> None:
    def body(x: torch.Tensor) -> Any:
        between = x.as_strided((8,), (1,))
        between.mul_(2)
        return between + 1, x + 0

    step = segue.graph(body)
    check(step, body, [LAYOUTS[layout]] * 4, device)
    assert (step.report().replays > 0) == (layout in ("windows", "transposed"))


def test_a_place_in_the_storage_of_an_argument_is_found_as_in_eager(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.as_strided((2,), (1,), 17) + 1

    check(segue.graph(body), body, [LAYOUTS["ordinary"]] * 4, device)


def test_what_lies_between_the_elements_of_an_expanded_argument_is_left_alone(device: Device) -> None:
    @segue.eager_on_graph
    def cut(x: torch.Tensor) -> torch.Tensor:
        base[1::3] += 1
        return x * 2

    def body(x: torch.Tensor) -> torch.Tensor:
        x.fill_(3.0)
        return cut(x)

    base = torch.zeros(12, device=device.device)
    step = segue.graph(body)
    for call in range(1, 5):
        same(step(base.as_strided((4, 4), (0, 3))), torch.full((4, 4), 6.0, device=device.device))
        same(base.view(4, 3), torch.tensor([3.0, call, 0.0], device=device.device).expand(4, 3))


def test_a_pass_that_catches_what_an_operation_raises_is_answered_as_in_eager(device: Device) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            x.mul_(2)
        except RuntimeError:
            return x + 1
        return x * 3

    check(segue.graph(body), body, [LAYOUTS[name] for name in ("expanded rows", "ordinary") for _ in range(4)], device)

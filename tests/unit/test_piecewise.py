"""Pieces made by a compiler: one program for all shapes, results as eager's, what cannot be compiled refused by name."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from segue.backends.base import GraphReplay
from segue.backends.piecewise import PiecewiseBackend
from segue.errors import CaptureError, ConfigError, HostReadError
from segue.graph import Call, calling, current
from segue.inputs import mark_varying
from segue.memory.lane import Lane
from segue.shapes.key import ShapeKey
from tests_support import check_against_eager, record, replay

HIDDEN = 16


@segue.eager_on_graph
def attend(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.t(), dim=1) @ k


class Model(torch.nn.Module):
    """Layers of a product, a break, an addition."""

    def __init__(self, lane: Lane, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(HIDDEN, 2 * HIDDEN) for _ in range(num_layers)])
        self.to(lane.device.device).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            q, k = layer(torch.sin(x)).chunk(2, dim=1)
            x = x + attend(q.contiguous(), k)
        return {"last": x, "sum": x.sum(1)}


def rows(lane: Lane, n: int) -> torch.Tensor:
    x = torch.randn(n, HIDDEN, device=lane.device.device)
    mark_varying(x, 0)
    return x


class Shapes:
    """One backend, and a recording of `forward` for each size, the largest first."""

    def __init__(
        self, lane: Lane, forward: Callable[[torch.Tensor], Any], sizes: list[int], compiler: str = "eager"
    ) -> None:
        self.backend = PiecewiseBackend(lane, compiler)
        self.inputs = {n: rows(lane, n) for n in sizes}
        self.forwards = {n: self._bound(forward, x) for n, x in self.inputs.items()}
        self.recorded: dict[int, GraphReplay] = {}
        largest = None
        with torch.no_grad(), lane.exclusive():
            for n in sizes:
                _, trace = self.backend.trace(self.forwards[n], largest)
                largest = largest or trace
                self.recorded[n] = self.backend.record(ShapeKey("call", n), self.forwards[n], trace)

    @staticmethod
    def _bound(forward: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Callable[[], Any]:
        return lambda: forward(x)


def test_one_program_serves_all_shapes_and_their_recordings_share_a_pool(lane: Lane) -> None:
    shapes = Shapes(lane, Model(lane), [24, 12, 7, 2])
    assert shapes.backend.build.programs == 1 and shapes.backend.build.pieces == 4
    for n, recorded in shapes.recorded.items():
        assert (recorded.record.segments, recorded.record.breaks, recorded.record.backend) == (4, 3, "tc_piecewise")
        check_against_eager(lane, recorded, shapes.forwards[n], [shapes.inputs[n]])


def test_a_size_of_one_gets_a_program_of_its_own(lane: Lane) -> None:
    shapes = Shapes(lane, Model(lane), [5, 1])
    assert shapes.backend.build.programs == 2
    for n, recorded in shapes.recorded.items():
        check_against_eager(lane, recorded, shapes.forwards[n], [shapes.inputs[n]])


def test_sizes_that_nobody_marked_cost_a_second_program_and_no_more(lane: Lane) -> None:
    model = Model(lane)
    backend = PiecewiseBackend(lane, "eager")
    with torch.no_grad(), lane.exclusive():
        for n in (9, 6, 4):
            x = torch.randn(n, HIDDEN, device=lane.device.device)
            forward = Shapes._bound(model, x)
            _, trace = backend.trace(forward)
            recorded = backend.record(ShapeKey("call", n), forward, trace)
            x.normal_()
            torch.testing.assert_close(recorded.replay(), model(x), rtol=0, atol=0)
    assert backend.build.programs == 2


def test_neighbouring_split_points_share_a_piece(lane: Lane) -> None:
    x = rows(lane, 4)

    def forward() -> torch.Tensor:
        y = attend(attend(x * 2, x), x)
        segue.break_graph()
        return y + 1

    backend = PiecewiseBackend(lane, "eager")
    with torch.no_grad(), lane.exclusive():
        recorded = backend.record(ShapeKey("call", 4), forward, backend.trace(forward)[1])
    assert backend.build.pieces == 2
    assert (recorded.record.segments, recorded.record.breaks) == (2, 3)
    check_against_eager(lane, recorded, forward, [x])


def test_a_second_backend_takes_nothing_over_from_the_first(lane: Lane) -> None:
    """Dynamo remembers numbers by the name of the code that held them, and would make another value a symbol."""
    for scale in (0.5, 0.25):
        shapes = Shapes(lane, lambda x, scale=scale: attend(x * scale, x), [6, 3])
        check_against_eager(lane, shapes.recorded[3], shapes.forwards[3], [shapes.inputs[3]])


# -- the live call ----------------------------------------------------------------------------------------------------


def test_the_live_call_is_an_input_of_the_program_and_reaches_the_body(lane: Lane) -> None:
    """Fused models read tensors of the batch between the breaks."""
    scales = {n: torch.randn(n, 1, device=lane.device.device) for n in (8, 3)}
    body = segue.eager_on_graph(lambda y: y * current().batch["factor"])
    backend = PiecewiseBackend(lane, "eager")
    recorded = {}
    inputs = {n: rows(lane, n) for n in scales}

    def forward_of(n: int) -> Callable[[], torch.Tensor]:
        return lambda: body(inputs[n] * current().batch["scale"]) + 1

    for scale in scales.values():
        mark_varying(scale, 0)
    for n, scale in scales.items():
        with torch.no_grad(), lane.exclusive(), calling(Call(batch={"scale": scale, "factor": 1})):
            _, trace = backend.trace(forward_of(n))
            recorded[n] = backend.record(ShapeKey("call", n), forward_of(n), trace)
    for factor in (2, 3):
        for n, scale in scales.items():
            scale.normal_()
            with calling(Call(batch={"factor": factor})):
                got = replay(lane, recorded[n])
            torch.testing.assert_close(got, inputs[n] * scale * factor + 1, rtol=0, atol=0)


class Head:
    """A method as a break: its object is no part of the program."""

    def __init__(self, lane: Lane) -> None:
        self.bias = torch.randn(HIDDEN, device=lane.device.device)

    @segue.eager_on_graph
    def add(self, y: torch.Tensor) -> torch.Tensor:
        return y + self.bias


def test_an_object_that_a_break_is_called_with_is_that_of_its_own_shape(lane: Lane) -> None:
    heads = {8: Head(lane), 3: Head(lane)}
    shapes = Shapes(lane, lambda x: heads[x.shape[0]].add(x * 2) * 3, [8, 3])
    for n, recorded in shapes.recorded.items():
        check_against_eager(lane, recorded, shapes.forwards[n], [shapes.inputs[n], heads[n].bias])


# -- fakes: exact or refused --------------------------------------------------------------------------------------------


@segue.eager_on_graph
def halves(y: torch.Tensor) -> torch.Tensor:
    return y[::2] + 1


@segue.eager_on_graph(fake=lambda y: y.new_empty((y.shape[0] + 1) // 2, y.shape[1]))
def declared_halves(y: torch.Tensor) -> torch.Tensor:
    return y[::2] + 1


@segue.eager_on_graph(fake=lambda y: y.new_empty(y.shape[0], y.shape[1]))
def misdeclared_halves(y: torch.Tensor) -> torch.Tensor:
    return y[::2] + 1


@segue.eager_on_graph
def fixed(y: torch.Tensor) -> torch.Tensor:
    """As many rows as the first shape has, in every shape."""
    return y.sum(0).expand(8, HIDDEN).contiguous()


@segue.eager_on_graph
def counted(y: torch.Tensor) -> tuple[torch.Tensor, int]:
    return y + 1, y.shape[0]


@segue.eager_on_graph
def turned(y: torch.Tensor) -> torch.Tensor:
    return (y * 2).t()


@pytest.mark.parametrize(("body", "named"), [(halves, "halves"), (fixed, "fixed"), (counted, "counted")])
def test_a_result_that_does_not_follow_its_derived_fake_is_refused_at_the_shape_where_it_shows(
    lane: Lane, body: Any, named: str
) -> None:
    def forward(x: torch.Tensor) -> Any:
        out = body(x * 2)
        return (out[0] if isinstance(out, tuple) else out) * 3

    alone = Shapes(lane, forward, [8])
    check_against_eager(lane, alone.recorded[8], alone.forwards[8], [alone.inputs[8]])
    with pytest.raises(CaptureError, match=rf"break {named} .*returned.*breakable") as caught:
        Shapes(lane, forward, [8, 4])
    assert caught.value.operation == named


def test_a_fake_that_is_given_makes_it_exact(lane: Lane) -> None:
    shapes = Shapes(lane, lambda x: declared_halves(x * 2) * 3, [8, 5, 4])
    assert shapes.backend.build.programs == 1
    for n, recorded in shapes.recorded.items():
        check_against_eager(lane, recorded, shapes.forwards[n], [shapes.inputs[n]])


def test_a_fake_that_is_wrong_is_refused(lane: Lane) -> None:
    with pytest.raises(CaptureError, match=r"misdeclared_halves.*returned a float32 tensor of shape \[4, 16\].*\[8, 16\]"):
        Shapes(lane, lambda x: misdeclared_halves(x * 2) * 3, [8])


def test_strides_are_derived_too(lane: Lane) -> None:
    shapes = Shapes(lane, lambda x: turned(x + 1) * 3, [8, 5])
    for n, recorded in shapes.recorded.items():
        check_against_eager(lane, recorded, shapes.forwards[n], [shapes.inputs[n]])


# -- moved memory -------------------------------------------------------------------------------------------------------


def test_what_a_break_returns_may_lie_elsewhere_at_each_replay(lane: Lane) -> None:
    taken: list[torch.Tensor] = []
    addresses: list[int] = []

    @segue.eager_on_graph
    def elsewhere(y: torch.Tensor) -> torch.Tensor:
        taken.append(torch.empty_like(y))
        result = y * 2
        addresses.append(result.data_ptr())
        return result

    shapes = Shapes(lane, lambda x: elsewhere(x + 1) * 3, [6])
    for _ in range(4):
        shapes.inputs[6].normal_()
        got = replay(lane, shapes.recorded[6])
        torch.testing.assert_close(got, (shapes.inputs[6] + 1) * 2 * 3, rtol=0, atol=0)
    assert len(set(addresses[-4:])) > 1


def test_a_piece_reads_a_parameter_that_nothing_else_keeps(lane: Lane) -> None:
    model = Model(lane)
    shapes = Shapes(lane, model, [6])
    x = shapes.inputs[6]
    expected = {name: value.clone() for name, value in model(x).items()}
    for parameter in model.parameters():
        parameter.data = torch.full_like(parameter, float("nan"))
    torch.testing.assert_close(replay(lane, shapes.recorded[6]), expected, rtol=0, atol=0)


# -- what cannot be compiled --------------------------------------------------------------------------------------------


def test_a_branch_on_host_data_runs_under_breakable_and_is_refused_with_its_line(lane: Lane) -> None:
    """A recording keeps the branch that its capture took, as it keeps any host value; a compiler cannot follow it."""
    numpy = pytest.importorskip("numpy")
    flags = numpy.array([0, 1])
    x = rows(lane, 4)

    def forward() -> torch.Tensor:
        y = attend(x * 2, x)
        if flags.sum() > 0:
            y = y + 1
        return attend(y, x) * 3

    check_against_eager(lane, record(lane, forward, "breakable"), forward, [x])
    with pytest.raises(
        CaptureError, match=r"Data-dependent.* at .*test_piecewise.py:\d+ in forward \(if flags.*breakable"
    ) as e:
        record(lane, forward, "tc_piecewise")
    assert e.value.location is not None and e.value.location.endswith(" in forward")
    assert e.value.operation is not None and e.value.operation.startswith("Data-dependent")
    check_against_eager(lane, record(lane, lambda: attend(x, x) + 1, "tc_piecewise"), lambda: attend(x, x) + 1, [x])


def test_python_that_dynamo_does_not_know_runs_under_breakable_alone(lane: Lane) -> None:
    lock = threading.Lock()
    x = rows(lane, 4)

    def forward() -> torch.Tensor:
        with lock:
            return attend(x * 2, x) + 1

    check_against_eager(lane, record(lane, forward, "breakable"), forward, [x])
    with pytest.raises(CaptureError, match=r"test_piecewise.py:\d+ in forward \(with lock:\)"):
        record(lane, forward, "tc_piecewise")


def test_a_branch_on_device_data_is_refused_by_both(lane: Lane) -> None:
    x = rows(lane, 4)

    def forward() -> torch.Tensor:
        y = attend(x * 2, x)
        return y + 1 if y.sum() > 0 else y

    with pytest.raises(HostReadError):
        record(lane, forward, "breakable")
    with pytest.raises(CaptureError, match="Data-dependent branching"):
        record(lane, forward, "tc_piecewise")


def test_a_branch_on_data_inside_a_break_runs_under_both(lane: Lane) -> None:
    x = rows(lane, 4)

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        return y + 1 if y.sum() > 0 else y - 1

    for backend in ("breakable", "tc_piecewise"):
        check_against_eager(lane, record(lane, lambda: body(x * 2) * 3, backend), lambda: body(x * 2) * 3, [x], rounds=6)


def test_an_unknown_compiler_is_refused(lane: Lane) -> None:
    with pytest.raises(ConfigError, match=r"compiler is 'gcc'.*inductor.*eager"):
        PiecewiseBackend(lane, "gcc")


# -- inductor ---------------------------------------------------------------------------------------------------------

inductor = [pytest.mark.compiler, pytest.mark.slow]


@pytest.mark.parametrize("sizes", [pytest.param([24, 7, 1], marks=inductor)])
def test_inductor_replays_what_its_program_computes_and_stays_near_eager(lane: Lane, sizes: list[int]) -> None:
    model = Model(lane)
    shapes = Shapes(lane, model, sizes, "inductor")
    assert shapes.backend.build.programs == 2
    is_recorded = lane.device.kind == "cuda"
    for n, recorded in shapes.recorded.items():
        assert (recorded.record.segments, recorded.record.breaks) == ((4, 3) if is_recorded else (0, 7))
        for _ in range(3):
            shapes.inputs[n].normal_()
            got = replay(lane, recorded)
            with torch.no_grad():
                compiled, _ = shapes.backend.trace(shapes.forwards[n])
            torch.testing.assert_close(got, compiled, rtol=0, atol=0)
            torch.testing.assert_close(got, model(shapes.inputs[n]), rtol=1e-4, atol=1e-4)


SHARED: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view of the argument": lambda y: y[1:],
    "two that share a storage": lambda y: (lambda z: (z[:2], z))(y + 1),
}


@pytest.mark.compiler
@pytest.mark.parametrize("case", SHARED)
def test_inductor_refuses_results_that_share_memory(lane: Lane, case: str) -> None:
    body = segue.eager_on_graph(SHARED[case])

    def forward(x: torch.Tensor) -> Any:
        out = body(x * 2)
        return [out, x + 1]

    with pytest.raises(CaptureError, match=r"break .*lambda.* shares.*return a copy.*breakable"):
        Shapes(lane, forward, [4], "inductor")


@pytest.mark.parametrize("writes", [pytest.param("writes", marks=inductor)])
def test_inductor_sees_what_a_break_writes_into_its_arguments(lane: Lane, writes: str) -> None:
    """Also through a view that the piece before it made."""

    @segue.eager_on_graph
    def write(y: torch.Tensor) -> None:
        y.mul_(2)

    @segue.eager_on_graph
    def write_back(y: torch.Tensor) -> torch.Tensor:
        return y.add_(1)

    def forward(x: torch.Tensor) -> Any:
        y = torch.sin(x)
        turned = y.t()
        write(y)
        z = write_back(y)
        return turned * 3, z + y

    shapes = Shapes(lane, forward, [6, 3], "inductor")
    for n, recorded in shapes.recorded.items():
        for _ in range(2):
            shapes.inputs[n].normal_()
            y = torch.sin(shapes.inputs[n]) * 2 + 1
            torch.testing.assert_close(replay(lane, recorded), (y.t() * 3, y + y), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=inductor)])
def test_views_shapes_and_written_results_may_cross_a_break(lane: Lane, compiler: str) -> None:
    """As in a fused layer: a flat view of the hidden states is written on both sides of the break, and both are read."""

    @segue.eager_on_graph
    def body(y: torch.Tensor) -> torch.Tensor:
        return y * 0.5

    def forward(x: torch.Tensor) -> Any:
        hidden = torch.sin(x)[None]
        shape = hidden.shape
        flat = hidden.view(-1, hidden.shape[-1])
        left, right = flat.chunk(2, dim=1)
        flat += body(flat)
        left.add_(right)
        out = body(left.contiguous())
        return flat.view(shape), hidden[0, :, :2] * 2, out, right + 1

    shapes = Shapes(lane, forward, [6, 3], compiler)
    tolerance = 0.0 if compiler == "eager" else 1e-5
    for n, recorded in shapes.recorded.items():
        for _ in range(2):
            shapes.inputs[n].normal_()
            expected = forward(shapes.inputs[n])
            torch.testing.assert_close(replay(lane, recorded), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("compiler", [pytest.param("inductor", marks=pytest.mark.compiler)])
def test_a_piece_that_writes_memory_that_two_inputs_share_is_refused(lane: Lane, compiler: str) -> None:
    whole = torch.randn(8, HIDDEN, device=lane.device.device)
    first, second = whole[:4], whole[2:6]

    def forward(x: torch.Tensor) -> torch.Tensor:
        first.add_(x)
        return second * 2

    with pytest.raises(CaptureError, match=r"writes memory that two of its inputs share.*breakable"):
        Shapes(lane, forward, [4], compiler)


PROGRAM = """
import torch
from torch._dynamo.utils import counters
from segue.backends.piecewise import PiecewiseBackend
from segue.device import get_device
from segue.memory.lane import Lane
x = torch.ones(4, 4)
with torch.no_grad():
    PiecewiseBackend(Lane(get_device("cpu")), "inductor").trace(lambda: torch.sin(x) + 1)
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
"""


@pytest.mark.compiler
@pytest.mark.slow
def test_what_inductor_made_is_found_again_by_the_next_process(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"} | {"SEGUE_CACHE": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)

    def run() -> list[str]:
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
        ).stdout.split()

    assert run() == ["0", "1"]
    assert any((tmp_path / "inductor").iterdir())
    assert run() == ["1", "0"]

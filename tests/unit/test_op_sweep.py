"""The cpu device against torch's own operator and module samples: what it records replays bit for bit as eager does, on
values it has not seen, and what it refuses it refuses because a recording could not repeat it.

The whole of `op_db` and `module_db` is under the marker `slow`; a varied selection runs always.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from segue.device import get_device
from segue.device.watch import HostReads
from segue.errors import CaptureError, HostReadError
from segue.memory.lane import Lane
from tests_support import record, replay

pytest.importorskip("expecttest", reason="torch's operator samples need it")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.common_modules import module_db

DTYPES = (torch.float32, torch.bfloat16, torch.int64)

COMMON = (
    "abs", "add", "addmm", "all", "amax", "any", "arange", "argmax", "argsort", "baddbmm", "bmm", "cat", "chunk", "clamp",
    "clone", "cos", "cumsum", "div", "einsum", "empty_like", "eq", "exp", "expand", "fill", "flatten", "full_like", "gather",
    "ge", "index_add", "index_copy", "index_put", "index_select", "isnan", "linspace", "log_softmax", "logical_and",
    "masked_fill", "matmul", "max", "maximum", "mean", "mm", "mul", "narrow", "neg", "new_zeros", "nn.functional.conv2d",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.group_norm", "nn.functional.interpolate",
    "nn.functional.layer_norm", "nn.functional.linear", "nn.functional.mse_loss", "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention", "nn.functional.silu", "ones_like", "permute", "pow", "repeat", "reshape",
    "rsqrt", "scatter", "scatter_add", "sigmoid", "softmax", "sort", "split", "stack", "sub", "sum", "tanh", "to", "topk",
    "transpose", "tril", "unbind", "unsqueeze", "var_mean", "where", "zeros_like",
)  # fmt: skip

NOT_JUDGED = {
    "empty": "its result has no defined values",
    "empty_like": "its result has no defined values",
    "empty_strided": "its result has no defined values",
    "empty_permuted": "its result has no defined values",
    "new_empty": "its result has no defined values",
    "new_empty_strided": "its result has no defined values",
    "nn.functional.max_unpool2d": "threads race where indices repeat: eager answers otherwise from call to call",
}

LAST_BITS = {
    "linalg.cond": "as linalg.svdvals",
    "linalg.eigvalsh": "as linalg.svdvals",
    "linalg.matrix_norm": "as linalg.svdvals",
    "linalg.norm": "as linalg.svdvals",
    "linalg.svdvals": "torch computes the vectors as well where it sees a dispatch mode, by another LAPACK routine",
    "norm": "as linalg.svdvals (the nuclear norm)",
    "nn.LinearCrossEntropyLoss": "its chunks of matrix products differ with the alignment of memory, in eager too",
}
"""compared within tolerance, and why"""

REFUSED = {
    HostReadError: {
        "aten._linalg_check_errors.default", "aten._local_scalar_dense.default", "aten._unique2.default",
        "aten.bincount.default", "aten.equal.default", "aten.index.Tensor", "aten.index_put.default",
        "aten.lift_fresh.default", "aten.linalg_lstsq.default", "aten.masked_select.default", "aten.nonzero.default",
        "aten.repeat_interleave.Tensor", "aten.unique_consecutive.default", "aten.unique_dim.default",
        "aten._ctc_loss.Tensor", "aten._ctc_loss.default", "tensor_split",
    },
    CaptureError: {
        "aten.resize_.default", "aten.resize_as_.default", "aten._to_sparse.default", "aten._to_sparse.sparse_dim", "sparse",
    },
}  # fmt: skip
"""what may be refused, by the operation that the error names: each reads data on the host, or has no fixed address"""


@dataclass
class Tally:
    right: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with a gap after each element of the last dimension."""
    if not tensor.dim():
        return tensor.clone()
    wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))
    return wide[..., ::2].copy_(tensor)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the last dimension outermost."""
    order = tuple(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"as it is": torch.clone, "apart": _apart, "turned": _turned}


def _judge(
    tally: Tally, name: str, lane: Lane, call: Callable[[Any], Any], arguments: Any, layout: str = "as it is"
) -> None:
    """Records `call(arguments)`, and replays it twice on other values beside eager on copies of them."""
    lay = LAYOUTS[layout]
    live = pytree.tree_map_only(torch.Tensor, lambda t: lay(t.detach()) if _is_strided(t) else t.clone(), arguments)

    def copy(value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda t: lay(t) if _is_strided(t) else t.clone(), value)

    try:
        with torch.no_grad(), _same_seed():
            if not _tensors(call(copy(live))):
                return
    except Exception:  # eager refuses the sample
        return
    try:
        recorded = record(lane, lambda: call(live))
    except CaptureError as error:
        _judge_refusal(tally, name, error)
        return
    except Exception as error:
        tally.wrong.append(f"{name}: capture raised {type(error).__name__}: {str(error)[:200]}")
        return
    for seed in (1, 2):
        try:
            with torch.no_grad(), _same_seed():
                for tensor in _tensors(live):
                    _refresh(tensor, seed)
                expected_arguments = copy(live)
                with HostReads(lambda what: None):  # torch's attention modules leave their fast path beside such a mode
                    expected = call(expected_arguments)
        except Exception:  # the new values are no valid input
            return
        try:
            lane.pool.fill_free_memory(0xFF)  # type: ignore[attr-defined]
            with _same_seed():
                got = replay(lane, recorded)
        except Exception as error:
            tally.wrong.append(f"{name}: replay raised {type(error).__name__}: {str(error)[:200]}")
            return
        is_close = any(name.startswith((f"{known}.", f"{known} ")) for known in LAST_BITS)
        if not _same((got, live), (expected, expected_arguments), is_close=is_close):
            tally.wrong.append(f"{name}: replay {seed} differs")
            return
    tally.right += 1


def _is_strided(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided


def _refresh(tensor: torch.Tensor, seed: int) -> None:
    """New values of the kind that are there: a rolled copy, so that indices stay indices."""
    if tensor.numel():
        tensor.copy_(torch.roll(tensor.clone(), seed))


@contextlib.contextmanager
def _same_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)  # as op_db's own operators do inside
        yield


def _same(got: Any, expected: Any, *, is_close: bool) -> bool:
    pairs = list(zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True))
    return all(_same_leaf(a, b, is_close=is_close) for a, b in pairs)


def _same_leaf(a: Any, b: Any, *, is_close: bool) -> bool:
    if not isinstance(b, torch.Tensor):
        return bool(a == b) or a != a
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype == torch.complex32:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if is_close:
        return torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def _judge_refusal(tally: Tally, name: str, error: CaptureError) -> None:
    what = "sparse" if "sparse or nested tensor" in str(error) else error.operation
    tally.refused[f"{type(error).__name__} {what}"] += 1
    if what not in REFUSED[type(error)]:
        tally.wrong.append(f"{name}: refused: {error}")


def _sweep_operators(names: tuple[str, ...] | None, most: int, layout: str = "as it is") -> Tally:
    tally = Tally()
    for info in op_db:
        if (names is not None and info.name not in names) or info.name in NOT_JUDGED:
            continue
        lane = Lane(get_device("cpu"))
        for dtype in DTYPES:
            if not info.supports_dtype(dtype, "cpu"):
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    samples = list(itertools.islice(info.sample_inputs("cpu", dtype, requires_grad=False), most))
                except Exception:
                    continue
                for index, sample in enumerate(samples):
                    arguments = (sample.input, sample.args, sample.kwargs)
                    name = f"{info.name}.{info.variant_test_name} {dtype} #{index}"
                    _judge(tally, name, lane, lambda a, f=info: f.op(a[0], *a[1], **a[2]), arguments, layout)
        lane.close()
    return tally


def _sweep_modules() -> Tally:
    tally = Tally()
    for info in module_db:
        lane = Lane(get_device("cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for training in (False, True):
                samples = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float32, requires_grad=False, training=training
                )
                for index, sample in enumerate(samples):
                    made, given = sample.constructor_input, sample.forward_input
                    if given is None:
                        continue
                    torch.manual_seed(0)
                    module = info.module_cls(*made.args, **made.kwargs).train(training)
                    name = f"{info.name} training={training} #{index}"
                    _judge(tally, name, lane, _module_call(module), (given.args, given.kwargs))
        lane.close()
    return tally


def _module_call(module: torch.nn.Module) -> Callable[[Any], Any]:
    """Calls the module; what it keeps (running statistics) starts anew each time, in place."""
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}

    def call(arguments: Any) -> Any:
        for name, buffer in module.named_buffers():
            buffer.copy_(kept[name])
        return module(*arguments[0], **arguments[1]), [b.clone() for b in module.buffers()]

    return call


def test_common_operators_replay_as_eager() -> None:
    tally = _sweep_operators(COMMON, most=4)
    assert not tally.wrong, "\n".join(tally.wrong[:20])
    assert tally.right > 900


@pytest.mark.slow
def test_all_operators_replay_as_eager() -> None:
    tally = _sweep_operators(None, most=400)
    assert not tally.wrong, "\n".join(tally.wrong[:50])
    assert tally.right > 29_000


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["apart", "turned"])
def test_all_operators_replay_as_eager_whatever_the_layout(layout: str) -> None:
    tally = _sweep_operators(None, most=20, layout=layout)
    assert not tally.wrong, "\n".join(tally.wrong[:50])
    assert tally.right > 9_000


@pytest.mark.slow
def test_all_modules_replay_as_eager() -> None:
    tally = _sweep_modules()
    assert not tally.wrong, "\n".join(tally.wrong[:50])
    assert tally.right > 800

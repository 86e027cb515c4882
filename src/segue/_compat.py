"""Every private torch or driver call the package makes, and what it knows of where objects lie in memory, each with the
versions it was read and tried on.

Nothing else in the package touches `torch._C` or the CUDA driver library, so a new torch release is checked here and
nowhere else. Functions are thin: no policy, no state beyond the cached driver handle.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch._C._dynamo.guards import set_is_in_mode_without_ignore_compile_internals as _note_modes_for_dynamo  # 2.11 - 2.13
from torch.nn.utils import parametrize as _parametrize  # 2.11 - 2.13
from torch.overrides import _get_current_function_mode_stack as _function_stack  # 2.11 - 2.13
from torch.utils import _python_dispatch  # 2.11 - 2.13
from torch.utils import _pytree as torch_pytree  # 2.11 - 2.13
from torch.utils._device import DeviceContext  # 2.11 - 2.13: `with torch.device(..)`, which is part of a call's key
from torch.utils._python_dispatch import TorchDispatchMode  # 2.11 - 2.13
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as _dispatch_stack

__all__ = ["TorchDispatchMode"]

_HAS_CUDA = torch.backends.cuda.is_built()
"""otherwise torch has stand-ins in the builtins' places"""


# -- tensors and storages (2.11 - 2.13) -------------------------------------------------------------------------------


def data_address(tensor: torch.Tensor) -> int:
    """The address of the first element, read without asking for write access."""
    return int(torch._C._data_address(tensor) + tensor.storage_offset() * tensor.itemsize)  # type: ignore[attr-defined]


def storage_handle(tensor: torch.Tensor) -> int:
    """An identity of the tensor's storage; re-used by the next storage unless a `storage_weakref` is held."""
    return int(tensor.untyped_storage()._cdata)


def storage_owners(tensor: torch.Tensor) -> int:
    """How many C++ references the storage has, less the one that asking takes."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - 1


def storage_bytes(tensor: torch.Tensor, address: int, nbytes: int) -> torch.Tensor:
    """`nbytes` bytes from `address` on of the tensor's storage, as a tensor over the same memory."""
    start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
        tensor.untyped_storage(), address - start, (nbytes,), (1,)
    )


@functools.lru_cache(maxsize=1)
def references_to_base() -> int:
    """What `sys.getrefcount` counts for a view's base that the view alone holds, seen through one local variable."""
    with torch.inference_mode(False):
        view = torch.empty(2)[:1]
    base = view._base
    return sys.getrefcount(base)


@functools.lru_cache(maxsize=1)
def references_to_item() -> int:
    """What `sys.getrefcount` counts for a tensor that one list alone holds, seen through that list, less the list's."""
    items = [torch.empty(0)]
    return sys.getrefcount(items[0]) - 1


def storage_weakref(tensor: torch.Tensor) -> Any:
    """Keeps the storage's identity from being re-used, and not its memory alive; has `expired()`."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def tensor_at(
    address: int, nbytes: int, dtype: torch.dtype, device: torch.device, size: tuple[int, ...], stride: tuple[int, ...]
) -> torch.Tensor:
    """A tensor over foreign memory: it owns nothing and its storage cannot be resized. CPU and CUDA."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, size, stride)


def tensor_handle(tensor: torch.Tensor | torch.Generator) -> int:
    """Where the C++ tensor (or generator) lies that the object holds; `torch.utils.swap_tensors` gives it another one."""
    return int(tensor._cdata)  # type: ignore[union-attr]


def dispatch_keys(tensor: torch.Tensor) -> int:
    """What the tensor is to the dispatcher: also whether it is conjugated or negated lazily."""
    return int(torch._C._dispatch_keys(tensor).raw_repr())


@functools.lru_cache(maxsize=1)
def tensor_layout() -> TensorLayout | None:
    """None where the places are not found, or objects move between threads (CPython without a GIL)."""
    if not has_gil():
        return None
    offset, size, stride = 12_345, (3, 7), (71, 10)
    with torch.inference_mode(False):
        tensor = torch.empty(1 << 15, dtype=torch.uint8, device="cpu").as_strided(size, stride, offset)
    storage = tensor.untyped_storage()
    found = (
        _find(id(tensor), type(tensor).__basicsize__, [tensor._cdata]),
        _find(tensor._cdata, 80, [storage._cdata]),
        _find(tensor._cdata, 168, [offset]),
        _find(tensor._cdata, 168, [2, *size, *[None] * (MOST_INLINE - 2), *stride]),
        _find(storage._cdata, 40, [storage.data_ptr()]),
        _find(tensor._cdata, 184, [dispatch_keys(tensor)]),
    )
    return None if None in found else TensorLayout(*found)  # type: ignore[arg-type]


class TensorLayout(NamedTuple):
    """At which byte a tensor's object holds its C++ tensor; that one its storage, offset, shape (the number of
    dimensions, then five sizes and five strides, or a pointer where there are more) and keys; and a storage its address."""

    cell: int
    storage: int
    offset: int
    shape: int
    data: int
    keys: int


MOST_INLINE = 5
"""dimensions whose sizes and strides a C++ tensor holds itself"""


def has_gil() -> bool:
    return getattr(sys, "_is_gil_enabled", lambda: True)() and not sysconfig.get_config_var("Py_GIL_DISABLED")


def _find(start: int, nbytes: int, values: list[int | None]) -> int | None:
    """Where these words stand one after the other, None being any."""
    words = words_at(start, nbytes)
    places = range(1, len(words) - len(values) + 1)
    return next((8 * at for at in places if all(v in (None, word) for word, v in zip(words[at:], values))), None)


def words_at(start: int, nbytes: int) -> list[int]:
    """What memory of this process holds."""
    return list((ctypes.c_int64 * (nbytes // 8)).from_address(start))


def forbid_data_access(tensor: torch.Tensor) -> None:
    """From now on `data_ptr`, numpy, DLPack, pickle and every writing kernel raise for this storage."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def tensor_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function of as many tensors that says whether each looks as one of these does (kind, dtype, device, sizes, strides,
    whether it requires grad, lazily conjugated or not) and no two are one object; never true by mistake. Keeps no tensor."""
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (ImportError, TypeError):
        return None
    return guards.check  # type: ignore[no-any-return]


# -- dispatch (2.11 - 2.13) -------------------------------------------------------------------------------------------


def has_kernel(operator_name: str, dispatch_key: str) -> bool:
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator_name, dispatch_key))
    except RuntimeError:  # TorchScript's own (prim::layout), of which the dispatcher does not know
        return False


def run_composite(overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a composite operation's C++ kernel, which calls other operations, as eager does. `OpOverload.decompose` would
    prefer Python decompositions, which differ from it and take long to import."""
    return overload._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


def never_compiled(function: F) -> F:
    """Dynamo runs `function`, and what it calls, as it is: handlers of modes are called from compiled code too."""
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

        set_code_exec_strategy(function.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    except (ImportError, TypeError):  # another version: at worst Dynamo reads them
        pass
    return function


def asking_frame(frame: FrameType) -> FrameType | None:
    """Of the function written in Python that asks function modes; `frame` is their handler's caller. None: it is one of
    torch's written in C++."""
    asking = frame.f_back if frame.f_code is _HANDLES else None
    while asking is not None and asking.f_code.co_name in _ASKING_FOR_OTHERS:
        asking = asking.f_back
    return asking


_HANDLES = torch.overrides.handle_torch_function.__code__
_ASKING_FOR_OTHERS = ("_unique_torch_function", "_unique_consecutive_torch_function")


def without_torch_function() -> Any:
    """A context in which torch functions ignore subclasses and function modes."""
    return torch._C.DisableTorchFunction()


def without_autocast() -> Any:
    """A context in which autocast casts nothing, whatever the caller has switched on."""
    return torch._C._DisableAutocast()


def without_modes(kind: type | None = None) -> contextlib.AbstractContextManager[None]:
    """Runs a block outside every dispatch mode, and outside the function modes from the innermost one of `kind` on.

    Function modes below it are the caller's own (`torch.device("cuda")` is one) and stay. A body that is compiled must
    not meet a mode of ours: Dynamo would skip it for good.
    """
    if not torch._C._len_torch_dispatch_stack() and (kind is None or not torch._C._len_torch_function_stack()):
        return _NOTHING
    return _leaving_modes(kind)


_NOTHING = contextlib.nullcontext()


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transforms, _forward_ad = torch._C._functorch.peek_interpreter_stack, torch.autograd.forward_ad


def is_observed() -> bool:
    """Whether a mode, a transform, a forward-mode level or a cache of parametrized weights sees what a replay passes by."""
    if _dispatch_modes() or _transforms() or _parametrize._cache_enabled or _forward_ad._current_level >= 0:
        return True
    return _function_modes() > 0 and any([type(mode) is not DeviceContext for mode in _function_stack()])


class keeping_mode_stacks:
    """After the block this thread is in the modes that it was in before, whatever interrupted those that enter and leave
    them: a handler of a signal that raises, or the end of the stack."""

    def __enter__(self) -> None:
        self._dispatch, self._function = _dispatch_stack(), _function_stack()
        self._flags = [getattr(_python_dispatch, name) for name in _MODE_FLAGS]
        self._keys = [torch._C._dispatch_tls_is_dispatch_key_included(key) for key in _MODE_KEYS]
        self._has_grad = is_grad_enabled()
        self._caches_casts = torch.is_autocast_cache_enabled()

    def __exit__(self, kind: Any = None, error: BaseException | None = None, *_: Any) -> None:
        while _dispatch_modes() > len(self._dispatch):
            mode = torch._C._get_dispatch_stack_at(_dispatch_modes() - 1)
            try:
                mode.__exit__(None, None, None)
            except IndexError:  # it was interrupted on its way out
                torch._C._pop_torch_dispatch_stack(getattr(mode, "_mode_key", None))
        while _function_modes() > len(self._function):
            torch._C._pop_torch_function_stack()
        for mode in self._dispatch[_dispatch_modes() :]:
            torch._C._push_on_torch_dispatch_stack(mode)
        for mode in self._function[_function_modes() :]:
            torch._C._push_on_torch_function_stack(mode)
        if error is not None:
            end_grad_modes(error, self._has_grad)
            for key, is_included in zip(_MODE_KEYS, self._keys):  # which blocks of inference mode put back too
                torch._C._dispatch_tls_set_dispatch_key_included(key, is_included)
            for name, flag in zip(_MODE_FLAGS, self._flags):
                setattr(_python_dispatch, name, flag)
            _note_modes_for_dynamo(self._flags[-1])
        if torch.is_autocast_cache_enabled() != self._caches_casts:
            torch.set_autocast_cache_enabled(self._caches_casts)


_MODE_KEYS = torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot
_MODE_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
"""what torch notes of the modes that were entered, in its module"""


class _leaving_modes(keeping_mode_stacks):
    """See `without_modes`. torch's own `_disable_current_modes` is a generator: kept from ending, it would end, and enter
    these modes again, at some later time."""

    def __init__(self, kind: type | None) -> None:
        self._kind = kind

    def __enter__(self) -> None:
        super().__enter__()
        kind = self._kind
        ours = [i for i, mode in enumerate(self._function) if kind is not None and isinstance(mode, kind)]
        try:
            while ours and _function_modes() > ours[-1]:
                torch._C._pop_torch_function_stack()
            while _dispatch_modes():
                torch._C._pop_torch_dispatch_stack(None)
        except BaseException:
            self.__exit__()
            raise


def is_entered(mode: Any) -> bool:
    """Whether this thread is in a dispatch mode or a function mode."""
    return id(mode) in [id(entered) for entered in (*_dispatch_stack(), *_function_stack())]


inference_guard: Any = torch._C._InferenceMode
"""`torch.inference_mode` without Python, so that no signal's handler interrupts it as it begins or ends (2.11 - 2.13)"""
is_grad_enabled: Callable[[], bool] = torch.is_grad_enabled


def end_grad_modes(error: BaseException, has_grad: bool) -> None:
    """Where `error` interrupted one of torch's blocks of grad mode or inference mode as it began or ended, that one has
    ended, and grad mode is `has_grad`."""
    trail = error.__traceback__
    while trail is not None:
        frame, trail = trail.tb_frame, trail.tb_next
        if frame.f_code.co_filename == _GRAD_BLOCKS:
            guard = getattr(frame.f_locals.get("self"), "_inference_mode_context", None)
            if guard is not None:
                guard.__exit__(None, None, None)
            torch._C._set_grad_enabled(has_grad)


_GRAD_BLOCKS = torch.no_grad.__enter__.__code__.co_filename


def num_modes() -> tuple[int, int]:
    """How many function modes and dispatch modes this thread is in."""
    return _function_modes(), _dispatch_modes()


def has_function_modes() -> bool:
    """Whether a function mode is active in this thread (`torch.device("cuda")` as a context is one)."""
    return _function_modes() > 0


# what torch's own functions of similar names answer with, without a Python frame: all are asked at each call
(
    is_any_autocast_enabled, is_deterministic, matmul_precision, allows_flash, allows_memory_efficient, allows_math,
    allows_cudnn, uses_cudnn, cudnn_allows_tf32, cudnn_tries, cudnn_is_deterministic, reduces_in_fp16, reduces_in_bf16,
    adds_in_fp16, uses_mkldnn, fp32_precision,
) = [getattr(torch._C, name) for name in (
    "_is_any_autocast_enabled", "_get_deterministic_algorithms", "_get_float32_matmul_precision", "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled", "_get_cudnn_enabled",
    "_get_cudnn_allow_tf32", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
    "_get_cublas_allow_fp16_reduced_precision_reduction", "_get_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation", "_get_mkldnn_enabled", "_get_fp32_precision_getter",
)]  # fmt: skip
is_stream_capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing if _HAS_CUDA else bool
"""whether the current CUDA stream is being captured"""


def pytree_node(kind: type) -> tuple[Callable[[Any], tuple[list[Any], Any]], Callable[[Any, Any], Any]] | None:
    """How torch's registry takes a container apart and builds it again, or None for a leaf."""
    node = torch_pytree.SUPPORTED_NODES.get(kind)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


class AllocationWatch:
    """Inside, every allocation of ordinary memory by this process's tensors is noted by torch's profiler (2.11 - 2.13);
    afterwards `peak_bytes` is the most that was held at once, above what there was at the beginning."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.peak_bytes = 0

    def __enter__(self) -> AllocationWatch:
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        results: Any = self._profile.profiler.kineto_results  # type: ignore[union-attr]
        held = 0
        for event in sorted((e for e in results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()):
            held += event.nbytes()
            self.peak_bytes = max(self.peak_bytes, held)


# -- torch.compile (2.11 - 2.13) ---------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


def read_while_compiling(function: F) -> F:
    """`torch.compiler.assume_constant_result`, which would import Dynamo: where a function of no arguments is compiled
    into another one, it is called then, and its answer is a constant of that program."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def mark_varying(tensor: torch.Tensor, dimension: int) -> None:
    """Says to compilers that the size along `dimension` depends on the captured shape. It is
    `torch._dynamo.maybe_mark_dynamic`, without importing Dynamo."""
    tensor._dynamo_weak_dynamic_indices = {dimension}  # type: ignore[attr-defined]
    tensor._has_dynamo_dim_marking = True  # type: ignore[attr-defined]  # asked first, since 2.13


def tracing_attempt() -> Any:
    """An object that stands for the present attempt of Dynamo's to trace a function; it starts over now and then."""
    return torch._guards.TracingContext.try_get()


def inductor(graph: torch.fx.GraphModule, inputs: list[Any], folder: Path) -> Callable[..., Any]:
    """Compiles one piece of a graph that Dynamo is tracing. The pieces share its symbols, and nothing else: each has a
    tracing context of its own, since AOTAutograd leaves in it what belongs to one graph.

    `folder` keeps what was compiled. That is a setting of the process: it stays so, unless the user made it.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    if os.environ.get("TORCHINDUCTOR_CACHE_DIR") in (None, default_cache_dir()):  # torch sets it to its own default
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    with torch._guards.tracing(torch._guards.TracingContext(torch._guards.TracingContext.get().fake_mode)):
        compiled: Any = compile_fx(graph, inputs)
    return compiled  # type: ignore[no-any-return]


# -- the CUDA caching allocator and generator (2.11 - 2.13) -----------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _snapshot_options() -> dict[str, bool]:
    accepts = inspect.signature(torch.cuda.memory_snapshot).parameters
    return {"include_traces": False} if "include_traces" in accepts else {}


def pool_snapshot(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """The allocator's segments of one private pool, each with its blocks.

    torch 2.11 drops a reference to each number of the pool's id that it does not own (a crash once ids pass 256, where
    numbers are no longer shared), so one is lent for the call, and taken back where it was not eaten.
    """
    high, low = pool
    before = sys.getrefcount(high), sys.getrefcount(low)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(high))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(low))
    segments = torch.cuda.memory_snapshot(mempool_id=pool, **_snapshot_options())  # type: ignore[no-untyped-call]
    after = sys.getrefcount(high), sys.getrefcount(low)
    if after[0] > before[0]:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(high))
    if after[1] > before[1]:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(low))
    return [s for s in segments if tuple(s["segment_pool_id"]) == pool]


def stop_routing_to_pool(device: int, pool: tuple[int, int]) -> None:
    """After a capture that failed: the allocator no longer sends this device's allocations to the pool (2.11)."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:  # the capture never came to allocate from the pool, so it holds no share of it either
        return
    torch._C._cuda_releasePool(device, pool)


@contextlib.contextmanager
def routing_to_pool(device: int, pool: tuple[int, int]) -> Iterator[None]:
    """What this thread allocates on the device inside comes from the pool, which no capture may use meanwhile. It is what
    `torch.cuda.use_mem_pool` does, which takes pools of another kind (2.11 - 2.13)."""
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def set_stream_builtin() -> Any:
    """The builtin behind `torch.cuda.set_stream` and `torch.cuda.stream`; None where torch has no CUDA."""
    return getattr(torch._C, "_cuda_setStream", None)


current_raw_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if _HAS_CUDA else int
"""the driver's handle of a device's current stream; `torch.cuda.current_stream` makes an object, ten times slower"""

current_device: Callable[[], int] = torch._C._cuda_getDevice if _HAS_CUDA else int
"""the index of the current device, in a process that has used CUDA"""

"""Watching a forward pass operation by operation.

`OperationMode` is a dispatch mode that shows its subclass the stream of *primitive* operations: composite ones are
decomposed first, so that grad, no_grad and inference mode give one stream. `HostReads` is a function mode for the cpu
device, where `tolist`, `numpy`, `repr`, `apply_` and their like read tensor data without passing the dispatcher.

`user_line` names the caller: the innermost frame that belongs neither to Python's library, nor to torch, nor to this
package. It walks frames with a dictionary of code objects already judged (half a microsecond), so it can always be on.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    TracebackType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from segue._compat import TorchDispatchMode, asking_frame, is_entered, never_compiled, run_composite, without_torch_function
from segue.device.operations import Operation, operation, tensors

Location = tuple[CodeType, int]

_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")
_SEGUE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_PACKAGES = ("site-packages", "dist-packages")
_skip: dict[CodeType, bool] = {}


def user_line() -> Location | None:
    """Code object and line of the innermost frame outside Python, torch and this package; format it with `describe_line`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        skip = _skip.get(code)
        if skip is None:
            skip = _skip[code] = is_library(code.co_filename)
        if not skip:
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def is_library(filename: str) -> bool:
    """Python, torch and the recording machinery are not the user's; model code, ours included, is what one wants to see."""
    if filename.startswith(_SEGUE):
        return not filename[len(_SEGUE) :].startswith(("llm", "diffusion"))
    if filename.startswith(_PYTHON):
        return filename.startswith(_TORCH) or not filename[len(_PYTHON) :].startswith(_PACKAGES)
    return filename.startswith(("<frozen", "<eval_with_key>", _TORCH))


def describe_line(location: Location | None) -> str | None:
    if location is None:
        return None
    code, line = location
    return f"{code.co_filename}:{line} in {code.co_name}"


def error_line(error: BaseException) -> str | None:
    """The innermost user frame of a traceback."""
    found: Location | None = None
    trail: TracebackType | None = error.__traceback__
    while trail is not None:
        code = trail.tb_frame.f_code
        if not is_library(code.co_filename):
            found = code, trail.tb_lineno
        trail = trail.tb_next
    return describe_line(found)


class OperationMode(TorchDispatchMode):
    """A dispatch mode over primitive operations; subclasses override `handle`, and `handle_opaque` for operators that
    run a function inside (`torch.cond`, `flex_attention`), and `handle_strange`. `kind` is the device's: what is primitive
    depends on it."""

    supports_higher_order_operators = True

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __exit__(self, *exception: Any) -> None:
        if is_entered(self):  # otherwise who was interrupted has left it already
            super().__exit__(*exception)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Yes: under other modes Dynamo compiles nothing, and skips for good what it was to compile (`flex_attention`, which
        compiles itself)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: wrapping `__torch_dispatch__` would import Dynamo, a second of start-up, and nothing here is compiled."""
        return False

    @never_compiled
    def __torch_dispatch__(  # type: ignore[override]
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return self.handle_opaque(func, args, kwargs)
        strange = kind_with_own_operations(types)
        if strange is not None:  # what it does for a composite operation may be that operation
            return self.handle_strange(func, strange, args, kwargs)
        op = operation(func)
        if self._kind in op.composite_on and not _takes_nested(args):
            with self, without_torch_function():
                return run_composite(func, args, kwargs)
        return self.handle(op, args, kwargs)

    def handle(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return op.overload(*args, **kwargs)

    def handle_strange(self, func: OpOverload, kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that is told a kind of tensor with operations of its own, which run unwatched."""
        return func(*args, **kwargs)

    def handle_opaque(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def kind_with_own_operations(types: Any) -> type | None:
    """Among kinds of tensors one that dispatches by itself: a nested tensor, a quantized weight, a fake tensor."""
    return next((t for t in types if t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__), None)


def strange_text(operation: str, kind: type) -> str:
    return (
        f"{operation} takes a {kind.__name__}, a kind of tensor with operations of its own, which a recording does not see: "
        "unpack it into plain tensors, or put what uses it behind @segue.eager_on_graph."
    )


def _takes_nested(args: tuple[Any, ...]) -> bool:
    return any([t.is_nested for t in tensors(args)])


GRAD = "Tensor.grad"
_SPLIT = "tensor_split"  # reads where it is told the places by a tensor


@functools.lru_cache(maxsize=1)
def _reading_functions() -> dict[Any, str]:
    names = (
        "tolist", "numpy", "__array__", "cpu", "__repr__", "__format__", "__dlpack__", "__deepcopy__", "__reduce_ex__",
        "apply_", "map_", "map2_",
    )  # fmt: skip
    kinds = torch.Tensor.__mro__[:2]
    reading: dict[Any, str] = {getattr(kind, n): f"Tensor.{n}" for kind in kinds for n in names if hasattr(kind, n)}
    reading |= {func.__code__: name for func, name in reading.items() if isinstance(func, FunctionType)}
    reading[vars(torch.Tensor.__mro__[1])["grad"].__get__] = GRAD
    return reading | {torch.tensor_split: _SPLIT, torch.Tensor.tensor_split: _SPLIT}


_BUILT_IN = frozenset((
    BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType, MethodWrapperType, OpOverload, OpOverloadPacket,
))  # fmt: skip
"""what torch's functions are that are not written in Python"""


def _asking(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, asking: FrameType | None
) -> tuple[Any, tuple[Any, ...], dict[str, Any] | None]:
    """What runs on where a function asks. It tells a mode what its name holds, which is a wrapper that has called it already
    where somebody has put one there: to call that would wrap twice. So here is what asks in its place, as it was called."""
    if asking is None:
        name = None if _is_torchs(func) else next((n for n, held in vars(torch.Tensor).items() if held is func), None)
        return (func if name is None else getattr(torch.Tensor.__mro__[1], name, func)), args, kwargs
    code = asking.f_code
    is_torchs = _is_torchs(func)  # such a one may hold what asks for it (`torch.unique`, which dispatches by a flag)
    own = None if is_torchs and func.__code__ is not code else _inside(func, code)
    if own is None:
        named = asking.f_globals.get(code.co_name), vars(torch.Tensor).get(code.co_name)
        is_named = any([held is func for held in named])
        if code.co_freevars or (not is_named and (is_torchs or not code.co_filename.startswith(_TORCH))):
            return func, args, kwargs
        own = FunctionType(code, asking.f_globals, code.co_name)
    called = _as_called(asking, args, kwargs or {})
    return (func, args, kwargs) if called is None else (own, *called)


_MOST_HELD = 64
"""objects to look at for what a wrapper wraps"""


def _inside(func: Any, code: CodeType) -> FunctionType | None:
    """The function of this code that `func` is, or wraps."""
    found = [func]
    for held in found:
        if isinstance(held, FunctionType):
            if held.__code__ is code:
                return held
            cells = [cell.cell_contents for cell in held.__closure__ or () if cell != CellType()]
            inner = [*cells, *vars(held).values(), *(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values()]
        elif isinstance(held, (functools.partial, functools.partialmethod)):
            inner = [held.func]
        elif isinstance(held, (MethodType, staticmethod, classmethod)):
            inner = [held.__func__]
        else:
            inner = list(getattr(held, "__dict__", {}).values())
        found += [x for x in inner if callable(x) and not isinstance(x, type)][: _MOST_HELD - len(found)]
    return None


def _as_called(
    asking: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a running function was called with: what its parameters hold, where its code never changes them, else what it
    tells that a mode shall call it with. None where the two contradict each other, or neither says it."""
    code, held = asking.f_code, asking.f_locals
    changed, names = _changed(code), code.co_varnames
    num, last = code.co_argcount, code.co_argcount + code.co_kwonlyargcount
    has_more = bool(code.co_flags & inspect.CO_VARARGS)
    told = dict(zip(names[:num], args)) | {name: value for name, value in kwargs.items() if name in names[:last]}
    known = {name: held[name] for name in names[:last] if name not in changed and name in held}
    more = args[num:]
    if has_more and names[last] not in changed and names[last] in held:
        more = held[names[last]]
    others = {name: value for name, value in kwargs.items() if name not in told}
    if len(known) < last or others:
        if any([told[name] is not value for name, value in known.items() if name in told]):
            return None
        known = told | known
    takes_others = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    if len(known) < last or (more and not has_more) or (others and not takes_others):
        return None
    return (*[known[name] for name in names[:num]], *more), {name: known[name] for name in names[num:last]} | others


@functools.lru_cache(maxsize=256)
def _changed(code: CodeType) -> frozenset[Any]:
    """The names that code, or what is defined in it, binds or unbinds."""
    found: set[Any] = set()
    for step in dis.get_instructions(code):
        if step.opname.startswith(("STORE_FAST", "DELETE_FAST", "STORE_DEREF", "DELETE_DEREF")):
            found.update(step.argval if isinstance(step.argval, tuple) else (step.argval,))
    inner = [part for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(found.union(*[_changed(part) for part in inner]))


def _is_torchs(func: Any) -> bool:
    code = getattr(func, "__code__", None)
    return isinstance(code, CodeType) and code.co_filename.startswith(_TORCH)


class HostReads(TorchFunctionMode):
    """Tells `on_read(name)` of every Python-level read of tensor data, and of a tensor's `grad`; the callback may raise to
    refuse it."""

    def __init__(self, on_read: Callable[[str], None]) -> None:
        super().__init__()
        self._on_read = on_read
        self._names = _reading_functions()

    def __exit__(self, *exception: Any) -> None:
        if is_entered(self):
            super().__exit__(*exception)

    @never_compiled
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        key = func
        if type(func) not in _BUILT_IN and not torch.compiler.is_compiling():  # Dynamo, which reads this, knows no frames
            asking = asking_frame(sys._getframe(1))
            func, args, kwargs = _asking(func, args, kwargs, asking)
            key = getattr(func, "__code__", func)
        name = self._names.get(key)
        if name is not None and (name != _SPLIT or any(isinstance(a, torch.Tensor) for a in args[1:])):
            self._on_read(name)
        return func(*args, **(kwargs or {}))

"""A graph of Dynamo's as pieces: split points by themselves, neighbouring ones together, and what lies between compiled.

A piece is compiled alone, and its compiler takes each tensor that comes in for memory of its own. So a view and what it is a
view of must not both come in where one of them is written: views are made again in each piece that reads them, from the
tensor that has the memory, and a result of a writing operation is the tensor that was written. Where two inputs share
memory all the same, a piece that writes there is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from segue._compat import storage_handle
from segue.backends.split import SplitPoints, split_point
from segue.errors import CaptureError

Program = Callable[..., Any]
CompilePiece = Callable[[GraphModule, str], Program]

_VIEWS = frozenset(
    (
        "as_strided", "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "movedim", "narrow", "permute",
        "real", "reshape", "select", "split", "squeeze", "swapaxes", "t", "tensor_split", "transpose", "unbind", "unflatten",
        "unfold", "unsqueeze", "view", "view_as",
    )
)  # fmt: skip
_INPLACE = frozenset(("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "iand", "ior", "ixor"))


def split(graph: GraphModule, points: SplitPoints, compile_piece: CompilePiece) -> tuple[Program, int]:
    """The graph as a program, and how many pieces were compiled.

    Raises:
        CaptureError: the graph does not hold the breaks that were learnt, or a piece is refused.
    """
    from torch.fx.passes.split_module import split_module

    found = [node.args[0] for node in graph.graph.nodes if node.target is split_point]
    if found != list(range(len(points))):
        raise CaptureError(f"the compiler met {len(found)} breaks, where the eager run met {len(points)}")
    piece_of = _pieces(graph.graph)
    _localize_views(graph.graph, piece_of)
    whole = split_module(graph, graph, piece_of.__getitem__, keep_original_order=True)
    num_compiled = 0
    for name, piece in list(whole.named_children()):
        assert isinstance(piece, GraphModule)
        calls = [node for node in piece.graph.nodes if node.target is split_point]
        if calls:
            for node in calls:
                node.target, node.args = points.calling(node.args[0]), node.args[1:]
            piece.recompile()
            continue
        program = compile_piece(piece, f"piece {num_compiled}")
        num_compiled += 1
        delattr(whole, name)
        setattr(whole, name, program)
    return whole.forward, num_compiled


def _pieces(graph: Graph) -> dict[Node, int]:
    """The number of each node's piece; what takes a split point's results apart belongs to it."""
    piece_of: dict[Node, int] = {}
    points: set[Node] = set()
    current, is_split = 0, False
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_part = node.target is operator.getitem and node.args[0] in points
        is_point = node.target is split_point or is_part
        if is_point:
            points.add(node)
        if is_point != is_split:
            current, is_split = current + 1, is_point
        piece_of[node] = current
    return piece_of


def _localize_views(graph: Graph, piece_of: dict[Node, int]) -> None:
    """Each piece makes the views that it reads. Backwards, so that a copy's own input is looked at after it."""
    split_pieces = {piece_of[node] for node in graph.nodes if node.target is split_point}
    for node in reversed(list(graph.nodes)):
        if node.op not in ("call_function", "call_method"):
            continue
        owner = _written(node) if not _is_view(node) else None
        if owner is None and not _is_view(node):
            continue
        copies: dict[int, Node] = {}
        for user in sorted(node.users, key=list(graph.nodes).index):
            piece = piece_of.get(user)
            if piece is None or piece == piece_of[node] or piece in split_pieces:
                continue
            if owner is not None:
                user.replace_input_with(node, owner)
                continue
            if piece not in copies:
                with graph.inserting_before(user):
                    copies[piece] = graph.node_copy(node)
                piece_of[copies[piece]] = piece
            user.replace_input_with(node, copies[piece])
    graph.lint()


def _is_view(node: Node) -> bool:
    """Whether the node makes other views of an input's memory, or reads a shape, and nothing else."""
    if isinstance(node.meta.get("example_value"), torch.Size):
        return True
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, Node)
        value = source.meta.get("example_value")
        is_piece = isinstance(value, (tuple, list)) and not isinstance(value, torch.Size)
        return _is_view(source) if is_piece else _shares(node, source)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    source = node.args[0] if node.args else None
    return name in _VIEWS and isinstance(source, Node) and _shares(node, source)


def _written(node: Node) -> Node | None:
    """The input that the node wrote and returned, None for any other node."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not _shares(node, source) or node.target is operator.getitem:
        return None
    made, given = node.meta["example_value"], source.meta["example_value"]
    return source if _geometry(made) == _geometry(given) else None


def _shares(node: Node, source: Node) -> bool:
    made = list(_handles(node))
    return bool(made) and all(handle in set(_handles(source)) for handle in made)


def _handles(node: Node) -> Iterator[int]:
    value = node.meta.get("example_value")
    for tensor in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
            yield storage_handle(tensor)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, str(tensor.shape), str(tensor.stride()), str(tensor.storage_offset())


def refuse_shared_inputs(piece: GraphModule, name: str) -> None:
    """
    Raises:
        CaptureError: the piece writes memory that two of its inputs share.
    """
    owners: dict[int, list[str]] = {}
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            for handle in _handles(node):
                owners.setdefault(handle, []).append(node.name)
    shared = {handle: names for handle, names in owners.items() if len(names) > 1}
    for node in piece.graph.nodes if shared else ():
        for source in _targets(node):
            for handle in _handles(source):
                if handle in shared:
                    raise CaptureError(
                        f"{name} of the pass writes memory that two of its inputs share ({', '.join(shared[handle])}), "
                        "which its compiler would take for two: use compiler='eager' or backend='breakable'",
                        operation=str(node.target),
                    )


def _targets(node: Node) -> list[Node]:
    """The inputs that a node writes."""
    if node.op not in ("call_function", "call_method"):
        return []
    schema = getattr(getattr(node.target, "default", node.target), "_schema", None)
    if schema is not None:
        arguments = zip(schema.arguments, node.args)
        found = [value for argument, value in arguments if argument.alias_info is not None and argument.alias_info.is_write]
    else:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        is_inplace = name in _INPLACE or (name.endswith("_") and not name.endswith("__"))
        found = [node.args[0]] if is_inplace and node.args else []
    return [value for value in (*found, node.kwargs.get("out")) if isinstance(value, Node)]

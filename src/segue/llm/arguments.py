"""What callers hand to the engine, checked before anything is queued: one line each, naming the argument."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from segue.llm.sampling_params import SamplingParams

Prompt = str | Sequence[int]


def check_type(name: str, value: object, kind: type) -> None:
    """Raises TypeError where `value` is no `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a {kind.__name__}")


def check_text(text: str) -> None:
    """Raises ValueError for a str that no encoding can write, as undecodable bytes of a command line become."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not valid text: character {error.start} is half a surrogate pair") from None


def check_messages(messages: object) -> list[dict[str, Any]]:
    """A conversation as a list. Raises TypeError where it is none, ValueError where it is empty."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(f"messages is a {type(messages).__name__}; it must be a list of dicts with role and content")
    found = list(messages)
    if not found:
        raise ValueError("the conversation is empty: give at least one message")
    for message in found:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise TypeError("each message must be a dict with role and content")
        content = message["content"]
        if not isinstance(content, (str, list, tuple)) and not (content is None and message.get("tool_calls")):
            raise TypeError(f"the content of a message is {content!r:.80}; it must be text")
    return found


def prompt_ids(prompt: object) -> list[int]:
    """Token ids of a prompt that is no text."""
    try:
        if isinstance(prompt, (set, frozenset, Mapping)):  # without an order that means something
            raise TypeError
        items = list(prompt)  # type: ignore[call-overload]
        if not all(map(_is_id, items)):
            raise TypeError
        return [operator.index(i) for i in items]
    except TypeError:
        kind = f"{prompt.dtype} {type(prompt).__name__}" if hasattr(prompt, "dtype") else type(prompt).__name__
        if isinstance(prompt, (list, tuple)):
            kind += f" of {type(next(i for i in prompt if not _is_id(i))).__name__}"
        raise TypeError(f"a prompt is text or a sequence of token ids (integers), not {kind}") from None


def _is_id(item: object) -> bool:
    return hasattr(item, "__index__") and not isinstance(item, bool)


def many_prompts(prompts: object) -> list[Any]:
    """One prompt or several, as several."""
    if isinstance(prompts, str):
        return [prompts]
    is_number = getattr(prompts, "ndim", None) == 0  # an array without a dimension
    if isinstance(prompts, (bytes, Mapping, set, frozenset)) or is_number or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is a {type(prompts).__name__}; it must be text, token ids, or a list of those")
    found = list(prompts)
    is_one = bool(found) and (isinstance(found[0], Integral) or getattr(found[0], "ndim", None) == 0)  # an array of ids
    return [prompts if hasattr(prompts, "dtype") else found] if is_one else found


def params_of_each(params: object, count: int) -> list[Any]:
    """Sampling parameters for each of `count` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or isinstance(params, (str, bytes)):
        check_type("params", params, SamplingParams)
    each = list(params)  # type: ignore[call-overload]
    if len(each) != count:
        raise ValueError(f"{count} prompts came with {len(each)} sampling parameters: pass one, or one a prompt")
    return each

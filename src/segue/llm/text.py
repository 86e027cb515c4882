"""From token ids to text, piece by piece, as they come.

A token is not a piece of text: a character may lie in several tokens (emoji, Chinese), a decoder may strip or add a
space depending on the neighbour, and a stop string may begin in one token and end three tokens later. So a piece is
released only when nothing that follows can change it:

- Decoding runs over a window that starts one released group of tokens before the new ones, so that the decoder sees a
  neighbour; what is new is the difference to the window's part that was decoded before.
- A run of U+FFFD at the end may be the beginning of a character: it is held back until a later token settles it.
- Text that may be the beginning of a stop string is held back until it is one, or cannot be one any more.

The pieces joined are the decode of all ids, cut before the first stop string. (Where tokens stand for single bytes, a run of
them that ends inside a character decodes to U+FFFD throughout; whole characters of it are out by then.) Clean-up of
spaces, which some old tokenizers apply on top, is off: it changes what was said.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    @property
    def all_special_ids(self) -> list[int]: ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ..., **kwargs: Any) -> str | list[str]: ...


class IncrementalDetokenizer:
    """The text of one request: `push` each token, `finish` at the end, and join what they return.

    `stopped_by` names the stop string that was found, None before; after it nothing more is released.
    """

    def __init__(self, tokenizer: Detokenizer, stop: Iterable[str] = (), *, skip_special_tokens: bool = True) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._skip_special_tokens = skip_special_tokens
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._num_context = 0  # ids at the window's beginning whose text was settled before
        self._settled_length = 0  # characters of the window's text that were settled
        self._held = ""  # settled text that may begin a stop string
        self._released: list[str] = []

    @property
    def text(self) -> str:
        """All that was released so far."""
        return "".join(self._released)

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text that is certain now, often empty."""
        if self.stopped_by is not None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        return self._release(self._settle(is_final=False), is_final=False)

    def finish(self) -> str:
        """No more tokens come: returns what was held back."""
        if self.stopped_by is not None:
            return ""
        return self._release(self._settle(is_final=True), is_final=True)

    def _settle(self, *, is_final: bool) -> str:
        """The part of the window's text that became certain."""
        text = self._decode(self._window)
        certain = text if is_final else text.rstrip(_REPLACEMENT)
        new = certain[self._settled_length :]
        if len(certain) == len(text) and len(self._window) > self._num_context:
            self._move_window()
        else:
            self._settled_length = max(self._settled_length, len(certain))
        return new

    def _move_window(self) -> None:
        """All of the window's text is certain: keep its newest group of tokens as context for what follows."""
        window = self._window[self._num_context :]
        settled_length = len(self._decode(window))  # which may raise: then nothing has changed
        self._window, self._num_context, self._settled_length = window, len(window), settled_length

    def _release(self, new: str, *, is_final: bool) -> str:
        text = self._held + new
        found = [(text.index(stop), stop) for stop in self._stop if stop in text]
        if found:
            end, self.stopped_by = min(found)
            self._held = ""
        else:
            end = len(text) if is_final else len(text) - self._num_possible(text)
            self._held = text[end:]
        if end:
            self._released.append(text[:end])
        return text[:end]

    def _num_possible(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, self._skip_special_tokens, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

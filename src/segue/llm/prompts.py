"""Prompts and conversations as token ids that an engine can run, or a ValueError that says what is wrong with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from segue.llm.arguments import Prompt, check_messages, check_text, prompt_ids


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int, max_context: int, longest: int) -> list[int]:
    """Token ids of a prompt, which leave room for output in a context of `max_context`; the model's own holds `longest`."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("this model came without a tokenizer: pass token ids, or tokenizer=...")
        check_text(prompt)
        ids = list(tokenizer(prompt, verbose=False).input_ids)  # the length is checked here, not warned about
    else:
        ids = prompt_ids(prompt)
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    outside = next((i for i in ids if not 0 <= i < vocab_size), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is outside the vocabulary of {vocab_size}")
    if len(ids) >= max_context:
        raise ValueError(
            f"the prompt has {len(ids)} tokens, and the context holds {max_context} with the output: "
            + ("shorten it, or raise max_context" if max_context < longest else "shorten it (the model takes no more)")
        )
    return ids


def chat_ids(messages: Sequence[dict[str, str]], tokenizer: Any) -> list[int]:
    """Token ids of a conversation in the tokenizer's chat template, ready for the assistant's turn."""
    messages = check_messages(messages)
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise ValueError("this model has no chat template: use generate() with plain text")
    try:
        text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the checkpoint's, and raises what it likes
        raise ValueError(f"the model's chat template refuses the messages: {' '.join(str(error).split())}") from error
    check_text(text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

"""Streamed text against the decode of the whole, for real and for awkward tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.llm.text import IncrementalDetokenizer

TEXTS = [
    "Hello, world!",
    "日本語のテキスト",
    "你好，世界。",
    "👩‍👩‍👧‍👦 family 🇩🇪",
    "naïve café — “quotes”",
    "a\n\n\tb   c",
    "🤖🤖",
    "x�y",
]
relaxed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def whole(tokenizer: Any, ids: list[int], **options: Any) -> str:
    options = {"skip_special_tokens": True} | options
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False, **options))


def stream(tokenizer: Any, ids: list[int], **options: Any) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert detokenizer.text == "".join(pieces)
    return pieces


@relaxed
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_random_ids_give_the_decode_of_all(smollm2_tokenizer: Any, ids: list[int]) -> None:
    assert "".join(stream(smollm2_tokenizer, ids)) == whole(smollm2_tokenizer, ids)
    shown = {"skip_special_tokens": False}
    assert "".join(stream(smollm2_tokenizer, ids, **shown)) == whole(smollm2_tokenizer, ids, **shown)


@relaxed
@given(data=st.data())
def test_broken_bytes_give_the_decode_of_all(smollm2_tokenizer: Any, data: st.DataObject) -> None:
    """Ids of single bytes, most of which are no UTF-8, between those of whole texts."""
    single = [i for i in range(17, 300) if len(smollm2_tokenizer.convert_ids_to_tokens(i)) == 1]
    parts = st.one_of(
        st.lists(st.sampled_from(single), max_size=6),
        st.sampled_from(TEXTS).map(lambda text: smollm2_tokenizer(text).input_ids),
    )
    ids = [i for part in data.draw(st.lists(parts, max_size=6)) for i in part]
    assert "".join(stream(smollm2_tokenizer, ids)) == whole(smollm2_tokenizer, ids)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_no_piece_holds_half_a_character(smollm2_tokenizer: Any, text: str) -> None:
    pieces = stream(smollm2_tokenizer, smollm2_tokenizer(text).input_ids)
    assert "".join(pieces) == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


def test_plain_text_is_released_at_once(smollm2_tokenizer: Any) -> None:
    ids = smollm2_tokenizer("The quick brown fox").input_ids
    assert stream(smollm2_tokenizer, ids) == ["The", " quick", " brown", " fox", ""]


@relaxed
@given(data=st.data())
def test_a_stop_string_cuts_the_text_before_it(smollm2_tokenizer: Any, data: st.DataObject) -> None:
    alphabet = st.text(alphabet="ab \n日", min_size=1, max_size=30)
    text = data.draw(alphabet)
    stop = data.draw(st.lists(st.text(alphabet="ab \n日", min_size=1, max_size=4), max_size=3))
    ids = smollm2_tokenizer(text).input_ids
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, stop)
    pieces: list[str] = []
    expected = text
    for count, token in enumerate(ids, 1):
        pieces.append(detokenizer.push(token))
        seen = whole(smollm2_tokenizer, ids[:count]).rstrip("�")
        found = [seen.index(s) for s in stop if s in seen]
        if found:
            expected = seen[: min(found)]
            break
        released = "".join(pieces)
        assert seen.startswith(released) and not any(s in released for s in stop)
        held = seen[len(released) :]
        assert not held or any(s.startswith(held) for s in stop)
    assert (detokenizer.stopped_by is not None) == bool([s for s in stop if s in text])
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == detokenizer.text == expected


def test_after_a_stop_string_nothing_comes(smollm2_tokenizer: Any) -> None:
    detokenizer = IncrementalDetokenizer(smollm2_tokenizer, ["\nUser:"])
    pieces = [detokenizer.push(i) for i in smollm2_tokenizer("Yes.\nUser: more").input_ids]
    assert "".join(pieces) == "Yes." and detokenizer.stopped_by == "\nUser:" and detokenizer.finish() == ""


def test_what_only_looked_like_a_stop_string_comes_in_the_end(smollm2_tokenizer: Any) -> None:
    assert "".join(stream(smollm2_tokenizer, smollm2_tokenizer("a\nUse").input_ids, stop=["\nUser:"])) == "a\nUse"


@pytest.fixture(scope="module")
def sentencepiece_like() -> Any:
    """A tokenizer as llama-2's: it writes spaces as U+2581, drops the first one, and falls back to single bytes."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models

    words = ["▁", "▁the", "▁cat", "s", "▁你", "好", "!", "a", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    backend = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


@relaxed
@given(ids=st.lists(st.one_of(st.integers(259, 267), st.sampled_from([1, 2, 3 + 0x41, 3 + 0x20])), max_size=20))
def test_a_decoder_that_looks_at_its_neighbours_is_followed(sentencepiece_like: Any, ids: list[int]) -> None:
    assert "".join(stream(sentencepiece_like, ids)) == whole(sentencepiece_like, ids)


def test_bytes_that_make_a_character_are_held_until_it_is_whole(sentencepiece_like: Any) -> None:
    ids = [260, *[3 + byte for byte in "é😀".encode()], 261]
    assert stream(sentencepiece_like, ids) == ["the", "", "é", "", "", "", "😀", " cat", ""]

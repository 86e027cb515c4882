"""A real checkpoint's greedy text is transformers' own, token for token, in every graph mode and every batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from segue import config as c
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.load import LoadedModel, load_model

pytest.importorskip("transformers")
from llm_support import assert_same_text, greedy

NUM_TOKENS = 16
CHUNK = 64
DECODES, PREFILLS = ("full", "breakable", "disabled"), ("breakable", "disabled")
MODES = list(product(DECODES, PREFILLS))

PASSAGE = (
    "The lighthouse keeper had lived alone on the island for eleven years. Each evening he climbed the iron stairs, "
    "trimmed the wick, and wrote one line into a book: the wind, the ships that passed, and the weather to come. In "
    "winter the boat could not land for weeks, and he ate dried fish and bread that he baked himself. He did not mind. "
    "He knew the names of all the rocks, and he had given names to the gulls as well, though they never answered him. "
)
RAW = [
    "Once upon a",
    "The capital of France is",
    "def fibonacci(n):\n    if n <",
    "1, 2, 3, 5, 8, 13, 21,",
    "Die Hauptstadt von Österreich heißt 维也纳 🎡 and its",
    PASSAGE[:290],
    PASSAGE + PASSAGE[:160],
    PASSAGE * 3 + "One night",
]
CHATS = ["Hi!", "What is the capital of Italy?", "Name three colours.", "Shorten this: " + PASSAGE[:400]]


class Case(NamedTuple):
    prompt: list[int]
    expected: list[int]


class Oracle:
    """transformers, loaded plainly; the prompts and their texts, by length."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        assert self.model.config._attn_implementation == "sdpa"
        prompts = [tokenizer(text).input_ids for text in RAW]
        for text in CHATS:
            message = [{"role": "user", "content": text}]
            rendered = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            prompts.append(tokenizer(rendered, add_special_tokens=False).input_ids)
        prompts.sort(key=len)
        self.cases = [Case(prompt, greedy(self.model, prompt, NUM_TOKENS)) for prompt in prompts]

    def check(self, case: Case, got: Sequence[int], where: str) -> None:
        assert_same_text(self.model, case.prompt, got, case.expected, where)


@pytest.fixture(scope="module")
def oracle(smollm2_folder: Path, smollm2_tokenizer: Any) -> Oracle:
    return Oracle(smollm2_folder, smollm2_tokenizer)


@pytest.fixture(scope="module")
def loaded(smollm2_folder: Path) -> LoadedModel:
    from segue.llm.attention import register

    register()
    return load_model(smollm2_folder, device="cpu", dtype=torch.float32)


def engine_of(
    loaded: LoadedModel, decode: str, prefill: str, decode_ladder: tuple[int, ...] = (1, 5, 9), **changes: Any
) -> Engine:
    """Few rungs: starting takes a few seconds, and no size falls between them."""
    graphs = c.GraphConfig(
        decode=c.PhaseConfig(backend=decode, ladder=decode_ladder, max_padding=3.0),
        prefill=c.PhaseConfig(
            backend=prefill, ladder=(CHUNK,) if prefill == "full" else (16, CHUNK), max_padding=float(CHUNK)
        ),
    )
    sizes = {"chunk_size": CHUNK, "max_requests": 9, "max_context": 352} | changes
    return Engine(loaded.model, EngineConfig(device="cpu", graphs=graphs, **sizes), tokenizer=loaded.tokenizer)


def run(engine: Engine, oracle: Oracle, cases: Sequence[Case], size: int, where: str, num_tokens: int = NUM_TOKENS) -> None:
    """All `cases`, in batches of `size`; the first `num_tokens` of their texts."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    for start in range(0, len(cases), size):
        group = cases[start : start + size]
        outputs = engine.generate([case.prompt for case in group], params)
        for case, output in zip(group, outputs, strict=True):
            shortened = Case(case.prompt, case.expected[:num_tokens])
            oracle.check(shortened, output.token_ids, f"{where}, {size} at once")


def check_replays(engine: Engine) -> None:
    """Every step was a replay where graphs are on, and none where they are off."""
    stats = engine.stats()
    for name, phase in stats["phases"].items():
        num_steps = stats["steps"][name]
        assert num_steps > 0
        if phase["backend"] == "disabled":
            assert phase["eager"] == {"disabled": num_steps} and phase["captures"] == phase["replays"] == 0
        else:
            assert phase["eager"] == {} and phase["replays"] == num_steps
            assert phase["replays"] == sum(graph["hits"] for graph in phase["graphs"])


def test_the_prompts_are_of_all_kinds(oracle: Oracle, smollm2_tokenizer: Any) -> None:
    lengths = [len(case.prompt) for case in oracle.cases]
    assert len(lengths) == 12 and lengths[0] == 3 and 290 < lengths[-1] < 330
    assert sum(length > CHUNK for length in lengths) >= 3
    assert any(len(case.expected) < NUM_TOKENS for case in oracle.cases)  # some end by themselves
    texts = [smollm2_tokenizer.decode(case.expected, skip_special_tokens=True) for case in oracle.cases]
    assert any("Paris" in text for text in texts) and len(set(texts)) == 12


@pytest.mark.parametrize(("decode", "prefill"), MODES)
def test_the_text_is_that_of_transformers(oracle: Oracle, loaded: LoadedModel, decode: str, prefill: str) -> None:
    where = f"decode {decode}, prefill {prefill}"
    cases, turn = oracle.cases, MODES.index((decode, prefill))
    with engine_of(loaded, decode, prefill) as engine:
        run(engine, oracle, cases, 9, where)
        run(engine, oracle, cases[turn : turn + 7 : 6], 1, where, num_tokens=4)  # other ones alone in each mode
        run(engine, oracle, cases[turn : turn + 5], 5, where, num_tokens=4)
        check_replays(engine)


def test_the_text_is_that_of_transformers_with_prefill_as_one_graph(oracle: Oracle, loaded: LoadedModel) -> None:
    with engine_of(loaded, "disabled", "full", max_requests=3) as engine:
        run(engine, oracle, [oracle.cases[i] for i in (0, 9, 11)], 3, "prefill full", num_tokens=4)
        check_replays(engine)


@pytest.mark.slow
def test_the_text_is_that_of_transformers_when_both_phases_are_compiled_pieces(oracle: Oracle, loaded: LoadedModel) -> None:
    with engine_of(loaded, "tc_piecewise", "tc_piecewise", decode_ladder=(3,), max_requests=3) as engine:
        run(engine, oracle, [oracle.cases[i] for i in (0, 9, 11)], 3, "tc_piecewise", num_tokens=8)
        check_replays(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("decode", "prefill"), [*MODES, ("full", "full"), ("tc_piecewise", "tc_piecewise")])
def test_the_text_is_the_same_alone_and_in_any_batch(oracle: Oracle, loaded: LoadedModel, decode: str, prefill: str) -> None:
    with engine_of(loaded, decode, prefill) as engine:
        for size in (1, 3, 5, 9):
            run(engine, oracle, oracle.cases, size, f"decode {decode}, prefill {prefill}")
        check_replays(engine)


@pytest.mark.parametrize(
    ("decode", "prefill"),
    [("full", "breakable"), *(pytest.param(*mode, marks=pytest.mark.slow) for mode in MODES if mode != MODES[0])],
)
def test_preempted_requests_write_the_same_text(
    long_cases: list[Case], oracle: Oracle, loaded: LoadedModel, decode: str, prefill: str
) -> None:
    """Each text needs three pages, and there are four for both."""
    with engine_of(loaded, decode, prefill, num_pages=2 + 4, max_context=64) as engine:
        outputs = engine.generate([case.prompt for case in long_cases], LONG)
        assert engine.stats()["preemptions"] > 0
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0
        check_replays(engine)
    for case, output in zip(long_cases, outputs, strict=True):
        oracle.check(case, output.token_ids, f"preempted, decode {decode}, prefill {prefill}")


LONG = SamplingParams(temperature=0.0, max_tokens=34, ignore_eos=True)


@pytest.fixture(scope="module")
def long_cases(oracle: Oracle) -> list[Case]:
    """Two short prompts with longer texts, past end tokens."""
    model = oracle.model
    ends, model.generation_config.eos_token_id = model.generation_config.eos_token_id, None
    cases = [Case(case.prompt, greedy(model, case.prompt, LONG.max_tokens)) for case in oracle.cases[:2]]
    model.generation_config.eos_token_id = ends
    return cases

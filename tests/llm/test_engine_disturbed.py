"""An engine that is disturbed: Ctrl-C at any moment, a tokenizer that raises, weights that are exchanged, another dtype, and
a cache that shrinks and grows. Undisturbed text is the oracle."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.config import GraphConfig
from segue.errors import ConfigError, SegueError
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.checkpoints import converted_folder
from segue.llm.interrupts import uninterrupted

pytest.importorskip("transformers")
from llm_support import VOCABULARY, prompt_of, tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SIZES: dict[str, Any] = {"device": "cpu", "chunk_size": 32, "max_requests": 4, "max_context": 64, "num_pages": 24}
OFF = GraphConfig(decode="disabled", prefill="disabled")
PROMPTS = [prompt_of(9), prompt_of(21), prompt_of(3)]


def tokens(engine: Engine) -> list[tuple[int, ...]]:
    return [output.token_ids for output in engine.generate(PROMPTS, GREEDY)]


class Letters:
    """A tokenizer of one letter a token, which raises where it is told to."""

    eos_token_id = None

    def __init__(self) -> None:
        self.raises_in = 0
        self.all_special_ids: list[int] = []

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % VOCABULARY for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True, **_: Any) -> str:
        self.raises_in -= 1
        if self.raises_in == 0:
            raise ValueError("no such letter")
        return "".join(chr(0x4E00 + i) for i in token_ids)


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_at_any_moment_leaves_a_whole_engine(overlap: bool) -> None:
    with Engine(tiny_model(), EngineConfig(**SIZES, overlap=overlap)) as engine:
        start = time.perf_counter()
        expected = tokens(engine)
        took = time.perf_counter() - start
        free = engine.stats()["free_pages"]
        interrupted = 0
        for at in range(40):
            timer = threading.Timer(took * (at + 0.5) / 40, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                tokens(engine)
                time.sleep(0.2)
            except KeyboardInterrupt:
                interrupted += 1
            timer.join()
            assert tokens(engine) == expected
            assert engine.stats()["free_pages"] == free
        assert interrupted > 20
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_users_own_stays_in_its_place() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Engine(tiny_model(), EngineConfig(**SIZES)) as engine:
            os.kill(os.getpid(), signal.SIGINT)
            assert len(tokens(engine)) == 3 and seen == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_has_its_own_handler_again_whatever_another_signals_handler_raised() -> None:
    """Between the two halves of a block: then its function has ended, and what it had put in Ctrl-C's place knows that."""

    def left_behind() -> uninterrupted:
        block = uninterrupted()
        block.__enter__()
        return block  # as an exception behind `__enter__` leaves it

    block = left_behind()
    assert signal.getsignal(signal.SIGINT) == block._note
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    left_behind()
    with Engine(tiny_model(), EngineConfig(**SIZES)) as engine:
        assert len(tokens(engine)) == 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def keeps_it() -> int:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            return 3

    with pytest.raises(KeyboardInterrupt):
        keeps_it()


def test_an_engine_that_is_called_in_the_middle_of_its_step_says_so() -> None:
    asked: list[Any] = []

    def hook(*_: Any) -> None:
        for call in asked:
            with pytest.raises(SegueError, match="in the middle of a step"):
                call()

    model = tiny_model()
    model.model.layers[0].mlp.register_forward_hook(hook)
    with Engine(model, EngineConfig(**SIZES, graphs=OFF)) as engine:
        expected = tokens(engine)
        asked += [engine.step, engine.close, lambda: engine.sleep(preempt=True), lambda: engine.resize_cache(20)]
        assert tokens(engine) == expected
        asked.clear()
        assert tokens(engine) == expected
    engine.close()
    assert engine.lane.reserved_bytes == 0


def test_an_engine_can_be_neither_copied_nor_pickled() -> None:
    with Engine(tiny_model(), EngineConfig(**SIZES)) as engine:
        for make in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="neither copied nor pickled"):
                make(engine)
        assert len(tokens(engine)) == 3


@pytest.mark.parametrize("at", [1, 2, 3, 8, 16, 17, 18])
def test_a_tokenizer_that_raises_disturbs_no_other_request(at: int) -> None:
    tokenizer = Letters()
    with Engine(tiny_model(), EngineConfig(**SIZES), tokenizer=tokenizer) as engine:
        expected = [output.text for output in engine.generate(PROMPTS, GREEDY)]
        names = [engine.add_request(prompt, GREEDY) for prompt in PROMPTS]
        tokenizer.raises_in, failures = at, 0
        for _ in range(40):
            try:
                if not engine.step():
                    break
            except ValueError:
                failures += 1
        found = [engine.take_output(name) for name in names]
        assert all(output is not None for output in found), "each request has ended"
        wrong = [o.text for o, text in zip(found, expected, strict=True) if o is not None and o.text != text]
        assert failures == 1 and len(wrong) <= 1
        assert [output.text for output in engine.generate(PROMPTS, GREEDY)] == expected


def test_weights_may_be_exchanged_for_one_another() -> None:
    with Engine(tiny_model(), EngineConfig(**SIZES)) as engine:
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
        state = engine.model.state_dict()
        first, second = (state[name].clone() for name in names)
        engine.update_weights({names[0]: state[names[1]], names[1]: state[names[0]]})
        assert torch.equal(state[names[0]], second) and torch.equal(state[names[1]], first)


def test_one_tensor_under_two_names_takes_one_value() -> None:
    with Engine(tiny_model(tie_word_embeddings=True), EngineConfig(**SIZES)) as engine:
        names = ("model.embed_tokens.weight", "lm_head.weight")
        old = engine.model.state_dict()[names[0]].clone()
        with pytest.raises(ValueError, match="one tensor"):
            engine.update_weights({names[0]: old + 1, names[1]: old + 2})
        assert torch.equal(engine.model.state_dict()[names[0]], old)
        engine.update_weights({names[0]: old + 1, names[1]: old + 1})
        assert torch.equal(engine.model.state_dict()[names[1]], old + 1)


def test_a_cache_that_shrinks_and_grows_again_gives_the_limits_back() -> None:
    with Engine(tiny_model(), EngineConfig(**SIZES)) as engine:
        before, expected = engine.sizes, tokens(engine)
        engine.resize_cache(4)
        assert engine.sizes.max_requests == 2
        engine.resize_cache(before.num_pages)
        assert engine.sizes == before and tokens(engine) == expected
        with pytest.raises(ConfigError, match="set a smaller num_pages"):
            engine.resize_cache(1 << 40)
        assert tokens(engine) == expected


def test_weights_of_another_dtype_are_refused_until_they_are_converted_back() -> None:
    with Engine(tiny_model(), EngineConfig(**SIZES)) as engine:
        expected = tokens(engine)
        engine.model.to(torch.bfloat16)
        for _ in range(2):
            with pytest.raises(SegueError, match=r"bfloat16 now, and this engine was made for torch\.float32"):
                tokens(engine)
        engine.model.to(torch.float32)
        assert [len(ids) for ids in tokens(engine)] == [len(ids) for ids in expected]


def test_files_that_differ_in_their_middle_are_different_files(tmp_path: Path) -> None:
    content = bytearray(6 << 20)
    names = []
    for at in (0, 1, len(content) // 2, len(content) - 1):
        content[at] ^= 1
        (tmp_path / "x.gguf").write_bytes(content)
        names.append(converted_folder(tmp_path / "x.gguf"))
    assert len(set(names)) == len(names)


def test_weights_of_another_size_or_kind_are_told_before_they_are_made(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model()
    model.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, told = load_file(file), config.read_text()
    config.write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"another shape than its config\.json says"):
        Engine(str(tmp_path), EngineConfig(**SIZES))
    config.write_text(told)
    save_file({name: tensor.to(torch.uint8) for name, tensor in whole.items()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="U8, which is no floating-point number"):
        Engine(str(tmp_path), EngineConfig(**SIZES))
    save_file(whole, file, {"format": "pt"})
    with Engine(str(tmp_path), EngineConfig(**SIZES)) as engine:
        assert len(tokens(engine)) == 3

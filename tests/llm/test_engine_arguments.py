"""What callers hand over by mistake: one clear line each, and what a model does by itself arrives as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import segue
from segue import GraphConfig
from segue.errors import ConfigError, SegueError
from segue.llm import Engine, EngineConfig, SamplingParams

pytest.importorskip("transformers")
from llm_support import prompt_of, tiny_model

OFF = EngineConfig(device="cpu", chunk_size=32, max_requests=2, max_context=128, graphs=GraphConfig.off())
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(tiny_model(num_hidden_layers=1), OFF) as engine:
        yield engine


MISTAKES: dict[str, tuple[Callable[[Engine], Any], type[Exception], str]] = {
    "params": (lambda e: e.generate([1], {"max_tokens": 3}), TypeError, "params is a dict; it must be a SamplingParams"),  # type: ignore[arg-type]
    "a list of dicts": (lambda e: e.generate([[1]], [{}]), TypeError, "params is a dict"),  # type: ignore[list-item]
    "no prompts": (lambda e: e.generate(None), TypeError, "prompts is a NoneType"),  # type: ignore[arg-type]
    "a dict": (lambda e: e.generate({"a": 1}), TypeError, "prompts is a dict"),  # type: ignore[arg-type]
    "bytes": (lambda e: e.generate(b"abc"), TypeError, "prompts is a bytes"),
    "an id": (lambda e: e.add_request([1], None, 7), TypeError, "request_id is a int"),  # type: ignore[arg-type]
    "chat text": (lambda e: e.chat("hello"), TypeError, "messages is a str"),  # type: ignore[arg-type]
    "chat texts": (lambda e: e.chat(["hello"]), TypeError, "each message must be a dict"),  # type: ignore[list-item]
    "chat without text": (
        lambda e: e.chat([{"role": "user", "content": None}]),  # type: ignore[dict-item]
        TypeError,
        "the content of a message is None; it must be text",
    ),
    "a chat without roles": (lambda e: e.chat([{"text": "x"}]), TypeError, "role and content"),
    "a set": (lambda e: e.generate({1, 2}), TypeError, "prompts is a set"),  # type: ignore[arg-type]
    "a set in a list": (lambda e: e.generate([{1, 2}]), TypeError, "token ids .integers., not set"),
    "a number": (lambda e: e.generate(torch.tensor(5)), TypeError, "prompts is a Tensor"),  # type: ignore[arg-type]
    "floats": (lambda e: e.generate(torch.tensor([1.0, 2.0])), TypeError, "not torch.float32 Tensor"),  # type: ignore[arg-type]
    "booleans": (lambda e: e.generate([True, False]), TypeError, "token ids .integers., not list"),
    "pages": (lambda e: e.resize_cache("x"), TypeError, "num_pages is a str"),  # type: ignore[arg-type]
    "weights": (lambda e: e.update_weights([1]), TypeError, "weights is a list"),  # type: ignore[arg-type]
    "integers for weights": (
        lambda e: e.update_weights({"model.norm.weight": torch.ones(32, dtype=torch.int64)}),
        ValueError,
        "torch.int64",
    ),
    "a config": (lambda e: Engine(tiny_model(), {"device": "cpu"}), TypeError, "config is a dict"),  # type: ignore[arg-type]
    "no source": (lambda e: Engine(None, OFF), TypeError, "source is None"),
    "a module": (lambda e: Engine(torch.nn.Linear(2, 2), OFF), TypeError, "source is a Linear"),
    "a device": (lambda e: EngineConfig(device="tpu"), ConfigError, "device is 'tpu'"),
    "a device's number": (lambda e: EngineConfig(device="cuda:x"), ConfigError, "device is 'cuda:x'"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_one_clear_line(engine: Engine, mistake: str) -> None:
    call, kind, message = MISTAKES[mistake]
    with pytest.raises(kind, match=message) as caught:
        call(engine)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
    assert engine.stats()["waiting"] == engine.stats()["running"] == 0


def test_ids_come_in_any_container(engine: Engine) -> None:
    (expected,) = (output.token_ids for output in engine.generate([[1, 2, 3]], GREEDY))
    one = torch.tensor([1, 2, 3])
    for prompts in (one, one.numpy(), (1, 2, 3), [one], [one.numpy()], one[None], iter([one.tolist()])):
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == [expected]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["\udcff", "a\ud800b"])
def test_text_that_no_encoding_writes_is_refused(smollm2_tokenizer: Any, text: str) -> None:
    model = tiny_model(vocab_size=len(smollm2_tokenizer), num_hidden_layers=1)
    with Engine(model, OFF, tokenizer=smollm2_tokenizer) as engine:
        for call in (lambda: engine.generate(text), lambda: engine.chat([{"role": "user", "content": text}])):
            with pytest.raises(ValueError, match="the prompt is not valid text"):
                call()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=1, max_tokens=4, top_k=5)])
def test_logits_that_are_not_finite_are_an_error_and_leave_nothing(poison: float, params: SamplingParams) -> None:
    model = tiny_model(num_hidden_layers=1)
    with Engine(model, OFF) as engine:
        expected = engine.generate([prompt_of(5)] * 2, params)
        with torch.no_grad():
            before = model.lm_head.weight[3].clone()
            model.lm_head.weight[3] = poison
        with pytest.raises(SegueError, match="logits are not finite in 2 of 2 rows"):
            engine.generate([prompt_of(5)] * 2, params)
        assert engine.stats()["running"] == 0
        with torch.no_grad():
            model.lm_head.weight[3] = before
        assert [o.token_ids for o in engine.generate([prompt_of(5)] * 2, params)] == [o.token_ids for o in expected]


def test_an_engine_closed_while_a_thread_generates_says_so() -> None:
    engine, caught = Engine(tiny_model(num_hidden_layers=1), OFF), []
    started = threading.Event()
    engine._model.register_forward_pre_hook(lambda *_: started.set())

    def work() -> None:
        try:
            while True:  # until it is closed, in the middle of a text or between two
                engine.generate(prompt_of(5), SamplingParams(max_tokens=120, ignore_eos=True))
        except Exception as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    started.wait(30)
    engine.close()
    thread.join(60)
    assert [type(error) for error in caught] == [SegueError] and "this engine is closed" in str(caught[0])
    with pytest.raises(SegueError, match="this engine is closed"):
        engine.take_output("request-0")


# -- a model's own code at load ------------------------------------------------------------------------------------------


def test_a_break_of_the_models_own_may_read_the_live_batch() -> None:
    seen = []

    @segue.eager_on_graph
    def scaled(x: torch.Tensor) -> torch.Tensor:
        seen.append(segue.current().batch.host.num_requests)
        return x * (segue.current().batch.seq_lens.sum() > 0)

    model = tiny_model(num_hidden_layers=1)
    model.model.norm.register_forward_hook(lambda module, args, output: scaled(output))
    with Engine(model, EngineConfig(device="cpu", chunk_size=32, max_requests=2, max_context=128)) as engine:
        assert len(engine.generate(prompt_of(5), GREEDY)[0].token_ids) == 4
    assert seen and seen[0] == 1


def test_an_exception_of_the_users_own_at_load_arrives_unchanged() -> None:
    mine = KeyError("mine")

    def hook(*_: Any) -> None:
        raise mine

    model = tiny_model(num_hidden_layers=1)
    model.model.norm.register_forward_hook(hook)
    with pytest.raises(KeyError) as caught:
        Engine(model, OFF)
    assert caught.value is mine

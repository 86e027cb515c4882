"""The engine as its callers see it: streams, stops, seeds, threads, mistakes, and what is left after each of them."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from segue import config as c
from segue.errors import CaptureError, CaptureNotAllowed, ConfigError, SegueError, StrictModeError
from segue.llm import Engine, EngineConfig, RequestOutput, SamplingParams

pytest.importorskip("transformers")
from llm_support import greedy, prompt_of, tiny_model

MODES = [("full", "breakable"), ("breakable", "full"), ("disabled", "disabled")]
PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def graphs_of(decode: str = "full", prefill: str = "breakable", **settings: Any) -> c.GraphConfig:
    return c.GraphConfig(
        decode=c.PhaseConfig(backend=decode, ladder=(1, 2, 4)),
        prefill=c.PhaseConfig(backend=prefill, ladder=(32,), max_size=32, max_padding=32.0),
        **settings,
    )


def config_of(decode: str = "full", prefill: str = "breakable", **changes: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"chunk_size": 32, "max_requests": 4, "max_context": 128}
    return EngineConfig(device="cpu", **({"graphs": graphs_of(decode, prefill)} | sizes | changes))


def model_that_speaks(tokenizer: Any) -> Any:
    """A tiny model with random weights over a real vocabulary: fast, and its text is a jumble of real tokens."""
    return tiny_model(vocab_size=len(tokenizer), num_hidden_layers=1)


@pytest.fixture(scope="module")
def engine(smollm2_tokenizer: Any) -> Iterator[Engine]:
    with Engine(model_that_speaks(smollm2_tokenizer), config_of(), tokenizer=smollm2_tokenizer) as engine:
        yield engine


@pytest.fixture
def silent() -> Iterator[Engine]:
    """An engine of its own for each test: no tokenizer, no graphs, so that the model's Python runs in every step."""
    with Engine(tiny_model(), config_of("disabled", "disabled")) as engine:
        yield engine


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test the shared engine has no requests and all its pages, and still answers."""
    yield
    if "engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("engine")
        assert_idle(engine)
        assert engine.generate(PROMPT, GREEDY)[0].finish_reason == "length"


def assert_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert stats["waiting"] == stats["running"] == 0 and stats["free_pages"] == stats["pages"]
    assert not engine._live and not engine._finished


def run_all(engine: Engine) -> None:
    while engine.step():
        pass


def finished(engine: Engine, name: str) -> RequestOutput:
    output = engine.take_output(name)
    assert output is not None
    return output


# -- ways to run -------------------------------------------------------------------------------------------------------


def test_text_is_the_decoded_tokens(engine: Engine, smollm2_tokenizer: Any) -> None:
    output = engine.generate(PROMPT, GREEDY)[0]
    assert len(output.token_ids) == 12 and output.finish_reason == "length" and output.logprobs is None
    assert list(output.prompt_ids) == smollm2_tokenizer(PROMPT).input_ids
    assert output.text == smollm2_tokenizer.decode(output.token_ids, skip_special_tokens=True)
    assert list(output.token_ids) == greedy_past_end(smollm2_tokenizer, output.prompt_ids, 12)


def greedy_past_end(tokenizer: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    return greedy(model_that_speaks(tokenizer), prompt, num_tokens)


def test_a_stream_yields_the_text_of_generate(engine: Engine) -> None:
    expected = engine.generate(PROMPT, GREEDY)[0].text
    pieces = list(engine.stream(PROMPT, GREEDY))
    assert "".join(pieces) == expected and len(pieces) > 3 and all(pieces)


def test_streams_and_a_batch_interleave(engine: Engine) -> None:
    prompts = [PROMPT, "One two", "Once upon a time there"]
    expected = [output.text for output in engine.generate(prompts, GREEDY)]
    streams = [engine.stream(prompt, GREEDY) for prompt in prompts]
    texts = ["", "", ""]
    texts[0] += next(streams[0])
    assert engine.stats()["running"] == 3  # queued at once, and run in one batch
    assert engine.generate(prompts[1], GREEDY)[0].text == expected[1]
    for place, stream in enumerate(streams):
        texts[place] += "".join(stream)
    assert texts == expected


@pytest.mark.parametrize("num_pieces", [0, 1, 3])
def test_a_stream_closed_early_aborts_its_request(engine: Engine, num_pieces: int) -> None:
    stream = engine.stream(PROMPT, GREEDY)
    for _ in range(num_pieces):
        next(stream)
    assert engine.stats()["waiting"] + engine.stats()["running"] == 1
    stream.close()  # type: ignore[attr-defined]
    assert_idle(engine)


def test_a_stream_that_is_dropped_aborts_its_request(engine: Engine) -> None:
    for piece in engine.stream(PROMPT, GREEDY):
        assert piece
        break
    gc.collect()
    assert_idle(engine)


def test_requests_run_step_by_step(engine: Engine) -> None:
    expected = engine.generate([PROMPT, "One two"], GREEDY)
    names = [engine.add_request(PROMPT, GREEDY), engine.add_request("One two", GREEDY, request_id="mine")]
    assert names[1] == "mine" and names[0] != "mine"
    assert engine.take_output("mine") is None
    run_all(engine)
    assert not engine.step()
    for name, output in zip(names, expected, strict=True):
        got = finished(engine, name)
        assert (got.id, got.text, got.token_ids) == (name, output.text, output.token_ids)
        with pytest.raises(KeyError, match=name):
            engine.take_output(name)


def test_an_id_is_taken_until_its_output_was_handed_out(engine: Engine) -> None:
    engine.add_request(PROMPT, GREEDY, request_id="a")
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("other", GREEDY, request_id="a")
    run_all(engine)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add_request("other", GREEDY, request_id="a")
    assert list(finished(engine, "a").prompt_ids) == engine.encode(PROMPT)
    engine.add_request("other", GREEDY, request_id="a")
    assert engine.abort("a") and finished(engine, "a").token_ids == ()


def test_own_ids_never_meet_those_of_the_engine(engine: Engine) -> None:
    number = int(engine.add_request(PROMPT, GREEDY, None).rpartition("-")[2])
    mine = engine.add_request(PROMPT, GREEDY, request_id=f"request-{number + 1}")
    theirs = engine.add_request(PROMPT, GREEDY)
    assert theirs != mine
    for name in (f"request-{number}", mine, theirs):
        assert engine.abort(name)
        engine.take_output(name)


def test_an_abort_keeps_what_was_written(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)[0]
    name = engine.add_request(PROMPT, GREEDY)
    for _ in range(4):
        engine.step()
    assert engine.abort(name) and not engine.abort(name) and not engine.abort("nobody")
    output = finished(engine, name)
    assert output.finish_reason == "abort" and output.token_ids == whole.token_ids[:4]
    assert output.text and whole.text.startswith(output.text)


def test_each_prompt_may_have_its_own_params(engine: Engine) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 7)]
    outputs = engine.generate([PROMPT, PROMPT], params)
    assert [len(output.token_ids) for output in outputs] == [3, 7]
    with pytest.raises(ValueError, match="2 prompts came with 1 sampling"):
        engine.generate([PROMPT, PROMPT], params[:1])
    assert engine.generate([], GREEDY) == []


def test_a_chat_is_the_rendered_template(engine: Engine, smollm2_tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    text = smollm2_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n")
    expected = engine.generate(text, GREEDY)[0]
    output = engine.chat(messages, GREEDY)
    assert output.prompt_ids == expected.prompt_ids and output.token_ids == expected.token_ids


# -- when to stop ------------------------------------------------------------------------------------------------------


def test_a_stop_string_across_a_token_border_ends_the_text_before_it(engine: Engine, smollm2_tokenizer: Any) -> None:
    whole = engine.generate(PROMPT, GREEDY)[0]
    border = len(smollm2_tokenizer.decode(whole.token_ids[:5]))
    stop = whole.text[border - 2 : border + 2]
    assert whole.text.index(stop) == border - 2
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop=["never found", stop])
    output = engine.generate(PROMPT, params)[0]
    assert output.text == whole.text[: border - 2] and output.finish_reason == "stop"
    ends = [len(smollm2_tokenizer.decode(whole.token_ids[:n])) for n in range(13)]
    num_tokens = next(n for n, end in enumerate(ends) if end >= border + 2)
    assert output.token_ids == whole.token_ids[:num_tokens] and num_tokens > 5
    assert "".join(engine.stream(PROMPT, params)) == output.text


def test_a_stop_string_in_the_last_token_is_a_stop(engine: Engine) -> None:
    whole = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))[0]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, stop=whole.text[-2:])
    output = engine.generate(PROMPT, params)[0]
    assert (output.text, output.finish_reason) == (whole.text[:-2], "stop")


def test_a_stop_token_ends_the_text_and_is_kept(engine: Engine) -> None:
    whole = engine.generate(PROMPT, GREEDY)[0]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=[whole.token_ids[3]])
    output = engine.generate(PROMPT, params)[0]
    assert output.finish_reason == "stop" and output.token_ids == whole.token_ids[:4]


def test_an_end_token_ends_the_text_unless_it_is_ignored() -> None:
    prompt = prompt_of(6)
    whole = greedy(tiny_model(), prompt, 8)
    place = next(i for i in range(2, 8) if whole[i] not in whole[:i])
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with Engine(tiny_model(eos_token_id=whole[place]), config_of("disabled", "disabled")) as engine:
        output = engine.generate(prompt, params)[0]
        assert (list(output.token_ids), output.finish_reason) == (whole[: place + 1], "stop")
        output = engine.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))[0]
        assert (list(output.token_ids), output.finish_reason) == (whole, "length")


def test_the_context_ends_a_text(silent: Engine) -> None:
    output = silent.generate(prompt_of(120), SamplingParams(temperature=0.0, max_tokens=50))[0]
    assert len(output.token_ids) == 8 and output.finish_reason == "length"


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_the_log_softmax_of_the_model(num_top: int) -> None:
    reference, prompts = tiny_model(), [prompt_of(5), prompt_of(40)]
    params = [SamplingParams(temperature=0.8, seed=3, max_tokens=6, logprobs=n) for n in (num_top, None)]
    with Engine(tiny_model(), config_of()) as engine:
        first, second = engine.generate(prompts, params)
    assert second.logprobs is None and first.logprobs is not None and len(first.logprobs) == 6
    ids = torch.tensor([[*first.prompt_ids, *first.token_ids]])
    with torch.inference_mode():
        expected = reference(ids).logits[0, len(prompts[0]) - 1 : -1].log_softmax(dim=-1)
    for row, token, chosen in zip(expected, first.token_ids, first.logprobs, strict=True):
        assert chosen.token_id == token and len(chosen.top) == num_top
        assert chosen.logprob == pytest.approx(row[token].item(), abs=1e-4)
        top = row.topk(max(num_top, 1))
        assert [i for i, _ in chosen.top] == top.indices.tolist()[:num_top]
        for (_, got), value in zip(chosen.top, top.values.tolist(), strict=False):
            assert got == pytest.approx(value, abs=1e-4)


def test_a_seed_gives_the_same_tokens_in_any_batch_and_any_mode() -> None:
    prompts = [prompt_of(length) for length in (4, 17, 40)]
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=10) for seed in (1, 2, 3)]
    found: set[tuple[tuple[int, ...], ...]] = set()
    for decode, prefill in MODES:
        with Engine(tiny_model(), config_of(decode, prefill)) as engine:
            alone = [engine.generate(p, q)[0].token_ids for p, q in zip(prompts, params, strict=True)]
            batched = [output.token_ids for output in engine.generate(prompts, params)]  # 3 rows in a rung of 4
            backwards = [output.token_ids for output in engine.generate(prompts[::-1], params[::-1])][::-1]
            found |= {tuple(alone), tuple(batched), tuple(backwards)}
    assert len(found) == 1
    with Engine(tiny_model(), config_of("disabled", "disabled")) as engine:
        other = engine.generate(prompts[0], SamplingParams(temperature=0.9, top_p=0.95, seed=9, max_tokens=10))
        free = {engine.generate(prompts[0], SamplingParams(max_tokens=10))[0].token_ids for _ in range(4)}
    assert other[0].token_ids != next(iter(found))[0] and len(free) > 1


# -- models in memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("decode", "prefill"), MODES)
def test_a_model_in_memory_needs_no_tokenizer(decode: str, prefill: str) -> None:
    prompt = prompt_of(9)
    with Engine(tiny_model(), config_of(decode, prefill)) as engine:
        output = engine.generate(prompt, GREEDY)[0]
        assert list(output.token_ids) == greedy(tiny_model(), prompt, 12) and output.text == ""
        assert engine.generate([prompt], GREEDY)[0].token_ids == output.token_ids
        assert engine.generate(tuple(prompt), GREEDY)[0].token_ids == output.token_ids
        assert engine.generate(torch.tensor(prompt).numpy(), GREEDY)[0].token_ids == output.token_ids
        for call, message in (
            (lambda: engine.generate("text"), "without a tokenizer: pass token ids"),
            (lambda: engine.stream(prompt), "no text to stream"),
            (lambda: engine.generate(prompt, SamplingParams(stop="x")), "stop strings need a tokenizer"),
            (lambda: engine.chat([{"role": "user", "content": "x"}]), "no chat template"),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        assert_idle(engine)


# -- mistakes ----------------------------------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[Callable[[Engine], Any], str]] = {
    "empty text": (lambda e: e.generate(""), "the prompt is empty"),
    "no ids": (lambda e: e.generate([[]]), "the prompt is empty"),
    "an empty one among others": (lambda e: e.generate([PROMPT, "", PROMPT]), "the prompt is empty"),
    "an id outside": (lambda e: e.generate([5, 10**6]), "token id 1000000 is outside the vocabulary of 49152"),
    "a negative id": (lambda e: e.generate([5, -1]), "token id -1 is outside"),
    "too long": (lambda e: e.generate([5] * 128), "the prompt has 128 tokens, and the context holds 128"),
    "a long one among others": (lambda e: e.generate([[5], [5] * 500]), "the prompt has 500 tokens"),
    "an empty stream": (lambda e: e.stream(""), "the prompt is empty"),
    "an empty request": (lambda e: e.add_request([]), "the prompt is empty"),
    "no messages": (lambda e: e.chat([]), "the conversation is empty"),
    "no tokens to write": (lambda e: e.generate(PROMPT, SamplingParams(max_tokens=0)), "max_tokens is 0"),
}


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_is_a_value_error_in_one_line_and_leaves_nothing_behind(engine: Engine, mistake: str) -> None:
    call, message = MISTAKES[mistake]
    steps = engine.stats()["steps"]
    with pytest.raises(ValueError, match=message) as caught:
        call(engine)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200
    assert_idle(engine)
    assert engine.stats()["steps"] == steps


@pytest.mark.parametrize("prompt", [[1.5, 2.0], ["a", "b"], None, 7, [[1], None]])
def test_what_is_no_prompt_is_a_type_error(engine: Engine, prompt: Any) -> None:
    with pytest.raises(TypeError):
        engine.add_request(prompt)
    assert_idle(engine)


def test_what_never_fits_the_cache_is_refused() -> None:
    with Engine(tiny_model(), config_of("disabled", "disabled", num_pages=2 + 3)) as engine:
        with pytest.raises(ValueError, match=r"may need 4 pages .* has 3; lower max_tokens"):
            engine.generate([prompt_of(5), prompt_of(40)], SamplingParams(max_tokens=20))
        assert_idle(engine)
        assert len(engine.generate(prompt_of(40), SamplingParams(max_tokens=8, ignore_eos=True))[0].token_ids) == 8


def test_no_chat_template_and_a_template_that_refuses(smollm2_tokenizer: Any) -> None:
    import copy

    tokenizer = copy.deepcopy(smollm2_tokenizer)
    with Engine(model_that_speaks(tokenizer), config_of("disabled", "disabled"), tokenizer=tokenizer) as engine:
        tokenizer.chat_template = None
        with pytest.raises(ValueError, match=r"no chat template: use generate\(\)"):
            engine.chat([{"role": "user", "content": "Hi"}])
        tokenizer.chat_template = "{{ raise_exception('roles must\nalternate') }}"
        with pytest.raises(ValueError, match="template refuses the messages: roles must alternate"):
            engine.chat([{"role": "user", "content": "Hi"}])
        assert_idle(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cuda:9" if torch.cuda.is_available() else "cuda"}, "cuda"),
        ({"device": "nonsense"}, "nonsense"),
        ({"max_requests": 0}, "max_requests is 0"),
        ({"num_pages": 2}, "num_pages is 2"),
        ({"max_context": 1 << 24, "num_pages": "auto"}, ""),
    ],
)
def test_settings_are_refused_by_name_or_bounded(changes: dict[str, Any], message: str) -> None:
    def make() -> Engine:
        return Engine(tiny_model(), EngineConfig(**({"device": "cpu", "graphs": c.GraphConfig.off()} | changes)))

    if not message:
        with make() as engine:
            assert engine.sizes.max_context == 512  # the model's own
            with pytest.raises(ValueError, match="the model takes no more"):
                engine.generate([[1] * 600], SamplingParams(max_tokens=2))
        return
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_a_prompt_that_is_too_long_for_the_setting_is_told_to_raise_it(silent: Engine) -> None:
    with pytest.raises(ValueError, match="or raise max_context"):
        silent.generate([[1] * 128], SamplingParams(max_tokens=2))


# -- steps that fail ---------------------------------------------------------------------------------------------------


class Trouble:
    """A pre-hook of the model that raises while it is armed, in forward passes of so many tokens."""

    def __init__(self, model: Any) -> None:
        self.error: BaseException | None = None
        self.num_tokens = 0
        model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.error is not None and self.num_tokens in (0, kwargs["input_ids"].shape[1]):
            raise self.error


@pytest.mark.parametrize("num_steps", [0, 1, 3], ids=["prefill", "first decode", "later"])
@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_step_that_raises_changes_nothing(silent: Engine, num_steps: int, error: BaseException) -> None:
    prompts = [prompt_of(5), prompt_of(20)]
    expected = [output.token_ids for output in silent.generate(prompts, GREEDY)]
    trouble = Trouble(silent._model)
    names = [silent.add_request(prompt, GREEDY) for prompt in prompts]
    for _ in range(num_steps):
        silent.step()
    before = silent.stats()
    trouble.error = error
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            silent.step()
        assert caught.value is error
    assert silent.stats()["steps"] == before["steps"] and silent.stats()["generated_tokens"] == before["generated_tokens"]
    trouble.error = None
    run_all(silent)
    assert [finished(silent, name).token_ids for name in names] == expected
    assert_idle(silent)


@pytest.mark.parametrize("way", ["generate", "stream"])
def test_a_generation_that_fails_ends_its_own_requests_alone(silent: Engine, way: str) -> None:
    expected = silent.generate(prompt_of(7), GREEDY)[0].token_ids
    other = silent.add_request(prompt_of(7), GREEDY)
    silent.step()
    trouble = Trouble(silent._model)
    trouble.error, trouble.num_tokens = OSError("mine"), 2  # the first decode of both together
    with pytest.raises(OSError, match="mine"):
        silent.generate([prompt_of(9)], GREEDY)
    stats = silent.stats()
    assert (stats["running"], stats["waiting"]) == (1, 0)
    assert stats["pages"] - stats["free_pages"] == 1
    run_all(silent)
    assert finished(silent, other).token_ids == expected
    assert_idle(silent)


def test_strict_mode_raises_instead_of_running_eagerly() -> None:
    graphs = graphs_of(strict=True)
    with Engine(
        tiny_model(), EngineConfig(device="cpu", chunk_size=64, max_requests=4, max_context=128, graphs=graphs)
    ) as e:
        assert len(e.generate(prompt_of(20), GREEDY)[0].token_ids) == 12
        with pytest.raises(StrictModeError, match="prefill batch would run eagerly: no_rung"):
            e.generate(prompt_of(40), GREEDY)
        assert_idle(e)
        assert len(e.generate(prompt_of(20), GREEDY)[0].token_ids) == 12


# -- start-up and the end ----------------------------------------------------------------------------------------------


def test_after_start_up_nothing_is_captured(engine: Engine) -> None:
    captures = {name: phase["captures"] for name, phase in engine.stats()["phases"].items()}
    with pytest.raises(CaptureNotAllowed, match="start-up is over"):
        engine.capture()
    for runner in engine.runners:
        with pytest.raises(CaptureNotAllowed):
            runner.capture(list(runner.keys())[:1])
    assert captures == {name: phase["captures"] for name, phase in engine.stats()["phases"].items()}


def test_captured_by_hand_the_engine_runs_eagerly_before_and_replays_after() -> None:
    config = EngineConfig(device="cpu", chunk_size=32, max_requests=4, max_context=128, graphs=graphs_of(capture="manual"))
    with Engine(tiny_model(), config) as engine:
        eager = engine.generate(prompt_of(9), GREEDY)[0].token_ids
        assert engine.stats()["phases"]["decode"]["eager"] == {"not_captured": 11}
        told: list[str] = []
        reports = engine.capture(lambda key, what: told.append(f"{what} of {key}"))
        assert set(reports) == {"prefill", "decode"} and "capture of decode[4 tokens, 4 requests, context 128]" in told
        assert engine.generate(prompt_of(9), GREEDY)[0].token_ids == eager
        assert engine.stats()["phases"]["decode"]["replays"] == 11
        with pytest.raises(CaptureNotAllowed):
            engine.capture()


def test_a_start_up_that_fails_can_be_tried_again() -> None:
    config = EngineConfig(device="cpu", chunk_size=32, max_requests=4, max_context=128, graphs=graphs_of(capture="manual"))
    model = tiny_model()
    with Engine(model, config) as engine:

        def read_on_host(module: Any, args: Any, output: torch.Tensor) -> None:
            if output.shape[1] == 4:
                output.sum().item()

        handle = model.model.norm.register_forward_hook(read_on_host)
        with pytest.raises(CaptureError, match=r"decode\[4 tokens, 4 requests, context 128\].*test_engine.py"):
            engine.capture()
        prompts = [prompt_of(9)] * 3
        assert len({output.token_ids for output in engine.generate(prompts, GREEDY)}) == 1
        handle.remove()
        reports = engine.capture()
        assert [len(reports[name].records) for name in ("prefill", "decode")] == [0, 3]
        engine.generate(prompts, GREEDY)
        assert engine.stats()["phases"]["decode"]["replays"] == 11


def test_closing_twice_is_closing_once_and_a_closed_engine_says_so(smollm2_tokenizer: Any) -> None:
    engine = Engine(model_that_speaks(smollm2_tokenizer), config_of(), tokenizer=smollm2_tokenizer)
    stream = engine.stream(PROMPT, GREEDY)
    next(stream)
    name = engine.add_request(PROMPT, GREEDY)
    engine.close()
    engine.close()
    stats = engine.stats()
    assert stats["cache_bytes"] == stats["graph_pool_bytes"] == 0
    assert (stats["free_pages"], stats["running"], stats["waiting"]) == (stats["pages"], 0, 0)
    for call in (
        lambda: engine.generate(PROMPT, GREEDY), lambda: engine.step(), lambda: next(stream), lambda: engine.capture(),
        lambda: engine.measure(), lambda: engine.wake(), lambda: engine.update_weights({}),
    ):  # fmt: skip
        with pytest.raises(SegueError, match="this engine is closed"):
            call()
    assert not engine.abort(name)


def test_stats_are_plain_values(engine: Engine) -> None:
    engine.generate(PROMPT, GREEDY)
    stats = engine.stats()
    assert json.loads(json.dumps(stats)) == stats
    decode = stats["phases"]["decode"]
    assert decode["backend"] == "full" and decode["captures"] == 3
    assert decode["real_tokens"] <= decode["padded_tokens"] and decode["static_bytes"] > 0


def test_four_threads_get_what_one_gets(engine: Engine) -> None:
    prompts = [PROMPT, "One two three", "Once upon a time there was", "def main():"]
    expected = [output.text for output in engine.generate(prompts, GREEDY)]
    got: dict[int, list[str]] = {}
    failures: list[BaseException] = []

    def work(place: int) -> None:
        try:
            texts = []
            for turn in range(4):
                if turn % 2:
                    texts.append("".join(engine.stream(prompts[place], GREEDY)))
                else:
                    texts.append(engine.generate(prompts[place], GREEDY)[0].text)
                with pytest.raises(ValueError, match="empty"):
                    engine.generate("")
            got[place] = texts
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not failures and not any(thread.is_alive() for thread in threads)
    assert got == {place: [expected[place]] * 4 for place in range(4)}


@pytest.mark.parametrize("debug", ["forward", "ops"])
def test_debug_modes_give_the_same_tokens_on_the_replay_path(debug: Any) -> None:
    prompts = [[3, 4, 5], list(range(7, 40))]
    with Engine(tiny_model(), config_of()) as plain:
        expected = [output.token_ids for output in plain.generate(prompts, GREEDY)]
    with Engine(tiny_model(), config_of(graphs=graphs_of(debug=debug))) as engine:
        assert [output.token_ids for output in engine.generate(prompts, GREEDY)] == expected
        phases = engine.stats()["phases"]
    assert {phase["backend"] for phase in phases.values()} == {debug}
    assert all(phase["eager"] == {} and phase["replays"] > 0 for phase in phases.values())
    if debug == "ops":
        assert all(graph["nodes"] == graph["segments"] > 50 for graph in phases["decode"]["graphs"])

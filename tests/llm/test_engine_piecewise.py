"""Both phases as compiled pieces: the text is transformers' own, and a model that cannot be compiled says where."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from segue import config as c
from segue.backends.piecewise import PiecewiseBackend
from segue.errors import CaptureError
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.bench.decode import decode_batch
from segue.llm.bench.prefill import prefill_batch

pytest.importorskip("transformers")
from llm_support import FAMILIES, greedy, prompt_of, tiny_model

LENGTHS = (3, 17, 40, 5)
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def engine_of(model: Any, *, fuse: bool = False, **settings: Any) -> Engine:
    graphs = c.GraphConfig(
        decode=c.PhaseConfig(backend="tc_piecewise", ladder=(2, 4), **settings),
        prefill=c.PhaseConfig(backend="tc_piecewise", ladder=(8, 64), max_padding=64.0, **settings),
    )
    sizes: dict[str, Any] = {"chunk_size": 64, "max_requests": 4, "max_context": 128}
    return Engine(model, EngineConfig(device="cpu", graphs=graphs, fuse=fuse, **sizes))


@pytest.mark.parametrize(
    ("family", "fuse"),
    [
        ("Llama", True),
        *[pytest.param(family, fuse, marks=pytest.mark.slow) for family in FAMILIES for fuse in (False, True)],
    ],
)
def test_the_text_is_that_of_transformers_in_both_phases(family: str, fuse: bool) -> None:
    model = tiny_model(family)
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [greedy(model, prompt, PARAMS.max_tokens) for prompt in prompts]
    with engine_of(model, fuse=fuse) as engine:
        assert [list(output.token_ids) for output in engine.generate(prompts, PARAMS)] == expected
        stats = engine.stats()
        for name, phase in stats["phases"].items():
            assert phase["backend"] == "tc_piecewise" and phase["eager"] == {}
            assert phase["replays"] == stats["steps"][name] > 0
        programs = [runner.backend.build.programs for runner in engine.runners]  # type: ignore[attr-defined]
        assert programs == [1, 1]  # one for all rungs of a phase
    assert "compiler  auto -> eager" in engine.resolved.explain()


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=[pytest.mark.compiler, pytest.mark.slow])])
def test_pieces_that_run_unrecorded_answer_as_the_eager_pass_does(compiler: str) -> None:
    with engine_of(tiny_model(), compiler=compiler) as engine, torch.inference_mode():
        for runner, host in (
            (engine.decode, decode_batch(3, 5)),
            (engine.prefill, prefill_batch(7)),
            (engine.decode, decode_batch(2, 9)),
        ):
            key = runner.decide(host).key
            assert key is not None and isinstance(runner.backend, PiecewiseBackend)
            expected = [t.clone() for t in runner.run_padded_eagerly(host, key)]
            for got, value in zip(
                runner.run_padded_eagerly(host, key, runner.backend.run_unrecorded), expected, strict=True
            ):
                torch.testing.assert_close(got, value)
            assert engine.stats()["phases"][runner.phase]["replays"] == 0


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(("family", "fuse"), [("Llama", False), ("Llama", True), ("Mixtral", False)])
def test_the_text_is_that_of_transformers_when_inductor_makes_the_pieces(family: str, fuse: bool) -> None:
    model = tiny_model(family)
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [greedy(model, prompt, PARAMS.max_tokens) for prompt in prompts]
    with engine_of(model, fuse=fuse, compiler="inductor") as engine:
        assert [list(output.token_ids) for output in engine.generate(prompts, PARAMS)] == expected


def model_that_locks() -> Any:
    """Python that no compiler reads, and that a recording does not mind."""
    model, lock = tiny_model(), threading.Lock()

    def hold(*_: Any) -> None:
        with lock:
            return None

    model.model.norm.register_forward_pre_hook(hold)
    return model


def test_a_model_that_cannot_be_compiled_is_refused_with_the_line() -> None:
    with pytest.raises(CaptureError, match=r"test_engine_piecewise.py:\d+ in hold \(with lock:\).*backend='breakable'"):
        engine_of(model_that_locks())


def test_a_model_that_cannot_be_compiled_runs_eagerly_where_the_phase_says_so() -> None:
    prompt = prompt_of(9)
    expected = greedy(tiny_model(), prompt, PARAMS.max_tokens)
    with engine_of(model_that_locks(), on_failure="eager") as engine:
        assert list(engine.generate([prompt], PARAMS)[0].token_ids) == expected
        for name, phase in engine.stats()["phases"].items():
            assert phase["eager"] == {"capture_failed": engine.stats()["steps"][name]}
            failures = engine.capture_reports[name].failures
            assert all("breakable" in str(error) for _, error in failures) and failures

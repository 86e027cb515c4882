"""`segue bench`: runs on cpu in seconds, its figures add up, and mistakes are one line."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.cli import main
from segue.cli.bench.child import in_child
from segue.cli.bench.memory import default_ceilings, doubling
from segue.cli.usage import UsageError
from segue.errors import SegueError
from segue.llm.bench.models import SHAPES, random_model
from segue_command import noticing_interrupts

pytest.importorskip("transformers")


def bench(*arguments: str) -> int:
    try:
        return main(["bench", *arguments])
    except SystemExit as end:
        return int(end.code or 0)


def test_memory_by_ceiling_and_by_rung_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "memory.json"
    assert bench("memory", "--shape", "tiny", "--device", "cpu", "--chunk-size", "32", "--json", str(file)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 130 and "by capture ceiling" in printed[0] and "mixed held" in printed[1]
    result = json.loads(file.read_text())
    assert [r["ceiling"] for r in result["prefill"]] == [0, 4, 16, 32, 64]
    assert [r["ceiling"] for r in result["decode"]] == [0, 1, 2, 4]
    for reading in (*result["prefill"], *result["decode"]):
        assert reading["total"] == reading["resident"] + reading["pool"] + reading["driver"] + reading["peak"]
        held = max(reading["held"], reading["mixed"] or 0)
        assert reading["held_total"] == reading["reserved"] + reading["driver"] + held >= reading["total"]
        assert reading["held"] >= reading["peak"] > 0
        assert (reading["graphs"] > 0) == (reading["ceiling"] > 0) == (reading["pool"] > 0) and reading["driver"] == 0
    peaks = {r["ceiling"]: r["peak"] for r in result["prefill"]}
    assert peaks[0] == pytest.approx(peaks[4], rel=0.05) == pytest.approx(peaks[16], rel=0.05)
    assert max(peaks[32], peaks[64]) < 0.75 * peaks[0], "from the chunk size on, the prefill runs in the pool"
    mixed = {r["ceiling"]: r["mixed"] for r in result["prefill"]}
    assert mixed[0] >= peaks[0] and mixed[32] < 0.75 * mixed[0] and {r["mixed"] for r in result["decode"]} == {None}


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "cannot be read"), ("[]", "names no model_type"), ('{"model_type": "nonsense"}', "does not know the model type")],
)
def test_a_folder_without_a_usable_configuration_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    assert bench("decode", "--shape", str(tmp_path), "--device", "cpu") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line and str(tmp_path) in line


def test_a_coarser_ladder_holds_less(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    sizes = ("--shape", "tiny", "--device", "cpu", "--chunk-size", "32", "--ceilings", "16,32", "--max-requests", "1")
    assert bench("memory", *sizes, "--ladder", "8,16,24", "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert result["ladder"] == "8,16,24"
    assert [(r["ceiling"], r["graphs"]) for r in result["prefill"]] == [(0, 0), (16, 2), (32, 4)]


def test_eager_prefills_in_the_lent_pool_need_little_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "memory.json"
    sizes = ("--chunk-size", "32", "--ceilings", "4,16", "--max-requests", "1")
    assert bench("memory", "--shape", "tiny", "--device", "cpu", *sizes, "--lend", "--json", str(file)) == 0
    result = json.loads(file.read_text())
    peaks = {r["ceiling"]: r["peak"] for r in result["prefill"]}
    assert result["lend"] and max(peaks[4], peaks[16]) < 0.5 * peaks[0]


def seconds_of(rows: list[dict[str, Any]]) -> list[float]:
    return [sample["median"] for row in rows for sample in row["seconds"].values()]


def test_decode_by_batch_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "decode.json"
    assert bench("decode", "--device", "cpu", "--batches", "1,3", "--context", "20", "--json", str(file)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 130 and len(printed) == 5
    rows = json.loads(file.read_text())["rows"]
    assert [(r["batch"], r["rung"]) for r in rows] == [(1, 1), (3, 3)] and min(seconds_of(rows)) > 0
    weights = 2 * (64 * (64 + 64) + 64 * 64 + 3 * 64 * 128) + 64 * 256  # q, k, v; o; gate, up, down; the head
    assert {r["weight_bytes"] for r in rows} == {4 * weights}


def test_prefill_by_length_and_arm_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prefill.json"
    assert bench("prefill", "--device", "cpu", "--lengths", "4,24", "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert [set(r["seconds"]) for r in result["rows"]] == [{"eager", "full", "breakable"}] * 2
    assert {arm: build["shapes"] for arm, build in result["build"].items()} == {"eager": 0, "full": 2, "breakable": 2}
    assert "full: 2 shapes built in" in capsys.readouterr().out


def test_build_and_throughput_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    assert bench("build", "--device", "cpu", "--chunk-size", "32", "--max-requests", "2", "--json", str(file)) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [(r["start"], r["phase"]) for r in rows] == [(s, p) for s in ("first", "second") for p in ("prefill", "decode")]
    job = ("--prompts", "3", "--lengths", "5,9", "--new-tokens", "4")
    assert bench("throughput", "--device", "cpu", *job, "--json", str(file)) == 0
    result = json.loads(file.read_text())
    assert result["prompts"] == 3 and 15 <= result["prompt_tokens"] <= 27
    assert 0 < result["floor"]["prompt_s"] + result["floor"]["decode_s"] < min(result["seconds"])
    assert "segue reaches" in capsys.readouterr().out


def test_padding_of_tokens_and_of_slots_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "padding.json"
    job = ("--tokens", "3:8,17:32", "--slot-tokens", "32", "--empty", "2,31")
    assert bench("padding", "--device", "cpu", *job, "--json", str(file)) == 0
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 160 and printed[-1].endswith(("is shown here", "is refuted here"))
    result = json.loads(file.read_text())
    assert [(r["real"], r["rung"]) for r in result["tokens"]] == [(3, 8), (17, 32)]
    assert [(r["requests"], r["empty"]) for r in result["slots"]] == [(30, 2), (1, 31)]
    for row in (*result["tokens"], *result["slots"]):
        seconds, count = row["seconds"], row.get("empty") or row["rung"] - row["real"]
        cost = seconds["padded"]["median"] - seconds["fits"]["median"]
        assert row["cost_each_s"] * count == pytest.approx(cost) and min(s["low"] for s in seconds.values()) > 0
    most = {kind: max(row["cost_share"] for row in result[kind]) for kind in ("tokens", "slots")}
    assert result["is_claim_shown"] == (most["slots"] < most["tokens"]) == ("shown" in printed[-1])


def test_the_matrix_of_modes_on_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, arms = tmp_path / "matrix.json", ("disabled", "compiled", "full", "breakable", "tc_piecewise")
    assert bench("matrix", "--device", "cpu", "--decode", "1,2", "--prefill", "8", "--context", "5", "--calls", "5",
                 "--json", str(file)) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 120 and "compiled: the pieces of tc_piecewise" in printed
    result = json.loads(file.read_text())
    engines = [("disabled", 0), ("tc_piecewise", 3), ("full", 3), ("breakable", 3)]
    assert [(a["arm"], a["shapes"]) for a in result["arms"]] == engines
    assert all(set(arm["resolved"].values()) == {arm["arm"]} for arm in result["arms"])
    rows = result["rows"]
    cells = [(p, n, arm) for p, n in (("decode", 1), ("decode", 2), ("prefill", 8)) for arm in arms]
    assert [(r["phase"], r["rung"], r["arm"]) for r in rows] == cells
    for row in rows:
        assert row["compile"] == (row["arm"] in ("compiled", "tc_piecewise")) and row["device_s"] is None
        assert row["graphs"] == (row["arm"] not in ("disabled", "compiled")) == (row["pool_bytes"] > 0)
        assert row["reason"] == ("disabled" if row["arm"] == "disabled" else None)
        latency, samples = row["latency_s"], sorted(row["samples_s"])
        assert [latency["p50"], latency["p90"], latency["p99"]] == [samples[2], samples[4], samples[4]] and len(samples) == 5
        assert 0 < row["submit_s"] <= latency["p50"]


def test_ceilings_reach_from_small_ones_over_the_chunk_to_one_beyond() -> None:
    assert default_ceilings(2048) == (64, 256, 1024, 2048, 4096)
    assert default_ceilings(8192) == (64, 256, 1024, 4096, 8192, 16384)
    assert default_ceilings(1) == (1, 2) and default_ceilings(64) == (8, 32, 64, 128)
    assert doubling(1) == (1,) and doubling(6) == (1, 2, 4, 6) and doubling(8) == (1, 2, 4, 8)


MISTAKES: dict[str, tuple[tuple[str, ...], int]] = {
    "the following arguments are required: COMMAND": ((), 2),
    "--ceilings is '3,x'": (("memory", "--ceilings", "3,x"), 2),
    "--ceilings is '9999999'; 1,048,576 is the most": (("memory", "--ceilings", "9999999"), 2),
    "--ladder is '0'": (("memory", "--ladder", "0"), 2),
    "--lengths takes the shortest prompt and the longest": (("throughput", "--lengths", "9,3"), 2),
    "--png x.xyz: name a file that ends in .png": (("decode", "--png", "x.xyz"), 2),
    "--arms is 'half'": (("prefill", "--arms", "half"), 2),
    "--lengths takes": (("throughput", "--lengths", "1,2,3"), 2),
    "--transformers measures on cuda": (("throughput", "--device", "cpu", "--transformers"), 2),
    "no shape is called 'huge'": (("memory", "--shape", "huge"), 2),
    "at least 1": (("memory", "--chunk-size", "0"), 2),
    "--tokens is '16:9'": (("padding", "--tokens", "16:9"), 2),
    "--empty must stay below 32": (("padding", "--empty", "32"), 2),
    "--arms is 'fast'": (("matrix", "--arms", "fast"), 2),
    "--calls must be at least 1": (("matrix", "--calls", "0"), 2),
    "--context is 99999999; it must be from 1 to 8388608": (("decode", "--context", "99999999"), 2),
    "--batches is '1,99999999'; 65,536 is the most": (("decode", "--batches", "1,99999999"), 2),
    "--prompts and --new-tokens are at most 65,536": (("throughput", "--prompts", "999999999"), 2),
    "--lengths is '1,999999999'; 1,048,576 is the most": (("throughput", "--lengths", "1,999999999"), 2),
    "--max-requests is 9999999; it must be": (("build", "--max-requests", "9999999"), 2),
}


@pytest.mark.parametrize("message", list(MISTAKES))
def test_a_mistake_is_one_line(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, status = MISTAKES[message]
    assert bench(*arguments, *(("--device", "cpu") if arguments else ())) == status
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1] and "Traceback" not in captured.err


FIGURES = {
    "memory": ("--chunk-size", "16", "--max-requests", "1"),
    "decode": ("--batches", "1,2", "--context", "9"),
    "prefill": ("--lengths", "4,8", "--arms", "eager,full"),
    "throughput": ("--prompts", "2", "--lengths", "5", "--new-tokens", "3"),
}


@pytest.mark.parametrize("name", list(FIGURES))
def test_a_figure_needs_matplotlib_or_says_so(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figure.png"
    status = bench(name, "--device", "cpu", *FIGURES[name], "--png", str(file))
    if importlib.util.find_spec("matplotlib") is None:
        assert status == 1 and "--png needs matplotlib" in capsys.readouterr().err and not file.exists()
    else:
        assert status == 0 and file.read_bytes().startswith(b"\x89PNG")


# -- random models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_shape_is_one_that_transformers_builds_in_its_size(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = dict(SHAPES[name])
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {"smollm2": 0.135, "llama-3-8b": 8.03, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5}
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert name not in sizes or billions == pytest.approx(sizes[name], rel=0.01)


def test_a_random_model_is_the_same_each_time_and_draws_nothing_of_the_caller_s() -> None:
    state = torch.get_rng_state()
    one, other = (random_model("tiny", torch.device("cpu"), torch.float32) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs) and one.dtype is torch.float32


def test_layers_that_share_weights_are_layers_of_their_own(tmp_path: Path) -> None:
    from segue.llm import Engine, EngineConfig, SamplingParams

    small: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 5, "n_routed_experts": 4, "vocab_size": 128}
    small |= {"moe_intermediate_size": 32, "intermediate_size": 32, "num_experts_per_tok": 2, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["moe-78-layers"] | small))
    model = random_model(str(tmp_path), torch.device("cpu"), torch.float32, share_layers=True)
    assert len({id(layer.self_attn.q_proj.weight) for layer in model.model.layers}) == 1
    assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {"cpu"}
    with Engine(model, EngineConfig(device="cpu", chunk_size=16, max_requests=1, max_context=32, num_pages=8)) as engine:
        assert engine.facts.num_layers == 5
        assert len(engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids) == 4


# -- measuring in processes --------------------------------------------------------------------------------------------


def test_a_child_s_answer_comes_back_and_leaves_nothing_here() -> None:
    here: list[int] = []

    def work() -> tuple[int, int]:
        here.append(1)
        return os.getpid(), len(here)

    answers = [in_child(work) for _ in range(3)]
    assert len({pid for pid, _ in answers} | {os.getpid()}) == 4 and {n for _, n in answers} == {1} and here == []
    assert multiprocessing.active_children() == []


def raising(error: BaseException) -> Any:
    raise error


FAILURES: dict[str, tuple[Any, type[Exception], str]] = {
    "an error": (lambda: raising(KeyError("no\nsuch  thing")), SegueError, r"^'no\\nsuch thing'$"),
    "one without words": (lambda: raising(MemoryError()), SegueError, "^MemoryError$"),
    "bad usage": (lambda: raising(UsageError("--x is 3")), UsageError, "^--x is 3$"),
    "an exit": (lambda: raising(SystemExit(4)), SegueError, "^4$"),
    "an end by itself": (lambda: os._exit(7), SegueError, "by itself, with status 7$"),
    "a kill": (lambda: os.kill(os.getpid(), signal.SIGKILL), SegueError, "by itself, with status -9$"),
    "an answer that cannot be sent": (lambda: lambda: 1, SegueError, "pickle"),
}


@pytest.mark.parametrize("name", list(FAILURES))
def test_a_child_that_fails_is_one_error_here(name: str) -> None:
    work, kind, text = FAILURES[name]
    with pytest.raises(kind, match=text) as caught:
        in_child(work)
    assert type(caught.value) is kind and multiprocessing.active_children() == []
    if name == "an error":
        assert "in raising" in str(caught.value.__cause__), "for --debug"


def test_an_interrupt_in_a_finaliser_arrives() -> None:
    class Busy:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt), noticing_interrupts():
        Busy()
        time.sleep(20)
    assert time.perf_counter() - start < 10
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_child_ends_with_an_interrupt_here() -> None:
    def interrupt_here() -> None:
        time.sleep(0.5)  # until this process waits: what falls into a library's hook after the fork is lost there
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        in_child(interrupt_here)
    assert time.perf_counter() - start < 30 and multiprocessing.active_children() == []

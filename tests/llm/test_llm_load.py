"""Loading: what is accepted gives transformers' logits, what is not is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.errors import SegueError
from segue.llm import Engine, EngineConfig, SamplingParams
from segue.llm.facts import attention_facts
from segue.llm.load import load_model

transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file  # noqa: E402

Checkpoint = Callable[..., Path]
SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def tiny_model(family: str, **changes: Any) -> Any:
    settings = {name: value for name, value in (SMALL | changes).items() if value is not None}
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def refusal(source: Any, **settings: Any) -> str:
    with pytest.raises(SegueError) as caught:
        load_model(source, device="cpu", **settings)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    return message


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    every = torch.arange(len(ids))
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), position_ids=every[None], use_cache=False, logits_to_keep=every).logits


def test_a_folder_gives_the_facts_and_the_logits_of_transformers(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    loaded = load_model(folder, device="cpu")
    facts = loaded.facts
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (2, 4, 2, 8)
    assert (facts.hidden_size, facts.vocab_size, facts.max_context) == (32, 64, 128)
    assert facts.eos_token_ids == {2, 3} and facts.dtype == torch.float32 and facts.layer_windows == (None, None)
    assert loaded.tokenizer is None and loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(loaded.model, [1, 5, 9, 33]), logits(oracle, [1, 5, 9, 33]))


def test_a_model_in_memory_is_taken_as_it_is() -> None:
    model = tiny_model("Llama").train()
    loaded = load_model(model, device="cpu")
    assert loaded.model is model and not model.training and loaded.facts.dtype == torch.float32
    assert load_model(tiny_model("Llama"), device="cpu", dtype=torch.bfloat16).facts.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "family",
    ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma", "Gemma2", "Phi3", "Olmo2", "Granite", "Mixtral", "Cohere2"],
)
def test_families_with_the_attention_interface_are_supported(family: str) -> None:
    facts = load_model(tiny_model(family), device="cpu").facts
    assert (facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (2, 4, 2, 8)


def test_windows_caps_sinks_and_value_sizes_are_found_per_layer() -> None:
    mistral = load_model(tiny_model("Mistral", sliding_window=7), device="cpu").facts
    assert mistral.layer_windows == (7, 7) and mistral.sliding_window == 7
    gemma = load_model(tiny_model("Gemma2", sliding_window=9), device="cpu").facts
    assert gemma.layer_windows == (9, None) and gemma.softcap == 50.0 and not gemma.has_sinks
    gpt_oss = tiny_model("GptOss", num_local_experts=4, num_experts_per_tok=2, sliding_window=5)
    assert load_model(gpt_oss, device="cpu").facts.has_sinks
    mla = tiny_model(
        "DeepseekV3", head_dim=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6,
        num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=1, moe_intermediate_size=16,
    )  # fmt: skip
    facts = load_model(mla, device="cpu").facts
    assert (facts.num_kv_heads, facts.head_dim, facts.value_head_dim) == (4, 12, 6)


def test_a_window_that_stands_in_the_mask_alone_bounds_the_context() -> None:
    """Up to there it says nothing; transformers hands it to no attention function of this family."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    for window, context in ((9, 9), (None, 128), (4096, 128)):
        model = tiny_model("Phimoe", sliding_window=window, **experts)
        facts = load_model(model, device="cpu").facts
        assert facts.layer_windows == (None, None) and facts.max_context == context
    ids, wanted = list(range(5, 10)), 4
    model = tiny_model("Phimoe", sliding_window=9, **experts)
    expected = model.generate(torch.tensor([ids]), max_new_tokens=wanted, do_sample=False, eos_token_id=None)[0, 5:].tolist()
    with Engine(model, EngineConfig(device="cpu")) as engine:
        (output,) = engine.generate([ids], SamplingParams(max_tokens=wanted, temperature=0.0, ignore_eos=True))
        assert list(output.token_ids) == expected
        with pytest.raises(ValueError, match="the context holds 9"):
            engine.generate([list(range(12))])


def test_a_configuration_that_checks_what_is_set_loads() -> None:
    tokens = {"cls_token_id": 1, "sep_token_id": 2, "global_attn_every_n_layers": 2}
    assert load_model(tiny_model("ModernBertDecoder", **tokens), device="cpu").facts.num_layers == 2


def test_the_pad_warning_that_reads_ids_on_the_host_is_off() -> None:
    loaded = load_model(tiny_model("GPT2", n_embd=32, n_layer=2, n_head=4), device="cpu")
    assert loaded.model.config.pad_token_id is None and loaded.facts.max_context == 128


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Mamba", {}, "Mamba"),
        ("Falcon", {"head_dim": None}, "attention interface"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("Qwen3Next", {"layer_types": ["linear_attention", "full_attention"]}, "Qwen3NextForCausalLM"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, "conv"),
        ("Bert", {}, "bidirectional"),
        ("Roberta", {}, "bidirectional"),
        ("Llama", {"is_causal": False}, "bidirectional"),
        ("Gemma3Text", {"use_bidirectional_attention": True}, "bidirectional"),
    ],
)
def test_what_cannot_run_is_refused_by_name(family: str, changes: dict[str, Any], reason: str) -> None:
    message = refusal(tiny_model(family, **changes))
    assert family.removesuffix("Text") in message and reason in message and "cannot run under Segue" in message


def test_an_unsupported_folder_is_refused_before_its_weights_are_read(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    (folder / "model.safetensors").unlink()
    assert "'dynamic'" in refusal(folder)


def test_asking_the_layers_restores_the_attention() -> None:
    model = tiny_model("Llama")
    before = model.config._attn_implementation
    assert len(attention_facts(model)) == 2 and model.config._attn_implementation == before


def test_what_is_no_checkpoint_is_named(tmp_path: Path, tiny_checkpoint: Checkpoint) -> None:
    assert "no config.json" in refusal(tmp_path)
    assert "there is no checkpoint folder" in refusal(tmp_path / "absent")
    assert "there is no checkpoint folder" in refusal("./absent")
    assert "there is no checkpoint folder" in refusal("absent.gguf")
    assert "hf download nobody/nothing" in refusal("nobody/nothing")
    assert "pass its folder" in refusal(tiny_checkpoint() / "model.safetensors")


def test_damaged_configs_are_named(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text("{")
    assert "config.json cannot be read" in refusal(folder)
    (folder / "config.json").write_text("{}")
    assert "names no model_type" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "no_such_model"}))
    assert "no_such_model" in refusal(folder)
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "no_such_model", "auto_map": {"AutoConfig": "code.Config"}})
    )
    assert "never runs" in refusal(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "vit"}))
    assert "no causal LM" in refusal(folder)


@pytest.mark.parametrize("text", ['{"eos_token_id": [5]', "[]", '{"eos_token_id": "x"}', "\x00"])
def test_a_damaged_generation_config_is_named_for_its_end_tokens(tiny_checkpoint: Checkpoint, text: str) -> None:
    folder = tiny_checkpoint()
    (folder / "generation_config.json").write_text('{"eos_token_id": [5]}')
    assert 5 in load_model(folder, device="cpu").facts.eos_token_ids
    (folder / "generation_config.json").write_text(text)
    message = refusal(folder)
    assert "generation_config.json is damaged" in message or "eos_token_id = 'x'" in message


def test_damaged_weights_are_named(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (b"", whole[:4], whole[: len(whole) // 2], b"\xff" * 64):
        file.write_bytes(damaged)
        assert "model.safetensors is damaged" in refusal(folder)
    file.write_bytes(whole)
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight" in refusal(folder)
    file.unlink()
    assert "lacks model.safetensors" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "never read" in refusal(folder)


def test_weights_of_another_shape_are_refused(tiny_checkpoint: Checkpoint) -> None:
    folder, other = tiny_checkpoint(), tiny_checkpoint("other", vocab_size=80)
    shutil.copy(other / "model.safetensors", folder / "model.safetensors")
    assert "embed_tokens.weight: (80, 32) in the file, (64, 32) by the config" in refusal(folder) or "lm_head" in refusal(
        folder
    )


def test_weights_of_more_layers_than_the_config_says_are_refused(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert "have 2 layers, and its config.json says 1" in refusal(folder)


def test_weights_without_a_place_are_one_line_of_warning(
    tiny_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors") | {"model.extra.weight": torch.ones(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    capfd.readouterr()
    load_model(folder, device="cpu")
    assert [r.message for r in caplog.records if r.name == "segue"] == [
        f"segue: {folder}: 1 tensors have no place in this architecture and are left out, the first is model.extra.weight"
    ]
    assert "LOAD REPORT" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": -1}, {"num_hidden_layers": 0}, {"hidden_size": -32}, {"vocab_size": 0}, {"head_dim": -1}],
)
def test_a_config_that_cannot_be_is_named_by_its_field(tiny_checkpoint: Checkpoint, change: dict[str, int]) -> None:
    folder = tiny_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    ((name, value),) = change.items()
    message = refusal(folder)
    assert name in message and str(value) in message


def test_a_name_without_an_owner_is_refused_without_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def connect(*_: Any) -> None:
        raise AssertionError("it went to the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    assert "there is no checkpoint folder 'nope'" in refusal("nope")


@pytest.mark.parametrize("source", [None, 3, b"x", torch.nn.Linear(2, 2)])
def test_what_is_no_source_is_a_type_error(source: Any) -> None:
    with pytest.raises(TypeError, match="give a checkpoint folder"):
        load_model(source, device="cpu")


def test_each_file_of_an_index_must_be_there(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, folder / part, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: part for part, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(folder, device="cpu").facts.num_layers == 2
    (folder / "b.safetensors").unlink()
    assert "lacks b.safetensors" in refusal(folder)


def test_a_damaged_tokenizer_is_named(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint()
    (folder / "tokenizer.json").write_text("{")
    assert "the tokenizer of" in refusal(folder)

"""What tests of the engine share: tiny models with random weights, and greedy text as transformers makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

VOCABULARY = 96
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "head_dim": 8,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False,
    "initializer_range": 0.3,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"head_dim": None},
    "Mistral": {"sliding_window": 21},
    "Gemma2": {"sliding_window": 19, "query_pre_attn_scalar": 8},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 18},
}
"""Grouped heads; biases; a window in all layers; a cap and a window in every other layer; experts; sinks and experts."""

MORE_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {}, "Gemma": {}, "Phi3": {}, "Olmo2": {}, "Granite": {}, "SmolLM3": {}, "Ernie4_5": {}, "Starcoder2": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Cohere2": {"sliding_window": 19},
    "Gemma3Text": {"sliding_window": 19},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Qwen2Moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": None,
        "shared_expert_intermediate_size": 16,
    },
    "Glm4Moe": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 16, "use_qk_norm": True,
    },
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "head_dim": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
        "v_head_dim": 6, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
    },
}  # fmt: skip


def tiny_model(family: str = "Llama", **changes: Any) -> Any:
    """The same weights at every call with the same arguments."""
    import transformers

    settings = {
        k: v for k, v in (SIZES | (FAMILIES | MORE_FAMILIES)[family] | changes).items() if k != "head_dim" or v is not None
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCABULARY - 1, (length,), generator=generator).tolist()


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """transformers' own greedy text, by its own cache; end tokens, if it has any, end it."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def assert_same_text(model: Any, prompt: Sequence[int], got: Sequence[int], expected: Sequence[int], where: str) -> None:
    """Token for token; a difference is reported with how close the two likeliest tokens were for transformers."""
    if list(got) == list(expected):
        return
    place = next((i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), min(len(got), len(expected)))
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
    top = logits.topk(2)
    raise AssertionError(
        f"{where}: token {place} differs after a prompt of {len(prompt)}: {list(got)} for {list(expected)}; there the "
        f"reference's two likeliest are {top.indices.tolist()}, {(top.values[0] - top.values[1]).item():.2e} apart"
    )

"""Models of real shapes with random weights: what speed and memory depend on, without a checkpoint.

Sizes are those of the published configs. `random_model` also takes a checkpoint folder, of which it reads config.json
alone. Weights are made on the device, so that 16 GB of them take a second.

A shape marked `shares_layers` has one set of layer weights, which all layers hold: recordings cost what they would cost
with weights of their own, and a model that needs many devices fits on one. Its text means nothing in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from segue.errors import ConfigError
from segue.llm.checkpoints import require_extra

_STD = 0.02


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A transformers config class (without ``Config``) and what it is called with."""

    family: str
    config: dict[str, Any] = field(hash=False)
    shares_layers: bool = False


SHAPES: dict[str, ModelShape] = {
    "tiny": ModelShape("Llama", {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 4096,
    }),
    "smollm2": ModelShape("Llama", {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }),
    "llama-3-8b": ModelShape("Llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    }),
    "qwen3-8b": ModelShape("Qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }),
    "qwen3-30b-a3b": ModelShape("Qwen3Moe", {
        "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    }),
    "moe-78-layers": ModelShape("Glm4Moe", {  # a tensor-parallel share of 4 of 64 heads and of experts of 2,048
        "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 78, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 38912, "max_position_embeddings": 8192,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 512,
        "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1,
    }, shares_layers=True),
}  # fmt: skip


def random_model(shape: str, device: torch.device | str, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    """A causal LM in eval mode: a name of `SHAPES`, or a folder with a config.json. `dtype` None is bfloat16 on CUDA,
    float32 on cpu. No generator of the caller's advances.

    Raises:
        ConfigError: there is neither a shape nor a checkpoint folder of that name.
        MissingExtraError: the extra ``llm`` is not installed.
    """
    require_extra()
    device = torch.device(device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
    known = SHAPES.get(shape)
    config = _folder_config(shape) if known is None else _named_config(known)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        model = _shared_layers(config, device, dtype) if known is not None and known.shares_layers else None
        return _made(config, device, dtype) if model is None else model


def _named_config(shape: ModelShape) -> Any:
    import transformers

    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return getattr(transformers, f"{shape.family}Config")(**({"tie_word_embeddings": False} | shape.config | ends))


def _folder_config(folder: str) -> Any:
    from transformers import AutoConfig

    if not (Path(folder).expanduser() / "config.json").is_file():
        raise ConfigError(f"shape is {folder!r}; choose one of {', '.join(SHAPES)}, or a folder with a config.json")
    return AutoConfig.from_pretrained(str(Path(folder).expanduser()), trust_remote_code=False)


def _made(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """The constructor runs on the device, for the buffers that it computes; weights are then drawn in one way for all."""
    from transformers import AutoModelForCausalLM

    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, _STD) if parameter.dim() > 1 else parameter.fill_(1)
    return model.eval().requires_grad_(False)


def _shared_layers(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of one layer, made; and one of all layers without memory, which takes that layer's weights for each."""
    import copy

    from transformers import AutoModelForCausalLM

    single = copy.deepcopy(config)
    single.num_hidden_layers = 1
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(single, name, None):
            setattr(single, name, getattr(single, name)[:1])
    made = _made(single, device, dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for layer in model.model.layers:
        _take_weights(layer, made.model.layers[0])
    for name in ("embed_tokens", "norm", "rotary_emb"):
        setattr(model.model, name, getattr(made.model, name))
    model.lm_head = made.lm_head
    return model.eval().requires_grad_(False)


def _take_weights(target: torch.nn.Module, source: torch.nn.Module) -> None:
    for into, other in zip(target.modules(), source.modules(), strict=True):
        for table in ("_parameters", "_buffers"):
            getattr(into, table).update(getattr(other, table))

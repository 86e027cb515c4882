"""Models of known shapes with random weights, made on the device in a second: what is timed does not depend on values.

A shape of `SHARED_LAYERS` has one set of layer weights, which all layers hold: recordings cost what they would cost with
weights of their own, and a model that needs many devices fits on one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from segue.errors import ConfigError
from segue.llm.checkpoints import require_extra

_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _LLAMA | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256,
    },
    "smollm2": _LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True, "rope_theta": 100_000.0,
    },
    "llama-3-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500_000.0,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "rope_theta": 1_000_000.0,
    },
    "moe-78-layers": {  # a tensor-parallel share of 4 of 64 heads, and of 256 experts of 2,048 each
        "model_type": "glm4_moe", "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 78,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 38912, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 512, "first_k_dense_replace": 0,
        "n_group": 1, "topk_group": 1,
    },
}  # fmt: skip
SHARED_LAYERS = {"moe-78-layers"}


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, max_context: int = 4096, *, share_layers: bool | None = None
) -> Any:
    """A transformers model of a named shape, or of the ``config.json`` in a folder, with small random weights.

    `share_layers` gives all layers one set of weights; None where the shape is one of `SHARED_LAYERS`.
    Raises ConfigError for an unknown name, or a folder without a configuration that transformers can use.
    """
    require_extra()
    from transformers import AutoConfig, AutoModelForCausalLM

    from segue.llm.load import load_config

    if shape in SHAPES:
        settings = dict(SHAPES[shape])
        kind = settings.pop("model_type")
        config = AutoConfig.for_model(kind, max_position_embeddings=max_context, **settings)
    elif (Path(shape) / "config.json").is_file():
        config = load_config(Path(shape))
    else:
        raise ConfigError(f"no shape is called {shape!r}: choose one of {', '.join(SHAPES)}, or a folder with config.json")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    is_shared = shape in SHARED_LAYERS if share_layers is None else share_layers
    layers = list(model.model.layers) if is_shared else []
    if layers:
        model.model.layers = torch.nn.ModuleList(layers[:1])
    model = model.to_empty(device=device).eval()
    for buffer in model.buffers():
        buffer.zero_()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[-1]), generator=generator)
            else:
                parameter.fill_(1)
    for module in model.modules():  # buffers are made from the config, and the meta device made none
        if hasattr(module, "inv_freq") and hasattr(module, "rope_init_fn"):
            fresh = type(module)(module.config, device=device)
            for name, buffer in fresh.named_buffers():
                module.get_buffer(name).copy_(buffer)
            module.original_inv_freq = fresh.inv_freq.clone()
    model.tie_weights()
    if layers:
        for layer in layers[1:]:
            _take_weights(layer, layers[0])
        model.model.layers = torch.nn.ModuleList(layers)
    return model


def _take_weights(target: torch.nn.Module, source: torch.nn.Module) -> None:
    for into, other in zip(target.modules(), source.modules(), strict=True):
        into._parameters.update(other._parameters)
        into._buffers.update(other._buffers)

"""A GGUF file, written as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(file: Path, model: Any) -> None:
    """`model` (a llama) as llama.cpp writes it: float32, rows of q and k permuted, a byte-level vocabulary."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = ["<unk>", "<s>", "</s>", *bytes_to_unicode().values(), "ab", "abc"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}.get(name.split(".")[-2][0])
        if "self_attn" in name and heads:
            pairs = values.reshape(heads, 2, values.shape[0] // heads // 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(gguf_name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

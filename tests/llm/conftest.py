"""The default model, once a session, and an attention under Segue's name where nothing has registered one yet."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from segue.errors import ConfigError
from segue.llm.load import ATTENTION, default_model


def plain_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **settings: Any
) -> tuple[torch.Tensor, None]:
    """Causal attention of one sequence: all that a test of loading needs."""
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=query.shape[2] > 1, scale=settings.get("scaling"), enable_gqa=True
    )
    return out.transpose(1, 2).contiguous(), None


@pytest.fixture(scope="session", autouse=True)
def attention_is_registered() -> None:
    pytest.importorskip("transformers")
    from transformers import AttentionInterface

    if ATTENTION not in AttentionInterface().valid_keys():
        AttentionInterface.register(ATTENTION, plain_attention)


@pytest.fixture(scope="session", autouse=True)
def interrupts_arrive() -> None:
    """Also where the tests were started in the background of a shell, which ignores interrupts; children inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The folder of SmolLM2-135M-Instruct; skips where the model is not on this machine."""
    try:
        return default_model()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.fixture
def tiny_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Writes a two-layer llama with random weights into a folder of its own; keywords change its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def write(name: str = "tiny", **changes: Any) -> Path:
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 128}
        config = LlamaConfig(**(sizes | {"bos_token_id": 1, "eos_token_id": [2, 3]} | changes))
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
        return tmp_path / name

    return write

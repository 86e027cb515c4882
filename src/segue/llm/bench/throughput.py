"""Tokens a second of a whole job: prompts of mixed lengths, a fixed number of new tokens each, end tokens ignored.

The floor has two parts: the prompt's tokens at the rate of one large matrix product, and each decode step's weights and
cached keys and values at the rate of a large read, both measured in the same process.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from segue.llm.bench.decode import matrix_products
from segue.llm.engine import Engine
from segue.llm.sampler import SamplingParams


def make_prompts(count: int, shortest: int, longest: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def measure_engine(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int, rounds: int = 3) -> list[float]:
    """Seconds of each round; one round before, unmeasured."""
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    seconds = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        outputs = engine.generate([list(p) for p in prompts], params)
        if number:
            seconds.append(time.perf_counter() - start)
        assert all(len(output.token_ids) == num_new for output in outputs)
    return seconds


def measure_transformers(model: Any, prompts: Sequence[Sequence[int]], num_new: int) -> float:
    """Seconds of transformers' continuous batching, in its attention ``paged|sdpa``, after a round that warms it up."""
    from transformers import GenerationConfig

    model.set_attn_implementation("paged|sdpa")
    settings = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(inputs=[list(p) for p in prompts[:4]], generation_config=settings, progress_bar=False)
    torch.cuda.synchronize()
    start = time.perf_counter()
    outputs = model.generate_batch(inputs=[list(p) for p in prompts], generation_config=settings, progress_bar=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    produced = [len(output.generated_tokens) for output in outputs.values()]
    assert len(produced) == len(prompts) and all(n == num_new for n in produced), produced
    return seconds


def floor_seconds(engine: Engine, prompts: Sequence[Sequence[int]], num_new: int) -> dict[str, float]:
    """The least time that the job could take on this device, and the two rates that it follows from."""
    weights = matrix_products(engine)
    elements = sum(w.numel() for w in weights)
    rates = measured_rates(engine.device.device, weights[0].dtype)
    prompt_tokens = sum(map(len, prompts))
    facts = engine.facts
    per_token = 2 * facts.num_layers * facts.num_kv_heads * facts.head_dim * weights[0].itemsize
    cached = sum(len(p) + i for p in prompts for i in range(num_new))
    batches = -(-len(prompts) // engine.sizes.max_requests)
    read = batches * num_new * sum(w.nbytes for w in weights) + cached * per_token
    return {
        "prompt_s": 2 * elements * prompt_tokens / rates["flop_per_s"],
        "decode_s": read / rates["bytes_per_s"],
        **rates,
    }


def measured_rates(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Operations a second of a large square product, and bytes a second of a large read."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    big = torch.zeros(size * size * (32 if device.type == "cuda" else 4), dtype=torch.int32, device=device)
    flops = 2 * size**3 / _fastest(lambda: a @ b, device)
    return {"flop_per_s": flops, "bytes_per_s": big.nbytes / _fastest(big.amax, device)}


def _fastest(call: Any, device: torch.device) -> float:
    best = float("inf")
    for _ in range(5):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best

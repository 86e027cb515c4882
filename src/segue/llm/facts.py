"""Whether Segue can run a model, and what its attention and its cache must know of it.

Configs of different families name the same thing differently, and some do not name it at all. So the layers are asked
instead: one token runs through the model with an attention that computes nothing and notes the shapes and the settings
that each layer hands over (`attention_facts`). That also proves the safe call of the engine to work: no mask, no
cache, positions given, logits for chosen indices.

Supported is a causal LM that declares the attention interface and keeps nothing but K and V between steps, the same
sizes in every layer. Everything else is refused in one line, where possible from the config, before weights load.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from segue._compat import without_autocast
from segue.errors import ConfigError
from segue.graph import Call, calling
from segue.llm.attention_switch import switch_attention
from segue.llm.batch import dummy_batch, to_device
from segue.llm.parts import Parts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_ATTENTION = "segue_probe"
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LIBRARIES = frozenset({"segue", "torch", "transformers"})
_BIDIRECTIONAL = "its attention is bidirectional: tokens see those behind them, which no cache of K and V can serve"
_REFUSED_ROPE = frozenset({"dynamic", "longrope"})


class LayerFacts(NamedTuple):
    """What one layer hands to its attention."""

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    sliding_window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as the engine sees it. `dtype` is that of the weights; `max_context` counts prompt and output.

    `sliding_window` is the window of the layers that have one, None where all see everything; `layer_windows` has one
    entry a layer. `softcap` is that of the attention scores; `has_sinks` says that layers pass attention sinks.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    hidden_size: int
    vocab_size: int
    max_context: int
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    sliding_window: int | None
    layer_windows: tuple[int | None, ...]
    softcap: float | None
    has_sinks: bool


def check_supported(model_class: Any, config: Any) -> None:
    """ConfigError, naming the architecture and the reason, where Segue cannot run `model_class` with `config`."""
    name = model_class.__name__
    text = config.get_text_config()
    for field in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "vocab_size",
    ):
        try:
            value = getattr(text, field, None)
        except RuntimeError:  # transformers' own, for what its layers have each
            _refuse(name, f"its layers differ in {field}")
        if value is not None and (not isinstance(value, int) or value < 1):
            _refuse(name, f"its config says {field} = {value!r}, which must be an integer of at least 1")
    if not getattr(model_class, "_supports_attention_backend", False):
        _refuse(name, "it does not declare transformers' attention interface")
    odd = sorted(set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES)
    if getattr(model_class, "_is_stateful", False) or odd:
        layers = f" ({', '.join(odd)} layers)" if odd else ""
        _refuse(name, f"it keeps a state besides K and V between steps, or attends in another way{layers}")
    if getattr(text, "num_kv_shared_layers", 0):
        _refuse(name, "some of its layers share another layer's K and V")
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        _refuse(name, _BIDIRECTIONAL)
    refused = sorted(_REFUSED_ROPE & set(_rope_types(text)))
    if refused:
        _refuse(name, f"its rope type {refused[0]!r} changes with the length of the text; set a static one in config.json")


def model_facts(model: PreTrainedModel, layers: tuple[LayerFacts, ...], eos_token_ids: frozenset[int]) -> ModelFacts:
    """The facts of a loaded model whose `layers` were asked by `attention_facts`."""
    config = model.config.get_text_config()
    first = layers[0]
    windows = tuple(layer.sliding_window for layer in layers)
    head = model.get_output_embeddings()
    return ModelFacts(
        architecture=type(model).__name__,
        num_layers=len(layers),
        num_heads=first.num_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        value_head_dim=first.value_head_dim,
        hidden_size=int(config.hidden_size),
        vocab_size=int(config.vocab_size if head is None else head.weight.shape[0]),
        max_context=_max_context(type(model).__name__, config, windows),
        dtype=model.dtype,
        eos_token_ids=eos_token_ids,
        sliding_window=max((window for window in windows if window is not None), default=None),
        layer_windows=windows,
        softcap=first.softcap,
        has_sinks=any(layer.has_sinks for layer in layers),
    )


def attention_facts(model: PreTrainedModel) -> tuple[LayerFacts, ...]:
    """What each layer hands to its attention, in the order of the layers, from a forward pass of one token.

    From then on the model's attention is switched (`attention_switch`), and outside such passes what it was. ConfigError
    where the pass fails in transformers' code, or where the layers do not call the attention once each with one set of
    sizes. An exception of code of the user's own (a hook, a break, a model's subclass) goes on unchanged.
    """
    name = type(model).__name__
    _register_probe()
    noted: list[LayerFacts] = []
    token = _notes.set(noted)
    try:
        switch_attention(model)
        zero = torch.zeros(1, dtype=torch.int64, device=model.device)
        batch = to_device(dummy_batch(1, 1), model.device)  # a model's breaks may read current().batch
        call = Call(batch=batch.planned(None, Parts(model, PROBE_ATTENTION)))
        with torch.inference_mode(), without_autocast(), calling(call):
            model(input_ids=zero[None], position_ids=zero[None], use_cache=False, logits_to_keep=zero)
    except Exception as error:
        if _is_of_user(error):
            raise
        # Whatever transformers' own code raises here, the answer is that we cannot run the model.
        first_line = (str(error).strip() or "no message").splitlines()[0]
        _refuse(name, f"a forward pass of one token without mask and cache fails: {type(error).__name__}: {first_line}")
    finally:
        _notes.reset(token)
    _check_layers(name, model.config.get_text_config(), noted)
    return tuple(sorted(noted))


def _check_layers(name: str, config: Any, noted: list[LayerFacts]) -> None:
    count, called = int(config.num_hidden_layers), sorted(layer.layer_idx for layer in noted)
    if len(called) == len(set(called)) != count:
        _refuse(name, f"{len(noted)} attentions were called for {count} layers; each layer must call its own once")
    if called != list(range(count)):
        _refuse(
            name,
            "its layers call their attention more than once, or share their numbers; each needs a cache of its own",
        )
    if len({layer[1:5] for layer in noted}) != 1:
        _refuse(name, "its layers differ in their numbers of heads or head sizes, and one KV cache holds all")
    if len({layer.softcap for layer in noted}) != 1:
        _refuse(name, "its layers differ in the cap of their attention scores")


def _is_of_user(error: Exception) -> bool:
    """Whether code that is neither transformers', torch's, Python's nor ours stands between the error and the pass."""
    if isinstance(error, _AddsToScores):
        return False
    trail, names = error.__traceback__, []
    while trail is not None:
        names.append(str(trail.tb_frame.f_globals.get("__name__", "")).partition(".")[0])
        trail = trail.tb_next
    return not set(names) <= _LIBRARIES | sys.stdlib_module_names - {"__main__"}


class _AddsToScores(ValueError):
    """A layer hands over, or asks for, what the paged attention has no place for."""


_notes: ContextVar[list[LayerFacts]] = ContextVar("segue_attention_notes")


def _register_probe() -> None:
    from transformers import AttentionInterface

    if PROBE_ATTENTION not in AttentionInterface().valid_keys():
        AttentionInterface.register(PROBE_ATTENTION, _probe)


def _probe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Notes the shapes (``[1, heads, tokens, dim]``) and returns zeros in the shape of an attention's result."""
    if attention_mask is not None or settings.get("position_bias") is not None:
        raise _AddsToScores("it adds a mask or a bias of its own to the attention scores")
    if not settings.get("is_causal", getattr(module, "is_causal", True)):
        raise _AddsToScores(_BIDIRECTIONAL)
    _notes.get().append(
        LayerFacts(
            layer_idx=int(module.layer_idx),  # type: ignore[arg-type]
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=key.shape[3],
            value_head_dim=value.shape[3],
            sliding_window=settings.get("sliding_window"),
            softcap=settings.get("softcap"),
            has_sinks=settings.get("s_aux") is not None,
        )
    )
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _max_context(name: str, config: Any, windows: tuple[int | None, ...]) -> int:
    """The largest position; or the length up to which a window says nothing that no layer hands to its attention, since it
    stands in a mask alone."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    is_hidden = isinstance(window, int) and not any(windows) and (kinds is None or "sliding_attention" in kinds)
    for field in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 0:
            return min(value, window) if is_hidden and window else value
    return _refuse(name, "its config names no largest position (max_position_embeddings)")


def _rope_types(config: Any) -> Iterator[str]:
    """All rope types of a config: flat, or one for each type of layer."""
    found = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while found:
        entry = found.pop()
        if isinstance(entry, dict):
            yield str(entry.get("rope_type", entry.get("type", "default")))
            found.extend(entry.values())


def _refuse(name: str, reason: str) -> Any:
    raise ConfigError(f"{name} cannot run under Segue: {reason}")

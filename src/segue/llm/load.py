"""From a name to a model that the engine can run, through transformers' own code.

Whatever goes wrong with a checkpoint ends in one line that says what to do. What transformers would let pass is looked
at here: files that the index names and that are not there, damaged safetensors, weights that are missing (transformers
fills them with random numbers and warns). Code from a checkpoint is never run and pickled weights are never read.

Inside an engine's calls the model attends by `ATTENTION`, which `segue.llm.attention` registers with transformers and which
must be registered before `load_model` is called (`attention_switch`).
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from segue.cache import cache_folder
from segue.errors import ConfigError
from segue.llm.attention_switch import ATTENTION, own_config
from segue.llm.checkpoints import convert_gguf, default_model, in_hub_cache, require_extra
from segue.llm.experts import guard_experts
from segue.llm.facts import ModelFacts, attention_facts, check_supported, model_facts
from segue.llm.moe import ExpertsChoice, choose_experts
from segue.llm.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ATTENTION", "LoadedModel", "ModelFacts", "cache_folder", "default_model", "load_model"]

_log = logging.getLogger("segue")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model on its device in eval mode, with its tokenizer (None where the source has none), config and facts."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    config: Any
    facts: ModelFacts
    experts: ExpertsChoice | None = None


def load_model(
    source: str | Path | PreTrainedModel,
    *,
    device: torch.device | str = "auto",
    dtype: torch.dtype | Literal["auto"] = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
    experts: str = "auto",
) -> LoadedModel:
    """Load a checkpoint folder, a GGUF file or a hub id, or take a model that is in memory.

    `device` "auto" is CUDA where there is one. `dtype` "auto" is the checkpoint's on CUDA, float32 on CPU; a model in
    memory keeps its own. That model is changed: moved, put into eval mode, and by Segue's attention in engines. `tokenizer`
    overrides the source's; `experts` is one of `moe.EXPERTS`. Raises ConfigError where the source cannot be loaded or run,
    MissingExtraError without transformers.
    """
    require_extra()
    from transformers import PreTrainedModel

    if not isinstance(source, (str, Path, PreTrainedModel)):
        raise TypeError(
            f"source is {_shown(source)}; give a checkpoint folder, a GGUF file, a hub id, or a transformers model"
        )
    device = _resolve_device(device)
    if isinstance(source, PreTrainedModel):
        return _take_model(source, device, dtype, tokenizer, experts)
    location = _locate(source)
    with quiet():
        config = load_config(location)
        check_supported(_model_class(location, config), config)
        if isinstance(location, Path):
            _check_generation_config(location / "generation_config.json")
            _check_weight_files(location, config)
        model = _load_weights(location, config, torch.float32 if dtype == "auto" and device.type == "cpu" else dtype)
        model.to(device)  # type: ignore[arg-type]
        tokenizer = _load_tokenizer(location) if tokenizer is None else tokenizer
    return _finish(model, tokenizer, experts)


def _take_model(
    model: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype | Literal["auto"],
    tokenizer: PreTrainedTokenizerBase | None,
    experts: str,
) -> LoadedModel:
    check_supported(type(model), model.config)
    model.to(device=device, dtype=model.dtype if dtype == "auto" else dtype)  # type: ignore[call-arg]
    return _finish(model, tokenizer, experts)


def _finish(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, experts: str) -> LoadedModel:
    model.eval()
    own_config(model)
    # With a pad id, some models compare it with the ids on the host at each call, to warn about a missing mask.
    vars(model.config)["pad_token_id"] = None  # past checks of the config's own
    capability = torch.cuda.get_device_capability(model.device) if model.device.type == "cuda" else None
    chosen = choose_experts(model, experts, capability)
    layers = attention_facts(model)
    guard_experts(model)
    facts = model_facts(model, layers, _eos_token_ids(model, tokenizer))
    return LoadedModel(model, tokenizer, model.config, facts, chosen)


def _resolve_device(device: torch.device | str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def _locate(source: str | Path) -> Path | str:
    """A checkpoint folder (a GGUF file's conversion), or a hub id."""
    if not str(source).strip():
        raise ConfigError("the model's name is empty; give a checkpoint folder, a GGUF file or a hub id")
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return convert_gguf(path)
        raise ConfigError(f"{path} is a file; pass its folder, which must hold config.json and *.safetensors")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path} is not a checkpoint folder: it has no config.json")
        return path
    looks_like_path = isinstance(source, Path) or path.suffix in (".gguf", ".safetensors") or path.is_absolute()
    if looks_like_path or not _HUB_ID.fullmatch(str(source)) or str(source).startswith("."):
        raise ConfigError(f"there is no checkpoint folder {path}; give a folder, a .gguf file, or a hub id (owner/name)")
    if "/" not in str(source) and not in_hub_cache(str(source), "config.json"):
        raise ConfigError(
            f"there is no checkpoint folder {str(source)!r} here; give a folder, a .gguf file, or a hub id with its owner "
            "(owner/name)"
        )
    return str(source)


def load_config(location: Path | str) -> Any:
    """Raises ConfigError, in one line, where there is none that transformers can use."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(location, trust_remote_code=False)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and others, for one cause: no config
        if isinstance(location, Path):
            raise ConfigError(_config_problem(location, error)) from error
        raise ConfigError(
            f"{location!r} is no folder here, and its config could not be had from the Hugging Face cache or hub "
            f"({_one_line(error)}); run `hf download {location}` where the hub can be reached"
        ) from error


def _config_problem(folder: Path, error: Exception) -> str:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as problem:
        return f"{folder / 'config.json'} cannot be read: {_one_line(problem)}; bring the checkpoint again"
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind is None:
        return f"{folder} is not a checkpoint of transformers: its config.json names no model_type"
    if "auto_map" in config:
        return f"model type {kind!r} needs code from its checkpoint, which Segue never runs; use a built-in architecture"
    from transformers import CONFIG_MAPPING

    if kind not in CONFIG_MAPPING:
        return f"the installed transformers does not know the model type {kind!r} of {folder}: use a newer one"
    reason = " ".join(str(error).split())[:300]
    return f"{folder / 'config.json'} is not valid for model type {kind!r}: {type(error).__name__}: {reason}"


def _model_class(location: Path | str, config: Any) -> Any:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except KeyError:
        raise ConfigError(
            f"{location}: model type {config.model_type!r} cannot run under Segue: transformers has no causal LM for it"
        ) from None


def _check_weight_files(folder: Path, config: Any) -> None:
    """Every weight file that the folder needs is there, is safetensors, whole, and of the size that the config says: that
    would be allocated before anything is compared."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise ValueError("a file that it names is no text")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is damaged: {_one_line(error)}; bring the checkpoint again") from error
    else:
        names = ["model.safetensors"]
    for name in names:
        file = folder / name
        if not file.is_file():
            pickled = any(folder.glob("pytorch_model*.bin"))
            hint = "pickled weights are never read; convert them to safetensors" if pickled else _remedy(folder)
            raise ConfigError(f"the checkpoint {folder} lacks {name}; {hint}")
        try:
            with safe_open(file, framework="pt") as held:
                _check_tensors(file, held, config)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} is damaged: {_one_line(error)}; {_remedy(folder)}") from error


def _check_tensors(file: Path, held: Any, config: Any) -> None:
    text = config.get_text_config()
    expected = [getattr(text, "vocab_size", None), getattr(text, "hidden_size", None)]
    for name in held.keys():  # noqa: SIM118 (it is no dict)
        part = held.get_slice(name)
        if name.endswith("embed_tokens.weight") and None not in expected and list(part.get_shape()) != expected:
            raise ConfigError(
                f"the weights of {file.parent} cannot be loaded: they have another shape than its config.json says, {name}: "
                f"{tuple(part.get_shape())} in the file, {tuple(expected)} by the config"
            )
        is_number = part.get_dtype().startswith(("F", "BF"))
        if name.endswith(".weight") and not is_number and getattr(config, "quantization_config", None) is None:
            raise ConfigError(
                f"{file} holds {name} as {part.get_dtype()}, which is no floating-point number, and config.json names no "
                "quantization: bring the checkpoint again"
            )


def _check_generation_config(file: Path) -> None:
    """transformers does without one that it cannot read, and its end tokens would be missing."""
    if not file.is_file():
        return
    try:
        if not isinstance(json.loads(file.read_text()), dict):
            raise ValueError("it holds no settings by name")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is damaged: {_one_line(error)}; {_remedy(file.parent)}") from error


def _remedy(folder: Path) -> str:
    is_ours = folder.resolve().parent == cache_folder().resolve()
    return f"remove {folder}, which is then converted again" if is_ours else "bring the file again"


def _load_weights(location: Path | str, config: Any, dtype: torch.dtype | Literal["auto"]) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM  # its annotations leave out the pair that output_loading_info asks for
    try:
        model, info = loader.from_pretrained(
            location,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name; transformers refers to its report
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, LookupError, ImportError, TypeError, AssertionError, AttributeError) as error:
        raise ConfigError(
            f"the model of {location} cannot be made from its config.json and weights: {_one_line(error)}; bring the "
            "checkpoint again, or a newer transformers"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(
            f"the weights of {location} lack {len(missing)} tensors of {type(model).__name__}, the first of them "
            f"{missing[0]}; they are of another architecture, or incomplete"
        )
    mismatched = sorted(info["mismatched_keys"], key=str)
    if mismatched:
        name, in_file, in_model = mismatched[0]
        raise ConfigError(
            f"the weights of {location} cannot be loaded: {len(mismatched)} tensors have another shape than its config.json "
            f"says, the first is {name}: {tuple(in_file)} in the file, {tuple(in_model)} by the config"
        )
    _check_unexpected(location, sorted(info["unexpected_keys"]), config)
    return model.requires_grad_(False)


def _check_unexpected(location: Path | str, names: list[str], config: Any) -> None:
    """Weights that the model has no place for: ConfigError where they are whole layers, else one line of warning."""
    count = config.get_text_config().num_hidden_layers
    found = (re.search(r"\b(?:layers|h|blocks)\.(\d+)\.", name) for name in names)
    beyond = max((int(match[1]) for match in found if match is not None), default=-1)
    if beyond >= count:
        raise ConfigError(
            f"the weights of {location} have {beyond + 1} layers, and its config.json says {count}: num_hidden_layers "
            "belongs to another checkpoint"
        )
    if names:
        _log.warning(
            "segue: %s: %d tensors have no place in this architecture and are left out, the first is %s",
            location, len(names), names[0],
        )  # fmt: skip


def _load_tokenizer(location: Path | str) -> PreTrainedTokenizerBase | None:
    from transformers import AutoTokenizer

    if isinstance(location, Path) and not any((location / name).is_file() for name in _TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(location, trust_remote_code=False)
    except Exception as error:  # as for configs: many kinds, one cause
        raise ConfigError(
            f"the tokenizer of {location} (tokenizer.json and what belongs to it) cannot be loaded: {_one_line(error)}; "
            "bring these files again, or pass tokenizer=..."
        ) from error


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """The union of what the generation config, the config and the tokenizer name: each alone has gaps."""
    found: set[int] = set()
    for source in (model.generation_config, model.config, tokenizer):
        value = getattr(source, "eos_token_id", None)
        named = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        if not all(type(token) is int for token in named):
            raise ConfigError(
                f"the {type(source).__name__} of {type(model).__name__} says eos_token_id = {value!r}: no token id"
            )
        found.update(named)
    return frozenset(found)


def _shown(value: object) -> str:
    """None, or the name of a type."""
    return "None" if value is None else f"a {type(value).__name__}"


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"

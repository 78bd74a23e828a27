"""The sizes of a model from its configuration alone: no weight is read and none is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ramet.engine.capacity import ModelSize
from ramet.engine.errors import ModelNotFound
from ramet.engine.gguf_weights import read_gguf_config
from ramet.engine.model_checks import check_config
from ramet.engine.model_files import DEFAULT_MODEL, find_packaged_gguf


def read_model_size(model: str, dtype: torch.dtype) -> ModelSize:
    """Of "smollm2", a .gguf file, a folder with a config.json, or a hub id whose config is cached here.

    Raises ModelNotFound or UnsupportedModel.
    """
    config = _read_config(model)
    shape = check_config(config, model)
    return ModelSize(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype_bytes=dtype.itemsize,
        num_parameters=_count_parameters(config),
        max_model_len=shape.max_model_len,
    )


def _read_config(model: str) -> Any:
    from transformers import AutoConfig

    if model == DEFAULT_MODEL:
        return read_gguf_config(find_packaged_gguf())
    path = Path(model).expanduser()
    if model.endswith(".gguf"):
        if not path.is_file():
            raise ModelNotFound(model, "there is no such file")
        return read_gguf_config(path)
    if path.is_dir() and not (path / "config.json").is_file():
        raise ModelNotFound(model, "the folder holds no config.json")
    try:
        # Planning asks nobody: what is not here is named, not fetched.
        return AutoConfig.from_pretrained(str(path) if path.is_dir() else model, local_files_only=True)
    except (OSError, ValueError) as error:
        remedy = f"no folder has this name, and no config of it is in the local cache; `hf download {model}"
        raise ModelNotFound(model, f"{remedy} config.json` gets it") from error


def _count_parameters(config: Any) -> int:
    """From the model's own class, on a device that has no memory; tied weights count once."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    skeleton.tie_weights()
    return sum(parameter.numel() for parameter in skeleton.parameters())

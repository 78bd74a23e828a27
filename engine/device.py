"""Where a model runs, and in which numbers: chosen and checked before anything is loaded."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec
from typing import Any

import torch

from ramet.engine.errors import InvalidInput, UnsupportedModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TYPES = ("cpu", "cuda")
_LEAST_CAPABILITY = (7, 5)  # of a GPU: what Triton compiles for


def pick_device(device: str | torch.device) -> torch.device:
    """The device; "auto" is the first GPU, or else the CPU. Raises InvalidInput."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InvalidInput("device", 'must be "auto", "cpu", or "cuda" or "cuda:0"', device) from error
    if picked.type not in _TYPES:
        raise InvalidInput("device", 'must be "auto", "cpu", or "cuda" or "cuda:0"', device)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if picked.type == "cuda" and (picked.index or 0) >= num_gpus:
        raise InvalidInput("device", f"must be one that is there: torch sees {num_gpus} GPUs", device)
    return picked


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype; "auto" is bfloat16 where the device multiplies it fast, or else float32."""
    if dtype == "auto":
        is_fast = _gpu_has_bf16(device) if device.type == "cuda" else _cpu_has_bf16()
        return torch.bfloat16 if is_fast else torch.float32
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise InvalidInput("dtype", 'must be "auto", "float32", "bfloat16" or "float16"', dtype)
    assert chosen is not None, "None is not among the dtypes"
    return chosen


def check_gpu(device: torch.device) -> None:
    """Raise InvalidInput if the kernels cannot run on this GPU."""
    if find_spec("triton") is None:
        raise InvalidInput("device", "must be the CPU where Triton is not installed", str(device))
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        least, has = ("{}.{}".format(*pair) for pair in (_LEAST_CAPABILITY, capability))
        limit = f"must be a GPU of compute capability {least} or newer: this one has {has}"
        raise InvalidInput("device", limit, str(device))


def move(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """The module on a device. Raises InvalidInput if it has no room for the weights."""
    try:
        return module.to(device)
    except torch.OutOfMemoryError as error:
        raise InvalidInput("device", "must have room for the model's weights", str(device)) from error


def convert(module: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The module in another dtype, all but the frequencies of its rotary embedding.

    Transformers loads those in fp32, whatever the weights are in: rounded to bfloat16 they turn a key by up
    to a radian too far after a few thousand tokens.
    """
    kept = [
        (owner, name, frequencies)
        for owner in module.modules()
        for name, frequencies in owner.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    module = module.to(dtype)
    for owner, name, frequencies in kept:
        setattr(owner, name, frequencies)
    return module


def check_weights(module: Any, name: str) -> None:
    """Raise UnsupportedModel unless all weights lie on one device that ramet runs on, in its numbers."""
    devices = {parameter.device for parameter in module.parameters()}
    if len(devices) > 1 or any(device.type not in _TYPES for device in devices):
        where = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModel(name, f"its weights lie on {where}; device= moves them to one CPU or GPU")
    dtype = module.get_input_embeddings().weight.dtype
    if dtype not in _DTYPES.values():
        names = ", ".join(_DTYPES)
        raise UnsupportedModel(name, f"its weights are {dtype}; dtype= makes them one of {names}")


def free_bytes(device: torch.device) -> int | None:
    """The memory that is free on the device; None where the system does not say."""
    if device.type == "cuda":
        gc.collect()  # an engine that was dropped may hold its pool until now
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def use_expandable_segments() -> None:
    """Let torch grow its memory on the GPU in place, from the next allocation on.

    A pool that comes from plain segments, freed and allocated again, was read 13 to 15 % more slowly on an
    H200; from expandable ones it never was.
    """
    settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if settings is not None:  # its only other way in is an environment variable
        settings("expandable_segments:True")


def _gpu_has_bf16(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware; torch's checks are private, so they may be absent."""
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(check() for name in names if (check := getattr(torch.cpu, name, None)) is not None)

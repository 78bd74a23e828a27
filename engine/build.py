"""Puts an engine together: model, pool, cache, runner. The one place that knows all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ramet.engine.config import EngineConfig
from ramet.engine.device import check_gpu, free_bytes, pick_device, use_expandable_segments
from ramet.engine.engine import Engine
from ramet.engine.errors import InvalidInput, UnsupportedModel
from ramet.engine.model_runner import ModelRunner
from ramet.engine.models import LoadedModel, load_model
from ramet.engine.scripted import ScriptedModel, ScriptedRunner
from ramet.engine.tokenizer import Tokenizer
from ramet.kernels.attention import MAX_BATCH_TOKENS, MAX_GROUP, MAX_HEAD_DIM
from ramet.kernels.kv_pool import KVPool

# A pool that is not sized by hand takes this part of the free memory, and no more than that many bytes.
_MEMORY_SHARE = 0.25
_MOST_BYTES = 4 << 30
# A GPU is there for this. The rest is for the activations of a step.
_GPU_MEMORY_SHARE = 0.9
_SCRIPTED_BLOCKS = 1024


def build_engine(
    model: Any,
    tokenizer: Any,
    *,
    device: str,
    dtype: str | torch.dtype,
    block_size: int,
    num_blocks: int | None,
    max_model_len: int | None,
    max_batch_tokens: int,
    min_partial: int | None,
    seed: int,
    cache_dir: str | Path | None,
) -> Engine:
    """An engine for any model that `LLM` takes. Raises InvalidInput, ModelNotFound or UnsupportedModel."""
    settings: dict[str, Any] = {
        "block_size": block_size,
        "max_batch_tokens": max_batch_tokens,
        "min_partial": min_partial,
        "seed": seed,
    }
    if isinstance(model, ScriptedModel):
        config = EngineConfig(
            num_blocks=_SCRIPTED_BLOCKS if num_blocks is None else num_blocks,
            max_model_len=1 << 20 if max_model_len is None else max_model_len,
            **settings,
        )
        runner = ScriptedRunner(model, config.num_blocks, config.block_size)
        if tokenizer is not None and not isinstance(tokenizer, Tokenizer):
            tokenizer = Tokenizer(tokenizer)
        return Engine(
            runner,
            config,
            vocab_size=model.vocab_size,
            tokenizer=tokenizer,
            eos_token_ids=model.eos_token_ids,
            block_nbytes=runner.pages.nbytes // config.num_blocks,
        )
    # Checked before anything is loaded.
    EngineConfig(num_blocks=1 if num_blocks is None else num_blocks, max_model_len=1, **settings)
    target = _device_of(model, device)
    if target.type == "cuda":
        check_gpu(target)
        _check_gpu_settings(block_size, max_batch_tokens)
        use_expandable_segments()
    loaded = load_model(
        model, tokenizer, device=device, dtype=dtype, max_model_len=max_model_len, cache_dir=cache_dir
    )
    shape = loaded.shape
    if loaded.device.type == "cuda":
        _check_heads(loaded)
    bytes_per_block = KVPool.block_nbytes(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, loaded.dtype
    )
    if num_blocks is None:
        num_blocks = _fitting_blocks(bytes_per_block, loaded.device)
    elif loaded.device.type == "cuda":
        _check_fits(num_blocks, bytes_per_block, loaded.device)
    config = EngineConfig(num_blocks=num_blocks, max_model_len=shape.max_model_len, **settings)
    try:
        pool = KVPool(
            shape.num_layers,
            num_blocks,
            shape.num_kv_heads,
            shape.head_dim,
            block_size,
            loaded.dtype,
            loaded.device,
        )
    except (OSError, OverflowError, torch.OutOfMemoryError) as error:
        size = f"{num_blocks * bytes_per_block} bytes"
        raise InvalidInput("num_blocks", f"must fit into memory: these take {size}", num_blocks) from error
    return Engine(
        ModelRunner(loaded, pool),
        config,
        vocab_size=shape.vocab_size,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        block_nbytes=bytes_per_block,
    )


def _device_of(model: Any, device: str | torch.device) -> torch.device:
    """Where the model will run: a module that is loaded already stays where it is, unless told otherwise."""
    if isinstance(model, torch.nn.Module) and device == "auto":
        return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return pick_device(device)


def _check_gpu_settings(block_size: int, max_batch_tokens: int) -> None:
    if block_size & (block_size - 1):
        raise InvalidInput("block_size", "must be a power of two on a GPU", block_size)
    if max_batch_tokens > MAX_BATCH_TOKENS:
        limit = f"must be at most {MAX_BATCH_TOKENS} on a GPU"
        raise InvalidInput("max_batch_tokens", limit, max_batch_tokens)


def _check_heads(loaded: LoadedModel) -> None:
    """Refuse what the GPU's kernels have no tile for."""
    shape = loaded.shape
    group = shape.num_heads // shape.num_kv_heads
    if shape.head_dim > MAX_HEAD_DIM or group > MAX_GROUP:
        raise UnsupportedModel(
            loaded.name,
            f"on a GPU a head has up to {MAX_HEAD_DIM} numbers and a KV head up to {MAX_GROUP} query heads;"
            f" it has {shape.head_dim} and {group}",
        )


def _check_fits(num_blocks: int, bytes_per_block: int, device: torch.device) -> None:
    asked, free = num_blocks * bytes_per_block, free_bytes(device)
    if free is not None and asked > free:
        limit = f"must fit into memory: these take {asked} bytes, {free} are free"
        raise InvalidInput("num_blocks", limit, num_blocks)


def _fitting_blocks(bytes_per_block: int, device: torch.device) -> int:
    """How many blocks a part of the free memory holds."""
    free = free_bytes(device)
    if device.type == "cuda":
        assert free is not None, "a GPU says how much is free"
        usable = int(free * _GPU_MEMORY_SHARE)
    else:
        usable = _MOST_BYTES if free is None else min(int(free * _MEMORY_SHARE), _MOST_BYTES)
    num_blocks = usable // bytes_per_block
    if num_blocks < 1:
        raise InvalidInput(
            "num_blocks", f"must be given: a block takes {bytes_per_block} bytes, {free} are free"
        )
    return num_blocks

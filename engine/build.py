"""Puts an engine together: model, pool, cache, runner. The one place that knows all of them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ramet.engine.config import EngineConfig
from ramet.engine.engine import Engine
from ramet.engine.errors import InvalidInput
from ramet.engine.model_runner import ModelRunner
from ramet.engine.models import load_model
from ramet.engine.scripted import ScriptedModel, ScriptedRunner
from ramet.engine.tokenizer import Tokenizer
from ramet.kernels.kv_pool import KVPool

# A pool that is not sized by hand takes this part of the free memory, and no more than that many bytes.
_MEMORY_SHARE = 0.25
_MOST_BYTES = 4 << 30
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
    if num_blocks is not None:  # checked before anything is loaded
        EngineConfig(num_blocks=num_blocks, max_model_len=1, **settings)
    loaded = load_model(
        model, tokenizer, device=device, dtype=dtype, max_model_len=max_model_len, cache_dir=cache_dir
    )
    shape = loaded.shape
    bytes_per_block = KVPool.block_nbytes(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, block_size, loaded.dtype
    )
    if num_blocks is None:
        num_blocks = _fitting_blocks(bytes_per_block)
    config = EngineConfig(num_blocks=num_blocks, max_model_len=shape.max_model_len, **settings)
    pool = KVPool(
        shape.num_layers,
        num_blocks,
        shape.num_kv_heads,
        shape.head_dim,
        block_size,
        loaded.dtype,
        loaded.device,
    )
    return Engine(
        ModelRunner(loaded, pool),
        config,
        vocab_size=shape.vocab_size,
        tokenizer=loaded.tokenizer,
        eos_token_ids=loaded.eos_token_ids,
        block_nbytes=bytes_per_block,
    )


def _fitting_blocks(bytes_per_block: int) -> int:
    """How many blocks a part of the free memory holds."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        free = _MOST_BYTES  # the system does not say
    num_blocks = int(min(free * _MEMORY_SHARE, _MOST_BYTES)) // bytes_per_block
    if num_blocks < 1:
        raise InvalidInput(
            "num_blocks", f"must be given: a block takes {bytes_per_block} bytes, {free} are free"
        )
    return num_blocks

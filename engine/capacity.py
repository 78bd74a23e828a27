"""How many branches fit into so many bytes: arithmetic on sizes, before anything is loaded. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ramet.engine.errors import InvalidInput


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a model decides how much memory it takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int  # of a weight, and of a number in the KV cache
    num_parameters: int
    max_model_len: int

    @property
    def weight_bytes(self) -> int:
        return self.num_parameters * self.dtype_bytes

    @property
    def token_bytes_per_layer(self) -> int:
        """A key and a value for each KV head."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes

    @property
    def token_bytes(self) -> int:
        return self.token_bytes_per_layer * self.num_layers


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is to run: `branches` continuations of one prompt, each `new` tokens long."""

    prompt: int
    branches: int
    new: int
    block_size: int = 16

    def __post_init__(self) -> None:
        for field in ("prompt", "branches", "new", "block_size"):
            if getattr(self, field) < 1:
                raise InvalidInput(field, "must be >= 1", getattr(self, field))

    @property
    def num_slots(self) -> int:
        """Of one branch at its end: the last sampled token is not fed, so it has no KV."""
        return self.prompt + self.new - 1


@dataclass(frozen=True)
class Way:
    """One way to keep the branches: `common` blocks once, and `own` blocks for each branch."""

    common: int
    own: int
    fits: int | None  # branches; None: without limit, for they need no block of their own
    asked_blocks: int  # for as many branches as were asked for
    asked_fits: bool


@dataclass(frozen=True)
class Capacity:
    """The answer: the pool, both ways, and what stops more branches."""

    pool_bytes: int  # what the weights leave
    block_bytes: int
    num_blocks: int
    shared: Way
    unshared: Way
    limit: str  # "weights", "context", or "blocks"


def capacity(size: ModelSize, load: Load, memory: int) -> Capacity:
    """How many branches `memory` bytes hold beside the weights, with the prompt shared and without.

    Activations are not counted: they live for a moment, and no longer than a step. Shared, the prompt's last
    block is counted once more for the branch that the others are forked from, if it is not full.
    """
    pool_bytes = max(0, memory - size.weight_bytes)
    block_bytes = size.token_bytes * load.block_size
    num_blocks = pool_bytes // block_bytes
    whole = _blocks(load.num_slots, load.block_size)
    prompt = _blocks(load.prompt, load.block_size)
    if load.prompt + load.new - 1 > size.max_model_len:
        limit = "context"
    else:
        limit = "blocks" if num_blocks >= whole else "weights"
    possible = 0 if limit == "context" else num_blocks
    return Capacity(
        pool_bytes=pool_bytes,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        shared=_way(prompt, whole - load.prompt // load.block_size, possible, load.branches),
        unshared=_way(0, whole, possible, load.branches),
        limit=limit,
    )


def _way(common: int, own: int, num_blocks: int, branches: int) -> Way:
    left = num_blocks - common
    fits = max(0, left) // own if own else (None if left >= 0 else 0)
    return Way(common, own, fits, common + own * branches, fits is None or fits >= branches)


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)

"""The settings of an engine, checked once. Unknown names are errors, and nothing reads the environment."""

from __future__ import annotations

from dataclasses import dataclass

from ramet.engine.errors import InvalidInput

MAX_BLOCK_SIZE = 256


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Raises InvalidInput, which names the field and its limit.

    Attributes:
        num_blocks: physical blocks in the pool, allocated once.
        block_size: token slots of a block, 1 to 256.
        max_model_len: tokens that one sequence may feed to the model; the last sampled one is not fed.
        max_batch_tokens: token budget of a step, decode rows and prefill chunks together.
        seed: where requests without a seed of their own get theirs from.
        min_partial: tokens that a hit inside a block must have to be used; None is a quarter of a block.
    """

    num_blocks: int
    block_size: int = 16
    max_model_len: int
    max_batch_tokens: int = 512
    seed: int = 0
    min_partial: int | None = None

    def __post_init__(self) -> None:
        _check("num_blocks", self.num_blocks, 1)
        _check("block_size", self.block_size, 1, MAX_BLOCK_SIZE)
        _check("max_model_len", self.max_model_len, 1)
        _check("max_batch_tokens", self.max_batch_tokens, 1)
        _check("seed", self.seed, -(2**63), 2**64 - 1)
        if self.min_partial is not None:
            _check("min_partial", self.min_partial, 1, self.block_size)

    @property
    def max_tokens(self) -> int:
        """The most tokens of one sequence that can have KV: the context and the whole pool both bound it."""
        return min(self.max_model_len, self.num_blocks * self.block_size)


def _check(field: str, value: object, low: int, high: int | None = None) -> None:
    limit = f"must be >= {low}" if high is None else f"must be between {low} and {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidInput(field, f"must be a whole number, and {limit.removeprefix('must be ')}", value)
    if value < low or (high is not None and value > high):
        raise InvalidInput(field, limit, value)

"""What a search needs of a branch. The AsyncBranch of an engine in this process and that of a client both
have it, so that a search is written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self, TypeAlias, TypeVar

Prompt: TypeAlias = str | Sequence[int]


class Continuation(Protocol):
    """What a branch generated; see ramet.Choice."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def mean_logprob(self) -> float: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...


class Likelihood(Protocol):
    """How likely a candidate is; see ramet.Score."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def token_logprobs(self) -> list[float]: ...
    @property
    def logprob(self) -> float: ...


class Branch(Protocol):
    """See ramet.Branch for what the verbs do."""

    @property
    def position(self) -> int: ...
    @property
    def output(self) -> Continuation | None: ...
    async def fork(self, n: int = 1) -> Sequence[Self]: ...
    async def extend(self, text: Prompt) -> Sequence[int]: ...
    async def generate(self, **settings: Any) -> Continuation: ...
    async def expand(self, n: int | None = None, **settings: Any) -> Sequence[Self]: ...
    async def score(
        self, candidates: Sequence[Prompt], *, suffix: Prompt | None = None
    ) -> Sequence[Likelihood]: ...
    async def release(self) -> object: ...
    async def prune(self) -> object: ...


B = TypeVar("B", bound=Branch)

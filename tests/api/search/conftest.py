"""The same search in process and over HTTP, on a model that spells, and what is left of it afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

import pytest

from ramet import LLM, AsyncClient, AsyncLLM
from ramet.testing import check_idle
from tests.api.serving import Serving, make_llm, serving

PROMPT = "a prompt that fills a block and a half of one"
# Opens a branch at the end of PROMPT, whose type is not the same in both places.
Open: TypeAlias = Callable[[], AbstractAsyncContextManager[Any]]


class Place:
    """Where branches are."""

    def __init__(self, name: str, llm: LLM, open_branch: Open) -> None:
        self.name = name
        self.llm = llm
        self.open = open_branch

    @property
    def num_held(self) -> tuple[int, int]:
        """Branches, and blocks that are in use."""
        return len(self.llm.engine.sequences), self.llm.stats().pages.num_in_use

    async def settles_at(self, held: tuple[int, int]) -> None:
        """What a caller has let go of is gone soon, if not at once."""
        for _ in range(500):
            if self.num_held == held:
                return
            await asyncio.sleep(0.01)
        assert self.num_held == held, "branches or blocks were left behind"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    one = serving(None, (), {})
    yield one
    one.stop()
    check_idle(one.llm)


@pytest.fixture(params=["process", "http"])
def place(request: pytest.FixtureRequest, server: Serving) -> Place:
    if request.param == "http":

        @asynccontextmanager
        async def over_http() -> AsyncIterator[Any]:
            async with AsyncClient(server.url) as client, await client.branch(PROMPT) as branch:
                yield branch

        return Place("http", server.llm, over_http)
    llm = make_llm()

    @asynccontextmanager
    async def in_process() -> AsyncIterator[Any]:
        async with AsyncLLM(llm) as engine, await engine.branch(PROMPT) as branch:
            yield branch

    return Place("process", llm, in_process)


def letters(node: Any) -> list[str]:
    """Steps of a small game: a word of a's and b's."""
    return ["a", "b"]


def word_value(word: str) -> Callable[[Any], float]:
    """How much of a word a state has: nobody has to guess which way is right."""

    def value(node: Any) -> float:
        said = node.transcript
        common = next((i for i, (x, y) in enumerate(zip(said, word, strict=False)) if x != y), len(said))
        return common / len(word)

    return value


def run(place: Place, search: Callable[[Any], Awaitable[Any]]) -> tuple[Any, list[int]]:
    """Run a search on a branch; then everything but what it found must be gone, and at the end that too.

    Returns what it found, and the tokens of its branch.
    """

    async def main() -> tuple[Any, list[int]]:
        async with place.open() as branch:
            before = place.num_held
            found = await search(branch)
            assert place.num_held[0] == before[0] + 1, "one branch is left, the best"
            ids = found.branch.token_ids
            token_ids = await ids() if callable(ids) else ids
            await found.branch.prune()
            await place.settles_at(before)
            return found, token_ids

    return asyncio.run(main())

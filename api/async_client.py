"""The client of client.py for asyncio: the same verbs, each a coroutine. See there for what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence as Seq
from typing import Any

import httpx2

from ramet.api import client_calls as calls
from ramet.api.client_calls import (
    MAX_RETRIES,
    ApiError,
    BeamProgress,
    Call,
    Candidate,
    Choice,
    Delta,
    EventReader,
    Freed,
    NextToken,
    OnProgress,
    Prompt,
    Said,
    Score,
    T,
    given,
)


class AsyncClient:
    """See Client."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=timeout)
        self._max_retries = max_retries

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def branch(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        tree_id: str | None = None,
        name: str | None = None,
        lease: float | None = None,
        pin: str | None = None,
        metadata: Mapping[str, str] | None = None,
        cache_salt: str | None = None,
        prefill: str | None = None,
    ) -> AsyncBranch:
        fields = {
            "tree_id": tree_id,
            "name": name,
            "lease": None if lease is None else {"ttl": lease},
            "pin": pin,
            "metadata": metadata,
            "cache_salt": cache_salt,
            "prefill": prefill,
        }
        body = calls.create(prompt, messages, fields)
        return await self._send(Call("POST", "/v1/branches", self._branch, body))

    async def beam_search(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[AsyncBranch]:
        body = calls.create(prompt, messages, calls.generation({**settings, "return_branches": True}))
        return await self._beams("/v1/beam_search", body, on_progress)

    async def get(self, branch_id: str) -> AsyncBranch:
        return await self._send(Call("GET", f"/v1/branches/{branch_id}", self._branch))

    async def tree(self, tree_id: str, *, include: str | None = None) -> dict[str, Any]:
        query = f"?include={include}" if include else ""
        return await self._send(Call("GET", f"/v1/trees/{tree_id}{query}", dict))

    async def delete_tree(self, tree_id: str) -> Freed:
        return await self._send(Call("DELETE", f"/v1/trees/{tree_id}", calls.freed))

    async def limits(self) -> dict[str, Any]:
        return await self._send(Call("GET", "/v1/limits", dict))

    async def _beams(
        self, path: str, body: dict[str, Any], on_progress: OnProgress | None
    ) -> list[AsyncBranch]:
        if on_progress is None:
            return [self._child(choice) for choice in await self._send(calls.beam_search(path, body))]
        choices = []
        async for said in self._stream(path, body):
            if isinstance(said, BeamProgress):
                on_progress(said)
            elif isinstance(said, Choice):
                choices.append(said)
        return [self._child(choice) for choice in choices]

    def _child(self, choice: Choice) -> AsyncBranch:
        child = AsyncBranch(self, calls.info_of(choice))
        child.output = choice
        return child

    def _branch(self, answer: dict[str, Any]) -> AsyncBranch:
        return AsyncBranch(self, answer)

    async def _send(self, call: Call[T]) -> T:
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                response = await self._http.request(
                    call.method, call.path, json=call.body, headers=call.headers()
                )
            except httpx2.TransportError:
                if last:
                    raise
                await asyncio.sleep(calls.wait_before_retry(attempt, {}))
                continue
            if response.is_success:
                return call.read(response.json())
            if last or not calls.worth_a_retry(response.status_code, response.headers):
                raise calls.error_in(response.status_code, response.text, response.headers)
            await asyncio.sleep(calls.wait_before_retry(attempt, response.headers))
        raise AssertionError("the last try returns or raises")

    async def _stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Said]:
        async with self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if not response.is_success:
                await response.aread()
                raise calls.error_in(response.status_code, response.text, response.headers)
            reader = EventReader()
            async for line in response.aiter_lines():
                event = reader.feed(line)
                if event is not None and (said := calls.told(event, response.headers)) is not None:
                    yield said


class AsyncBranch:
    """See Branch of client.py; `token_ids` and `text` are coroutines, too."""

    def __init__(self, client: AsyncClient, info: dict[str, Any]) -> None:
        self.client = client
        self.info = info
        self.output: Choice | None = None  # what the last generate or expand gave

    def __repr__(self) -> str:
        return f"<AsyncBranch {self.id}: {self.info.get('position')} tokens>"

    async def __aenter__(self) -> AsyncBranch:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.prune()

    @property
    def id(self) -> str:
        return str(self.info["id"])

    @property
    def tree_id(self) -> str:
        return str(self.info["tree_id"])

    @property
    def position(self) -> int:
        """How many tokens there are, as the server said it last."""
        return int(self.info["position"])

    async def token_ids(self) -> list[int]:
        return list((await self.refresh("token_ids"))["token_ids"])

    async def text(self) -> str:
        return str((await self.refresh("text"))["text"])

    async def refresh(self, include: str | None = None) -> dict[str, Any]:
        query = f"?include={include}" if include else ""
        self.info = await self.client._send(Call("GET", f"{self._path}{query}", dict))
        return self.info

    async def fork(
        self, n: int = 1, *, at: int | str | None = None, lease: float | None = None
    ) -> list[AsyncBranch]:
        body = given(n=n, at=at, lease=None if lease is None else {"ttl": lease})

        def read(answer: dict[str, Any]) -> list[AsyncBranch]:
            return [AsyncBranch(self.client, one) for one in answer["data"]]

        return await self.client._send(Call("POST", f"{self._path}/fork", read, body))

    async def extend(
        self,
        text: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        checkpoint: str | None = None,
        expect_position: int | None = None,
        on_mismatch: str | None = None,
    ) -> list[int]:
        fields = {
            "messages": messages,
            "checkpoint": checkpoint,
            "expect_position": expect_position,
            "on_mismatch": on_mismatch,
        }
        return await self.client._send(calls.extend(self.id, text, fields))

    async def generate(self, **settings: Any) -> Choice:
        (self.output,) = await self.client._send(calls.generate(self.id, settings))
        return self.output

    async def expand(
        self, n: int | None = None, *, params: Seq[Mapping[str, Any]] | None = None, **settings: Any
    ) -> list[AsyncBranch]:
        settings = {**settings, "n": n, "params": params, "into": "children"}
        choices = await self.client._send(calls.generate(self.id, settings))
        return [self.client._child(choice) for choice in choices]

    async def beam_search(
        self, *, on_progress: OnProgress | None = None, **settings: Any
    ) -> list[AsyncBranch]:
        path = f"{self._path}/beam_search"
        return await self.client._beams(path, calls.generation(settings), on_progress)

    async def stream(self, **settings: Any) -> AsyncGenerator[Delta | Choice]:
        path = f"{self._path}/generate"
        async for said in self.client._stream(path, calls.generation(settings)):
            if not isinstance(said, BeamProgress):
                yield said

    async def score(
        self, candidates: Seq[Candidate], *, suffix: Prompt | None = None, normalize: str | None = None
    ) -> list[Score]:
        return await self.client._send(
            calls.score(self.id, candidates, {"suffix": suffix, "normalize": normalize})
        )

    async def next_tokens(self, labels: Seq[str], *, suffix: Prompt | None = None) -> list[NextToken]:
        return await self.client._send(calls.next_tokens(self.id, labels, {"suffix": suffix}))

    async def truncate(self, position: int | str, *, expect_position: int | None = None) -> None:
        field = "checkpoint" if isinstance(position, str) else "position"
        body = given(**{field: position}, expect_position=expect_position)
        self.info = await self.client._send(Call("POST", f"{self._path}/truncate", dict, body))

    async def update(self, **fields: Any) -> None:
        self.info = await self.client._send(Call("PATCH", self._path, dict, given(**fields)))

    async def cancel(self) -> None:
        await self.client._send(Call("POST", f"{self._path}/cancel", dict))

    async def release(self) -> Freed:
        return await self._delete("branch")

    async def prune(self) -> Freed:
        return await self._delete("subtree")

    async def promote(self, ancestor: str | None = None) -> Freed:
        return await self.client._send(
            Call("POST", f"{self._path}/promote", calls.freed, given(ancestor=ancestor))
        )

    async def _delete(self, scope: str) -> Freed:
        try:
            return await self.client._send(Call("DELETE", f"{self._path}?scope={scope}", calls.freed))
        except ApiError as error:
            if error.code in ("branch_not_found", "branch_expired"):
                return Freed(0, 0, 0)  # it is gone, as was asked for
            raise

    @property
    def _path(self) -> str:
        return f"/v1/branches/{self.id}"

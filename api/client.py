"""A client for `ramet serve` that blocks: the verbs of an in-process Branch, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence as Seq
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


class Client:
    """Talks to one server. As a context manager it closes its connections; branches stay on the server."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        api_key: str | None = None,
        *,
        timeout: float = 600.0,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._http = httpx2.Client(base_url=base_url, headers=headers, timeout=timeout)
        self._max_retries = max_retries

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def branch(
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
    ) -> Branch:
        """A branch at the end of a prompt, or of messages; computed now unless `prefill` is "lazy".

        lease: seconds for which it keeps its blocks until those of all others without one are gone.
        Raises ApiError.
        """
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
        return self._send(Call("POST", "/v1/branches", self._branch, body))

    def beam_search(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        on_progress: OnProgress | None = None,
        **settings: Any,
    ) -> list[Branch]:
        """The best continuations of a prompt, or of messages, best first; see Branch.beam_search."""
        body = calls.create(prompt, messages, calls.generation({**settings, "return_branches": True}))
        return self._beams("/v1/beam_search", body, on_progress)

    def get(self, branch_id: str) -> Branch:
        """A branch that is there already."""
        return self._send(Call("GET", f"/v1/branches/{branch_id}", self._branch))

    def tree(self, tree_id: str, *, include: str | None = None) -> dict[str, Any]:
        """What a tree holds and shares; see docs/api.md."""
        query = f"?include={include}" if include else ""
        return self._send(Call("GET", f"/v1/trees/{tree_id}{query}", dict))

    def delete_tree(self, tree_id: str) -> Freed:
        return self._send(Call("DELETE", f"/v1/trees/{tree_id}", calls.freed))

    def limits(self) -> dict[str, Any]:
        return self._send(Call("GET", "/v1/limits", dict))

    def _beams(self, path: str, body: dict[str, Any], on_progress: OnProgress | None) -> list[Branch]:
        if on_progress is None:
            return [self._child(choice) for choice in self._send(calls.beam_search(path, body))]
        choices = []
        for said in self._stream(path, body):
            if isinstance(said, BeamProgress):
                on_progress(said)
            elif isinstance(said, Choice):
                choices.append(said)
        return [self._child(choice) for choice in choices]

    def _child(self, choice: Choice) -> Branch:
        child = Branch(self, calls.info_of(choice))
        child.output = choice
        return child

    def _branch(self, answer: dict[str, Any]) -> Branch:
        return Branch(self, answer)

    def _send(self, call: Call[T]) -> T:
        """Send a call, again if it is safe and may help. Raises ApiError, or what httpx2 raises."""
        for attempt in range(self._max_retries + 1):
            last = attempt == self._max_retries
            try:
                response = self._http.request(call.method, call.path, json=call.body, headers=call.headers())
            except httpx2.TransportError:
                if last:
                    raise
                time.sleep(calls.wait_before_retry(attempt, {}))
                continue
            if response.is_success:
                return call.read(response.json())
            if last or not calls.worth_a_retry(response.status_code, response.headers):
                raise calls.error_in(response.status_code, response.text, response.headers)
            time.sleep(calls.wait_before_retry(attempt, response.headers))
        raise AssertionError("the last try returns or raises")

    def _stream(self, path: str, body: dict[str, Any]) -> Generator[Said]:
        with self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if not response.is_success:
                response.read()
                raise calls.error_in(response.status_code, response.text, response.headers)
            reader = EventReader()
            for line in response.iter_lines():
                event = reader.feed(line)
                if event is not None and (said := calls.told(event, response.headers)) is not None:
                    yield said


class Branch:
    """One branch on a server. `info` is what the server said of it when it was made or refreshed."""

    def __init__(self, client: Client, info: dict[str, Any]) -> None:
        self.client = client
        self.info = info
        self.output: Choice | None = None  # what the last generate or expand gave

    def __repr__(self) -> str:
        return f"<Branch {self.id}: {self.info.get('position')} tokens>"

    def __enter__(self) -> Branch:
        return self

    def __exit__(self, *_: object) -> None:
        self.prune()

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

    @property
    def token_ids(self) -> list[int]:
        """All tokens, asked of the server."""
        return list(self.refresh("token_ids")["token_ids"])

    @property
    def text(self) -> str:
        """All text, control tokens included, asked of the server."""
        return str(self.refresh("text")["text"])

    def __len__(self) -> int:
        return int(self.refresh()["position"])

    def refresh(self, include: str | None = None) -> dict[str, Any]:
        """What the server says of it now."""
        query = f"?include={include}" if include else ""
        self.info = self.client._send(Call("GET", f"{self._path}{query}", dict))
        return self.info

    def fork(self, n: int = 1, *, at: int | str | None = None, lease: float | None = None) -> list[Branch]:
        """`n` branches with the same past, or that up to `at`, a position or a checkpoint."""
        body = given(n=n, at=at, lease=None if lease is None else {"ttl": lease})

        def read(answer: dict[str, Any]) -> list[Branch]:
            return [Branch(self.client, one) for one in answer["data"]]

        return self.client._send(Call("POST", f"{self._path}/fork", read, body))

    def extend(
        self,
        text: Prompt | None = None,
        *,
        messages: Seq[Mapping[str, Any]] | None = None,
        checkpoint: str | None = None,
        expect_position: int | None = None,
        on_mismatch: str | None = None,
    ) -> list[int]:
        """Append a text, token ids, or messages through the chat template; returns the new tokens."""
        fields = {
            "messages": messages,
            "checkpoint": checkpoint,
            "expect_position": expect_position,
            "on_mismatch": on_mismatch,
        }
        return self.client._send(calls.extend(self.id, text, fields))

    def generate(self, **settings: Any) -> Choice:
        """Continue this branch; `settings` are the fields of SamplingParams."""
        (self.output,) = self.client._send(calls.generate(self.id, settings))
        return self.output

    def expand(
        self, n: int | None = None, *, params: Seq[Mapping[str, Any]] | None = None, **settings: Any
    ) -> list[Branch]:
        """`n` new children that each generate, in one batch; `params` may give each its own settings."""
        settings = {**settings, "n": n, "params": params, "into": "children"}
        return [self.client._child(choice) for choice in self.client._send(calls.generate(self.id, settings))]

    def beam_search(self, *, on_progress: OnProgress | None = None, **settings: Any) -> list[Branch]:
        """The best continuations as new children, best first; `settings` are fields of BeamSearchParams.

        `on_progress` is called while the search goes on, with what is new then.
        """
        return self.client._beams(f"{self._path}/beam_search", calls.generation(settings), on_progress)

    def stream(self, **settings: Any) -> Generator[Delta | Choice]:
        """As `generate`, or with into="children" as `expand`: each piece of text as it comes, and each
        branch's choice when it is complete. To leave early cancels what is not."""
        for said in self.client._stream(f"{self._path}/generate", calls.generation(settings)):
            if not isinstance(said, BeamProgress):
                yield said

    def score(
        self, candidates: Seq[Candidate], *, suffix: Prompt | None = None, normalize: str | None = None
    ) -> list[Score]:
        """The log-probabilities of candidate continuations, or of those after `suffix`; nothing changes."""
        return self.client._send(calls.score(self.id, candidates, {"suffix": suffix, "normalize": normalize}))

    def next_tokens(self, labels: Seq[str], *, suffix: Prompt | None = None) -> list[NextToken]:
        """How likely each of these single tokens is to come next, with its raw logit."""
        return self.client._send(calls.next_tokens(self.id, labels, {"suffix": suffix}))

    def truncate(self, position: int | str, *, expect_position: int | None = None) -> None:
        """Forget all but the first `position` tokens, or what comes after a checkpoint."""
        field = "checkpoint" if isinstance(position, str) else "position"
        body = given(**{field: position}, expect_position=expect_position)
        self.info = self.client._send(Call("POST", f"{self._path}/truncate", dict, body))

    def update(self, **fields: Any) -> None:
        """Set name, metadata, annotations, lease, pin or checkpoint."""
        self.info = self.client._send(Call("PATCH", self._path, dict, given(**fields)))

    def cancel(self) -> None:
        """End what is generated now, of this branch or from it; tokens so far are kept."""
        self.client._send(Call("POST", f"{self._path}/cancel", dict))

    def release(self) -> Freed:
        """Let go of the branch; its pages stay cached until they are needed."""
        return self._delete("branch")

    def prune(self) -> Freed:
        """Release this branch and all its descendants and free at once what nobody else uses."""
        return self._delete("subtree")

    def promote(self, ancestor: str | None = None) -> Freed:
        """Keep this branch and prune its siblings, up to `ancestor` (an id, or "root") if one is given."""
        return self.client._send(Call("POST", f"{self._path}/promote", calls.freed, given(ancestor=ancestor)))

    def _delete(self, scope: str) -> Freed:
        try:
            return self.client._send(Call("DELETE", f"{self._path}?scope={scope}", calls.freed))
        except ApiError as error:
            if error.code in ("branch_not_found", "branch_expired"):
                return Freed(0, 0, 0)  # it is gone, as was asked for
            raise

    @property
    def _path(self) -> str:
        return f"/v1/branches/{self.id}"

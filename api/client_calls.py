"""What the clients say to a server, and how they read its answers: plain data, no connection.

The blocking and the asynchronous client send the same calls; here is all that they have in common.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from ramet.engine.errors import RametError

T = TypeVar("T")
Prompt: TypeAlias = str | Seq[int]
Candidate: TypeAlias = str | Seq[int]

MAX_RETRIES = 2
_LONGEST_WAIT_S = 8.0


class ApiError(RametError):
    """What a server said no to.

    Attributes:
        status: the HTTP status.
        code: what is wrong, for programs ("branch_not_found"); None if the server named nothing.
        param: the field that is wrong, if it is one.
        request_id: under which the server's log has it.
        retryable: whether the same may work later.
    """

    def __init__(self, status: int, error: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        super().__init__(str(error.get("message", f"HTTP {status}")))
        self.status = status
        self.code: str | None = error.get("code")
        self.param: str | None = error.get("param")
        self.request_id: str | None = headers.get("x-request-id")
        self.retryable = headers.get("x-should-retry") == "true"


@dataclass(frozen=True)
class Choice:
    """One generated continuation, as in process: see ramet.Choice."""

    index: int
    branch_id: str
    tree_id: str
    parent_id: str | None  # of the branch
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None
    start_position: int
    end_position: int
    cumulative_logprob: float
    mean_logprob: float
    token_logprobs: list[float]
    entropies: list[float] | None
    score: float | None = None  # of a beam: what it was ranked by
    beam_indices: list[int] | None = None


@dataclass(frozen=True)
class Delta:
    """A piece of a stream."""

    index: int
    branch_id: str
    text: str
    token_ids: list[int]


@dataclass(frozen=True)
class BeamProgress:
    """A beam search after one of its steps."""

    num_tokens: int
    num_running: int
    num_finished: int
    text: str  # of the best beam


@dataclass(frozen=True)
class Score:
    """How likely one continuation of a branch is."""

    token_ids: list[int]
    token_logprobs: list[float]
    logprob: float
    score: float  # by which candidates are compared; the same unless `normalize` says otherwise
    is_greedy: bool


@dataclass(frozen=True)
class NextToken:
    """How likely one token is to come next; `logit` is as the model gave it."""

    text: str
    token_id: int
    logit: float | None
    logprob: float
    is_greedy: bool


@dataclass(frozen=True)
class Freed:
    """What pruning gave back."""

    num_branches: int
    blocks: int
    bytes: int


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request, and what to make of its answer."""

    method: str
    path: str
    read: Callable[[dict[str, Any]], T]
    body: dict[str, Any] | None = None
    # The same for all tries, so that a retry does nothing twice.
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def headers(self) -> dict[str, str]:
        return {"idempotency-key": self.key} if self.method == "POST" else {}


def given(**fields: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def create(prompt: Prompt | None, messages: Seq[Mapping[str, Any]] | None, fields: Any) -> dict[str, Any]:
    body = given(**fields)
    if messages is not None:
        body["messages"] = [dict(message) for message in messages]
    if prompt is not None:
        body.update(content(prompt, "prompt"))
    return body


def content(prompt: Prompt, name: str = "text") -> dict[str, Any]:
    """A text or token ids, under the field that takes it."""
    return {name: prompt} if isinstance(prompt, str) else {"token_ids": list(prompt)}


def extend(branch_id: str, new: Prompt | None, fields: Any) -> Call[list[int]]:
    body = {**({} if new is None else content(new)), **given(**fields)}
    return Call("POST", f"/v1/branches/{branch_id}/extend", lambda answer: answer["token_ids"], body)


def generation(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as in process; a server sends tokens and their log-probabilities only if asked."""
    return {"return_token_ids": True, "logprobs": True, **given(**settings)}


def generate(branch_id: str, settings: Mapping[str, Any]) -> Call[list[Choice]]:
    def read(answer: dict[str, Any]) -> list[Choice]:
        return [choice(one) for one in answer["choices"]]

    return Call("POST", f"/v1/branches/{branch_id}/generate", read, generation(settings))


def beam_search(path: str, body: dict[str, Any]) -> Call[list[Choice]]:
    return Call("POST", path, lambda answer: [choice(one) for one in answer["choices"]], body)


def score(branch_id: str, candidates: Seq[Candidate], fields: Any) -> Call[list[Score]]:
    body = {"candidates": [content(one) for one in candidates], "return_token_logprobs": True}
    body.update(_score_fields(fields))

    def read(answer: dict[str, Any]) -> list[Score]:
        names = ("token_ids", "token_logprobs", "logprob", "score", "is_greedy")
        return [Score(**{name: one[name] for name in names}) for one in answer["scores"]]

    return Call("POST", f"/v1/branches/{branch_id}/score", read, body)


def next_tokens(branch_id: str, labels: Seq[str], fields: Any) -> Call[list[NextToken]]:
    body = {"next_token_candidates": list(labels), **_score_fields(fields)}
    return Call(
        "POST",
        f"/v1/branches/{branch_id}/score",
        lambda answer: [NextToken(**one) for one in answer["next_token"]],
        body,
    )


def _score_fields(fields: dict[str, Any]) -> dict[str, Any]:
    suffix = fields.pop("suffix", None)
    return given(suffix=None if suffix is None else content(suffix), **fields)


def freed(answer: dict[str, Any]) -> Freed:
    return Freed(answer["num_branches"], answer["freed_blocks"], answer["freed_bytes"])


def choice(one: Mapping[str, Any]) -> Choice:
    return Choice(
        index=one["index"],
        branch_id=one["branch_id"],
        tree_id=one["tree_id"],
        parent_id=one["parent_id"],
        text=one["text"],
        token_ids=one.get("token_ids", []),
        finish_reason=one["finish_reason"],
        stop_reason=one["stop_reason"],
        start_position=one["start_position"],
        end_position=one["end_position"],
        cumulative_logprob=one["cumulative_logprob"],
        mean_logprob=one["mean_logprob"],
        token_logprobs=one.get("token_logprobs", []),
        entropies=one.get("entropy"),
        score=one.get("score"),
        beam_indices=one.get("beam_indices"),
    )


def info_of(child: Choice) -> dict[str, Any]:
    """What is known of a new branch from what it generated."""
    return {
        "id": child.branch_id,
        "tree_id": child.tree_id,
        "parent_id": child.parent_id,
        "position": child.end_position,
    }


class EventReader:
    """Server-sent events, line by line."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: str) -> dict[str, Any] | None:
        """The event that this line completes."""
        if line.startswith("data:"):
            self._data.append(line[5:].lstrip())
        if line or not self._data:
            return None
        text, self._data = "\n".join(self._data), []
        event: dict[str, Any] | None = None if text == "[DONE]" else json.loads(text)
        return event


Said: TypeAlias = Delta | Choice | BeamProgress
OnProgress: TypeAlias = Callable[[BeamProgress], object]


def told(event: Mapping[str, Any], headers: Mapping[str, str]) -> Said | None:
    """What an event of a generation says. Raises ApiError for one that says what went wrong."""
    if "error" in event:
        raise ApiError(200, event["error"], headers)
    match event["type"]:
        case "branch.output_text.delta":
            ids = event.get("token_ids", [])
            return Delta(event["index"], event["branch_id"], event["delta"], ids)
        case "branch.completed":
            return choice(event)
        case "beam_search.progress":
            names = ("num_tokens", "num_running", "num_finished", "text")
            return BeamProgress(**{name: event[name] for name in names})
    return None  # of no interest here, or newer than this client


def error_in(status: int, text: str, headers: Mapping[str, str]) -> ApiError:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"HTTP {status}: {text[:200]}"}
    return ApiError(status, error, headers)


def wait_before_retry(attempt: int, headers: Mapping[str, str]) -> float:
    """Seconds: what the server asks for, or ever longer with some chance in it."""
    asked = headers.get("retry-after", "")
    if asked.isdecimal():
        return min(float(asked), _LONGEST_WAIT_S)
    return float(min(0.25 * 2**attempt, _LONGEST_WAIT_S) * random.uniform(0.5, 1.0))


def worth_a_retry(status: int, headers: Mapping[str, str]) -> bool:
    return status >= 400 and headers.get("x-should-retry") == "true"

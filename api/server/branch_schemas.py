"""The bodies of the branch endpoints. As in schemas.py: strict types, null is "not given", none unknown."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from ramet.api.server.schemas import Body, EarlyStopping, Message, Neutral, SamplingFields, Stop
from ramet.engine.scoring import Normalize

MAX_BATCH = 256
MAX_CANDIDATES = 256
MAX_ANNOTATIONS = 32

_METADATA = Field(None, max_length=16, description="Up to 16 pairs: keys of 64, values of 512 characters.")
Key = Annotated[str, Field(min_length=1, max_length=64)]
Name = Annotated[str, Field(max_length=128)]
Text = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[Key, Text] | None, _METADATA]
Annotations = Annotated[dict[Key, float | Text] | None, Field(None, max_length=MAX_ANNOTATIONS)]
Position = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string"}, {"type": "null"}]}),
]
Id = Annotated[str, Field(max_length=64)]


class Lease(Body):
    """While it lasts the branch keeps its blocks until those of all others without one are gone."""

    ttl: float = Field(ge=1, le=86_400, allow_inf_nan=False, description="Seconds.")
    renew_on_use: bool | None = None


Pin = Literal["none", "soft", "hard"]


class Settable(Body):
    """What can be said of a branch when it is made, and later."""

    name: Name | None = None
    metadata: Metadata = None
    annotations: Annotations = None
    lease: Lease | None = None
    pin: Pin | None = None


class From(Body):
    branch_id: Id
    position: Position = None


class CreateRequest(Settable):
    model: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    prompt: str | None = None
    token_ids: list[int] | None = None
    from_: From | None = Field(None, alias="from")
    tree_id: Id | None = None
    prefill: Literal["eager", "lazy"] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    tools: Neutral = None


class PatchRequest(Settable):
    checkpoint: Key | None = Field(None, description="A name for the position where the branch is now.")


class ForkRequest(Settable):
    n: int | None = Field(None, ge=1, le=128)
    at: Position = None


class ExtendRequest(Body):
    token_ids: list[int] | None = None
    text: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    expect_position: int | None = None
    checkpoint: Key | None = None
    prefill: Literal["eager", "lazy"] | None = None
    return_logprobs: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    on_mismatch: Literal["error", "append_delta", "rerender"] | None = None


class GenerateRequest(SamplingFields):
    into: Literal["self", "children"] | None = None
    params: list[SamplingFields] | None = Field(None, min_length=1, max_length=128)
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    expect_position: int | None = None
    checkpoint: Key | None = None
    on_disconnect: Literal["cancel", "continue"] | None = None
    response_format: Neutral = None
    tools: Neutral = None


class BeamFields(Body):
    """How beams are ranked; see ramet.BeamSearchParams for what each does."""

    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    scoring: Literal["hf", "raw"] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


class BeamRequest(BeamFields):
    stream: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    expect_position: int | None = None
    num_beam_groups: Neutral = None
    diversity_penalty: Neutral = None
    response_format: Neutral = None


class PromptBeamRequest(BeamRequest):
    model: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    prompt: str | None = None
    token_ids: list[int] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    return_branches: bool | None = Field(None, description="Keep the beams, as children of the prompt.")


class Candidate(Body):
    text: str | None = None
    token_ids: list[int] | None = None


class ScoreRequest(Body):
    candidates: list[Candidate] | None = Field(None, max_length=MAX_CANDIDATES)
    next_token_candidates: list[str] | None = Field(None, max_length=MAX_CANDIDATES)
    suffix: Candidate | None = None
    normalize: Normalize | None = None
    return_token_logprobs: bool | None = None


class TruncateRequest(Body):
    position: int | None = None
    checkpoint: Key | None = None
    expect_position: int | None = None


class PromoteRequest(Body):
    ancestor: Id | None = Field(None, description='A branch id, "root", or by default the parent.')


class BatchOp(Body):
    op: Literal[
        "fork", "extend", "generate", "beam_search", "score", "truncate", "promote", "cancel", "delete", "get"
    ]
    branch_id: Id
    body: dict[str, Any] | None = None


class BatchRequest(Body):
    ops: list[BatchOp] = Field(min_length=1, max_length=MAX_BATCH)
    stream: bool | None = None

"""The bodies of the OpenAI-compatible endpoints.

Types are strict (no "0.5" for 0.5), each optional field may be null, and unknown fields are refused by name:
nothing that a client asks for is left out in silence. Ranges are checked by SamplingParams.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

_TEXT: dict[str, Any] = {"type": "string"}
_NULL: dict[str, Any] = {"type": "null"}
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}}


def _one_of(*schemas: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": list(schemas)})


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


# Checked by hand, because an error in a union of types names no field.
Prompt = Annotated[Any, _one_of(_TEXT, _IDS, _list_of(_TEXT), _list_of(_IDS))]
Stop = Annotated[Any, _one_of(_TEXT, _list_of(_TEXT), _NULL)]
Content = Annotated[Any, _one_of(_TEXT, _list_of({"type": "object"}), _NULL)]
EarlyStopping = Annotated[Any, _one_of({"type": "boolean"}, {"const": "never"}, _NULL)]
# Accepted with the values that ask for nothing; see UNSUPPORTED.
Neutral = Annotated[
    Any, WithJsonSchema({"description": "Not supported, but for values that ask for nothing."})
]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ToolFunction(Body):
    name: str
    arguments: str | None = None


class ToolCall(Body):
    model_config = ConfigDict(extra="ignore")
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolFunction


class Message(Body):
    """Clients send back what they were sent, so more keys than these may be there; they say nothing."""

    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class SamplingFields(Body):
    """How tokens are chosen; see ramet.SamplingParams for what each does."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    banned_token_ids: list[int] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = Field(None, description="Tokens to report at each place.")
    return_entropy: bool | None = None


class GenerationRequest(SamplingFields):
    """What both endpoints take."""

    # What else clients send, and the values that ask for nothing: all others are refused by name.
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "bad_words": ([],),
        "logprobs_mode": ("raw", "raw_logprobs"),
        "service_tier": ("auto", "default"),
        "spaces_between_special_tokens": (True,),
    }

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: bool | None = Field(None, description="The n best of a beam search n wide.")
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    # Labels: they may be sent, and change nothing.
    user: str | None = None
    metadata: dict[str, str] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    response_format: Neutral = None
    structured_outputs: Neutral = None
    guided_json: Neutral = None
    guided_regex: Neutral = None
    guided_choice: Neutral = None
    guided_grammar: Neutral = None
    bad_words: Neutral = None
    logprobs_mode: Neutral = None
    service_tier: Neutral = None
    spaces_between_special_tokens: Neutral = None


class CompletionRequest(GenerationRequest):
    UNSUPPORTED = {**GenerationRequest.UNSUPPORTED, "suffix": ("",)}

    prompt: Prompt
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    suffix: Neutral = None


class ChatRequest(GenerationRequest):
    UNSUPPORTED = {
        **GenerationRequest.UNSUPPORTED,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "store": (False,),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
    }

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    branch_id: str | None = Field(
        None, max_length=64, description="Use this branch's tokens for its messages."
    )
    store_branch: bool | None = Field(None, description="Keep the choices as branches.")

    tools: Neutral = None
    tool_choice: Neutral = None
    parallel_tool_calls: Neutral = None
    functions: Neutral = None
    function_call: Neutral = None
    store: Neutral = None
    modalities: Neutral = None
    audio: Neutral = None
    prediction: Neutral = None
    web_search_options: Neutral = None
    reasoning_effort: Neutral = None
    verbosity: Neutral = None
    chat_template: Neutral = None
    documents: Neutral = None
    echo: Neutral = None


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]

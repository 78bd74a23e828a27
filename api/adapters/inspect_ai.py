"""inspect-ai's `ModelAPI` in process: `inspect eval task.py --model ramet/smollm2`, without a server.

Importing this module needs inspect-ai, which finds it by the entry point in pyproject.toml.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    GenerateConfig,
    Logprob,
    Logprobs,
    ModelAPI,
    ModelOutput,
    ModelUsage,
    StopReason,
    TopLogprob,
    modelapi,
)
from inspect_ai.tool import ToolChoice, ToolInfo

from ramet.engine.async_llm import AsyncLLM
from ramet.engine.errors import InvalidInput
from ramet.engine.outputs import Choice
from ramet.engine.sampler import TokenLogprob
from ramet.engine.sampling_params import SamplingParams
from ramet.engine.token_bytes import TokenBytes

# GenerateConfig -> SamplingParams, where both mean the same.
_FIELDS = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "seed": "seed",
    "stop_seqs": "stop",
    "num_choices": "n",
}
_REFUSED = ("best_of", "prompt_logprobs", "response_schema", "extra_body", "modalities")


@modelapi(name="ramet")  # type: ignore[untyped-decorator, unused-ignore]
def ramet() -> type[ModelAPI]:
    """inspect-ai's registry calls this for a model named `ramet/...`."""
    return RametAPI


class RametAPI(ModelAPI):  # type: ignore[misc, unused-ignore]
    """Chats over an AsyncLLM: what the conversations of one evaluation have in common is computed once.

    `model_args` are the settings of LLM; the model is what stands behind the first slash, such as a folder.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 - as inspect-ai itself has it
        **model_args: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self.llm = AsyncLLM(model_name, **model_args)
        if self.llm.tokenizer is None or not self.llm.tokenizer.has_chat_template:
            raise InvalidInput("model", "must have a tokenizer with a chat template", model_name)
        self._tokenizer = self.llm.tokenizer.copy()
        self._bytes = TokenBytes(self._tokenizer)

    async def aclose(self) -> None:
        await self.llm.close()

    def max_connections(self) -> int:
        """How many samples inspect-ai runs side by side: they share the engine's batches."""
        return 32

    def connection_key(self) -> str:
        return str(self.model_name)

    async def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    async def count_text_tokens(self, text: str) -> int:
        return len(await self.tokenize(text))

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """`num_choices` answers from one prefill. Raises InvalidInput for what is not supported here."""
        if tools:
            raise InvalidInput("tools", "are not supported by this adapter", [tool.name for tool in tools])
        params = _params_of(config)
        messages = [{"role": message.role, "content": _text_of(message)} for message in input]
        (output,) = await self.llm.generate([self._tokenizer.apply_chat_template(messages)], params)
        prompt_tokens, cached = len(output.prompt_token_ids), output.num_cached_tokens
        generated = sum(len(choice.token_ids) for choice in output.choices)
        return ModelOutput(
            model=self.model_name,
            choices=[self._choice(choice, params) for choice in output.choices],
            usage=ModelUsage(
                input_tokens=prompt_tokens - cached,
                input_tokens_cache_read=cached,
                output_tokens=generated,
                total_tokens=prompt_tokens + generated,
            ),
        )

    def _choice(self, choice: Choice, params: SamplingParams) -> ChatCompletionChoice:
        message = ChatMessageAssistant(content=choice.text, model=self.model_name, source="generate")
        full = choice.finish_reason == "length"
        at_limit = full and len(choice.token_ids) == params.max_tokens
        stop_reason: StopReason = "max_tokens" if at_limit else "model_length" if full else "stop"
        told = ChatCompletionChoice(message=message, stop_reason=stop_reason)
        if choice.logprobs is not None:
            told.logprobs = Logprobs(content=self._logprobs(choice.token_ids, choice.logprobs, params))
        return told

    def _logprobs(
        self, token_ids: Seq[int], rows: Seq[Seq[TokenLogprob]], params: SamplingParams
    ) -> list[Logprob]:
        """A row has its own token wherever it ranks; inspect-ai wants that apart from the likeliest."""
        found = []
        for token_id, row in zip(token_ids, rows, strict=True):
            own = next(one for one in row if one.token_id == token_id)
            top = [TopLogprob(**self._named(one)) for one in row[: params.logprobs]]
            found.append(Logprob(**self._named(own), top_logprobs=top or None))
        return found

    def _named(self, token: TokenLogprob) -> dict[str, Any]:
        spelled = self._bytes[token.token_id]
        return {"token": spelled.decode(errors="replace"), "logprob": token.logprob, "bytes": list(spelled)}


def _params_of(config: GenerateConfig) -> SamplingParams:
    given = config.model_dump(exclude_none=True)
    for field in _REFUSED:
        if field in given:
            raise InvalidInput(field, "is not supported by this adapter", given[field])
    settings = {ours: given[theirs] for theirs, ours in _FIELDS.items() if theirs in given}
    settings.setdefault("max_tokens", None)  # up to the context limit, and not our own default
    if given.get("logprobs"):
        settings["logprobs"] = given.get("top_logprobs", 0)
    return SamplingParams(**settings)


def _text_of(message: ChatMessage) -> str:
    """The message without its reasoning, which templates leave out of what came before."""
    if not isinstance(message.content, str):
        for part in message.content:
            if part.type not in ("text", "reasoning"):
                raise InvalidInput("input", "must hold text only", part.type)
    return str(message.text)

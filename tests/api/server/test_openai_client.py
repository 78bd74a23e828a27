"""The openai client, unchanged, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.api.serving import LETTERS, Serve, Serving, make_llm

HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(shared: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="unused", max_retries=0) as one:
        yield one


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "ramet"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"
    assert caught.value.request_id


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": "m", "messages": HI, "max_completion_tokens": 9, "seed": 4, "n": 2}
    whole = client.chat.completions.create(**ask)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens is not None
    texts = ["", ""]
    usage = None
    stream = client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert usage is not None and usage.completion_tokens == 18


def test_chat_logprobs(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="m", messages=HI, max_tokens=3, logprobs=True, top_logprobs=2, logit_bias={str(LETTERS[0]): 2}
    )
    told = reply.choices[0].logprobs
    assert told is not None and told.content is not None
    assert [len(row.top_logprobs) for row in told.content] == [2, 2, 2]


def test_completions_echo_and_extra_body(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="m",
        prompt=["ab", "cd"],
        max_tokens=2,
        echo=True,
        logprobs=1,
        stop=["zzz"],
        extra_body={"return_token_ids": True, "top_k": 2},
    )
    assert [choice.text[:2] for choice in reply.choices] == ["ab", "cd"]
    told: Any = reply.choices[0]
    assert told.logprobs.token_logprobs[0] is None
    assert len(told.token_ids) == 2


def test_the_stream_helper_of_the_client(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=HI, max_tokens=900, seed=1, stop=".")
    assert whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(model="m", messages=HI, max_tokens=900, seed=1, stop=".") as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, reasoning_effort="high", stream=True)
    assert (caught.value.param, caught.value.code) == ("reasoning_effort", "unsupported_parameter")


def test_an_error_in_mid_stream_is_raised(serve: Serve) -> None:
    def breaks(past: list[int]) -> dict[int, float]:
        assert len(past) < 30
        return {LETTERS[0]: 0.0}

    server = serve(make_llm(breaks))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        stream = client.completions.create(model="m", prompt="a", max_tokens=99, stream=True)
        with pytest.raises(openai.APIError, match="the model failed"):
            for _ in stream:
                pass


def test_a_wrong_key_is_an_authentication_error(serve: Serve) -> None:
    server = serve(keys=("sk-first-0001",))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong-key", max_retries=2) as client:
        with pytest.raises(openai.AuthenticationError):
            client.models.list()
        assert len(client.with_options(api_key="sk-first-0001").models.list().data) == 1


def test_closing_and_cancelling_frees_the_blocks(serve: Serve) -> None:
    server = serve()
    ask: dict[str, Any] = {"model": "m", "prompt": "abc", "max_tokens": 100_000}

    def nothing_is_left() -> bool:
        return not server.llm.engine.sequences

    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        stream = client.completions.create(**ask, stream=True)
        next(iter(stream))
        assert not nothing_is_left()
        stream.close()
        server.wait_until(nothing_is_left)

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
            task = asyncio.create_task(client.completions.create(**ask))
            while nothing_is_left():
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    server.wait_until(nothing_is_left)

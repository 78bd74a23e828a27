# needs: openai==3.57.0
"""The openai client: chat and completions, whole and streamed, log-probabilities, n, echo, leaving early."""

from __future__ import annotations

import sys
from typing import Any

import openai

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused")
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Name a colour."}]
ask: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": 12}
ask.update(n=2, seed=3, logprobs=True, top_logprobs=2)
whole = client.chat.completions.create(**ask)
texts = ["", ""]
for chunk in client.chat.completions.create(**ask, stream=True):
    for choice in chunk.choices:
        texts[choice.index] += choice.delta.content or ""
assert texts == [choice.message.content for choice in whole.choices], texts
prompt = "The capital of France is"
echoed = client.completions.create(
    model=model, prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1
)
assert echoed.choices[0].text == f"{prompt} Paris", echoed.choices[0].text
told = echoed.choices[0].logprobs
assert told is not None and told.token_logprobs is not None and told.token_logprobs[0] is None
assert "".join(told.tokens or ()) == echoed.choices[0].text
stream = client.completions.create(model=model, prompt=prompt, max_tokens=2000, stream=True)
next(iter(stream))
stream.close()
refused = None
try:
    client.chat.completions.create(**{**ask, "temperature": -1})
except openai.BadRequestError as error:
    refused = error.param
assert refused == "temperature", refused

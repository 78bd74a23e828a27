# needs: langchain-openai==1.7.4
"""LangChain's chat model and completion model: invoke, stream with usage, log-probabilities, extra_body."""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

common: dict[str, Any] = {"base_url": f"{sys.argv[1]}/v1", "api_key": "unused", "model": "smollm2"}
chat = ChatOpenAI(**common, temperature=0, max_tokens=12, seed=1, stream_usage=True)
messages = [("system", "Answer in one word."), ("user", "What is the capital of France?")]
reply = chat.invoke(messages)
assert reply.usage_metadata is not None and reply.usage_metadata["output_tokens"] <= 12
pieces = list(chat.stream(messages))
assert "".join(str(piece.content) for piece in pieces) == reply.content, reply.content
assert any(piece.usage_metadata for piece in pieces), "no usage in the stream"
told = chat.bind(logprobs=True, top_logprobs=2).invoke(messages).response_metadata["logprobs"]["content"]
assert all(len(row["top_logprobs"]) == 2 for row in told)
several = chat.bind(extra_body={"top_k": 3, "return_token_ids": True}).batch([messages, messages])
assert len(several) == 2
wide = ChatOpenAI(**common, n=3, max_tokens=8, extra_body={"use_beam_search": True, "length_penalty": 0.0})
beams = [one.message for one in wide.generate([[HumanMessage("Name a colour.")]]).generations[0]]
assert len({str(beam.content) for beam in beams}) == 3, beams
streamed = "".join(str(piece.content) for piece in wide.bind(n=1).stream("Name a colour."))
assert streamed == wide.bind(n=1).invoke("Name a colour.").content
completion = OpenAI(**common, temperature=0, max_tokens=1)
assert completion.invoke("The capital of France is") == " Paris"

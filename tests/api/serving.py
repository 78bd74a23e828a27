"""Real servers on loopback, over a scripted model that reads and writes bytes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx2
from tokenizers import Tokenizer as Backend, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ramet import LLM, AsyncLLM
from ramet.api.server.auth import Keys, load_keys
from ramet.api.server.log import JsonLines, logger
from ramet.api.server.run import Server, make_server
from ramet.api.server.settings import Settings
from ramet.testing import ScriptedModel, check_invariants

T = TypeVar("T")
TEMPLATE = """\
{%- for m in messages -%}
<s>{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}</s>
{%- endfor -%}
{%- if add_generation_prompt %}<s>a:{% endif -%}
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each byte, then <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({piece: token_id for token_id, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    hf = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>"
    )
    hf.chat_template = TEMPLATE
    return hf


_TOKENIZER = byte_tokenizer()
LETTERS: list[int] = _TOKENIZER.encode("abcdefghijklmnopqrstuvwxyz. ")
[END] = _TOKENIZER.encode("</s>")


def babble(past: list[int]) -> dict[int, float]:
    """Letters that depend on all that came before; never an end."""
    state = 7
    for token_id in past[-6:]:
        state = (state * 31 + token_id + 1) % 1_000_003
    state += len(past)
    return {LETTERS[(state + 5 * i) % len(LETTERS)]: 2.0 - i for i in range(4)}


def make_llm(next_token: Callable[[list[int]], Any] = babble, **settings: Any) -> LLM:
    model = ScriptedModel(next_token, len(_TOKENIZER), frozenset([END]))
    llm = LLM(model, _TOKENIZER, **{"num_blocks": 256, **settings})
    llm.on_step(lambda: check_invariants(llm))
    return llm


class Steps:
    """A model that takes a while, and waits where it is told to."""

    def __init__(self) -> None:
        self.num = 0
        self.open = threading.Event()
        self.open.set()

    def __call__(self, past: list[int]) -> dict[int, float]:
        self.open.wait(10)
        time.sleep(0.002)
        self.num += 1
        return babble(past)


class _Bugs(logging.Handler):
    """What the log says of bugs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(JsonLines().format(record))


class Serving:
    """A server in a thread of its own, and a client for it."""

    def __init__(self, llm: LLM, settings: Settings, keys: Keys) -> None:
        self.llm = llm
        self._handler = _Bugs()
        self.bugs = self._handler.seen  # a test that causes one takes it out
        logger.addHandler(self._handler)
        started = threading.Event()

        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            self.server: Server = make_server(AsyncLLM(llm), settings, keys)
            serving = asyncio.create_task(self.server.serve())
            while not self.server.started and not serving.done():
                await asyncio.sleep(0.005)
            started.set()
            await serving

        self._thread = threading.Thread(target=lambda: asyncio.run(main()))
        self._thread.start()
        started.wait(30)
        self.url = f"http://127.0.0.1:{self.server.port}"
        self.http = httpx2.Client(base_url=self.url, timeout=30)

    def post(self, path: str, body: Any = None, **more: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **more)

    def get(self, path: str, **more: Any) -> httpx2.Response:
        return self.http.get(path, **more)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Let the server's event loop do something."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(10)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 10) -> None:
        """Until something that a thread does has happened."""
        done = threading.Event()
        for _ in range(int(seconds / 0.01)):
            if condition():
                return
            done.wait(0.01)
        raise AssertionError("it did not happen in time")

    def stop(self) -> None:
        self.server.should_exit = True
        self.join()

    def join(self) -> None:
        self.http.close()
        self._thread.join(30)
        assert not self._thread.is_alive(), "the server did not stop"
        logger.removeHandler(self._handler)
        assert not self.bugs, self.bugs


Serve = Callable[..., Serving]


def serving(llm: LLM | None, keys: tuple[str, ...], settings: dict[str, Any]) -> Serving:
    known = load_keys(keys, None)
    values = {"port": 0, "model_names": ("m",), "has_keys": bool(keys), "shutdown_timeout": 5.0, **settings}
    return Serving(llm or make_llm(), Settings(**values), known)


def error_of(response: httpx2.Response, status: int) -> dict[str, Any]:
    """The error in a response, which must have OpenAI's shape, a request id, and say whether to retry."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert response.headers["x-request-id"]
    assert response.headers["x-should-retry"] in ("true", "false")
    assert "Traceback" not in response.text and "Error(" not in response.text
    return error

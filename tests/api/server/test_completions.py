"""/v1/completions: every parameter is honoured or refused by name, and streams say what wholes say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ramet import LLM
from tests.api.serving import END, LETTERS, Serve, Serving, Steps, byte_tokenizer, error_of, make_llm

PATH = "/v1/completions"


def events(server: Serving, body: dict[str, Any], path: str = PATH) -> list[dict[str, Any]]:
    """The data of a stream, which must be exactly what SSE clients parse, and end with [DONE]."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.text.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]"
    assert all(part.startswith("data: {") and "\n" not in part for part in parts[:-2])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What the chunks of each choice say together."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            whole = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            whole["text"] += part["text"]
            if part["logprobs"] is not None:
                columns = whole["logprobs"] = whole["logprobs"] or {key: [] for key in part["logprobs"]}
                for key, column in part["logprobs"].items():
                    columns[key] += column
            for key in ("token_ids", "entropy", "logprob_token_ids"):
                if key in part:
                    whole[key] = whole.get(key, []) + part[key]
            more = {"prompt_token_ids", "prompt_logprobs", "finish_reason", "stop_reason", "matched_stop"}
            whole.update(
                {key: part[key] for key in [*more, "cumulative_logprob"] if part.get(key) is not None}
            )
    return choices


def compared(choice: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if value is not None}


def both(server: Serving, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices, which must be the same streamed and whole."""
    whole = server.post(PATH, body)
    assert whole.status_code == 200, whole.text
    choices: list[dict[str, Any]] = whole.json()["choices"]
    streamed = joined(events(server, body))
    assert [compared(streamed[i]) for i in range(len(choices))] == [compared(choice) for choice in choices]
    return choices


def test_text_tokens_and_usage(shared: Serving) -> None:
    expected = make_llm().generate("hello", temperature=0, max_tokens=9)[0].choices[0]
    reply = shared.post(PATH, {"model": "m", "prompt": "hello", "temperature": 0, "max_tokens": 9}).json()
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == (expected.text, "length")
    assert (choice["index"], choice["logprobs"], choice["stop_reason"]) == (0, None, None)
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 9, 14)
    assert (
        len(shared.post(PATH, {"prompt": "x", "return_token_ids": True}).json()["choices"][0]["token_ids"])
        == 16
    )


def test_usage_tells_what_was_cached(serve: Serve) -> None:
    server = serve(make_llm(min_partial=1))
    body = {"prompt": "a" * 40, "max_tokens": 1}
    details = [server.post(PATH, body).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details == [
        {"cached_tokens": 0, "cache_write_tokens": 40},
        {"cached_tokens": 32, "cache_write_tokens": 8},
    ]
    chunks = events(server, {**body, "stream_options": {"include_usage": True}})
    assert [chunk["usage"] is None for chunk in chunks] == [True, False]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens_details"] == details[1]


def test_prompts_may_be_texts_or_token_ids_one_or_many(shared: Serving) -> None:
    ids = [byte_tokenizer().encode(text) for text in ("long prompt here", "b", "mid one")]
    body = {"temperature": 0, "max_tokens": 4, "echo": True}
    for prompt in (["long prompt here", "b", "mid one"], ids, [ids[0], "b", ids[2]]):
        choices = both(shared, {**body, "prompt": prompt, "n": 2, "seed": 1})
        assert [choice["index"] for choice in choices] == list(range(6))
        for index, choice in enumerate(choices):
            assert choice["text"].startswith(("long prompt here", "b", "mid one")[index // 2])
    one = both(shared, {**body, "prompt": ids[0]})
    assert one[0]["text"] == both(shared, {**body, "prompt": "long prompt here"})[0]["text"]
    reply = shared.post(PATH, {"prompt": ids, "n": 2, "max_tokens": 3}).json()
    assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert reply["usage"]["completion_tokens"] == 3 * 6


def test_choices_differ_and_come_again_with_their_seed(shared: Serving) -> None:
    body = {"prompt": "abc", "n": 4, "seed": 7, "max_tokens": 12}
    first, again = (both(shared, body) for _ in range(2))
    assert [c["text"] for c in first] == [c["text"] for c in again]
    assert len({c["text"] for c in first}) > 1


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echo_with_logprobs(shared: Serving, max_tokens: int) -> None:
    body = {"prompt": "hello", "echo": True, "logprobs": 2, "max_tokens": max_tokens, "temperature": 0}
    (choice,) = both(shared, body)
    told = choice["logprobs"]
    assert {len(column) for column in told.values()} == {5 + max_tokens}
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    ends = [*told["text_offset"][1:], len(choice["text"])]
    slices = [choice["text"][a:b] for a, b in zip(told["text_offset"], ends, strict=True)]
    assert slices == told["tokens"]
    for name, own, top in zip(
        *(told[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True
    ):
        assert top[name] == own  # exactly, as lm-eval compares them
    assert choice["finish_reason"] == "length"


def test_a_prompts_logprobs_are_those_of_the_model_cold_and_warm(shared: Serving) -> None:
    prompt = byte_tokenizer().encode("the cat sat on")
    expected = make_llm().generate(prompt, max_tokens=1, prompt_logprobs=1)[0].prompt_logprobs
    assert expected is not None
    for _ in range(2):
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        (choice,) = both(shared, body)
        shown = choice["prompt_logprobs"]
        assert shown[0] is None and len(shown) == len(prompt)
        for token_id, entry, known in zip(prompt[1:], shown[1:], expected[1:], strict=True):
            assert next(iter(entry)) == str(token_id)  # the prompt's own comes first
            assert known is not None
            own = next(t.logprob for t in known if t.token_id == token_id)
            assert entry[str(token_id)]["logprob"] == max(own, -9999.0)


def test_what_may_be_reported_of_tokens(shared: Serving) -> None:
    body = {
        "prompt": "ab",
        "max_tokens": 3,
        "seed": 2,
        "logprobs": 0,
        "return_token_ids": True,
        "return_entropy": True,
        "logprob_token_ids": LETTERS[:2],
        "return_tokens_as_token_ids": True,
    }
    (choice,) = both(shared, body)
    ids = choice["token_ids"]
    assert choice["prompt_token_ids"] == byte_tokenizer().encode("ab")
    assert choice["logprobs"]["tokens"] == [f"token_id:{one}" for one in ids]
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])
    assert choice["cumulative_logprob"] == pytest.approx(sum(choice["logprobs"]["token_logprobs"]))
    assert len(choice["entropy"]) == 3
    assert [set(named) for named in choice["logprob_token_ids"]] == [{str(i) for i in LETTERS[:2]}] * 3


def test_stop_strings_and_tokens(serve: Serve) -> None:
    script = byte_tokenizer().encode("ABC def")
    llm = make_llm(lambda past: [*script, END][min(len(past) - 1, len(script))])
    server = serve(llm)
    body = {"prompt": "x", "temperature": 0, "max_tokens": 20}
    (choice,) = both(server, {**body, "stop": ["zz", "C d"]})
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("AB", "stop", "C d")
    (choice,) = both(server, {**body, "stop": "C d", "include_stop_str_in_output": True})
    assert (choice["text"], choice["matched_stop"]) == ("ABC d", "C d")
    (choice,) = both(server, {**body, "stop_token_ids": [script[3]]})
    assert (choice["text"], choice["stop_reason"]) == ("ABC", script[3])
    (choice,) = both(server, body)
    assert (choice["text"], choice["finish_reason"], choice.get("stop_reason")) == ("ABC def", "stop", None)
    assert choice["matched_stop"] == END
    (choice,) = both(server, {**body, "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 9})
    assert choice["text"] == "ABC def</s></s>"
    (choice,) = both(server, {**body, "min_tokens": 6, "stop": "B"})
    assert choice["text"] == "ABC def"


def test_characters_of_several_tokens_stay_whole_in_a_stream(serve: Serve) -> None:
    script = byte_tokenizer().encode("a\U0001f336中b")
    server = serve(make_llm(lambda past: [*script, END][min(len(past) - 1, len(script))]))
    chunks = events(server, {"prompt": "x", "temperature": 0})
    texts = [part["text"] for chunk in chunks for part in chunk["choices"]]
    assert "".join(texts) == "a\U0001f336中b"
    assert not any("\ufffd" in text for text in texts)
    (choice,) = both(server, {"prompt": "x", "temperature": 0, "logprobs": 1})
    assert choice["logprobs"]["tokens"][1:3] == ["bytes:\\xf0", "bytes:\\x9f"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"logit_bias": {str(LETTERS[0]): 100}}, LETTERS[0]),
        ({"allowed_token_ids": [LETTERS[3]]}, LETTERS[3]),
        ({"banned_token_ids": LETTERS[1:], "logit_bias": {str(LETTERS[0]): 50}}, LETTERS[0]),
    ],
)
def test_tokens_that_must_come(serve: Serve, settings: dict[str, Any], expected: int) -> None:
    server = serve(make_llm(lambda past: [0.0] * 258))
    (choice,) = both(server, {"prompt": "x", "max_tokens": 4, "return_token_ids": True, **settings})
    assert choice["token_ids"] == [expected] * 4


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": 3, "min_p": 0.05},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 1.5},
        {"top_p": 0},
        {"top_k": -1},
        {"temperature": 1e-8},
    ],
)
def test_sampling_is_that_of_the_engine(shared: Serving, settings: dict[str, Any]) -> None:
    expected = make_llm().generate("abc", seed=11, max_tokens=10, n=2, **settings)[0].choices
    choices = both(shared, {"prompt": "abc", "seed": 11, "max_tokens": 10, "n": 2, **settings})
    assert [choice["text"] for choice in choices] == [choice.text for choice in expected]


def test_every_optional_field_may_be_null(shared: Serving) -> None:
    from ramet.api.server.schemas import CompletionRequest

    body = dict.fromkeys(set(CompletionRequest.model_fields) - {"prompt"})
    assert shared.post(PATH, {**body, "prompt": "a"}).status_code == 200


def test_what_asks_for_nothing_is_accepted(shared: Serving) -> None:
    body = {
        "prompt": "a",
        "best_of": 1,
        "suffix": "",
        "user": "u",
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "use_beam_search": False,
        "service_tier": "auto",
        "prompt_cache_key": "k",
    }
    assert shared.post(PATH, body).status_code == 200


BAD = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt.1"),
    ({"prompt": [[1], [258]]}, "prompt.1"),
    ({"prompt": [[1], [True]]}, "prompt.1"),
    ({"prompt": [1, 2.5]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 10**6}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 128, "prompt": ["a"] * 64}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias.1"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1, "echo": True, "logprobs": 1}, "prompt_logprobs"),
    ({"best_of": 0}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"wrong": True}}, "stream_options.wrong"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "a" * 1025}, "cache_salt"),
    ({"no_such_thing": 1}, "no_such_thing"),
    ({"model": 7}, "model"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_input_names_its_field(shared: Serving, change: dict[str, Any], param: str, stream: bool) -> None:
    streams = stream and param != "stream_options"  # which is fine in a stream
    body = {"prompt": "a", **({"stream": True} if streams else {}), **change}
    error = error_of(shared.post(PATH, body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_with_valid_json(shared: Serving, constant: str) -> None:
    content = f'{{"prompt": "a", "temperature": {constant}}}'.encode()
    response = shared.http.post(PATH, content=content, headers={"content-type": "application/json"})
    assert error_of(response, 400)["code"] == "invalid_json"


def test_a_lone_surrogate_is_refused_before_a_stream_begins(shared: Serving) -> None:
    for field in ("prompt", "stop", "user"):
        content = f'{{"prompt": "a", "{field}": "\\ud83d", "stream": true}}'.encode()
        response = shared.http.post(PATH, content=content, headers={"content-type": "application/json"})
        assert error_of(response, 400)["param"] == field


def test_unknown_models_are_not_found(shared: Serving) -> None:
    error = error_of(shared.post(PATH, {"prompt": "a", "model": "gpt-" + "4" * 1000}), 404)
    assert (error["code"], error["type"]) == ("model_not_found", "not_found_error")
    assert len(error["message"]) < 200


def test_the_context_limit(serve: Serve) -> None:
    server = serve(make_llm(max_model_len=64))
    for length, made in ((62, 3), (63, 2), (64, 1)):
        for _ in range(2):
            body = {"prompt": "a" * length, "max_tokens": 10, "temperature": 0, "return_token_ids": True}
            (choice,) = both(server, body)
            assert (len(choice["token_ids"]), choice["finish_reason"]) == (made, "length")
    for stream in (True, False):
        error = error_of(server.post(PATH, {"prompt": "a" * 65, "stream": stream}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_salts_and_tenants_share_no_prefix(serve: Serve) -> None:
    keys = ("sk-first-0001", "sk-other-0002")
    server = serve(keys=keys)
    seen: dict[tuple[str, str | None], list[int]] = {}
    for _ in range(2):
        for key in keys:
            for salt in (None, "a", "b"):
                body = {"prompt": "p" * 64, "max_tokens": 1, "cache_salt": salt}
                reply = server.post(PATH, body, headers={"authorization": f"Bearer {key}"}).json()
                cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
                seen.setdefault((key, salt), []).append(cached)
    assert set(map(tuple, seen.values())) == {(0, 63)}


def test_a_tenant_has_a_limit_and_others_do_not_feel_it(serve: Serve) -> None:
    keys = ("sk-first-0001", "sk-other-0002")
    server = serve(make_llm(Steps()), keys=keys, max_running=1)
    first, other = ({"authorization": f"Bearer {key}"} for key in keys)
    body = {"prompt": "a", "max_tokens": 3000, "stream": True}
    with server.http.stream("POST", PATH, json=body, headers=first) as stream:
        lines = stream.iter_lines()  # kept: without it the connection would be closed
        next(lines)
        refused = server.post(PATH, {"prompt": "a"}, headers=first)
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1" and refused.headers["x-should-retry"] == "true"
        assert server.post(PATH, {"prompt": "a"}, headers=other).status_code == 200
    again = {"prompt": "a", "max_tokens": 1}
    server.wait_until(lambda: server.post(PATH, again, headers=first).status_code == 200)


def test_an_error_in_mid_stream_is_an_event(serve: Serve) -> None:
    def breaks(past: list[int]) -> dict[int, float]:
        if len(past) > 20:
            raise RuntimeError("secret of the model")
        return {LETTERS[0]: 0.0}

    server = serve(make_llm(breaks))
    chunks = events(server, {"prompt": "a", "max_tokens": 50})
    assert "".join(part["text"] for chunk in chunks[:-1] for part in chunk["choices"]) == "a" * 20
    error = chunks[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "step_failed")
    assert "secret" not in json.dumps(error) and "RuntimeError" not in json.dumps(error)
    assert error_of(server.post(PATH, {"prompt": "a", "max_tokens": 50}), 500)["code"] == "step_failed"
    assert server.post(PATH, {"prompt": "a", "max_tokens": 5}).status_code == 200


def test_the_embedded_model_says_what_it_says_in_process(serve: Serve, make_smollm2: Any) -> None:
    llm: LLM = make_smollm2()
    expected = llm.generate("The capital of France is", temperature=0, max_tokens=6)[0].choices[0].text
    server = serve(llm)
    (choice,) = both(server, {"prompt": "The capital of France is", "temperature": 0, "max_tokens": 6})
    assert choice["text"] == expected

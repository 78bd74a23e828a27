"""Beam search over HTTP: the beams of the engine, as choices and as branches, also for OpenAI's clients."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from ramet.api.server import branch_beams, branch_store, generating
from tests.api.server.test_branches import Api, ok
from tests.api.server.test_metrics import scrape
from tests.api.server.test_sse import send
from tests.api.serving import END, LETTERS, Serve, Serving, Steps, byte_tokenizer, error_of, make_llm

HI = [{"role": "user", "content": "hi"}]
BEAMS = {"num_beams": 4, "max_tokens": 6}


@pytest.fixture
def api(shared: Serving) -> Any:
    """A tenant that leaves nothing behind."""
    one = Api(shared)
    yield one
    for tree in ok(one.call("GET", "/v1/trees?limit=100"))["data"]:
        one.drop(tree["id"])


def expected(prompt: str | list[int] = "hello", **settings: Any) -> list[Any]:
    """What the engine gives in process."""
    return [beam.output for beam in make_llm().beam_search(prompt, **{**BEAMS, **settings})]


def events_of(response: Any) -> list[dict[str, Any]]:
    """The data of the events, whose names must be their types."""
    assert response.status_code == 200, response.text
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    pairs = [one.split("\n") for one in events]
    found = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [one["type"] for one in found]
    return found


def check_choices(choices: list[dict[str, Any]], known: list[Any]) -> None:
    assert [one["index"] for one in choices] == list(range(len(known)))
    assert [one["text"] for one in choices] == [one.text for one in known]
    assert [one["score"] for one in choices] == pytest.approx([one.score for one in known])
    assert [one["beam_indices"] for one in choices] == [one.beam_indices for one in known]
    assert [one["cumulative_logprob"] for one in choices] == pytest.approx(
        [one.cumulative_logprob for one in known]
    )


def test_a_prompt_gives_the_engines_beams_and_keeps_nothing(shared: Serving) -> None:
    body = {"prompt": "hello", **BEAMS, "return_token_ids": True, "logprobs": True, "top_logprobs": 2}
    answer = ok(shared.post("/v1/beam_search", body))
    known = expected(logprobs=2)
    check_choices(answer["choices"], known)
    assert [one["token_ids"] for one in answer["choices"]] == [one.token_ids for one in known]
    assert [len(one["top_logprobs"]) for one in answer["choices"]] == [6] * 4
    assert answer["object"] == "beam_search" and answer["parent_id"] is None
    assert answer["usage"]["prompt_tokens"] == 5 and answer["usage"]["completion_tokens"] == 24
    assert not shared.llm.engine.sequences
    fewer = ok(shared.post("/v1/beam_search", {**body, "num_return_sequences": 1}))
    check_choices(fewer["choices"], known[:1])
    chat = ok(shared.post("/v1/beam_search", {"messages": HI, **BEAMS}))
    check_choices(chat["choices"], expected("<s>u:hi</s><s>a:"))
    ids = byte_tokenizer().encode("hello")
    check_choices(ok(shared.post("/v1/beam_search", {"token_ids": ids, **BEAMS}))["choices"], known)


def test_settings_reach_the_search(shared: Serving) -> None:
    letter = chr(LETTERS[0] + 64)
    for settings in (
        {"length_penalty": 2.0, "early_stopping": "never", "stop": letter},
        {"early_stopping": True, "stop_token_ids": LETTERS[:3], "min_tokens": 2},
        {"scoring": "raw", "repetition_penalty": 1.5},
        {"logit_bias": {str(LETTERS[1]): 3.0}, "banned_token_ids": LETTERS[4:9]},
    ):
        answer = ok(shared.post("/v1/beam_search", {"prompt": "hello", **BEAMS, **settings}))
        known: dict[str, Any] = dict(settings)
        if "logit_bias" in known:
            known["logit_bias"] = {LETTERS[1]: 3.0}
        check_choices(answer["choices"], expected(**known))


def test_beams_of_a_branch_are_its_children_and_go_on(api: Api) -> None:
    root = api.create(prompt="hello")["id"]
    answer = api.do(root, "beam_search", **BEAMS)
    check_choices(answer["choices"], expected())
    assert answer["parent_id"] == root
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 5
    assert api.get(root)["children"] == 4 and api.get(root)["position"] == 5
    for choice, beam in zip(answer["choices"], make_llm().branch("hello").beam_search(**BEAMS), strict=True):  # type: ignore[arg-type]
        child = api.get(choice["branch_id"])
        assert (child["parent_id"], child["forked_at"], child["position"]) == (root, 5, 11)
        assert child["text"] == "hello" + choice["text"]
        more = api.do(choice["branch_id"], "generate", temperature=0, max_tokens=4)["choices"][0]
        assert more["text"] == beam.generate(temperature=0, max_tokens=4).text
    best = answer["choices"][0]["branch_id"]
    assert api.do(best, "promote")["num_branches"] == 3
    again = ok(
        api.call(
            "POST", "/v1/branches/batch", {"ops": [{"op": "beam_search", "branch_id": root, "body": BEAMS}]}
        )
    )
    check_choices(again["data"][0]["result"]["choices"], expected())


def test_a_prompts_beams_may_be_kept(api: Api) -> None:
    answer = ok(api.call("POST", "/v1/beam_search", {"prompt": "hello", **BEAMS, "return_branches": True}))
    check_choices(answer["choices"], expected())
    root = api.get(answer["parent_id"])
    assert (root["text"], root["children"]) == ("hello", 4)
    assert {api.get(one["branch_id"])["tree_id"] for one in answer["choices"]} == {root["tree_id"]}


@pytest.mark.parametrize("kept", [True, False])
def test_progress_is_streamed(api: Api, kept: bool) -> None:
    body = {"prompt": "hello", **BEAMS, "stream": True, "return_branches": kept}
    *events, end = events_of(api.call("POST", "/v1/beam_search", body))
    progress = [one for one in events if one["type"] == "beam_search.progress"]
    choices = [one for one in events if one["type"] == "branch.completed"]
    assert events == [*progress, *choices]
    steps = [one["num_tokens"] for one in progress]
    assert steps == sorted(set(steps)) and steps[-1] == 6, "a slow reader may miss some, but not the last"
    assert progress[-1]["text"] == choices[0]["text"]
    check_choices(choices, expected())
    assert end["type"] == "beam_search.completed" and end["usage"]["completion_tokens"] == 24
    assert (end["parent_id"] is not None) is kept


def test_openais_endpoints_return_the_best_of_n_beams(shared: Serving) -> None:
    wide = {"use_beam_search": True, "n": 4, "max_tokens": 6, "temperature": 0.7}
    known = expected()
    answer = ok(shared.post("/v1/completions", {"prompt": "hello", **wide}))
    assert [one["text"] for one in answer["choices"]] == [one.text for one in known]
    assert [one["score"] for one in answer["choices"]] == pytest.approx([one.score for one in known])
    assert answer["usage"]["completion_tokens"] == 24
    fewer = ok(shared.post("/v1/completions", {"prompt": "hello", **wide, "n": 2, "best_of": 4}))
    assert [one["text"] for one in fewer["choices"]] == [one.text for one in known[:2]]
    several = ok(shared.post("/v1/completions", {"prompt": ["hello", "you"], **wide, "echo": True}))
    texts = ["hello" + one.text for one in known] + ["you" + one.text for one in expected("you")]
    assert [one["text"] for one in several["choices"]] == texts
    assert [one["index"] for one in several["choices"]] == list(range(8))
    chat = ok(
        shared.post("/v1/chat/completions", {"messages": HI, **wide, "length_penalty": 0.5, "logprobs": True})
    )
    told = expected("<s>u:hi</s><s>a:", length_penalty=0.5)
    assert [one["message"]["content"] for one in chat["choices"]] == [one.text for one in told]
    assert [len(one["logprobs"]["content"]) for one in chat["choices"]] == [6] * 4
    stream = shared.post(
        "/v1/chat/completions",
        {"messages": HI, **wide, "stream": True, "stream_options": {"include_usage": True}},
    )
    chunks = [json.loads(line[6:]) for line in stream.text.split("\n\n") if line.startswith("data: {")]
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    streamed = ["".join(one["delta"]["content"] for one in pieces if one["index"] == i) for i in range(4)]
    assert streamed == [one.text for one in expected("<s>u:hi</s><s>a:")]
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert not shared.llm.engine.sequences


def test_best_of_returns_the_n_best(shared: Serving) -> None:
    body = {"prompt": "hello", "n": 2, "best_of": 6, "seed": 3, "max_tokens": 5}
    answer = ok(shared.post("/v1/completions", body))
    known = make_llm().generate("hello", n=2, best_of=6, seed=3, max_tokens=5)[0].choices
    assert [one["text"] for one in answer["choices"]] == [one.text for one in known]
    assert answer["usage"]["completion_tokens"] == 10
    assert error_of(shared.post("/v1/completions", {**body, "stream": True}), 400)["param"] == "best_of"
    assert error_of(shared.post("/v1/completions", {**body, "best_of": 1}), 400)["param"] == "best_of"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        *[({"num_beams": value}, "num_beams") for value in [0, -1, 257, 10**9, 1.5, "4", True]],
        *[({"early_stopping": value}, "early_stopping") for value in ("always", 1, [1])],
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"num_return_sequences": 9}, "num_return_sequences"),
        ({"scoring": "best"}, "scoring"),
        ({"stop": ""}, "stop"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"num_beam_groups": 2}, "num_beam_groups"),
        ({"diversity_penalty": 0.5}, "diversity_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 0.5}, "temperature"),
        ({"prompt": None}, "messages"),
        ({"messages": HI}, "messages"),
        ({"token_ids": [999], "prompt": None}, "token_ids"),
        ({"expect_position": 3}, "expect_position"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_bad_fields_are_named(shared: Serving, body: dict[str, Any], field: str, stream: bool) -> None:
    response = shared.post("/v1/beam_search", {"prompt": "hello", **BEAMS, "stream": stream, **body})
    assert error_of(response, 400)["param"] == field
    assert not shared.llm.engine.sequences


@pytest.mark.parametrize(
    "bad", [{"num_beam_groups": 2}, {"num_beams": 0}, {"length_penalty": 11}, {"stop_token_ids": [999]}]
)
def test_what_is_refused_leaves_no_branch_of_its_prompt(shared: Serving, bad: dict[str, Any]) -> None:
    body = {"prompt": "hello", **BEAMS, **bad, "return_branches": True}
    assert error_of(shared.post("/v1/beam_search", body), 400)["param"] == next(iter(bad))
    assert not shared.llm.engine.sequences and not ok(shared.get("/v1/branches"))["data"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": True, "n": 257}, "n"),
        ({"use_beam_search": True, "n": 0}, "n"),
        ({"use_beam_search": True, "n": 3, "best_of": 2}, "best_of"),
        ({"use_beam_search": True, "return_entropy": True}, "return_entropy"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True, "echo": True, "logprobs": 1}, "echo"),
        ({"use_beam_search": True, "early_stopping": "maybe"}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_bad_fields_of_completions_are_named(shared: Serving, body: dict[str, Any], field: str) -> None:
    assert error_of(shared.post("/v1/completions", {"prompt": "a", **body}), 400)["param"] == field


def test_limits_of_a_tree_hold_for_beams(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    root = api.create(prompt="hello")["id"]
    assert api.fails(409, root, "beam_search", **BEAMS, expect_position=3)["code"] == "head_moved"
    assert ok(api.call("GET", "/v1/limits"))["max_beams"] == 256
    monkeypatch.setattr(branch_store, "MAX_TREE_BRANCHES", 4)
    assert api.fails(429, root, "beam_search", **BEAMS)["code"] == "branch_limit_exceeded"
    assert api.get(root)["children"] == 0


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("where", ["prompt", "kept", "branch", "completions"])
def test_a_client_that_goes_away_leaves_nothing(serve: Serve, where: str, stream: bool) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="hello")
    body: dict[str, Any] = {"num_beams": 3, "max_tokens": 2000, "stream": stream}
    paths = {
        "prompt": ("/v1/beam_search", {**body, "prompt": "hi"}),
        "kept": ("/v1/beam_search", {**body, "prompt": "hi", "return_branches": True}),
        "branch": (f"/v1/branches/{root['id']}/beam_search", body),
        "completions": (
            "/v1/completions",
            {"prompt": "hi", "n": 3, "use_beam_search": True, "max_tokens": 2000, "stream": stream},
        ),
    }
    raw = send(server, *paths[where])
    server.wait_until(lambda: any(len(s.token_ids) > 15 for s in list(server.llm.engine.sequences)))
    raw.close()
    server.wait_until(lambda: len(server.llm.engine.sequences) == 1)
    server.wait_until(lambda: len(ok(api.call("GET", "/v1/branches"))["data"]) == 1)
    assert (api.get(root["id"])["position"], api.get(root["id"])["children"]) == (5, 0)
    api.drop(root["tree_id"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["subtree", "sibling promoted"])
def test_a_search_goes_with_the_subtree_that_it_is_in(serve: Serve, how: str, stream: bool) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    root = api.create(prompt="hello")
    asked, other = (api.do(root["id"], "fork")["data"][0]["id"] for _ in range(2))
    body = {"num_beams": 3, "max_tokens": 2000, "stream": stream}
    replies: list[Any] = []
    path = f"/v1/branches/{asked}/beam_search"
    thread = threading.Thread(target=lambda: replies.append(api.call("POST", path, body)))
    thread.start()
    server.wait_until(lambda: any(len(s.token_ids) > 15 for s in list(server.llm.engine.sequences)))
    if how == "subtree":
        ok(api.call("DELETE", f"/v1/branches/{asked}?scope=subtree"))
    else:
        api.do(other, "promote")
    thread.join(10)
    if stream:
        assert events_of_failure(replies[0]) == "branch_not_found"
    else:
        assert error_of(replies[0], 404)["code"] == "branch_not_found"
    assert [one["id"] for one in ok(api.call("GET", "/v1/branches"))["data"]] == [root["id"], other]
    assert len(server.llm.engine.sequences) == 2
    api.drop(root["tree_id"])


def events_of_failure(response: Any) -> str:
    """The code of the error that ends a stream."""
    error: str = json.loads(response.text.split("data: ")[-2])["error"]["code"]
    return error


def test_beams_that_come_as_their_branch_is_pruned_go_with_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve()
    api = Api(server)
    root = api.create(prompt="hello")
    asked = api.do(root["id"], "fork")["data"][0]["id"]
    real = generating.result_of

    async def late(entry: Any, work: Any) -> Any:
        result = await real(entry, work)
        await asyncio.to_thread(server.http.delete, f"/v1/branches/{asked}?scope=subtree")
        return result

    monkeypatch.setattr(branch_beams, "result_of", late)
    assert api.fails(409, asked, "beam_search", **BEAMS)["code"] == "cancelled"
    assert [one["id"] for one in ok(api.call("GET", "/v1/branches"))["data"]] == [root["id"]]
    api.drop(root["tree_id"])


def test_cancel_keeps_the_beams_so_far(serve: Serve) -> None:
    server = serve(make_llm(Steps()))
    api = Api(server)
    made = api.create(prompt="hello")
    replies: list[dict[str, Any]] = []
    ask = {"num_beams": 3, "max_tokens": 2000}
    thread = threading.Thread(target=lambda: replies.append(api.do(made["id"], "beam_search", **ask)))
    thread.start()
    server.wait_until(lambda: any(len(s.token_ids) > 15 for s in list(server.llm.engine.sequences)))
    api.do(made["id"], "cancel")
    thread.join(10)
    for choice in replies[0]["choices"]:
        assert choice["finish_reason"] == "cancelled"
        assert api.get(choice["branch_id"])["text"] == "hello" + choice["text"]
    api.drop(made["tree_id"])


def test_beams_are_counted(serve: Serve) -> None:
    server = serve()
    server.post("/v1/beam_search", {"prompt": "a", **BEAMS})
    server.post("/v1/completions", {"prompt": ["a", "b"], "n": 3, "max_tokens": 2, "use_beam_search": True})
    seen = scrape(server)
    assert seen["ramet_beam_searches_total", ""] == 3
    assert seen["ramet_beams_total", ""] == 4 + 2 * 3


def test_ends_end_beams(serve: Serve) -> None:
    server = serve(make_llm(lambda past: {END: 0.0, LETTERS[0]: -0.1}))
    choices = ok(server.post("/v1/beam_search", {"prompt": "a", "num_beams": 2, "max_tokens": 3}))["choices"]
    assert [one["finish_reason"] for one in choices] == ["stop", "stop"]
    assert [one["stop_reason"] for one in choices] == [END, END]

"""Chat completions on branches: the whole conversation is sent each time, and the branch's tokens stay."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.server.test_branches import Api, ids, ok
from tests.api.server.test_chat_completions import PATH, both
from tests.api.server.test_completions import events
from tests.api.server.test_sse import send
from tests.api.serving import END, Serve, Serving, Steps, error_of, make_llm

HI = [{"role": "user", "content": "hi"}]
PROMPT = ids("<s>u:hi</s><s>a:")  # as the template of these tests has it
ASK: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "store_branch": True, "return_token_ids": True}


@pytest.fixture
def api(shared: Serving) -> Any:
    """A tenant that leaves nothing behind."""
    one = Api(shared)
    yield one
    for tree in ok(one.call("GET", "/v1/trees?limit=100"))["data"]:
        one.drop(tree["id"])


def chat(api: Api, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    return ok(api.call("POST", PATH, {"messages": messages, **ASK, **body}))


def reply_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The message, as a client sends it back."""
    return {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}


def test_what_is_stored_says_what_is_not(api: Api) -> None:
    for more in ({}, {"n": 3, "temperature": 1, "seed": 5, "logprobs": True, "top_logprobs": 2}):
        body = {"messages": HI, **ASK, **more}
        kept = both(api.server, body)
        plain = both(api.server, {**body, "store_branch": False})
        for one, other in zip(kept["choices"], plain["choices"], strict=True):
            branch = api.get(one.pop("branch_id"), "token_ids,text,messages")
            assert one == other
            assert branch["token_ids"] == PROMPT + one["token_ids"]
            assert branch["messages"] == HI
            assert branch["forked_at"] == (len(PROMPT) if more else 0)
        assert kept["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_the_last_piece_of_a_stream_names_the_branch(api: Api) -> None:
    chunks = events(api.server, {"messages": HI, **ASK, "n": 2, "seed": 1, "temperature": 1}, PATH)
    named = {
        part["index"]: part["branch_id"]
        for chunk in chunks
        for part in chunk["choices"]
        if part["finish_reason"] is not None
    }
    assert len(set(named.values())) == 2
    parents = {api.get(one)["parent_id"] for one in named.values()}
    assert len(parents) == 1 and None not in parents


def test_the_next_turn_computes_only_what_is_new(api: Api) -> None:
    first = chat(api, HI)
    branch = first["choices"][0]["branch_id"]
    more = [*HI, reply_of(first), {"role": "user", "content": "on"}]
    held = api.get(branch)
    second = chat(api, more, branch_id=branch)
    told = second["usage"]["prompt_tokens_details"]
    # All but the last token of the reply has been computed: it was sampled, not fed.
    assert told["cached_tokens"] == held["position"] - 1
    child = api.get(second["choices"][0]["branch_id"], "token_ids,messages")
    assert (child["parent_id"], child["forked_at"]) == (branch, held["position"])
    assert child["token_ids"][: held["position"]] == held["token_ids"]
    assert child["messages"] == more
    assert api.get(branch)["token_ids"] == held["token_ids"]


def test_the_models_own_spelling_stays(serve: Serve) -> None:
    """The reply's tokens are not those that the tokenizer would make of its text."""
    spelled = [*ids("a"), END]

    def next_token(past: list[int]) -> dict[int, float]:
        return {spelled[0] if past[-1] != spelled[0] else spelled[1]: 1.0}

    server = serve(make_llm(next_token))
    api = Api(server)
    first = chat(api, HI)
    assert first["choices"][0]["token_ids"] == spelled
    branch = first["choices"][0]["branch_id"]
    more = [*HI, {"role": "assistant", "content": "a"}, {"role": "user", "content": "on"}]
    rendered = ok(api.call("POST", f"{PATH}/render", {"messages": more, "branch_id": branch}))
    assert rendered["prompt_token_ids"] == PROMPT + spelled + ids("<s>u:on</s><s>a:")
    api.drop(api.get(branch)["tree_id"])


def test_an_edited_message_forks_where_the_conversations_part(api: Api) -> None:
    first = chat(api, HI)
    said = reply_of(first)
    second = chat(
        api, [*HI, said, {"role": "user", "content": "left"}], branch_id=first["choices"][0]["branch_id"]
    )
    deep = second["choices"][0]["branch_id"]
    other = chat(api, [*HI, said, {"role": "user", "content": "right"}], branch_id=deep)
    child = api.get(other["choices"][0]["branch_id"])
    assert child["parent_id"] == deep
    whole = "<s>u:hi</s><s>a:" + said["content"] + "</s><s>u:"
    assert child["forked_at"] == len(ids(whole))
    assert child["text"].startswith(f"{whole}right</s><s>a:")
    again = chat(api, HI, branch_id=deep)  # another answer to the first message
    assert api.get(again["choices"][0]["branch_id"])["forked_at"] == len(PROMPT)
    assert reply_of(again) == reply_of(first)


def test_without_storing_a_branch_is_read_and_none_is_made(api: Api) -> None:
    first = chat(api, HI)
    branch = first["choices"][0]["branch_id"]
    more = [*HI, reply_of(first), {"role": "user", "content": "on"}]
    answer = chat(api, more, branch_id=branch, store_branch=None)
    assert answer["choices"] == chat(api, more, store_branch=None)["choices"]
    assert [one["id"] for one in ok(api.call("GET", "/v1/branches"))["data"]] == [branch]


def test_a_branch_that_holds_no_messages_gives_what_both_begin_with(api: Api) -> None:
    plain = api.create(prompt="<s>u:hi</s><s>u:")["id"]
    kept = chat(api, HI, branch_id=plain)["choices"][0]["branch_id"]
    shown = api.get(kept)
    assert (shown["parent_id"], shown["forked_at"]) == (plain, len(ids("<s>u:hi</s><s>")))
    assert shown["token_ids"][: len(PROMPT)] == PROMPT
    other = chat(api, HI, branch_id=api.create(prompt="none of it")["id"])["choices"][0]["branch_id"]
    assert api.get(other)["parent_id"] is None


def test_what_is_refused(api: Api) -> None:
    branch = chat(api, HI)["choices"][0]["branch_id"]
    for body, status, param in (
        ({"branch_id": "br_unknown"}, 404, "branch_id"),
        ({"branch_id": branch, "cache_salt": "x"}, 400, "cache_salt"),
        ({"branch_id": 5}, 400, "branch_id"),
        ({"branch_id": "b" * 65}, 400, "branch_id"),
        ({"store_branch": "yes"}, 400, "store_branch"),
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"n": 129}, 400, "n"),
    ):
        error = error_of(api.call("POST", PATH, {"messages": HI, **ASK, **body}), status)
        assert error["param"] == param
    assert len(ok(api.call("GET", "/v1/branches"))["data"]) == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_leaves_no_branch(serve: Serve, stream: bool, n: int) -> None:
    llm = make_llm(Steps())
    server = serve(llm)
    api = Api(server)
    raw = send(server, PATH, {"messages": HI, **ASK, "max_tokens": 2000, "n": n, "stream": stream})
    server.wait_until(lambda: any(len(s.token_ids) > 15 for s in list(llm.engine.sequences)))
    assert ok(api.call("GET", "/v1/branches"))["data"]
    raw.close()
    server.wait_until(lambda: not ok(api.call("GET", "/v1/branches"))["data"])

"""Random verbs with random bodies, good and bad, on branches that exist: no server error, and no leak."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.api.server.test_branches import Api, ok
from tests.api.serving import LETTERS, Serve, make_llm

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 3, 10**30, 0.5),
    *("", "x", "prompt", "\u0000"),
    *([], [1], [[]], {}, {"a": 1}, [None]),
]
FIELDS: dict[str, dict[str, list[Any]]] = {
    "fork": {
        "n": [1, 2],
        "at": [1, 2, "prompt"],
        "lease": [{"ttl": 5}],
        "pin": ["soft", "hard"],
        "name": ["n"],
    },
    "extend": {
        "text": ["a", "</s>"],
        "token_ids": [LETTERS[:2], []],
        "messages": [[{"role": "user", "content": "a"}], [{"role": "tool", "content": "b"}]],
        "prefill": ["lazy", "eager"],
        "return_logprobs": [True],
        "on_mismatch": ["rerender", "append_delta"],
        "checkpoint": ["c"],
    },
    "generate": {
        "max_tokens": [1, 4],
        "n": [2],
        "into": ["children", "self"],
        "params": [[{"max_tokens": 2}, {"max_tokens": 1, "temperature": 0}]],
        "stream": [True],
        "logprobs": [True],
        "top_logprobs": [1],
        "stop": ["a", ["b", "c"]],
        "logit_bias": [{"64": 5}],
        "return_token_ids": [True],
        "checkpoint": ["c"],
    },
    "score": {
        "candidates": [[{"text": "ab"}, {"token_ids": LETTERS[:3]}]],
        "next_token_candidates": [["a", "b"]],
        "suffix": [{"text": "?"}],
        "normalize": ["tokens", "bytes", "softmax"],
    },
    "truncate": {"position": [1, 2], "checkpoint": ["prompt", "c"]},
    "promote": {"ancestor": ["root"]},
    "cancel": {},
}


def body_of(rng: random.Random, verb: str) -> dict[str, Any]:
    """Mostly sound, sometimes odd, seldom with a field that is none."""
    body = {
        name: rng.choice(values) if rng.random() < 0.85 else rng.choice(ODD)
        for name, values in FIELDS[verb].items()
        if rng.random() < 0.4
    }
    if verb in ("extend", "truncate") and len(body) > 1 and rng.random() < 0.7:
        body = dict([rng.choice(list(body.items()))])
    if rng.random() < 0.05:
        body[rng.choice(["wrong", "__class__", "stream", "seed"])] = rng.choice(ODD)
    return body


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_requests(serve: Serve, seed: int) -> None:
    rng = random.Random(seed)
    server = serve(make_llm(num_blocks=48, block_size=4), max_pinned_ratio=0.2)
    api = Api(server)
    statuses: dict[int, int] = {}
    for _ in range(220):
        known = [one["id"] for one in ok(api.call("GET", "/v1/branches?limit=100"))["data"]]
        if len(known) < 2 or rng.random() < 0.05:
            messages = [{"role": "user", "content": "hi"}]
            made = rng.choice([{"prompt": "ab" * rng.randint(1, 9)}, {"messages": messages}])
            response = api.call("POST", "/v1/branches", made)
        elif rng.random() < 0.1 or len(known) > 12:
            scope = rng.choice(["branch", "subtree"])
            response = api.call("DELETE", f"/v1/branches/{rng.choice(known)}?scope={scope}")
        else:
            verb = rng.choice(list(FIELDS))
            path = f"/v1/branches/{rng.choice(known)}/{verb}"
            response = api.call("POST", path, body_of(rng, verb))
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        assert response.status_code < 500, response.text
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        elif response.headers["content-type"].startswith("text/event-stream"):
            assert response.text.endswith("data: [DONE]\n\n") and "internal_error" not in response.text
    assert statuses[200] > 60 and statuses[400] > 20, statuses
    for tree in ok(api.call("GET", "/v1/trees?limit=100"))["data"]:
        assert tree["branches"]["live"] > 0
        api.drop(tree["id"])
    assert ok(api.call("GET", "/v1/branches"))["data"] == []

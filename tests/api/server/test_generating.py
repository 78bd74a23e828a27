"""What a generation on branches costs, and what is left of one that is let go of."""

from __future__ import annotations

import threading
from typing import Any

from tests.api.server.test_branches import Api, ids, ok
from tests.api.server.test_sse import in_use
from tests.api.serving import Serve, Steps, make_llm


def test_forks_of_a_cold_prompt_compute_it_once_and_say_what_flat_requests_say(serve: Serve) -> None:
    tails, new = "abcdefgh", 6
    prompt = ("The words of a long prompt. " * 147)[
        :4096
    ]  # whole blocks: an open one that is cold is not shared
    llm = make_llm(num_blocks=400)
    server = serve(llm)
    api = Api(server)
    root = api.create(prompt=prompt, prefill="lazy")
    kids = [one["id"] for one in api.do(root["id"], "fork", n=len(tails))["data"]]
    for kid, tail in zip(kids, tails, strict=True):
        api.do(kid, "extend", text=f"{tail}: ", prefill="lazy")
    assert llm.engine.num_computed_tokens == 0
    body = {"max_tokens": new, "temperature": 0}
    texts: dict[str, str] = {}

    def generate(kid: str) -> None:
        texts[kid] = api.do(kid, "generate", **body)["choices"][0]["text"]

    threads = [threading.Thread(target=generate, args=(kid,)) for kid in kids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Of the new tokens the last one of each is not fed.
    assert llm.engine.num_computed_tokens == len(ids(prompt)) + len(kids) * (3 + new - 1)
    flat = {"prompt": [f"{prompt}{tail}: " for tail in tails], **body}
    choices = ok(server.post("/v1/completions", flat))["choices"]
    assert [texts[kid] for kid in kids] == [choice["text"] for choice in choices]
    api.drop(root["tree_id"])


def test_a_deleted_branch_frees_what_it_was_generating_within_two_steps(serve: Serve) -> None:
    model = Steps()
    llm = make_llm(model)
    server = serve(llm)
    api = Api(server)
    root = api.create(prompt="a" * 40)["id"]
    before, free = in_use(server), llm.stats().pages.num_free
    (loser,) = (one["id"] for one in api.do(root, "fork")["data"])
    replies: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda: replies.append(
                api.call("POST", f"/v1/branches/{loser}/generate", {"max_tokens": 900})
            )
        ),
        threading.Thread(
            target=lambda: replies.append(api.call("DELETE", f"/v1/branches/{loser}?scope=subtree"))
        ),
    ]
    threads[0].start()
    server.wait_until(lambda: in_use(server) > before + 2)
    model.open.clear()  # the step that runs now is the last one that may count it
    threads[1].start()
    trees = [tree for store in server.server.state.stores() for tree in store.trees.values()]
    server.wait_until(lambda: not any(loser in tree.branches for tree in trees))
    steps = llm.engine.num_steps
    model.open.set()
    server.wait_until(lambda: in_use(server) == before)
    assert llm.stats().pages.num_free == free  # not only given to the cache
    assert llm.engine.num_steps - steps <= 2
    for thread in threads:
        thread.join(10)
    told = {reply.json()["object"]: reply.json() for reply in replies}
    assert told["branch"]["deleted"] and told["branch"]["freed_blocks"] > 2
    assert told["branch.generation"]["choices"][0]["finish_reason"] == "cancelled"
    api.drop(api.get(root)["tree_id"])

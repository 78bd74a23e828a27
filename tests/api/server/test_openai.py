"""What surrounds completions: forgetting what was computed."""

from __future__ import annotations

from tests.api.server.test_branches import Api, ok
from tests.api.serving import Serve

PROMPT = "a prompt of a few blocks, all of which may be found again."


def cached(api: Api) -> int:
    answer = ok(api.call("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 1}))
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_tenant_forgets_what_was_computed_of_its_own_prompts(serve: Serve) -> None:
    keys = ("sk-first-0001", "sk-other-0002")
    server = serve(keys=keys)
    mine, theirs = (Api(server, key) for key in keys)
    for one in (mine, theirs):
        assert [cached(one), cached(one)] == [0, len(PROMPT) // 16 * 16]
    branch = mine.create(prompt=PROMPT, pin="soft")
    answer = ok(mine.call("POST", "/v1/admin/reset_prefix_cache"))
    num_blocks = -(-len(PROMPT) // 16)  # the last one is the branch's own
    assert (answer["object"], answer["freed_blocks"]) == ("prefix_cache.reset", num_blocks)
    assert answer["freed_bytes"] == num_blocks * server.llm.engine.block_nbytes
    shown = mine.get(branch["id"])
    assert (shown["state"], shown["text"], shown["kv"]["blocks"]) == ("parked", PROMPT, 0)
    assert cached(theirs) > 0
    assert cached(mine) == 0
    mine.drop(branch["tree_id"])

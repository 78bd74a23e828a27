# needs: treequest==0.3.3 httpx2==2.16.2
"""TreeQuest's AB-MCTS with ask_batch and results out of order, each node a branch on the server."""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from typing import Any

import treequest

url = sys.argv[1]


def call(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


# Longer than a few blocks: it is whole blocks that branches share for good.
PROMPT = "Fruits that grow on trees, one after the other. " * 10 + "A short list of fruits: apple,"
root = call("POST", "/v1/branches", {"prompt": PROMPT, "lease": {"ttl": 60}})


def expand(parent: dict[str, Any] | None, seed: int) -> tuple[dict[str, Any], float]:
    """A child of a branch, and how likely the model finds that it names a banana next."""
    branch = root["id"] if parent is None else parent["branch_id"]
    body = {"into": "children", "max_tokens": 4, "seed": seed}
    (choice,) = call("POST", f"/v1/branches/{branch}/generate", body)["choices"]
    path = f"/v1/branches/{choice['branch_id']}/score"
    (token,) = call("POST", path, {"next_token_candidates": [" banana"]})["next_token"]
    return {"branch_id": choice["branch_id"], "text": choice["text"]}, 1 / (1 - token["logprob"])


algorithm = treequest.ABMCTSA()
state = algorithm.init_tree()
order = random.Random(0)
for turn in range(4):
    state, trials = algorithm.ask_batch(state, 5, ["expand"])
    order.shuffle(trials)
    for index, trial in enumerate(trials):
        state = algorithm.tell(state, trial.trial_id, expand(trial.parent_state, 100 * turn + index))
pairs = algorithm.get_state_score_pairs(state)
assert len(pairs) == 20, len(pairs)
tree = call("GET", f"/v1/trees/{root['tree_id']}")
assert tree["branches"]["live"] == 21, tree
assert tree["tokens"]["sharing_ratio"] > 1.5, tree
best, _ = treequest.top_k(state, algorithm, k=1)[0]
call("POST", f"/v1/branches/{best['branch_id']}/promote", {"ancestor": "root"})
call("DELETE", f"/v1/trees/{root['tree_id']}")

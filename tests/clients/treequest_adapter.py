# needs: ramet treequest==0.3.3
"""TreeQuest's searches over branches, in process and on the server: AB-MCTS, MCTS, and one resumed."""

from __future__ import annotations

import asyncio
import math
import pickle
import sys
from typing import Any

import treequest

from ramet import AsyncClient, AsyncLLM
from ramet.api.adapters.treequest import BranchSearch, Thought

PROMPT = "Fruits that grow on trees, one after the other. " * 10 + "A short list of fruits: apple,"
ACTIONS: dict[str, dict[str, Any]] = {
    "bold": {"max_tokens": 4, "temperature": 1.2},
    "careful": {"max_tokens": 4, "temperature": 0.5},
}


async def likes_bananas(branch: Any) -> float:
    """How likely the model finds that a banana comes next."""
    (score,) = await branch.score([" banana"])
    return math.exp(score.logprob)


async def search(algorithm: Any, root: Any, batch_size: int) -> BranchSearch[Any]:
    done = BranchSearch(algorithm, root, likes_bananas, ACTIONS)
    await done.run(20, batch_size=batch_size)
    pairs = algorithm.get_state_score_pairs(done.state)
    assert len(pairs) == 20 and all(isinstance(thought, Thought) for thought, _ in pairs), pairs
    return done


async def in_process() -> None:
    async with AsyncLLM("smollm2", dtype="float32", num_blocks=1024) as llm:
        prompt_tokens = len(llm.tokenizer.encode(PROMPT)) if llm.tokenizer else 0
        algorithm = treequest.ABMCTSA()
        async with await llm.branch(PROMPT) as root:
            done = await search(algorithm, root, 5)
            computed = (await llm.stats()).num_computed_tokens
            # The prompt once. A node has 4 tokens and is scored with one more; it may compute the last one of
            # its parent again, and a score asks again for what follows its own last one.
            assert computed <= prompt_tokens + 20 * (4 + 1 + 1 + 1), (computed, prompt_tokens)
            best, score = treequest.top_k(done.state, algorithm, k=1)[0]
            branch = await done.branch(best)
            assert branch.token_ids[prompt_tokens:] == list(best.token_ids)
            assert math.isclose(await likes_bananas(branch), score, rel_tol=1e-4)
            stored = pickle.dumps(done.state)
        assert (await llm.stats()).pages.num_in_use == 0, "the pruned root has taken its nodes along"
        async with await llm.branch(PROMPT) as root:
            again = BranchSearch(algorithm, root, likes_bananas, ACTIONS)
            again.state = pickle.loads(stored)
            await again.run(5, batch_size=5)
            assert len(algorithm.get_state_score_pairs(again.state)) == 25


async def on_the_server(url: str) -> None:
    async with AsyncClient(url) as client, await client.branch(PROMPT) as root:
        # It wants two samples of each action before it goes on, and takes no more.
        algorithm = treequest.StandardMCTS(samples_per_action=2)
        pairs = algorithm.get_state_score_pairs((await search(algorithm, root, 4)).state)
        apart = {thought.token_ids for thought, _ in pairs}
        assert (await client.tree(root.tree_id))["branches"]["live"] == 1 + len(apart)


asyncio.run(in_process())
asyncio.run(on_the_server(sys.argv[1]))

"""TreeRL's rule for where to branch: in finished chains, right before their least likely tokens.

    python -m examples.treerl_split

Whole chains are sampled first. Then, in each round, every tree is split at the tokens of which the model was
least sure, wherever they are, and sampled again from there (EPTree, arXiv:2506.11902; THUDM/TreeRL). Its code
sends each prefix again as a prompt; here a split is a fork at that token, and computes nothing again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from examples.sums import SAMPLING, check, deal
from examples.tally import Tally, command, show
from ramet import LLM, Branch, SamplingParams


@dataclass(frozen=True)
class Chain:
    """One sampled chain. What it has of its own begins at a position of its branch."""

    branch: Branch
    start: int
    logprobs: list[float]  # of its own tokens
    is_split: bool  # whether it goes on from the middle of another


def least_likely(tree: Sequence[Chain], n: int) -> list[tuple[Chain, int]]:
    """The n tokens of a tree with the lowest log-probabilities: (chain, position)."""
    found = [
        (logprob, chain, chain.start + offset)
        for chain in tree
        for offset, logprob in enumerate(chain.logprobs)
        if offset or not chain.is_split  # the first token of a split was drawn anew already
    ]
    return [(chain, position) for _, chain, position in sorted(found, key=lambda one: one[0])[:n]]


def grow(
    root: Branch, params: SamplingParams, *, num_trees: int, num_splits: int, num_rounds: int
) -> list[list[Chain]]:
    """Trees of chains below a prompt, each with `num_splits` more chains a round; pruned with the root.

    No chain has more than `params.max_tokens` after the prompt. A seed would have all forks draw alike.
    """
    end = len(root) + (params.max_tokens or 0)
    forks = root.fork(num_trees)
    first = root.llm.step(forks, params)
    trees = [
        [Chain(fork, len(root), choice.token_logprobs, False)]
        for fork, choice in zip(forks, first, strict=True)
    ]
    for _ in range(num_rounds):
        splits = [(tree, *split) for tree in trees for split in least_likely(tree, num_splits)]
        forks = [chain.branch.fork(at=position)[0] for _, chain, position in splits]
        choices = root.llm.step(forks, [replace(params, max_tokens=end - len(fork)) for fork in forks])
        for (tree, _, position), fork, choice in zip(splits, forks, choices, strict=True):
            tree.append(Chain(fork, position, choice.token_logprobs, True))
    return trees


def main() -> None:
    command(__doc__).parse_args()
    llm, problem = LLM("smollm2"), deal(4)
    assert llm.tokenizer is not None, "the embedded model has one"
    params = SamplingParams(**SAMPLING)
    start = time.perf_counter()
    with llm.branch(problem.text) as root:
        trees = grow(root, params, num_trees=2, num_splits=2, num_rounds=2)
        chains = [chain for tree in trees for chain in tree]
        for chain in chains:
            ids = chain.branch.token_ids
            shared, own = ids[len(root) : chain.start], ids[chain.start :]
            print(f"{llm.tokenizer.decode(shared)!r:>44} | {llm.tokenizer.decode(own)!r}")
        num_right = sum(check(chain.branch.text[len(problem.text) :], problem) for chain in chains)
        num_flat = sum(len(chain.branch) for chain in chains)  # each a request with all before it
    num_tokens, seconds = llm.stats().num_computed_tokens, time.perf_counter() - start
    name = "2 trees, split twice"
    show("A sum", [Tally(name, len(chains), num_right, num_tokens, num_flat, seconds)], Console())


if __name__ == "__main__":
    main()

"""TreeRL's rule for where to branch: in finished chains, right before their least likely tokens.

    python -m examples.treerl_split

Whole chains are sampled first. Then, in each round, every tree is split at the tokens of which the model was
least sure, wherever they are, and sampled again from there (EPTree, arXiv:2506.11902; THUDM/TreeRL). Its code
sends each prefix again as a prompt; here a split is a fork at that token, and computes nothing again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ramet import LLM, Branch, SamplingParams

PROMPT = "Question: Tom has 3 boxes of 4 pens and gives 5 pens away. How many pens are left?\nAnswer: Tom has"


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
        (-logprob, chain_index, offset)
        for chain_index, chain in enumerate(tree)
        for offset, logprob in enumerate(chain.logprobs)
        if offset or not chain.is_split  # the first token of a split was drawn anew already
    ]
    found.sort(reverse=True)
    return [(tree[chain_index], tree[chain_index].start + offset) for _, chain_index, offset in found[:n]]


def grow(
    root: Branch, params: SamplingParams, *, num_trees: int, num_splits: int, num_rounds: int
) -> list[list[Chain]]:
    """Trees of chains below a prompt, each with `num_splits` more chains a round; pruned with the root.

    No chain has more than `params.max_tokens` after the prompt.
    """
    assert params.max_tokens is not None, "chains are finished"
    end = len(root) + params.max_tokens
    children = root.expand(num_trees, params=params)
    trees = [[_chain(child, len(root), is_split=False)] for child in children]
    for _ in range(num_rounds):
        splits = [(tree, *split) for tree in trees for split in least_likely(tree, num_splits)]
        forks = [chain.branch.fork(at=position)[0] for _, chain, position in splits]
        root.llm.step(forks, [replace(params, max_tokens=end - len(fork)) for fork in forks])
        for (tree, _, position), fork in zip(splits, forks, strict=True):
            tree.append(_chain(fork, position, is_split=True))
    return trees


def _chain(branch: Branch, start: int, *, is_split: bool) -> Chain:
    assert branch.output is not None, "it has just generated"
    return Chain(branch, start, branch.output.token_logprobs, is_split)


def main() -> None:
    """Print each tree of a small question, split by split."""
    llm = LLM("smollm2")
    assert llm.tokenizer is not None, "the embedded model has one"
    params = SamplingParams(max_tokens=32, temperature=0.8, stop="\n")
    with llm.branch(PROMPT) as root:
        trees = grow(root, params, num_trees=2, num_splits=2, num_rounds=2)
        for tree in trees:
            for chain in tree:
                ids = chain.branch.token_ids
                before, own = ids[len(root) : chain.start], ids[chain.start :]
                print(f"{llm.tokenizer.decode(before)!r} | {llm.tokenizer.decode(own)!r}")
            print()
        chains = [chain for tree in trees for chain in tree]
        again = sum(chain.start + len(chain.logprobs) for chain in chains)
    print(f"{llm.stats().num_computed_tokens} tokens computed; {again} if every chain began with its prompt")


if __name__ == "__main__":
    main()

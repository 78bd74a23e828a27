"""Searches over branches, in this process or over HTTP; see docs/search.md."""

from ramet.api.search.branches import Branch as Branch
from ramet.api.search.levels import beam as beam, tree_of_thought as tree_of_thought
from ramet.api.search.mcts import mcts as mcts, puct as puct, uct as uct
from ramet.api.search.node import Node as Node
from ramet.api.search.policy import (
    annotate as annotate,
    likelihood as likelihood,
    listed as listed,
    rollouts as rollouts,
    sampled as sampled,
    self_evaluation as self_evaluation,
)
from ramet.api.search.samples import best_of as best_of, self_consistency as self_consistency
from ramet.api.search.tree import Found as Found, Tree as Tree

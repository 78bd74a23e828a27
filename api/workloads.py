"""Abstract agent workloads for prefix-caching language-model engines.

A `Workload` is a fixed directed graph of `Call`s.  Each call is one request to an
engine: a prompt, how many sequences to draw from it, and how many tokens each has.
A prompt is a sequence of parts, where a part is either

* a `Text`: literal token ids, drawn at random from the seed, or
* a `Draw`: "whatever the engine generated as sample `sample` of call `call`".

So two prompts share exactly the parts they both name, and nothing else: every `Text`
begins with a token id that no other `Text` of the workload begins with.  Lengths are
fixed (end-of-sequence is ignored) and every choice a search would make (which thoughts
to keep, which node to expand) is drawn from the seed instead of from a score.  The
whole graph, all token counts and the best possible prefix reuse are therefore known
before anything runs and are the same for every engine.

Calls are grouped in rounds: a call only names draws of earlier rounds.  An engine may
run a round as one batch (`run_rounds`), or start each call as soon as the draws it names
exist (`Call.depends_on`).

    workload = build("W3", seed=0)
    outputs = run_rounds(workload, engine)    # engine(list of Request) -> samples
    print(workload.totals())

This module needs numpy only and knows nothing about any engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DEFAULT_VOCAB_SIZE = 128_000  # Llama 3's ordinary tokens; its special ones are above
SAMPLE, BEAM = "sample", "beam"


# --------------------------------------------------------------------------- the graph


@dataclass(frozen=True)
class Text:
    """Literal token ids.  `uid` alone is the identity used for sharing."""

    uid: int
    tokens: tuple[int, ...] = field(compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Draw:
    """The tokens generated as sample number `sample` of call number `call`."""

    call: int
    sample: int
    length: int

    def __len__(self) -> int:
        return self.length


Part = Text | Draw


@dataclass(frozen=True)
class Call:
    """One request: `n` sequences of `max_tokens` tokens, drawn after `prompt`."""

    uid: int
    prompt: tuple[Part, ...]
    max_tokens: int
    n: int = 1
    mode: str = SAMPLE  # or BEAM, where n is the beam width
    temperature: float = 1.0
    group: int = 0  # the tree, session or document that the call belongs to

    @property
    def prompt_length(self) -> int:
        return sum(len(part) for part in self.prompt)

    @property
    def depends_on(self) -> frozenset[int]:
        return frozenset(part.call for part in self.prompt if isinstance(part, Draw))

    def draw(self, sample: int = 0) -> Draw:
        return Draw(self.uid, sample, self.max_tokens)


@dataclass(frozen=True)
class Totals:
    """What a workload asks for, and the least an engine could compute for it.

    `prompt_tokens` counts every prompt once per call, `sequence_prompt_tokens` once per
    drawn sequence (as an engine does that turns n samples into n requests).
    `tree_tokens` is the size of the tree of all prompts and outputs: the KV that exists
    if everything shared is stored once and nothing is evicted.  `new_prompt_tokens` are
    the prompt tokens in that tree that no earlier call generated or prefilled; an ideal
    token-granular cache with all generated KV kept prefills only these (plus one token
    for a prompt that is cached to its very end).  The ideal hit rates are over
    `prompt_tokens` and `sequence_prompt_tokens`.
    """

    calls: int
    sequences: int
    rounds: int
    prompt_tokens: int
    sequence_prompt_tokens: int
    output_tokens: int
    new_prompt_tokens: int
    tree_tokens: int
    longest_sequence: int
    most_sequences_at_once: int

    @property
    def ideal_hit_rate(self) -> float:
        return 1 - self.new_prompt_tokens / self.prompt_tokens

    @property
    def ideal_sequence_hit_rate(self) -> float:
        return 1 - self.new_prompt_tokens / self.sequence_prompt_tokens


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    seed: int
    vocab_size: int
    rounds: tuple[tuple[Call, ...], ...]

    def __iter__(self) -> Iterator[Call]:
        for calls in self.rounds:
            yield from calls

    def totals(self) -> Totals:
        seen: set[tuple[Part, ...]] = set()  # paths of part identities from the root
        tree = new_prompt = prompts = sequence_prompts = outputs = longest = 0
        calls = list(self)
        for call in calls:
            path: tuple[Part, ...] = ()
            for part in call.prompt:
                path += (part,)
                if path not in seen:
                    seen.add(path)
                    tree += len(part)
                    new_prompt += len(part)
            for sample in range(call.n):
                leaf = (*path, call.draw(sample))
                if leaf not in seen:
                    seen.add(leaf)
                    tree += call.max_tokens
            prompts += call.prompt_length
            sequence_prompts += call.prompt_length * call.n
            outputs += call.max_tokens * call.n
            longest = max(longest, call.prompt_length + call.max_tokens)
        return Totals(
            calls=len(calls),
            sequences=sum(call.n for call in calls),
            rounds=len(self.rounds),
            prompt_tokens=prompts,
            sequence_prompt_tokens=sequence_prompts,
            output_tokens=outputs,
            new_prompt_tokens=new_prompt,
            tree_tokens=tree,
            longest_sequence=longest,
            most_sequences_at_once=max(sum(c.n for c in r) for r in self.rounds),
        )


# --------------------------------------------------------------------------- building


@dataclass
class _Builder:
    """Hands out texts and calls, and keeps the rounds."""

    seed: int
    stream: int
    vocab_size: int
    rng: np.random.Generator = field(init=False)
    rounds: list[list[Call]] = field(default_factory=list)
    _texts: int = 0
    _calls: int = 0

    def __post_init__(self) -> None:
        # One stream per workload: adding a workload does not change the others.
        self.rng = np.random.default_rng([self.seed, self.stream])
        self._first_tokens = self.rng.permutation(self.vocab_size)

    def text(self, length: int) -> Text:
        tokens = self.rng.integers(0, self.vocab_size, size=length)
        tokens[0] = self._first_tokens[self._texts]
        self._texts += 1
        return Text(self._texts - 1, tuple(tokens.tolist()))

    def call(self, prompt: Sequence[Part], max_tokens: int, **options: Any) -> Call:
        call = Call(self._calls, tuple(prompt), max_tokens, **options)
        self._calls += 1
        return call

    def add_round(self, calls: Sequence[Call]) -> None:
        self.rounds.append(list(calls))


def unshared(b: _Builder, prompts: int = 64, prompt_length: int = 1024, output_length: int = 256) -> str:
    """Independent prompts: nothing to share, the cost of the machinery alone."""
    b.add_round([b.call([b.text(prompt_length)], output_length, group=i) for i in range(prompts)])
    return f"unshared: {prompts} prompts x {prompt_length}, {output_length} out"


def parallel_sampling(
    b: _Builder, prompt_length: int = 4096, samples: int = 64, output_length: int = 256
) -> str:
    """One prompt, many samples."""
    b.add_round([b.call([b.text(prompt_length)], output_length, n=samples)])
    return f"parallel sampling: 1 x {prompt_length}, n={samples}, {output_length} out"


def tree_of_thought(
    b: _Builder,
    root_length: int = 2048,
    levels: int = 5,
    kept: int = 8,
    branching: int = 8,
    thought_length: int = 64,
) -> str:
    """Breadth-first search: every level expands `kept` states `branching` ways.

    At the first level the one state, the root, takes all kept x branching samples, so
    each level has as many generations as any other.
    """
    root = b.text(root_length)
    states: list[tuple[Part, ...]] = [(root,)]
    for _ in range(levels):
        per_state = kept * branching // len(states)
        calls = [b.call(state, thought_length, n=per_state) for state in states]
        b.add_round(calls)
        grown = [(*call.prompt, call.draw(i)) for call in calls for i in range(call.n)]
        chosen = b.rng.choice(len(grown), size=kept, replace=False)
        states = [grown[i] for i in sorted(chosen.tolist())]
    return (
        f"tree of thought: root {root_length}, {levels} levels, "
        f"keep {kept} x branch {branching} x {thought_length}"
    )


def monte_carlo_tree_search(
    b: _Builder,
    trees: int = 16,
    root_length: int = 1024,
    rollouts: int = 32,
    tool_length: tuple[int, int] = (32, 128),
    output_length: int = 64,
    parallel: int = 1,
) -> str:
    """Tree search with tool use, all trees in step.

    In each round every tree picks `parallel` of its nodes (the root or any rollout of an
    earlier round, with replacement, as virtual loss would) with a chance that grows with
    the square of the node's depth, appends a fresh tool result to each and generates; the
    results are new nodes.
    """
    if rollouts % parallel:
        raise ValueError(f"{rollouts} rollouts do not divide into rounds of {parallel}")
    nodes: list[list[tuple[Part, ...]]] = [[(b.text(root_length),)] for _ in range(trees)]
    depths: list[list[int]] = [[0] for _ in range(trees)]
    low, high = tool_length
    for _ in range(rollouts // parallel):
        calls = []
        for tree in range(trees):
            weights = (1.0 + np.asarray(depths[tree])) ** 2
            for parent in b.rng.choice(len(weights), size=parallel, p=weights / weights.sum()).tolist():
                tool = b.text(int(b.rng.integers(low, high + 1)))
                call = b.call(nodes[tree][parent] + (tool,), output_length, group=tree)
                calls.append(call)
                nodes[tree].append((*call.prompt, call.draw()))
                depths[tree].append(depths[tree][parent] + 1)
        b.add_round(calls)
    return (
        f"MCTS + tools: {trees} trees, root {root_length}, {rollouts} rollouts, {parallel} at once, "
        f"tool {low}-{high}, {output_length} out"
    )


def parallel_tree_search(
    b: _Builder, trees: int = 8, root_length: int = 4096, rollouts: int = 64, **sizes: Any
) -> str:
    """Tree search that expands eight leaves of each tree at once."""
    return monte_carlo_tree_search(b, trees, root_length, rollouts, **{"parallel": 8, **sizes})


def wide_beam_search(b: _Builder, **sizes: Any) -> str:
    """One prompt, many beams."""
    return beam_search(b, **{"prompts": 1, "prompt_length": 512, "width": 64, "output_length": 64, **sizes})


def beam_search(
    b: _Builder, prompts: int = 4, prompt_length: int = 512, width: int = 8, output_length: int = 128
) -> str:
    """Beam search; the engine's own scores choose the beams."""
    b.add_round(
        [b.call([b.text(prompt_length)], output_length, n=width, mode=BEAM, group=i) for i in range(prompts)]
    )
    return f"beam search: {prompts} prompts x {prompt_length}, width {width}, {output_length} out"


def agent_chat(
    b: _Builder,
    sessions: int = 32,
    system_length: int = 4096,
    turns: int = 8,
    user_length: int = 128,
    output_length: int = 128,
) -> str:
    """Multi-turn sessions under one system prompt."""
    system = b.text(system_length)
    history: list[tuple[Part, ...]] = [(system,)] * sessions
    for _ in range(turns):
        calls = [b.call(history[s] + (b.text(user_length),), output_length, group=s) for s in range(sessions)]
        b.add_round(calls)
        history = [(*call.prompt, call.draw()) for call in calls]
    return (
        f"agent chat: {sessions} sessions, system {system_length}, "
        f"{turns} turns of {user_length} + {output_length}"
    )


def shared_document(
    b: _Builder,
    document_length: int = 16384,
    questions: int = 32,
    question_length: int = 64,
    output_length: int = 128,
) -> str:
    """Many questions on one long document."""
    document = b.text(document_length)
    b.add_round(
        [b.call([document, b.text(question_length)], output_length, group=i) for i in range(questions)]
    )
    return (
        f"shared document: {document_length}, {questions} questions x {question_length}, {output_length} out"
    )


WORKLOADS: dict[str, Callable[..., str]] = {
    "W1": unshared,
    "W2": parallel_sampling,
    "W3": tree_of_thought,
    "W4": monte_carlo_tree_search,
    "W5": beam_search,
    "W6": agent_chat,
    "W7": shared_document,
    "W8": parallel_tree_search,
    "W9": wide_beam_search,
}

#: The same shapes, small enough for a CPU and a toy model.
TINY: dict[str, dict[str, Any]] = {
    "W1": {"prompts": 4, "prompt_length": 40, "output_length": 8},
    "W2": {"prompt_length": 64, "samples": 6, "output_length": 8},
    "W3": {"root_length": 48, "levels": 3, "kept": 2, "branching": 3, "thought_length": 8},
    "W4": {"trees": 2, "root_length": 32, "rollouts": 5, "tool_length": (3, 9), "output_length": 6},
    "W5": {"prompts": 2, "prompt_length": 24, "width": 3, "output_length": 6},
    "W6": {"sessions": 3, "system_length": 40, "turns": 3, "user_length": 7, "output_length": 5},
    "W7": {"document_length": 96, "questions": 3, "question_length": 9, "output_length": 6},
    "W8": {
        "trees": 2,
        "root_length": 48,
        "rollouts": 6,
        "tool_length": (3, 9),
        "output_length": 6,
        "parallel": 3,
    },
    "W9": {"prompts": 1, "prompt_length": 24, "width": 6, "output_length": 6},
}


def build(
    name: str, *, seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE, tiny: bool = False, **sizes: Any
) -> Workload:
    """The workload `name`; `sizes` override the recipe's keyword arguments."""
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}: choose from {sorted(WORKLOADS)}")
    recipe = WORKLOADS[name]
    builder = _Builder(seed, sorted(WORKLOADS).index(name), vocab_size)
    title = recipe(builder, **{**(TINY[name] if tiny else {}), **sizes})
    return Workload(name, title, seed, vocab_size, tuple(tuple(calls) for calls in builder.rounds))


# --------------------------------------------------------------------------- running


@dataclass(frozen=True)
class Request:
    """A call whose prompt is resolved to token ids."""

    call: Call
    prompt: list[int]


Samples = list[list[int]]  # the n generated sequences of one call
Engine = Callable[[list[Request]], list[Samples]]


def tokens_of(parts: Sequence[Part], outputs: dict[int, Samples]) -> list[int]:
    """The parts as token ids, given the outputs of the calls that they name."""
    tokens: list[int] = []
    for part in parts:
        tokens.extend(part.tokens if isinstance(part, Text) else outputs[part.call][part.sample])
    return tokens


def resolve(call: Call, outputs: dict[int, Samples]) -> Request:
    """The call's prompt as token ids, given the outputs of the calls it depends on."""
    prompt = tokens_of(call.prompt, outputs)
    if len(prompt) != call.prompt_length:
        raise ValueError(f"call {call.uid}: prompt has {len(prompt)} tokens, not {call.prompt_length}")
    return Request(call, prompt)


def run_rounds(workload: Workload, engine: Engine) -> dict[int, Samples]:
    """Run the workload one round at a time; returns every call's samples."""
    outputs: dict[int, Samples] = {}
    for calls in workload.rounds:
        requests = [resolve(call, outputs) for call in calls]
        results = engine(requests)
        for call, samples in zip(calls, results, strict=True):
            lengths = {len(tokens) for tokens in samples}
            if len(samples) != call.n or lengths != {call.max_tokens}:
                raise ValueError(
                    f"call {call.uid}: got {len(samples)} samples of lengths {sorted(lengths)}, "
                    f"not {call.n} of {call.max_tokens}"
                )
            outputs[call.uid] = samples
    return outputs


def random_engine(seed: int = 0, vocab_size: int = DEFAULT_VOCAB_SIZE) -> Engine:
    """An engine that generates random tokens; for checking traces and schedulers."""
    rng = np.random.default_rng(seed)

    def engine(requests: list[Request]) -> list[Samples]:
        return [rng.integers(0, vocab_size, size=(r.call.n, r.call.max_tokens)).tolist() for r in requests]

    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the workloads' sizes.")
    parser.add_argument("names", nargs="*", default=sorted(WORKLOADS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.names:
        workload = build(name, seed=arguments.seed, vocab_size=arguments.vocab_size, tiny=arguments.tiny)
        run_rounds(workload, random_engine())
        totals = workload.totals()
        if arguments.json:
            print(json.dumps({"name": name, "title": workload.title, **dataclasses.asdict(totals)}))
            continue
        print(f"{name}  {workload.title}")
        print(
            f"    {totals.calls} calls, {totals.sequences} sequences, {totals.rounds} rounds; "
            f"prompt tokens {totals.prompt_tokens} (per sequence {totals.sequence_prompt_tokens}), "
            f"new {totals.new_prompt_tokens}, output {totals.output_tokens}, tree {totals.tree_tokens}, "
            f"longest {totals.longest_sequence}; ideal hit rate {totals.ideal_hit_rate:.4f} "
            f"(per sequence {totals.ideal_sequence_hit_rate:.4f})"
        )


if __name__ == "__main__":
    main()

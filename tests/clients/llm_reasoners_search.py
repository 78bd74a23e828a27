# needs: ramet --no-deps llm-reasoners==1.0.2 peft==0.21.2 accelerate==1.15.0 psutil==7.2.2
"""llm-reasoners: the three methods beside those of its HFModel, and RAP on ten Blocksworld problems."""

from __future__ import annotations

import random
import sys
import tempfile
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import reasoners
import torch
from reasoners.algorithm import MCTS

from ramet import LLM, InvalidInput
from ramet.api.adapters.llm_reasoners import RametModel
from ramet.engine.model_files import load_default

EXAMPLE = (
    "I have to stack blocks. I can pick up, unstack, put down and stack one block at a time.\n\n[STATEMENT]\n"
    "As initial conditions I have that, the red block is on top of the blue block, the blue block is on the"
    " table.\nMy goal is to have that the blue block is on top of the red block.\n\n"
    "My plan is as follows:\n\n[PLAN]\nunstack the red block from on top of the blue block\n"
    "put down the red block\npick up the blue block\nstack the blue block on top of the red block\n"
    "[PLAN END]\n\n"
)
COLOURS = ("red", "blue", "orange", "yellow")


class State(NamedTuple):
    piles: tuple[tuple[str, ...], ...]  # bottom to top
    held: str
    plan: tuple[str, ...]


class Problem(NamedTuple):
    piles: tuple[tuple[str, ...], ...]
    goal: str

    def prompt(self, plan: tuple[str, ...]) -> str:
        parts = [f"the {pile[0]} block is on the table" for pile in self.piles]
        parts += [on_top(a, b) for pile in self.piles for b, a in pairwise(pile)]
        return (
            f"{EXAMPLE}[STATEMENT]\nAs initial conditions I have that, {', '.join(parts)}.\n"
            f"My goal is to have that {self.goal}.\n\nMy plan is as follows:\n\n"
            + "\n".join(("[PLAN]", *plan, ""))
        )


def on_top(above: str, below: str) -> str:
    return f"the {above} block is on top of the {below} block"


def moves(state: State) -> dict[str, State]:
    """Every action that the rules allow, in RAP's words, and where it leads."""
    found = {}
    for pile in state.piles:
        others = tuple(other for other in state.piles if other != pile)
        if state.held:
            words = f"stack the {state.held} block on top of the {pile[-1]} block"
            found[words] = State((*others, (*pile, state.held)), "", (*state.plan, words))
        else:
            lone = len(pile) == 1
            below = "" if lone else f" from on top of the {pile[-2]} block"
            words = f"{'pick up' if lone else 'unstack'} the {pile[-1]} block{below}"
            rest = others if lone else (*others, pile[:-1])
            found[words] = State(rest, pile[-1], (*state.plan, words))
    if state.held:
        words = f"put down the {state.held} block"
        found[words] = State((*state.piles, (state.held,)), "", (*state.plan, words))
    return found


def is_solved(problem: Problem, state: State) -> bool:
    return any(on_top(a, b) == problem.goal for pile in state.piles for b, a in pairwise(pile))


class World(reasoners.WorldModel):  # type: ignore[misc, unused-ignore]
    def init_state(self) -> State:
        return State(self.example.piles, "", ())

    def step(self, state: State, action: str) -> tuple[State, dict[str, Any]]:
        after = moves(state)[action]
        return after, {"solved": is_solved(self.example, after)}

    def is_terminal(self, state: State) -> bool:
        return is_solved(self.example, state)


class Config(reasoners.SearchConfig):  # type: ignore[misc, unused-ignore]
    """RAP's reward: how likely the action is, how likely it is called good, and whether the goal is met."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def get_actions(self, state: State) -> list[str]:
        return list(moves(state))

    def fast_reward(self, state: State, action: str) -> tuple[float, dict[str, Any]]:
        prefix = self.example.prompt(state.plan)
        (intuition,) = self.model.get_loglikelihood(prefix, [prefix + action])
        question = f"{prefix}{action}\n[EVALUATION]\nThis step is"
        ((good, bad),) = self.model.get_next_token_logits(question, [" good", " bad"])
        likely = float(intuition + good - np.logaddexp(good, bad)) / 2
        return likely, {"likely": likely}

    def reward(
        self, state: State, action: str, likely: float = 0.0, solved: bool = False
    ) -> tuple[float, dict[str, Any]]:
        return likely + 100 * solved, {}


def search(model: Any, problem: Problem) -> tuple[Any, Any]:
    algorithm = MCTS(depth_limit=4, n_iters=2)
    result = reasoners.Reasoner(World(), Config(model), algorithm)(problem)
    return result.trace, result.cum_reward


def problems(count: int) -> list[Problem]:
    draw = random.Random(0)
    made: list[Problem] = []
    while len(made) < count:
        first, second, third, fourth = draw.sample(COLOURS, 4)
        piles = draw.choice([((first, second), (third,), (fourth,)), ((first, second), (third, fourth))])
        top, below = draw.sample(COLOURS, 2)
        problem = Problem(piles, on_top(top, below))
        if not is_solved(problem, State(piles, "", ())):
            made.append(problem)
    return made


def refused(field: str, call: Callable[[], object]) -> None:
    before = llm.stats().num_steps
    try:
        call()
    except InvalidInput as error:
        said = error.field
    else:
        said = "nothing"
    assert said == field and llm.stats().num_steps == before, (said, field)


def load_peer(folder: str) -> Any:
    """Its HFModel over the embedded model in float32."""
    files = load_default(torch.float32, None)
    files.module.save_pretrained(folder)
    files.tokenizer.save_pretrained(folder)
    # reasoners.lm itself imports the client of every provider that it knows.
    package = types.ModuleType("reasoners.lm")
    package.__path__ = [str(Path(reasoners.__file__).parent / "lm")]
    sys.modules["reasoners.lm"] = package
    from reasoners.lm.hf_model import HFModel

    return HFModel(folder, folder, device="cpu", max_batch_size=8, device_map="cpu")


llm = LLM("smollm2", dtype="float32", num_blocks=512)
model = RametModel(llm)
assert isinstance(model, reasoners.LanguageModel)
with tempfile.TemporaryDirectory() as folder:
    peer = load_peer(folder)
first, *_ = cases = problems(10)
prefix = first.prompt(())
actions = [*moves(State(first.piles, "", ())), "put down the red block"]
contents = [prefix + action + "\n" for action in actions]

before = llm.stats().num_computed_tokens
found = model.get_loglikelihood(prefix, contents)
computed = llm.stats().num_computed_tokens - before
known = peer.get_loglikelihood(prefix, contents)
assert np.abs(found - known).max() < 1e-3, (found, known)
lengths = [len(llm.encode(text)) for text in contents]
start = len(llm.encode(prefix))
# The prefix once, and each rest but for its last token, whose successor nobody asks for.
assert computed == start + sum(length - start - 1 for length in lengths), (computed, start, lengths)

labels = ["Yes", "No", " good", " bad"]
(logits,), (known,) = model.get_next_token_logits(prefix, labels), peer.get_next_token_logits(prefix, labels)
assert np.abs(logits - known).max() < 1e-3, (logits, known)
((yes, no),) = model.get_next_token_logits(prefix, ["Yes", "No"], postprocess="log_softmax")
assert abs((yes - no) - (logits[0] - logits[1])) < 1e-3

prompts = [prefix, prefix + "pick up the"]
greedy: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": "\n"}
for prompt in prompts:
    texts, known = model.generate([prompt], **greedy).text, peer.generate([prompt], **greedy).text
    assert texts == known, (texts, known)
assert model.generate([prompts[1]], hide_input=False, **greedy).text == [prompts[1] + texts[0]]
drawn = model.generate([prefix] * 4, do_sample=True, max_new_tokens=8, output_log_probs=True)
assert len(drawn.text) == len(drawn.log_prob) == 4 and len(set(drawn.text)) > 1, drawn

refused("inputs", lambda: model.generate(prefix))
refused("max_length", lambda: model.generate([prefix], max_length=10))
refused("n", lambda: model.generate([prefix], num_return_sequences=129))
refused("stopping_criteria", lambda: model.generate([prefix], stopping_criteria=[]))
refused("candidates", lambda: model.get_next_token_logits(prefix, ["two words"]))
refused("candidates", lambda: model.get_next_token_logits([prefix, prefix], [["Yes"]]))
refused("postprocess", lambda: model.get_next_token_logits(prefix, ["Yes"], postprocess="log"))
refused("contents", lambda: model.get_loglikelihood(prefix, ["something else"]))
refused("contents", lambda: model.get_loglikelihood(prefix, [prefix]))

then = llm.stats()
results = [search(model, case) for case in cases]
now = llm.stats()
solved = [index for index, (trace, _) in enumerate(results) if trace is not None]
asked = now.num_prompt_tokens - then.num_prompt_tokens
computed = now.num_computed_tokens - then.num_computed_tokens
print(f"solved {len(solved)} of {len(cases)}; {computed} tokens computed where prompts had {asked}")
assert solved and computed < asked / 10, (solved, computed, asked)
# One of these searches again over its own model, which takes as long as all of them.
(trace, reward), (known_trace, known_reward) = results[solved[0]], search(peer, cases[solved[0]])
assert trace == known_trace and abs(reward - known_reward) < 1e-2, (trace, known_trace)

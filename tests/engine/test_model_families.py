"""Each model family through the whole engine against transformers: the same tokens, the same logits.

Cold, cached, chunked, batched, forked and truncated, with sequences longer than the families' windows, and
with everything that rows share read as shared. Weights are random and wide apart, so that outputs vary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from torch import Tensor

from ramet import LLM
from ramet.engine.errors import UnsupportedModel
from ramet.engine.model_runner import ModelRunner
from ramet.engine.step import Step
from ramet.engine.testing import check_invariants
from ramet.engine.tiny_model import tiny_llama
from ramet.kernels import attention
from ramet.kernels.options import AttentionOptions
from ramet.kernels.plan import Planner
from ramet.radix.prefix_cache import Copy

VOCAB = 128
BLOCK = 8
STEPS = 24
GREEDY: dict[str, Any] = {"max_tokens": STEPS, "temperature": 0.0}
WINDOW = 13  # no multiple of a block, and shorter than the prompts

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
GPT_SIZES = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128, "tie_word_embeddings": False}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SLIDING: dict[str, Any] = {"sliding_window": WINDOW}
ALTERNATING = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 20}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {**ALTERNATING, "use_sliding_window": True}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4}),
    "mistral": ("Mistral", SLIDING),
    "mixtral": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, **SLIDING}),
    "gemma2": ("Gemma2", {**ALTERNATING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 12}),
    "gemma3": ("Gemma3Text", {**ALTERNATING, "query_pre_attn_scalar": 12}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3-sliding": ("Phi3", {"pad_token_id": 0, **SLIDING}),
    "olmo2": ("Olmo2", {}),
    "gpt2": ("GPT2", {}),
    "gpt_neox": ("GPTNeoX", {"num_key_value_heads": None, "head_dim": None}),
    "gpt_oss": (
        "GptOss",
        {
            **ALTERNATING,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {**EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    ),
}  # fmt: skip

PROMPT = [(7 * i * i + 3 * i) % VOCAB for i in range(43)]
FORKS = [[*PROMPT, 5], [*PROMPT, 9, 4, 4]]
TRUNCATED = [*PROMPT[:29], 17, 3]
OTHER = [(11 * i + 2) % VOCAB for i in range(9)]
PROMPTS = [PROMPT, *FORKS, TRUNCATED, OTHER]


def make_model(family: str) -> Any:
    """A random transformers model of this family, in float32, whose attention matters."""
    name, changes = FAMILIES[family]
    sizes = GPT_SIZES if name == "GPT2" else SIZES
    config = {key: value for key, value in (sizes | changes).items() if value is not None or "token" in key}
    config_class = getattr(transformers, f"{name}Config")
    classes = (f"{name.removesuffix('Text')}ForCausalLM", f"{name}LMHeadModel")
    model_class = next(c for c in (getattr(transformers, name, None) for name in classes) if c is not None)
    model = model_class(config_class(**{"vocab_size": VOCAB, **config})).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.empty_like(parameter).normal_(0.0, 0.3, generator=generator)
            if "norm" in key or "ln_" in key:
                # Where what a layer gives is normalised, it has to outweigh the embeddings.
                parameter += noise + (2.0 if "post_" in key else 0.0)
            else:
                parameter.copy_(1.0 + 3.0 * noise if key.endswith("sinks") else noise)
    return model


class Expected(NamedTuple):
    """What transformers alone makes of a prompt."""

    token_ids: list[int]  # the prompt and what was generated
    logits: Tensor  # [T, V] of one pass over all of them


def reference(model: Any, prompts: Sequence[list[int]]) -> list[Expected]:
    model.set_attn_implementation("eager")
    results = []
    for prompt in prompts:
        given = torch.tensor([prompt])
        ids = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=STEPS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        with torch.no_grad():
            results.append(Expected(ids[0].tolist(), model(ids, use_cache=False).logits[0]))
    return results


class Recorder:
    """A runner that remembers the tokens in each block, and so which history each row of logits has."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.tokens: dict[tuple[int, int], int] = {}  # (block id, slot) -> token
        self.logits: list[tuple[list[int], Tensor]] = []

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        self.inner.copy_blocks(copies)
        for source, destination, num_slots in copies:
            for slot in range(num_slots):
                self.tokens[destination, slot] = self.tokens[source, slot]

    def forward(self, step: Step) -> Tensor:
        logits = self.inner.forward(step)
        rows = iter(logits)
        for row in step.rows:
            end = row.start + len(row.token_ids)
            for position, token in zip(range(row.start, end), row.token_ids, strict=True):
                self.tokens[row.block_ids[position // BLOCK], position % BLOCK] = token
            path = [self.tokens[row.block_ids[i // BLOCK], i % BLOCK] for i in range(end)]
            for length in range(end - row.num_logits + 1, end + 1):
                self.logits.append((path[:length], next(rows)))
        return logits


class Engine:
    """An LLM over a model, what it has to give, and a record of its logits."""

    def __init__(self, model: Any, expected: Sequence[Expected], **settings: Any) -> None:
        self.llm = LLM(model, block_size=BLOCK, num_blocks=200, dtype="float32", **settings)
        runner = self.llm.engine.runner
        assert isinstance(runner, ModelRunner)
        runner._planner = Planner(BLOCK, 0)  # so small a model would share nothing: it would not pay
        self.recorder = Recorder(runner)
        self.llm.engine.runner = self.recorder
        self.expected = expected

    def generate(self, *prompts: list[int]) -> None:
        outputs = self.llm.generate(list(prompts), **GREEDY)
        self.check(
            [prompt + output.choices[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)]
        )

    def check(self, results: Sequence[list[int]]) -> None:
        """These sequences, and each logit since the last check, are what transformers gives."""
        assert self.recorder.logits
        for token_ids in results:
            assert token_ids in [own.token_ids for own in self.expected]
        for path, logits in self.recorder.logits:
            own = next(own for own in self.expected if own.token_ids[: len(path)] == path)
            torch.testing.assert_close(logits.cpu(), own.logits[len(path) - 1], atol=1e-4, rtol=1e-5)
        self.recorder.logits.clear()
        check_invariants(self.llm)


def cold_and_cached(engine: Engine) -> None:
    engine.generate(PROMPT)
    engine.generate(PROMPT)


def batched(engine: Engine) -> None:
    engine.generate(*PROMPTS)
    engine.generate(*reversed(PROMPTS))


def forked(engine: Engine) -> None:
    root = engine.llm.branch(PROMPT)
    same = root.expand(n=3, **GREEDY)
    engine.check([kid.token_ids for kid in same])
    kids = root.fork(2)
    for kid, prompt in zip(kids, FORKS, strict=True):
        kid.extend(prompt[len(PROMPT) :])
    engine.llm.step([*kids, root], **GREEDY)
    engine.check([branch.token_ids for branch in (*kids, root)])
    root.prune()


def truncated(engine: Engine) -> None:
    branch = engine.llm.branch(PROMPT)
    branch.generate(**GREEDY)
    branch.truncate(29)
    branch.extend(TRUNCATED[29:])
    branch.generate(**GREEDY)
    engine.check([branch.token_ids])
    branch.prune()


WAYS: tuple[Callable[[Engine], None], ...] = (cold_and_cached, batched, forked, truncated)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_every_way(family: str, device: str) -> None:
    model = make_model(family)
    expected = reference(model, PROMPTS)
    assert all(len(set(own.token_ids[-STEPS:])) > 2 for own in expected), "outputs vary"
    for way in WAYS:
        way(Engine(model, expected, device=device))
    # prompts in chunks, beside rows that decode
    batched(Engine(model, expected, device=device, max_batch_tokens=7))


@pytest.fixture
def ignore(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let attention ignore one of its options."""
    real: Any = attention.attend

    def ignore_option(name: str) -> None:
        def attend(*arguments: Any) -> Tensor:
            *rest, options = arguments
            kept = {key: getattr(options, key) for key in ("window", "softcap", "sinks")}
            out: Tensor = real(*rest, AttentionOptions(**{**kept, name: None}))
            return out

        monkeypatch.setattr(attention, "attend", attend)

    return ignore_option


@pytest.mark.parametrize(
    ("family", "option"),
    [
        ("qwen2-sliding", "window"),
        ("mistral", "window"),
        ("mixtral", "window"),
        ("gemma2", "window"),
        ("gemma2", "softcap"),
        ("gemma3", "window"),
        ("phi3-sliding", "window"),
        ("gpt_oss", "window"),
        ("gpt_oss", "sinks"),
    ],
)
def test_an_option_that_is_ignored_would_show(
    family: str, option: str, ignore: Callable[[str], None]
) -> None:
    model = make_model(family)
    engine = Engine(model, reference(model, [PROMPT]))
    ignore(option)
    with pytest.raises(AssertionError):
        engine.generate(PROMPT)


@pytest.mark.parametrize("heads", [(9, 3, 64), (5, 1, 80), (6, 2, 96), (12, 4, 72)])
def test_head_shapes_in_every_way(heads: tuple[int, int, int], device: str) -> None:
    num_heads, num_kv_heads, head_dim = heads
    model = tiny_llama(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=VOCAB,
        weight_std=0.1,
    )
    expected = reference(model, PROMPTS)
    for way in WAYS:
        way(Engine(model, expected, device=device))
    batched(Engine(model, expected, device=device, max_batch_tokens=7))


def test_head_shapes_that_do_not_divide_are_refused() -> None:
    config = transformers.LlamaConfig(**{**SIZES, "hidden_size": 33 * 64, "head_dim": 64})
    model = transformers.LlamaForCausalLM(config)
    model.config.num_attention_heads, model.config.num_key_value_heads = 33, 2
    with pytest.raises(UnsupportedModel, match="33 query heads cannot share 2"):
        LLM(model)

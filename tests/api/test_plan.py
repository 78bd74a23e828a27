"""`ramet plan`: numbers derived by hand, and the engine itself as the judge of what fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ramet import LLM, InvalidInput, OutOfCapacity
from ramet.api.cli import app
from ramet.api.plan import formula, parse_memory
from ramet.engine.capacity import Load, ModelSize, capacity
from ramet.testing import ScriptedModel, check_invariants

# Llama 3.1 8B: 32 layers, 8 KV heads of 128 numbers of 2 bytes, 8,030,261,248 parameters.
LLAMA_8B = ModelSize(
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    dtype_bytes=2,
    num_parameters=8_030_261_248,
    max_model_len=131_072,
)


def test_an_8b_model_in_80_gb() -> None:
    assert LLAMA_8B.token_bytes_per_layer == 2 * 8 * 128 * 2 == 4096
    assert LLAMA_8B.token_bytes == 32 * 4096 == 131_072
    found = capacity(LLAMA_8B, Load(prompt=4096, branches=64, new=256), 80 * 10**9)
    # 80,000,000,000 - 16,060,522,496 = 63,939,477,504; a block is 16 x 131,072 = 2,097,152: 30,488.7 of them.
    assert (found.pool_bytes, found.block_bytes, found.num_blocks) == (63_939_477_504, 2_097_152, 30_488)
    # A branch has 4096 + 256 - 1 = 4351 slots: 271.9, so 272 blocks; 30,488 / 272 = 112.08.
    assert (found.unshared.common, found.unshared.own, found.unshared.fits) == (0, 272, 112)
    # Shared: 256 blocks of prompt once, 16 for each branch; (30,488 - 256) / 16 = 1889.5.
    assert (found.shared.common, found.shared.own, found.shared.fits) == (256, 16, 1889)
    assert (found.shared.asked_blocks, found.unshared.asked_blocks) == (256 + 64 * 16, 64 * 272)
    assert found.shared.asked_fits and found.unshared.asked_fits
    assert found.limit == "blocks"


def test_a_prompt_that_ends_inside_a_block() -> None:
    # 20 + 13 - 1 = 32 slots: 2 blocks. One block of the prompt is full; its open one is the parent's, too.
    found = capacity(LLAMA_8B, Load(prompt=20, branches=3, new=13), LLAMA_8B.weight_bytes + 5 * 2_097_152)
    assert found.num_blocks == 5
    assert (found.shared.common, found.shared.own, found.shared.fits) == (2, 1, 3)
    assert (found.unshared.own, found.unshared.fits, found.unshared.asked_fits) == (2, 2, False)


def test_branches_without_a_block_of_their_own_have_no_limit() -> None:
    found = capacity(LLAMA_8B, Load(prompt=32, branches=9, new=1), LLAMA_8B.weight_bytes + 2 * 2_097_152)
    assert (found.shared.own, found.shared.fits, found.shared.asked_fits) == (0, None, True)
    assert (found.unshared.fits, found.unshared.asked_fits) == (1, False)


@pytest.mark.parametrize(
    ("memory", "prompt", "limit"),
    [(16 * 10**9, 4096, "weights"), (10**15, 131_072, "context"), (80 * 10**9, 4096, "blocks")],
)
def test_what_limits(memory: int, prompt: int, limit: str) -> None:
    found = capacity(LLAMA_8B, Load(prompt=prompt, branches=1, new=2), memory)
    assert found.limit == limit
    assert (found.shared.fits == 0) == (limit != "blocks")


@pytest.mark.parametrize(("prompt", "new", "block_size"), [(32, 16, 16), (20, 13, 16), (7, 30, 8), (5, 1, 1)])
def test_the_engine_agrees(prompt: int, new: int, block_size: int) -> None:
    """A pool of exactly what is said to be needed runs four branches without preempting one."""
    load = Load(prompt=prompt, branches=4, new=new, block_size=block_size)
    needed = capacity(LLAMA_8B, load, 10**12).shared.asked_blocks

    def make(num_blocks: int) -> LLM:
        model = ScriptedModel(lambda past: {len(past) % 7: 0.0, 8: 0.0})
        llm = LLM(model, num_blocks=num_blocks, block_size=block_size)
        llm.on_step(lambda: check_invariants(llm))
        return llm

    llm = make(needed)
    llm.branch(list(range(100, 100 + prompt))).expand(n=4, max_tokens=new, temperature=1.0, seed=3)
    assert llm.stats().num_preemptions == 0
    alone = make(capacity(LLAMA_8B, load, 10**12).unshared.own)
    alone.generate(list(range(100, 100 + prompt)), max_tokens=new, ignore_eos=True)
    assert alone.stats().num_preemptions == 0
    with pytest.raises(OutOfCapacity):
        alone.branch(list(range(load.num_slots + block_size)))


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("24GiB", 24 << 30), ("1.5 gb", 1_500_000_000), ("512M", 512 * 10**6), ("7", 7)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["9223373TB", "9" * 400])  # 2^63 is 9,223,372.04 TB
def test_what_no_machine_has_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="64 bits"):
        parse_memory(text)


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "80 apples", "5ib"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="no size"):
        parse_memory(text)


def test_nothing_below_one() -> None:
    with pytest.raises(InvalidInput, match="new must be >= 1"):
        Load(prompt=1, branches=1, new=0)


def test_the_formula_has_its_numbers() -> None:
    load = Load(prompt=4096, branches=64, new=256)
    text = "\n".join(formula(LLAMA_8B, load, 80 * 10**9, capacity(LLAMA_8B, load, 80 * 10**9)))
    for number in ("16.06 GB", "131,072 bytes", "30,488", "272", "256 full blocks", ": 16"):
        assert number in text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with its configuration and no weights: 2 layers, 1 KV head of 16."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_reads_a_folder_without_weights(folder: Path) -> None:
    options = ["--memory", "1MB", "--prompt", "64", "--branches", "8", "--new", "16", "--json"]
    done = CliRunner().invoke(app, ["plan", str(folder), "--dtype", "float32", *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    # Embedding 512 x 48, tied. A layer: q and o 48 x 48, k and v 48 x 16, three of 48 x 96, two norms of 48.
    layer = 2 * 48 * 48 + 2 * 48 * 16 + 3 * 48 * 96 + 2 * 48
    assert found["num_parameters"] == 512 * 48 + 2 * layer + 48 == 64_752
    assert found["token_bytes"] == 2 * (2 * 1 * 16 * 4) == 256
    # (1,000,000 - 259,008) / (16 x 256) = 180.8; 5 blocks each (79 slots); (180 - 4) / 1.
    assert (found["num_blocks"], found["unshared"]["fits"], found["shared"]["fits"]) == (180, 36, 176)


def test_the_command_shows_a_table(folder: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(folder), "--memory", "1MB", "--prompt", "64"])
    assert done.exit_code == 0, done.output
    assert "prompt shared" in done.stdout and "branches that fit" in done.stdout


@pytest.mark.parametrize("name", ["no/such-model", "nowhere.gguf"])
def test_a_model_that_is_not_here(name: str) -> None:
    from ramet import ModelNotFound

    done = CliRunner().invoke(app, ["plan", name, "--memory", "1GB"])
    assert isinstance(done.exception, ModelNotFound)

"""Where a model may come from: an object, a folder, a .gguf file, a hub id. All give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from ramet import LLM
from ramet.engine.errors import ModelNotFound, UnsupportedModel
from ramet.engine.model_runner import ModelRunner
from ramet.engine.tiny_model import tiny_llama

WORDS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "He", "ll"]
END = "<|end|>"
PROMPT = "Hello there, wörld"
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": len(WORDS) + 1}


def make_tokenizer() -> Any:
    """Bytes as tokens, two pairs of them, and one end token."""
    words = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [("H", "e"), ("l", "l")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=words, eos_token=END)


def generate(llm: LLM) -> list[int]:
    (output,) = llm.generate(PROMPT, max_tokens=24, temperature=0.0)
    return output.choices[0].token_ids


@pytest.fixture(scope="module")
def expected() -> list[int]:
    """What transformers itself generates with the model that each source holds."""
    prompt = torch.tensor([make_tokenizer().encode(PROMPT)])
    mask = torch.ones_like(prompt)
    model: Any = tiny_llama(**SIZES)
    ids = model.generate(prompt, attention_mask=mask, max_new_tokens=24, do_sample=False, pad_token_id=0)
    new = ids[0, prompt.shape[1] :].tolist()
    assert len(set(new)) > 12
    return [int(token_id) for token_id in new]


def save(folder: Path) -> None:
    """The model and its tokenizer as transformers saves them."""
    tiny_llama(**SIZES).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def test_a_loaded_model(expected: list[int]) -> None:
    assert generate(LLM(tiny_llama(**SIZES), make_tokenizer())) == expected


def test_a_folder_of_safetensors(tmp_path: Path, expected: list[int]) -> None:
    save(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    for name in (tmp_path, str(tmp_path)):
        assert generate(LLM(name, dtype="float32")) == expected


def test_a_folder_of_several_safetensors(tmp_path: Path, expected: list[int]) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tiny_llama(**SIZES).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert generate(LLM(tmp_path, dtype="float32")) == expected


# -- a hub id ----------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without a network; the folder is the hub's cache on its disk."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("hub")
def test_a_hub_id_that_nobody_can_reach() -> None:
    with pytest.raises(
        ModelNotFound, match="no folder has this name, and no hub that can be reached"
    ) as caught:
        LLM("somebody/some-model")
    assert caught.value.name == "somebody/some-model"
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_was_fetched_before(hub: Path, expected: list[int]) -> None:
    repository = hub / "models--somebody--some-model"
    save(repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert generate(LLM("somebody/some-model", dtype="float32")) == expected


# -- a .gguf file ------------------------------------------------------------------------------------

_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def _gguf_tensor(name: str, weight: Tensor, config: Any) -> tuple[str, Tensor]:
    """A parameter's name in GGUF, and its rows in GGUF's rotary order: a pair's two rows side by side."""
    *path, kind, _ = name.split(".")
    layer = next((f"blk.{part}." for part in path if part.isdigit()), "")
    if kind in ("q_proj", "k_proj"):
        heads = config.num_attention_heads if kind == "q_proj" else config.num_key_value_heads
        weight = weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
    return f"{layer}{_NAMES[kind]}.weight", weight


def write_gguf(
    path: Path, kind: gguf.GGMLQuantizationType, architecture: str = "llama", merge: str = "H e"
) -> None:
    """The tiny model as a .gguf file whose matrices are stored in this way."""
    model = tiny_llama(**SIZES)
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_rope_dimension_count(SIZES["head_dim"])
    writer.add_rope_freq_base(10000.0)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(SIZES["num_kv_heads"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*WORDS, END])
    writer.add_token_types([1] * len(WORDS) + [3])
    writer.add_token_merges([merge, "l l"])
    writer.add_bos_token_id(len(WORDS))  # the oldest transformers wants one
    writer.add_eos_token_id(len(WORDS))
    for name, parameter in model.named_parameters():
        key, weight = _gguf_tensor(name, parameter.detach(), config)
        stored = kind if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(weight.numpy()), stored)
        writer.add_tensor(key, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(tmp_path: Path, expected: list[int]) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32)
    llm = LLM(tmp_path / "tiny.gguf", dtype="float32")
    assert generate(llm) == expected
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(llm.tokenizer.encode(PROMPT)) == PROMPT
    assert llm.tokenizer.eos_token_ids == {len(WORDS)}


def test_a_quantised_gguf_file(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    llm = LLM(tmp_path / "tiny.gguf", dtype="float32")
    original = tiny_llama(**SIZES).state_dict()
    assert isinstance(llm.engine.runner, ModelRunner)
    loaded = llm.engine.runner.model.module.state_dict()
    assert loaded.keys() == original.keys()
    for name, weight in loaded.items():
        assert weight.dtype == torch.float32
        assert (weight - original[name]).norm() < 0.01 * original[name].norm()


def test_a_gguf_file_of_another_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, architecture="gemma2")
    with pytest.raises(UnsupportedModel, match=r"'gemma2' are not read|cannot be read"):
        LLM(tmp_path / "tiny.gguf")


def test_a_gguf_file_whose_tokenizer_is_broken(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.F32, merge="x y")
    with pytest.raises(UnsupportedModel, match="cannot read its tokenizer"):
        LLM(tmp_path / "tiny.gguf")


def test_a_gguf_file_that_is_cut_short(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", gguf.GGMLQuantizationType.F32)
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: len(content) // 2])
    with pytest.raises(UnsupportedModel):
        LLM(tmp_path / "cut.gguf")

"""Reads a .gguf file into a plain transformers model: every weight unpacked, nothing left quantised.

Transformers reads the configuration and the tokenizer. The weights are unpacked here, because transformers'
own loader needs the accelerate package, and keeps weights packed in some of its versions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ramet.engine.errors import UnsupportedModel
from ramet.engine.model_checks import check_config

# The families whose tensors have one place each and need at most the rotary order of llama turned back.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")


def read_gguf_config(path: Path, max_model_len: int | None = None) -> Any:
    """The transformers configuration that the file describes, checked to be one that ramet runs.

    Raises UnsupportedModel for an architecture that is not read here, or for a file that is not GGUF.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(str(path), f"its header cannot be read ({error})") from error
    check_config(config, str(path), max_model_len)
    return config


def read_gguf_model(path: Path, dtype: torch.dtype, max_model_len: int | None = None) -> Any:
    """The whole file as a transformers model with weights of this dtype, on the CPU and in eval mode."""
    from transformers import AutoModelForCausalLM

    config = read_gguf_config(path, max_model_len)
    # On the meta device it takes no memory and no time: only its class and parameter names are wanted.
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    weights = _read_weights(path, config, skeleton, dtype)
    model_class: Any = type(skeleton)
    return model_class.from_pretrained(None, config=config, state_dict=weights, dtype=dtype).eval()


def read_gguf_tokenizer(path: Path, config: Any) -> Any:
    """The file's tokenizer, with its chat template; ``config`` is the file's own configuration.

    Raises UnsupportedModel where transformers cannot make one of it.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # The tokenizers package raises nothing more precise.
        raise UnsupportedModel(str(path), f"transformers cannot read its tokenizer ({error})") from error
    # Some versions of transformers read these from the file for the configuration only, and guess here.
    for name in ("bos_token", "eos_token", "pad_token"):
        token_id = getattr(config, f"{name}_id", None)
        if isinstance(token_id, int):
            setattr(tokenizer, name, tokenizer.convert_ids_to_tokens(token_id))
    return tokenizer


def _read_weights(path: Path, config: Any, skeleton: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    import gguf

    reader = gguf.GGUFReader(str(path))
    field = reader.get_field("general.architecture")
    architecture = None if field is None else field.contents()
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            str(path),
            f"GGUF files of the architecture {architecture!r} are not read; load safetensors instead",
        )
    packed = {tensor.name: tensor for tensor in reader.tensors}
    places = _places(gguf, architecture, config.num_hidden_layers, skeleton)
    left_over = sorted(packed.keys() - places.values())
    missing = sorted(places.values() - packed.keys())
    # Both ways, for a tensor without a place may be one that changes the result (rope_freqs is such a one).
    if left_over or missing:
        raise UnsupportedModel(str(path), f"tensors without a place: {left_over[:4]}, missing: {missing[:4]}")
    weights = {}
    for name, gguf_name in places.items():
        tensor = packed[gguf_name]
        weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = _halves_from_pairs(weight, heads)
        weights[name] = weight.to(dtype).contiguous()
    return weights


def _places(gguf: Any, architecture: str, num_layers: int, skeleton: Any) -> dict[str, str]:
    """Where each parameter of the model lies in the file: transformers' name -> the file's name."""
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, num_layers)
    tied = skeleton.config.tie_word_embeddings
    parameters = [name for name in skeleton.state_dict() if not (tied and name == "lm_head.weight")]
    places = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in parameters}
    assert all(places.values()), "every parameter of a listed architecture has a name in GGUF"
    return places


def _halves_from_pairs(weight: Tensor, num_heads: int) -> Tensor:
    """Rows [H*D, E] from GGUF's rotary order, pairs side by side, to transformers' order, two halves."""
    return weight.view(num_heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

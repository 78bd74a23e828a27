"""Which models ramet runs rightly: everything that can be told from a configuration and a class.

It refuses what would be silently wrong; what transformers itself cannot load is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ramet.engine.errors import InvalidInput, UnsupportedModel
from ramet.engine.model_attention import ModelShape
from ramet.kernels.options import AttentionOptions

# Tried one by one: these run through a registered attention function and give other logits, without an
# exception.
_SILENTLY_WRONG = frozenset(
    {"bloom", "mpt", "falcon_h1", "nemotron_h", "jamba", "minimax", "llama4", "llama4_text"}
)
# Held against transformers in the tests, cold and forked and truncated and batched. Any other family is
# tried out when it is loaded.
TRIED_FAMILIES = frozenset(
    {
        "gemma", "gemma2", "gemma3_text", "glm4_moe", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama",
        "mistral", "mixtral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe", "starcoder2",
    }
)  # fmt: skip
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_WHY_NOT = {
    "chunked_attention": "whose tokens see only their own chunk",
    "linear_attention": "which keep a state that cannot be shared by pages",
    "conv": "which mix neighbouring tokens without pages",
    "mamba": "which keep a state that cannot be shared by pages",
    "hybrid": "which keep a state beside their pages",
    "indexed_attention": "which choose what they see",
}
# These rotary embeddings change with the longest sequence of the batch, so that a token's key would depend
# on it.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def check_model(model: Any, name: str, max_model_len: int | None = None) -> ModelShape:
    """The shape of this transformers model, if it is one that ramet runs; see check_config for the errors."""
    if not hasattr(model, "set_attn_implementation"):
        raise UnsupportedModel(name, f"{type(model).__name__} is not a transformers model")
    shape = check_config(model.config, name, max_model_len)
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(name, f"{type(model).__name__} does not take a registered attention function")
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(name, f"{type(model).__name__} has no language-model head")
    return shape


def check_config(config: Any, name: str, max_model_len: int | None = None) -> ModelShape:
    """The shape of the model that this transformers configuration describes.

    ``max_model_len`` lowers the context limit (tokens). Raises UnsupportedModel, or InvalidInput for a limit
    above the model's own.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, "it is an encoder-decoder model")
    if config.model_type in _SILENTLY_WRONG:
        raise UnsupportedModel(name, f"the {config.model_type} family gives wrong logits with a paged cache")
    text_config = config.get_text_config(decoder=True)
    if text_config is not config:
        raise UnsupportedModel(name, f"{config.model_type} takes more than text; load its text model alone")
    if getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(name, "its attention is not causal")
    shape = _shape_of(config, name, max_model_len)
    _check_heads(config, shape, name)
    _check_layers(config, shape, name)
    _check_rope(config, shape, name)
    return shape


def _shape_of(config: Any, name: str, max_model_len: int | None) -> ModelShape:
    num_heads = getattr(config, "num_attention_heads", None)
    num_layers = getattr(config, "num_hidden_layers", None)
    limit = getattr(config, "max_position_embeddings", None)
    for field, value in (("attention heads", num_heads), ("layers", num_layers), ("positions", limit)):
        if not isinstance(value, int):
            raise UnsupportedModel(name, f"its configuration does not say how many {field} it has")
    assert isinstance(num_heads, int) and isinstance(num_layers, int), "just checked"
    assert isinstance(limit, int), "just checked"
    if max_model_len is not None:
        is_whole = isinstance(max_model_len, int) and not isinstance(max_model_len, bool)
        if not is_whole or not 1 <= max_model_len <= limit:
            field, rule = "max_model_len", f"must be between 1 and the model's own {limit}"
            raise InvalidInput(field, rule, max_model_len)
    num_kv_heads = getattr(config, "num_key_value_heads", None)
    head_dim = getattr(config, "head_dim", None)
    return ModelShape(
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
        head_dim=config.hidden_size // num_heads if head_dim is None else head_dim,
        vocab_size=config.vocab_size,
        max_model_len=limit if max_model_len is None else max_model_len,
    )


def _check_heads(config: Any, shape: ModelShape, name: str) -> None:
    for field in ("num_kv_heads", "head_dim"):
        if not isinstance(getattr(shape, field), int):
            raise UnsupportedModel(name, f"its {field} differ from layer to layer")
    if shape.num_heads % shape.num_kv_heads:
        raise UnsupportedModel(
            name, f"{shape.num_heads} query heads cannot share {shape.num_kv_heads} key-value heads evenly"
        )


def _check_layers(config: Any, shape: ModelShape, name: str) -> None:
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        return
    for kind in sorted({str(kind) for kind in layer_types} - _LAYER_TYPES):
        reason = _WHY_NOT.get(kind, "which ramet does not know")
        raise UnsupportedModel(name, f"it has layers of type {kind}, {reason}")
    if len(layer_types) != shape.num_layers:
        raise UnsupportedModel(
            name, f"it names types of {len(layer_types)} layers and has {shape.num_layers}"
        )
    window = getattr(config, "sliding_window", None)
    if "sliding_attention" in layer_types and (not isinstance(window, int) or window < 1):
        raise UnsupportedModel(name, f"it has layers with a sliding window of {window} tokens")


def check_options(config: Any, shape: ModelShape, options: Sequence[AttentionOptions], name: str) -> None:
    """Refuse a model whose layers do not ask their attention for what its configuration says.

    Some families put a window into a mask only, or leave an option out: that would be silently wrong.
    """
    window, softcap = (getattr(config, key, None) for key in ("sliding_window", "attn_logit_softcapping"))
    if window is not None and window >= shape.max_model_len:
        window = None
    for layer, found in enumerate(options):
        layer_types = getattr(config, "layer_types", None)
        # Without a list of types, a window holds for all layers.
        slides = layer_types is None or layer_types[layer] == "sliding_attention"
        for what, said, asked in (
            ("sliding window", window if slides else None, found.window),
            ("cap on attention logits", softcap, found.softcap),
        ):
            if said != asked:
                raise UnsupportedModel(
                    name,
                    f"its configuration says {what} {said} for layer {layer},"
                    f" which asks its attention for {asked}",
                )


def _check_rope(config: Any, shape: ModelShape, name: str) -> None:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    # Families with two kinds of layers keep one set of parameters for each kind.
    for parameters in [rope, *(nested for nested in rope.values() if isinstance(nested, dict))]:
        kind = parameters.get("rope_type", "default")
        if kind not in _known_rope_types():
            raise UnsupportedModel(name, f"it has an unknown rope scaling {kind!r}")
        original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
        if kind in _BATCH_DEPENDENT_ROPE and shape.max_model_len > original:
            raise UnsupportedModel(
                name,
                f"its {kind} rope scaling changes all keys when a sequence passes {original} tokens;"
                f" max_model_len={original} runs it without",
            )


def _known_rope_types() -> frozenset[str]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return frozenset(ROPE_INIT_FUNCTIONS) | {"default"}

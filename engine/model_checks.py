"""Which models ramet runs rightly: everything that can be told from a configuration and a class.

It refuses what would be silently wrong; what transformers itself cannot load is not here.
"""

from __future__ import annotations

from typing import Any

from ramet.engine.errors import InvalidInput, UnsupportedModel
from ramet.engine.model_attention import ModelShape

# Tried one by one: these run through a registered attention function and give other logits, without an
# exception.
_SILENTLY_WRONG = frozenset(
    {"bloom", "mpt", "falcon_h1", "nemotron_h", "jamba", "minimax", "llama4", "llama4_text"}
)
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

    ``max_model_len`` lowers the context limit (tokens), which lets a model with a sliding window of that
    length be loaded. Raises UnsupportedModel, or InvalidInput for a limit above the model's own.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(name, "it is an encoder-decoder model")
    if config.model_type in _SILENTLY_WRONG:
        raise UnsupportedModel(name, f"the {config.model_type} family gives wrong logits with a paged cache")
    text_config = config.get_text_config(decoder=True)
    if text_config is not config:
        raise UnsupportedModel(name, f"{config.model_type} takes more than text; load its text model alone")
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
    if max_model_len is not None and not 1 <= max_model_len <= limit:
        raise InvalidInput("max_model_len", f"must be between 1 and the model's own {limit}", max_model_len)
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
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise UnsupportedModel(name, f"it caps attention logits at {config.attn_logit_softcapping}")


def _check_layers(config: Any, shape: ModelShape, name: str) -> None:
    window = getattr(config, "sliding_window", None)
    window_covers_context = window is None or window >= shape.max_model_len
    layer_types = getattr(config, "layer_types", None)
    # Without a list of types, a window holds for all layers.
    uses_window = window is not None if layer_types is None else "sliding_attention" in layer_types
    if uses_window and not window_covers_context:
        raise UnsupportedModel(
            name,
            f"it has a sliding window of {window} tokens, shorter than the context of {shape.max_model_len};"
            f" max_model_len={window} runs it within the window",
        )
    others = sorted({str(kind) for kind in layer_types or ()} - {"full_attention", "sliding_attention"})
    if others:
        raise UnsupportedModel(name, f"it has layers of type {', '.join(others)}")


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

"""The attention function that transformers calls for each layer, and the check that it really did.

It owns the conversion between transformers' shapes and ours. It never computes attention: it hands queries,
keys and values to the ``attend`` function of the step that is running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ramet.engine.errors import UnsupportedModel

# attend(layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D], scale) -> out [T, H, D]
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]

ATTENTION_NAME = "ramet"
# Transformers hands unknown keyword arguments down to the attention function. A name of our own, because
# names such as `cache` or `block_table` mean something else to one or the other version of it.
ATTEND_KWARG = "ramet_attend"

# Arguments that do not change the result as long as no mask is made: they say what we know already.
_NEUTRAL_KWARGS = frozenset(
    {"position_ids", "cache_position", "position_embeddings", "use_cache", "output_attentions", "return_dict"}
)


class OutsideStep(RuntimeError):
    """The attention function was called without a step to attend for."""


class ModelShape(NamedTuple):
    """The sizes of a model that the pool, the kernels and the scheduler need."""

    num_layers: int
    num_heads: int  # H, query heads
    num_kv_heads: int  # Hkv
    head_dim: int  # D
    vocab_size: int  # V, the width of the logits
    max_model_len: int  # tokens of one sequence, prompt and output together


class AttendCall:
    """One forward pass: the step's ``attend``, and the layers that have called it so far."""

    def __init__(self, attend: Attend, shape: ModelShape, model_name: str) -> None:
        self._attend = attend
        self._shape = shape
        self._model_name = model_name
        self._layers: list[int] = []

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attention of one layer: q [T, H, D], k and v [T, Hkv, D] -> [T, H, D].

        Raises UnsupportedModel when this layer's heads differ from the shape that the pool was made for.
        """
        shape = self._shape
        kv_shape = (q.shape[0], shape.num_kv_heads, shape.head_dim)
        if q.shape[1:] != (shape.num_heads, shape.head_dim) or k.shape != kv_shape or v.shape != kv_shape:
            self.refuse(
                f"layer {layer} has q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} where the"
                f" configuration says {shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}"
            )
        self._layers.append(layer)
        return self._attend(layer, q, k, v, scale)

    def check_complete(self) -> None:
        """Raise UnsupportedModel unless every layer called once, in order."""
        if self._layers == list(range(self._shape.num_layers)):
            return
        self.refuse(
            f"its forward pass called the attention function for layers {self._layers} where each of"
            f" 0 to {self._shape.num_layers - 1} once was expected; the others mix tokens in their own way"
        )

    def check_options(self, mask: Tensor | None, options: dict[str, Any]) -> None:
        """Raise UnsupportedModel for a mask or an option that would change the result."""
        if mask is not None:
            self.refuse("it makes an attention mask of its own")
        window = options.pop("sliding_window", None)
        if window is not None and window < self._shape.max_model_len:
            self.refuse(f"it uses a sliding window of {window} tokens")
        if options.pop("is_causal", None) is False:
            self.refuse("its attention is not causal")
        options.pop("dropout", None)  # Only acts while training, and the model is in eval mode.
        for name, value in options.items():
            if name not in _NEUTRAL_KWARGS and value is not None and value is not False:
                self.refuse(f"it passes the option {name!r} to its attention")

    def refuse(self, reason: str) -> None:
        """Raise UnsupportedModel with this reason."""
        raise UnsupportedModel(self._model_name, reason)


def ramet_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, T, D]
    key: Tensor,  # [1, Hkv, T, D]
    value: Tensor,  # [1, Hkv, T, D]
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """What transformers calls for each layer; returns ([1, T, H, D], None).

    The tensors that it hands on are views: their last dimension is contiguous, the others need not be.
    Raises OutsideStep when no engine step called, UnsupportedModel for options that change the result.
    """
    call = options.pop(ATTEND_KWARG, None)
    if call is None:
        raise OutsideStep(
            "this model's attention belongs to ramet; model.set_attn_implementation('sdpa') takes it back"
        )
    assert isinstance(call, AttendCall), "only LoadedModel.forward passes this argument"
    call.check_options(attention_mask, options)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModel(type(module).__name__, "its attention layers do not know their number")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    return call.run(layer, q, k, v, scale)[None], None


def register_attention() -> None:
    """Make the function known to transformers; no mask is registered under the name, so that none is made."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, ramet_attention)


def attend_to_self(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of a single token that sees only itself: its own value, for each query head. T must be 1."""
    assert q.shape[0] == 1, "one token alone: anything longer needs real attention"
    return torch.repeat_interleave(v, q.shape[1] // v.shape[1], dim=1)

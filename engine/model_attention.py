"""The attention function that transformers calls for each layer, and the check that it really did.

It owns the conversion between transformers' shapes and ours. It never computes attention: it hands queries,
keys, values and the layer's options to the ``attend`` function of the step that is running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor, nn

from ramet.engine.errors import UnsupportedModel
from ramet.kernels.options import PLAIN, AttentionOptions

# attend(layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D], scale, options) -> out [T, H, D]
Attend: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, float, AttentionOptions], Tensor]

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
        self.options: list[AttentionOptions] = []  # of the layers that have called

    def run(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
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
        self.options.append(options)
        return self._attend(layer, q, k, v, scale, options)

    def check_complete(self) -> None:
        """Raise UnsupportedModel unless every layer called once, in order."""
        if self._layers == list(range(self._shape.num_layers)):
            return
        self.refuse(
            f"its forward pass called the attention function for layers {self._layers} where each of"
            f" 0 to {self._shape.num_layers - 1} once was expected; the others mix tokens in their own way"
        )

    def take_options(self, module: nn.Module, mask: Tensor | None, given: dict[str, Any]) -> AttentionOptions:
        """What a layer asks of its attention; raises UnsupportedModel for what ramet does not do."""
        if mask is not None:
            self.refuse("it makes an attention mask of its own")
        # Some families pass it, others only note it on the layer.
        if given.pop("is_causal", None) is False or getattr(module, "is_causal", None) is False:
            self.refuse("its attention is not causal")
        window, softcap, sinks = (given.pop(name, None) for name in ("sliding_window", "softcap", "s_aux"))
        given.pop("dropout", None)  # Only acts while training, and the model is in eval mode.
        for name, value in given.items():
            if name not in _NEUTRAL_KWARGS and value is not None and value is not False:
                self.refuse(f"it passes the option {name!r} to its attention")
        if window is not None and window >= self._shape.max_model_len:
            window = None
        if window is None and softcap is None and sinks is None:
            return PLAIN
        if (window is not None and window < 1) or (softcap is not None and softcap <= 0):
            self.refuse(f"it asks for a sliding window of {window} tokens and a cap of {softcap}")
        if sinks is not None and sinks.shape != (self._shape.num_heads,):
            self.refuse(f"its attention sinks have the shape {tuple(sinks.shape)}, not one number a head")
        return AttentionOptions(window, softcap, sinks)

    def refuse(self, reason: str) -> NoReturn:
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
    asked = call.take_options(module, attention_mask, options)
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModel(type(module).__name__, "its attention layers do not know their number")
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    scale = float(scaling) if scaling is not None else q.shape[-1] ** -0.5
    return call.run(layer, q, k, v, scale, asked)[None], None


def register_attention() -> None:
    """Make the function known to transformers; no mask is registered under the name, so that none is made."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, ramet_attention)


def attend_to_self(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
) -> Tensor:
    """Attention of a single token that sees only itself: its own value, for each query head. T must be 1.

    Only to see that the layers call: sinks are left out.
    """
    assert q.shape[0] == 1, "one token alone: anything longer needs real attention"
    return torch.repeat_interleave(v, q.shape[1] // v.shape[1], dim=1)

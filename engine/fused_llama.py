"""The forward pass of llama-shaped models in a few operators a layer.

An eager step of the unchanged module spends most of its time on Python and small operators. Here Q, K and V
are one matrix product, gate and up another, and rotary positions take three operators for Q and K together.
Whether a module runs like this is decided at load, by running both and comparing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ramet.engine.linear import RMSNorm, join_linears, rows_for_onednn
from ramet.engine.model_attention import Attend, AttendCall, ModelShape
from ramet.kernels.options import AttentionOptions

# Of exactly this form: norm, attention, norm, gated MLP. Families that look alike scale something more.
_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_FUSED_ATTRIBUTE = "_ramet_fused"
_NUM_COMPARED = 8  # tokens that both passes run at load

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # LoadedModel.forward


class _Layer:
    """One decoder layer's weights, with projections of the same input joined."""

    def __init__(self, layer: Any, options: AttentionOptions, onednn_from: int | None) -> None:
        self.options = options
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = join_linears([attention.q_proj, attention.k_proj, attention.v_proj], onednn_from)
        self.out = join_linears([attention.o_proj], onednn_from)
        self.gate_up = join_linears([mlp.gate_proj, mlp.up_proj], onednn_from)
        self.down = join_linears([mlp.down_proj], onednn_from)
        self.norm = RMSNorm(layer.input_layernorm)
        self.mlp_norm = RMSNorm(layer.post_attention_layernorm)
        self.scale = float(attention.scaling)
        self.head_norms: Tensor | None = None  # [H + Hkv, D], where heads are normalised (qwen3)

    def norm_heads(self, attention: Any, shape: ModelShape) -> None:
        """Take over the norms of the query and key heads, if there are any."""
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            self.head_norms = torch.cat([q.expand(shape.num_heads, -1), k.expand(shape.num_kv_heads, -1)])


class FusedLlama:
    """A llama-shaped module's weights, and the pass over them."""

    def __init__(self, module: Any, shape: ModelShape, options: Sequence[AttentionOptions]) -> None:
        self.shape = shape
        self.windows = [asked.window for asked in options]
        self._embed: Tensor = module.model.embed_tokens.weight.detach()  # [V, C]
        self._rotary = module.model.rotary_emb
        onednn_from = rows_for_onednn(self._embed)
        self._layers: list[_Layer] = []
        for layer, asked in zip(module.model.layers, options, strict=True):
            self._layers.append(_Layer(layer, asked, onednn_from))
            self._layers[-1].norm_heads(layer.self_attn, shape)
        self._norm = RMSNorm(module.model.norm)
        self._head = join_linears([module.lm_head], onednn_from)

    def forward(self, token_ids: Tensor, positions: Tensor, logits_at: Tensor, call: AttendCall) -> Tensor:
        """token_ids, positions [T], logits_at [R], all int64 -> logits [R, V]. See LoadedModel.forward."""
        shape = self.shape
        num_tokens, head_dim = token_ids.shape[0], shape.head_dim
        num_rotated = shape.num_heads + shape.num_kv_heads
        x = F.embedding(token_ids, self._embed)  # [T, C]
        cos, sin = self._rotation(x, positions)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.of_normed(x, layer.norm).view(num_tokens, -1, head_dim)  # [T, H + 2 Hkv, D]
            qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
            if layer.head_norms is not None:
                qk = F.rms_norm(qk, (head_dim,), None, layer.norm.eps) * layer.head_norms
            qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
            q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
            attended = call.run(index, q, k, v, layer.scale, layer.options)  # [T, H, D]
            x = layer.out(attended.reshape(num_tokens, -1), x)
            x = layer.down.of_gated(layer.gate_up.of_normed(x, layer.mlp_norm), x)
        if not logits_at.shape[0]:
            return x.new_empty(0, shape.vocab_size)
        return self._head.of_normed(x[logits_at], self._norm)

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] of each token's position, as the module's own rotary embedding has them.

        rotate_half(x) = (-x2, x1) is a roll by half a head with the first half's sign in `sin`.
        """
        cos, sin = self._rotary(x[None], positions[None])  # [1, T, D] each
        sin = sin[0].clone()
        sin[:, : sin.shape[-1] // 2].neg_()
        return cos[0][:, None], sin[:, None]


def fuse(
    module: Any, shape: ModelShape, options: Sequence[AttentionOptions], forward: Forward
) -> FusedLlama | None:
    """The fused pass of a llama-shaped module, if it computes what `forward`, the module's own pass, does.

    `options` are what the module's own layers ask of their attention.
    """
    if type(module).__name__ not in _CLASSES or getattr(module.config, "hidden_act", None) != "silu":
        return None
    known: FusedLlama | None = getattr(module, _FUSED_ATTRIBUTE, None)
    if known is not None and known.windows == [asked.window for asked in options]:
        return known  # several engines may run one module; its weights are joined once
    fused = FusedLlama(module, shape, options)
    positions = torch.arange(_NUM_COMPARED, device=module.lm_head.weight.device)
    # Ordinary tokens: what control tokens give is large and ill-conditioned.
    token_ids = (positions + 1) * shape.vocab_size // (_NUM_COMPARED + 1)
    expected = forward(token_ids, positions, positions, _attend_densely).float()  # [8, V]
    found = fused.forward(
        token_ids, positions, positions, AttendCall(_attend_densely, shape, "fused")
    ).float()
    tolerance = 1e-4 if module.lm_head.weight.dtype == torch.float32 else 0.05
    if (found - expected).norm() > tolerance * expected.norm():
        return None
    setattr(module, _FUSED_ATTRIBUTE, fused)
    return fused


def _attend_densely(
    layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
) -> Tensor:
    """Causal attention of one sequence [T, H, D] without pages; both passes are compared without options."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        x.transpose(0, 1)[None] for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1)

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

from ramet.engine.linear import Linear, join_linears, rows_for_fp32
from ramet.engine.model_attention import Attend, AttendCall, ModelShape
from ramet.kernels.options import AttentionOptions

# Of exactly this form: norm, attention, norm, gated MLP. Families that look alike scale something more.
_CLASSES = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
_FUSED_ATTRIBUTE = "_ramet_fused"
_NUM_COMPARED = 8  # tokens that both passes run at load

Forward: TypeAlias = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]  # LoadedModel.forward


class _Layer:
    """One decoder layer's weights, with projections of the same input joined."""

    def __init__(self, layer: Any, options: AttentionOptions, wide_from: int | None) -> None:
        self.options = options
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = join_linears([attention.q_proj, attention.k_proj, attention.v_proj], wide_from)
        self.out = join_linears([attention.o_proj], wide_from)
        self.gate_up = join_linears([mlp.gate_proj, mlp.up_proj], wide_from)
        self.down = join_linears([mlp.down_proj], wide_from)
        self.norm = _in_both(layer.input_layernorm.weight)
        self.mlp_norm = _in_both(layer.post_attention_layernorm.weight)
        self.eps = float(layer.input_layernorm.variance_epsilon)
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
        num_weights = sum(parameter.numel() for parameter in module.parameters())
        wide_from = self._wide_from = rows_for_fp32(num_weights, self._embed.dtype)
        self._layers: list[_Layer] = []
        for layer, asked in zip(module.model.layers, options, strict=True):
            self._layers.append(_Layer(layer, asked, wide_from))
            self._layers[-1].norm_heads(layer.self_attn, shape)
        self._norm: Tensor = module.model.norm.weight.detach()  # [C]
        self._eps = float(module.model.norm.variance_epsilon)
        self._head: Linear = join_linears([module.lm_head], wide_from)

    def forward(self, token_ids: Tensor, positions: Tensor, logits_at: Tensor, call: AttendCall) -> Tensor:
        """token_ids, positions [T], logits_at [R], all int64 -> logits [R, V]. See LoadedModel.forward."""
        shape = self.shape
        num_tokens, head_dim = token_ids.shape[0], shape.head_dim
        num_rotated = shape.num_heads + shape.num_kv_heads
        x = F.embedding(token_ids, self._embed)  # [T, C]
        dtype = x.dtype  # of the pages
        if self._wide_from is not None and num_tokens >= self._wide_from:
            x = x.float()  # all products are fp32 ones from here: converting around each would cost more
        cos, sin = self._rotation(x, positions)
        for index, layer in enumerate(self._layers):
            h = _norm(x, layer.norm, layer.eps)
            qkv = layer.qkv(h).view(num_tokens, -1, head_dim)  # [T, H + 2 Hkv, D]
            qk, v = qkv[:, :num_rotated], qkv[:, num_rotated:]
            if layer.head_norms is not None:
                qk = F.rms_norm(qk, (head_dim,), None, layer.eps) * layer.head_norms.to(qk.dtype)
            qk = torch.addcmul(qk * cos, qk.roll(head_dim // 2, -1), sin)
            q, k = qk[:, : shape.num_heads], qk[:, shape.num_heads :]
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
            attended = call.run(index, q, k, v, layer.scale, layer.options)  # [T, H, D]
            x = layer.out.added_to(x, attended.reshape(num_tokens, -1).to(x.dtype))
            h = _norm(x, layer.mlp_norm, layer.eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)  # [T, F] each
            x = layer.down.added_to(x, F.silu(gate).mul_(up))
        if not logits_at.shape[0]:
            return x.new_empty(0, shape.vocab_size)
        last = F.rms_norm(x[logits_at].to(dtype), self._norm.shape, self._norm, self._eps)  # [R, C]
        return self._head(last)

    def _rotation(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, D] of each token's position, as the module's own rotary embedding has them.

        rotate_half(x) = (-x2, x1) is a roll by half a head with the first half's sign in `sin`.
        """
        cos, sin = self._rotary(x[None], positions[None])  # [1, T, D] each
        sin = sin[0].clone()
        sin[:, : sin.shape[-1] // 2].neg_()
        return cos[0][:, None], sin[:, None]


def _in_both(weight: Tensor) -> dict[torch.dtype, Tensor]:
    """A norm's weight [C] in its own dtype and in fp32."""
    return {torch.float32: weight.detach().float(), weight.dtype: weight.detach()}


def _norm(x: Tensor, weights: dict[torch.dtype, Tensor], eps: float) -> Tensor:
    weight = weights[x.dtype]
    return F.rms_norm(x, weight.shape, weight, eps)


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

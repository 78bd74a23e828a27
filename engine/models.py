"""A loaded model: one forward pass over a flat batch of tokens, with attention left to the caller.

It owns the transformers module. It never knows about blocks, branches or requests.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ramet.engine.device import check_weights, convert, move, pick_device, pick_dtype
from ramet.engine.errors import ModelNotFound, UnsupportedModel
from ramet.engine.fused_llama import FusedLlama, fuse as fuse_llama
from ramet.engine.model_attention import (
    ATTEND_KWARG,
    ATTENTION_NAME,
    Attend,
    AttendCall,
    ModelShape,
    OutsideStep,
    attend_to_self,
    register_attention,
)
from ramet.engine.model_checks import TRIED_FAMILIES, check_model, check_options
from ramet.engine.model_files import DEFAULT_MODEL, LoadedFiles, load_default, load_folder, load_gguf
from ramet.engine.model_trial import try_model
from ramet.engine.tokenizer import Tokenizer
from ramet.kernels.options import AttentionOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LoadedModel:
    """A causal language model that is ready to run, and what the engine has to know about it.

    Attributes:
        module: the transformers model; its attention implementation is ours from now on.
        tokenizer: None where the model came without one; prompts are then token ids.
        eos_token_ids: the tokens that end a sequence.
    """

    def __init__(
        self,
        module: Any,
        tokenizer: Tokenizer | None,
        *,
        name: str,
        max_model_len: int | None = None,
    ) -> None:
        """Take over a transformers model, which is checked first. Raises UnsupportedModel or InvalidInput."""
        self.name = name
        self.shape: ModelShape = check_model(module, name, max_model_len)
        check_weights(module, name)
        self.module = module.eval()
        self.tokenizer = tokenizer
        self.eos_token_ids = _eos_token_ids(module, tokenizer)
        self._slices_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
        register_attention()
        module.set_attn_implementation(ATTENTION_NAME)
        self._fused: FusedLlama | None = None
        options = self._probe()
        check_options(module.config, self.shape, options, name)
        if module.config.model_type not in TRIED_FAMILIES:
            try_model(module, self.shape, self.forward, name)
        if self.device.type == "cpu":
            self._fused = fuse_llama(module, self.shape, options, self.forward)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings, and so of queries, keys and values."""
        return self.module.get_input_embeddings().weight.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where the embeddings lie, and so where a batch has to be."""
        return self.module.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, positions: Tensor, logits_at: Tensor, attend: Attend) -> Tensor:
        """Run a flat batch of tokens and return the logits of the asked rows.

        token_ids: [T] int64, the tokens of all sequences one after another; T >= 1.
        positions: [T] int64, each token's position in its own sequence.
        logits_at: [R] int64, indices into the T tokens; R may be 0, and then no logits are computed.
        attend: called once for each layer, in order, with (layer, q [T, H, D], k [T, Hkv, D], v [T, Hkv, D],
            scale, options), where the tensors are views; returns [T, H, D].
        Returns [R, V] in the model's dtype. Raises UnsupportedModel if a layer does not attend as it should.
        """
        # Triton launches on the current device, whatever its tensors lie on.
        with torch.cuda.device_of(token_ids):  # type: ignore[no-untyped-call]
            return self._forward(token_ids, positions, logits_at, AttendCall(attend, self.shape, self.name))

    def _forward(self, token_ids: Tensor, positions: Tensor, logits_at: Tensor, call: AttendCall) -> Tensor:
        assert token_ids.ndim == 1 and token_ids.shape == positions.shape, "one position for each token"
        if self._fused is not None:
            logits = self._fused.forward(token_ids, positions, logits_at, call)  # [R, V]
        else:
            logits = self._forward_module(token_ids, positions, logits_at, call)
        call.check_complete()
        assert logits.shape == (len(logits_at), self.shape.vocab_size), "the head gives a row for each index"
        return logits

    def _forward_module(
        self, token_ids: Tensor, positions: Tensor, logits_at: Tensor, call: AttendCall
    ) -> Tensor:
        """The unchanged transformers module, whose layers find `call` among their keyword arguments."""
        inputs: dict[str, Any] = {
            "input_ids": token_ids[None],
            "position_ids": positions[None],
            "use_cache": False,
            ATTEND_KWARG: call,
        }
        logits: Tensor
        if not len(logits_at):
            self.module.base_model(**inputs)
            logits = torch.empty((0, self.shape.vocab_size), dtype=self.dtype, device=self.device)  # [0, V]
        elif self._slices_logits:
            logits = self.module(**inputs, logits_to_keep=logits_at).logits[0]  # [R, V]
        else:
            logits = self.module(**inputs).logits[0][logits_at]  # [R, V]
        return logits

    @torch.inference_mode()
    def _probe(self) -> list[AttentionOptions]:
        """Run one token, so that a model whose layers do not attend as they should is refused now.

        Returns what each layer asks of its attention.
        """
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        call = AttendCall(attend_to_self, self.shape, self.name)
        try:
            self._forward(zero, zero, zero, call)
        except OutsideStep as error:
            raise UnsupportedModel(self.name, "its layers do not hand options to their attention") from error
        return call.options


def load_model(
    model: str | Path | nn.Module = DEFAULT_MODEL,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    max_model_len: int | None = None,
    cache_dir: str | Path | None = None,
) -> LoadedModel:
    """Load a model by name, or take over one that is loaded already.

    model: "smollm2" (the embedded default), a folder, a .gguf file, a hub id, or a transformers model; that
        one keeps its device and dtype unless others are asked for, and belongs to ramet from then on.
    tokenizer: instead of the one that comes with the weights.
    device: "auto" is the first GPU, or else the CPU.
    dtype: "auto" is bfloat16 where the device multiplies it fast, or else float32.
    max_model_len: a context limit below the model's own, in tokens.
    cache_dir: where the embedded model's converted copy lies; None is ``~/.cache/ramet``.
    Raises ModelNotFound, UnsupportedModel or InvalidInput.
    """
    if isinstance(model, nn.Module):
        files = LoadedFiles(_moved(model, device, dtype), None)
        name = str(getattr(getattr(model, "config", None), "name_or_path", "") or type(model).__name__)
    else:
        name = str(model)
        target = pick_device(device)
        cache = None if cache_dir is None else Path(cache_dir)
        files = _load_named(name, pick_dtype(dtype, target), max_model_len, cache)
        files = files._replace(module=move(files.module, target))
    found = files.tokenizer if tokenizer is None else tokenizer
    if found is not None and not isinstance(found, Tokenizer):
        found = Tokenizer(found)
    return LoadedModel(files.module, found, name=name, max_model_len=max_model_len)


def _load_named(
    name: str, dtype: torch.dtype, max_model_len: int | None, cache_dir: Path | None
) -> LoadedFiles:
    if name == DEFAULT_MODEL:
        return load_default(dtype, cache_dir)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return load_gguf(path, dtype, max_model_len)
    if path.is_dir():
        return load_folder(str(path), dtype, max_model_len)
    if name.startswith(("/", ".", "~")) or path.is_file():
        raise ModelNotFound(name, "give a folder with a model, a .gguf file, a hub id, or 'smollm2'")
    return load_folder(name, dtype, max_model_len)


def _moved(module: nn.Module, device: str | torch.device, dtype: str | torch.dtype) -> nn.Module:
    if device != "auto":
        module = move(module, pick_device(device))
    if dtype != "auto":
        module = convert(module, pick_dtype(dtype, torch.device("cpu")))
    return module


def _eos_token_ids(module: Any, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The end tokens that the generation config, the config and the tokenizer name, together."""
    found: set[int] = set() if tokenizer is None else set(tokenizer.eos_token_ids)
    for config in (getattr(module, "generation_config", None), module.config):
        eos = getattr(config, "eos_token_id", None)
        found.update([eos] if isinstance(eos, int) else eos or ())
    return frozenset(found)

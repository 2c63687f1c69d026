"""`attn_implementation="fa2"`: tiny random models give eager's logits and gradients, in every kind of batch; what fa2
does not compute is refused by name. The tolerance is that of fp32: transformers' norms, softmax and rotary embeddings
use it in a model of float64. Padded batches are in fp32 altogether, because eager gives NaN for padding in float64.
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fa2.integrations import register_with_transformers
from fa2.integrations import transformers as hook

pytest.importorskip("transformers")
import transformers as hf
from transformers.masking_utils import create_causal_mask

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"  # its new name
VOCABULARY, TOKENS = 61, 14


@pytest.fixture(autouse=True)
def registered() -> None:
    register_with_transformers()


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    **SPECIAL,
}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
SOFTCAP_OFF = {"attn_logit_softcapping": None, "query_pre_attn_scalar": 3, "sliding_window": 5}

CAUSAL: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**SIZES)),
    "mistral, window of 5": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SIZES, sliding_window=5)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**SIZES)),
    "gemma2, window of 5, no softcap": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, **SOFTCAP_OFF)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT, **SPECIAL)
    ),
}


def build(make: Callable[[], Any], training: bool = True, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = make().to(dtype).train(training)
    for parameter in model.parameters():  # not the tiny ones of the initialisation: masks must be seen in the logits
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of fa2's functions, as the attention calls them."""
    seen: list[str] = []
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        function = getattr(hook, name)

        def spy(*args: Any, name: str = name, function: Any = function, **kwargs: Any) -> Any:
            seen.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(hook, name, spy)
    return seen


def tokens(batch: int = 2, length: int = TOKENS, seed: int = 0) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: Any) -> dict[str, Tensor]:
    grads = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    assert grads
    return grads


def logits_and_gradients(
    model: Any, implementation: str, ids: Tensor, labels: Tensor, where: Tensor | None = None, **inputs: Any
) -> dict[str, Tensor]:
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    return {"logits": logits.detach() if where is None else logits.detach()[where], **gradients(model)}


def assert_equal(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    assert ours.keys() == eager.keys()
    for name, x in ours.items():
        scale = max(float(eager[name].abs().max()), 1.0)
        error = float((x - eager[name]).abs().max())
        assert error < 1e-4 * scale, f"{name}: off by {error} of {scale}"


causal_models = pytest.mark.parametrize("make", CAUSAL.values(), ids=CAUSAL.keys())


@causal_models
def test_full_batch(make: Callable[[], Any], calls: list[str]) -> None:
    model, ids = build(make), tokens()
    eager = logits_and_gradients(model, "eager", ids, ids)
    assert not calls
    assert_equal(logits_and_gradients(model, "fa2", ids, ids), eager)
    assert calls == ["flash_attn_func"] * 2
    assert_equal(logits_and_gradients(model, "fa2", ids, ids, attention_mask=torch.ones_like(ids)), eager)
    assert calls == ["flash_attn_func"] * 4


@causal_models
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch(make: Callable[[], Any], side: str, calls: list[str]) -> None:
    model, ids = build(make, dtype=torch.float32), tokens(3)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((4, 0, 9)):
        mask[row, slice(0, padding) if side == "left" else slice(TOKENS - padding, TOKENS)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    where = mask.bool()
    eager = logits_and_gradients(model, "eager", ids, labels, where, attention_mask=mask)
    assert_equal(logits_and_gradients(model, "fa2", ids, labels, where, attention_mask=mask), eager)
    assert calls == ["flash_attn_varlen_func"] * 2
    unmasked = logits_and_gradients(model, "eager", ids, labels, where)
    assert side == "right" or not torch.allclose(unmasked["logits"], eager["logits"], atol=1e-2)


LENGTHS = (3, 7, 1, 3)  # of the documents of a packed row


def positions(batch: int = 1) -> Tensor:
    return torch.cat([torch.arange(n) for n in LENGTHS]).expand(batch, -1)


@causal_models
@pytest.mark.parametrize("batch", [1, 2])
def test_packed_batch_by_position_ids(make: Callable[[], Any], batch: int, calls: list[str]) -> None:
    model, ids = build(make), tokens(batch)
    eager = logits_and_gradients(model, "eager", ids, ids, position_ids=positions(batch))
    assert_equal(logits_and_gradients(model, "fa2", ids, ids, position_ids=positions(batch)), eager)
    assert calls == ["flash_attn_varlen_func"] * 2
    at = 0
    for n in LENGTHS:  # each document as if it were alone
        alone = model(input_ids=ids[:, at : at + n]).logits
        torch.testing.assert_close(alone, eager["logits"][:, at : at + n], rtol=1e-4, atol=1e-4)
        at += n


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral, window of 5", "gemma"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_packed_batch_by_cu_seq_lens(name: str, as_tensor: bool, calls: list[str]) -> None:
    model, ids = build(CAUSAL[name]), tokens(1)
    eager = logits_and_gradients(model, "eager", ids, ids, position_ids=positions())
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    longest = torch.tensor(7) if as_tensor else 7
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
    assert_equal(logits_and_gradients(model, "fa2", ids, ids, position_ids=positions(), **lengths), eager)
    assert calls == ["flash_attn_varlen_func"] * 2


def test_cu_seq_lens_alone_say_where_documents_begin() -> None:
    """The arguments count, even where the position ids say nothing."""
    query = torch.randn(1, 2, TOKENS, 8, dtype=torch.float64)
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    out, _ = hook.attention(None, query, query, query, None, **lengths)
    alone, _ = hook.attention(None, *[query[:, :, 3:10]] * 3, None)
    torch.testing.assert_close(out[:, 3:10], alone)


def generate(model: Any, implementation: str, ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
    model.set_attn_implementation(implementation)
    made = model.generate(ids, max_new_tokens=9, do_sample=False, output_logits=True, return_dict_in_generate=True,
                          **inputs)  # fmt: skip
    return made.sequences, torch.stack(made.logits)


@causal_models
@pytest.mark.parametrize("padding", [0, 4])
def test_generate(make: Callable[[], Any], padding: int, calls: list[str]) -> None:
    """With a cache: one query, many keys; past the window; with a row that is padded on the left."""
    model, ids = build(make, training=False, dtype=torch.float32), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    eager, eager_logits = generate(model, "eager", ids, attention_mask=mask)
    assert not calls
    ours, logits = generate(model, "fa2", ids, attention_mask=mask)
    assert len(calls) == 2 * 9
    assert ours.tolist() == eager.tolist()
    torch.testing.assert_close(logits, eager_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral, window of 5", "gpt2"])
@pytest.mark.parametrize("padding", [0, 2])
def test_generate_with_a_static_cache(name: str, padding: int) -> None:
    """The cache has empty places after the last token."""
    model, ids = build(CAUSAL[name], training=False, dtype=torch.float32), tokens(2, 6)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    eager, eager_logits = generate(model, "eager", ids, attention_mask=mask)
    ours, logits = generate(model, "fa2", ids, attention_mask=mask, cache_implementation="static")
    assert ours.tolist() == eager.tolist()
    torch.testing.assert_close(logits, eager_logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["llama", "mistral, window of 5", "gemma2, window of 5, no softcap", "gpt2"])
@pytest.mark.parametrize("chunks", [(10, 4), (3, 1, 10), (2, 5, 7)])
def test_prompt_in_pieces(name: str, chunks: tuple[int, ...]) -> None:
    """Several queries behind cached keys: causal at the bottom right."""
    model, ids = build(CAUSAL[name], training=False), tokens()
    model.set_attn_implementation("eager")
    whole = model(input_ids=ids).logits
    model.set_attn_implementation("fa2")
    cache, pieces = hf.DynamicCache(config=model.config), []
    for piece in ids.split(chunks, dim=1):
        pieces.append(model(input_ids=piece, use_cache=True, **{CACHE: cache}).logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-4, atol=1e-4)


# --- models that look both ways


ENCODER = {name: x for name, x in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
MODERNBERT = {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 1}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_bidirectional_encoder(name: str, padded: bool, calls: list[str]) -> None:
    """The second with a window on both sides, in every other layer."""
    bert = hf.BertConfig(**ENCODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    modernbert = hf.ModernBertConfig(**ENCODER, **MODERNBERT)
    dtype = torch.float32 if padded else torch.float64
    make = {"bert": lambda: hf.BertForMaskedLM(bert), "modernbert": lambda: hf.ModernBertForMaskedLM(modernbert)}[name]
    model, ids = build(make, dtype=dtype), tokens()
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0 if padded else 1
    results = []
    for implementation in ("eager", "fa2"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
        logits.square().sum().backward()
        results.append({"logits": logits.detach(), **gradients(model)})
    assert_equal(results[1], results[0])
    assert set(calls) == {"flash_attn_varlen_func" if padded else "flash_attn_func"}


@pytest.mark.parametrize("source_length", [11, 6])
def test_cross_attention(source_length: int) -> None:
    """Padding of the source is no padding of the target, though they be equally long."""
    config = hf.BartConfig(vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48,
                           decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0,
                           max_position_embeddings=64, pad_token_id=0, forced_eos_token_id=None)  # fmt: skip
    model, source, target = (
        build(lambda: hf.BartForConditionalGeneration(config)),
        tokens(2, source_length),
        tokens(2, 6),
    )
    mask = torch.ones_like(source)
    mask[0, 4:] = 0
    results = []
    for implementation in ("eager", "fa2"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits
        logits.square().sum().backward()
        results.append({"logits": logits.detach(), **gradients(model)})
    assert_equal(results[1], results[0])


def test_values_of_a_smaller_headdim() -> None:
    """As multi-head latent attention has them."""
    q, k = (torch.randn(1, 2, 5, 8, dtype=torch.float64) for _ in range(2))
    v = torch.randn(1, 2, 5, 6, dtype=torch.float64)
    out, weights = hook.attention(None, q, k, v, None, is_causal=True)
    assert weights is None
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2))


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_counts_the_token_itself(causal: bool) -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, dtype=torch.float64) for _ in range(3))
    out, _ = hook.attention(None, q, k, v, None, is_causal=causal, sliding_window=3)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    seen = (distance < 3) & (distance >= 0 if causal else distance > -3)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    torch.testing.assert_close(out, wanted.transpose(1, 2))


# --- torch.compile


@pytest.fixture
def fresh_dynamo() -> None:
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["llama", "mistral, window of 5"])
def test_compiled_without_a_break(name: str) -> None:
    model, ids = build(CAUSAL[name]), tokens(1)
    cu = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0).int()
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 7, "max_length_k": 7}
    for inputs in ({}, {"position_ids": positions(), **lengths}):
        model.set_attn_implementation("eager")
        eager = model(input_ids=ids, use_cache=False, position_ids=inputs.get("position_ids")).logits
        model.set_attn_implementation("fa2")
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(
            compiled(input_ids=ids, use_cache=False, **inputs).logits, eager, rtol=1e-4, atol=1e-4
        )


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_packing_needs_cu_seq_lens() -> None:
    model, ids = build(CAUSAL["llama"], training=False), tokens(1)
    model.set_attn_implementation("fa2")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    message = r"fa2: packed documents under torch\.compile need cu_seq_lens_q"
    with torch.no_grad(), pytest.raises(RuntimeError, match=message):
        compiled(input_ids=ids, use_cache=False, position_ids=positions())


# --- what is refused

QUERY = torch.ones(1, 2, 4, 8)
CU = torch.tensor([0, 4])
ALL_LENGTHS = {"cu_seq_lens_q": CU, "cu_seq_lens_k": CU, "max_length_q": 4, "max_length_k": 4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, r"fa2: dropout must be 0.0 \(set the model's attention dropout to 0; .*\), got 0.1"),
    ({"softcap": 50.0}, r"fa2: softcap must be None \(soft-capped scores are not supported\), got 50.0"),
    ({"s_aux": torch.ones(2)}, r"fa2: s_aux must be None \(attention sinks are not supported\), got Tensor"),
    ({"position_bias": torch.ones(2)}, "fa2: position_bias must be None .*, got Tensor"),
    ({"block_table": torch.ones(2)}, "fa2: block_table must be None .*, got Tensor"),
    ({"output_attentions": True}, r"fa2: output_attentions must be False \(the weights are never formed\), got True"),
    (
        {"cu_seq_lens_q": CU, "max_length_q": 4, "max_length_k": 4},
        "fa2: cu_seq_lens_k must be given together with cu_seq_lens_q, max_length_q, max_length_k, got None",
    ),
    (
        {"attention_mask": torch.ones(1, 4, dtype=torch.bool), **ALL_LENGTHS},
        "fa2: attention_mask must be without padding where cu_seq_lens_q is given, got one with padding",
    ),
    (
        {"attention_mask": torch.zeros(1, 1, 4, 4)},
        r"fa2: attention_mask must be None or \(batch, tokens\), got shape \(1, 1, 4, 4\)",
    ),
    (
        {"attention_mask": torch.tensor([[True, False, True, True]]), "sliding_window": 2},
        "fa2: attention_mask must be padded at the ends of its rows alone, .*, got padding between tokens",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "message"), REFUSED, ids=[next(iter(a)) + str(i) for i, (a, _) in enumerate(REFUSED)]
)
def test_attention_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        hook.attention(None, QUERY, QUERY, QUERY, **arguments)


def test_models_with_softcap_and_dropout_are_refused() -> None:
    gemma2 = build(lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES)))
    gemma2.set_attn_implementation("fa2")
    with pytest.raises(ValueError, match="softcap must be None"):
        gemma2(input_ids=tokens())
    gpt2 = build(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4)))
    gpt2.set_attn_implementation("fa2")
    with pytest.raises(ValueError, match=r"dropout must be 0\.0"):
        gpt2(input_ids=tokens())
    gpt2.eval()(input_ids=tokens())


def test_models_with_sinks_and_position_biases_are_refused() -> None:
    sinks = build(lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)))
    sinks.set_attn_implementation("fa2")
    with pytest.raises(ValueError, match=r"s_aux must be None"):
        sinks(input_ids=tokens())
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    biases = build(lambda: hf.T5EncoderModel(config))
    biases.set_attn_implementation("fa2")
    with pytest.raises(ValueError, match=r"position_bias must be None"):
        biases(input_ids=tokens())


def test_a_models_own_mask_is_refused() -> None:
    config = hf.LlamaConfig(**SIZES, attn_implementation="fa2")
    embeddings = torch.zeros(1, 6, 32)
    prefix = lambda batch, head, query, key: key < 3  # noqa: E731

    def make(**overlay: Any) -> Any:
        return create_causal_mask(config, embeddings, attention_mask=None, **{CACHE: None}, **overlay)

    assert make() is None
    with pytest.raises(ValueError, match=r"fa2: mask_function must be .*, got a custom mask function"):
        make(or_mask_function=prefix)
    blocks = torch.tensor([[-1, 0, 0, 0, -1, -1]])
    with pytest.raises(ValueError, match=r"fa2: mask_function must be .*, got one that is causal for a part of"):
        make(block_sequence_ids=blocks)


def test_chunks_are_refused_where_they_matter() -> None:
    config = hf.LlamaConfig(**SIZES)
    config.attention_chunk_size = 4
    arguments = {"q_length": 4, "mask_function": lambda b, h, q, k: k <= q, "config": config}
    assert hook.mask(1, kv_length=4, **arguments) is None
    with pytest.raises(ValueError, match=r"fa2: kv_length must be at most attention_chunk_size \(4; .*\), got 5"):
        hook.mask(1, kv_length=5, **arguments)


def test_both_interfaces_know_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert ALL_ATTENTION_FUNCTIONS["fa2"] is hook.attention
    assert ALL_MASK_ATTENTION_FUNCTIONS["fa2"] is hook.mask


def test_a_missing_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"fa2: transformers must be installed .* \(5.4 or later\), got: import of"):
        register_with_transformers()


def test_an_old_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=rf"\(5.4 or later\), got {hf.__version__}"):
        register_with_transformers()


def test_import_fa2_imports_no_transformers() -> None:
    code = "import sys, fa2, fa2.integrations, fa2.integrations.transformers; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- on a GPU


in_every_kind_of_batch = pytest.mark.parametrize("kind", ["full", "padded", "packed"])
with_and_without_window = pytest.mark.parametrize("name", ["llama", "mistral, window of 5"])


def too_far_in_bf16(name: str, kind: str, device: str) -> list[str]:
    """The logits and gradients that fa2 puts further from fp32 than twice what eager attention in bf16 does.

    In norm over each tensor: its largest error alone is one draw, and eager's can be half of sdpa's. The
    right attentions come to 0.6 of the bound, a softmax_scale 1.1 times too large to 2.5 of it in the worst tensor.
    """
    model = build(CAUSAL[name]).to(device, torch.bfloat16)
    exact = build(CAUSAL[name], dtype=torch.float32).to(device)
    exact.load_state_dict(model.state_dict())
    ids = tokens(2, TOKENS).to(device)
    inputs: dict[str, Any] = {}
    where = torch.ones_like(ids).bool()
    if kind == "padded":
        where[0, :5] = False
        inputs["attention_mask"] = where.int()
    if kind == "packed":
        inputs["position_ids"] = positions(2).to(device)
    labels = ids.masked_fill(~where, -100)
    wanted = logits_and_gradients(exact, "eager", ids, labels, where, **inputs)
    peer = logits_and_gradients(model, "eager", ids, labels, where, **inputs)
    ours = logits_and_gradients(model, "fa2", ids, labels, where, **inputs)
    far = []
    for key, x in ours.items():
        error, peers = (float((y.double() - wanted[key]).norm()) for y in (x, peer[key]))
        bound = 2 * peers + 1e-2 * float(wanted[key].double().norm())
        if not error <= bound:
            far.append(f"{key}: off by {error:.4f}, bound {bound:.4f}")
    return far


@with_and_without_window
@in_every_kind_of_batch
def test_in_bf16(name: str, kind: str) -> None:
    assert not too_far_in_bf16(name, kind, "cpu")


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "scale": lambda given: {"softmax_scale": 1.25 * given["softmax_scale"]},
    "not causal": lambda given: {"causal": False},
    "window": lambda given: {"window_size": tuple(x + 1 if x > 0 else x for x in given["window_size"])},
}


@in_every_kind_of_batch
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_attention_in_bf16_is_noticed(
    wrong: Callable[[dict[str, Any]], dict[str, Any]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("flash_attn_func", "flash_attn_varlen_func"):
        right = getattr(hook, name)
        monkeypatch.setattr(hook, name, lambda *a, right=right, **given: right(*a, **given | wrong(given)))
    assert too_far_in_bf16("mistral, window of 5", kind, "cpu")


@pytest.mark.gpu
@in_every_kind_of_batch
@with_and_without_window
def test_on_a_gpu(name: str, kind: str) -> None:
    assert not too_far_in_bf16(name, kind, "cuda")


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("packed", [False, True])
def test_compiled_on_a_gpu(packed: bool) -> None:
    model, ids = build(CAUSAL["llama"]).to("cuda", torch.bfloat16), tokens(1).cuda()
    inputs: dict[str, Any] = {}
    if packed:
        cu = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0).int()
        inputs = {"position_ids": positions().cuda(), "cu_seq_lens_q": cu, "cu_seq_lens_k": cu}
        inputs |= {"max_length_q": 7, "max_length_k": 7}
    model.set_attn_implementation("fa2")
    once = logits_and_gradients(model, "fa2", ids, ids, **inputs)
    model.zero_grad()
    logits = torch.compile(model, fullgraph=True)(input_ids=ids, use_cache=False, **inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="sum").backward()
    for name, x in {"logits": logits.detach(), **gradients(model)}.items():
        assert (x - once[name]).abs().max() <= 5e-2 * once[name].abs().max(), name


@pytest.mark.gpu
def test_generate_on_a_gpu() -> None:
    model = build(CAUSAL["llama"], training=False).to("cuda", torch.bfloat16)
    ids = tokens(2, 6).cuda()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    model.set_attn_implementation("eager")
    eager = model.generate(ids, attention_mask=mask, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    model.set_attn_implementation("fa2")
    ours = model.generate(ids, attention_mask=mask, max_new_tokens=9, output_logits=True, return_dict_in_generate=True)
    assert ours.sequences.shape == (2, 15)
    spread = float(eager.logits[0].float().std())
    torch.testing.assert_close(ours.logits[0], eager.logits[0], rtol=0.0, atol=0.2 * spread)

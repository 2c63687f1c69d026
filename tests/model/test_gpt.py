"""The GPT over packed documents equals the GPT over each document alone; padding and neighbours leave no trace."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from model.attention import fa2_attention, reference_attention
from model.config import GPTConfig, Mlp, Norm, Position
from model.gelu import gelu_tanh
from model.gpt import GPT
from model.memory import count_params

TINY = GPTConfig(
    vocab_size=61,
    vocab_multiple=16,
    max_positions=32,
    n_layer=2,
    d_model=24,
    nheads_q=4,
    d_ff=40,
    loss_chunk_tokens=7,
    init_std=0.2,
)
LENGTHS = (5, 1, 13, 8)
PADDING = 4
OPTIONS = [
    dict(zip(("position", "norm", "mlp", "nheads_kv", "tie_embeddings", "bias"), values, strict=True))
    for values in itertools.product(Position, Norm, Mlp, (None, 2), (True, False), (True, False))
]
Batch = tuple[Tensor, Tensor, Tensor, Tensor, int]


def build(config: GPTConfig = TINY, dtype: torch.dtype = torch.float64, **changes: object) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(config, **changes), reference_attention).to(dtype)


def pack(
    documents: list[Tensor], padding: int = 0, max_seqlen: int = 16, pad_id: int = 0, fixed: int | None = None
) -> Batch:
    """(tokens, targets, positions, cu_seqlens, max_seqlen) of documents given as n + 1 ids each.

    fixed: length of cu_seqlens, so that batches of different documents have the same shapes.
    """
    fill = torch.full((padding,), pad_id)
    tokens = torch.cat([d[:-1] for d in documents] + [fill])
    targets = torch.cat([d[1:] for d in documents] + [torch.full((padding,), -100)])
    lengths = [len(d) - 1 for d in documents]
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in (*lengths, padding)])
    limits = [0, *itertools.accumulate(lengths)]
    repeats = 3 if fixed is None else fixed - len(limits)
    cu_seqlens = torch.tensor(limits + [limits[-1]] * repeats, dtype=torch.int32)
    return tokens, targets, positions, cu_seqlens, max_seqlen


def documents(seed: int = 0, low: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, 61, (n + 1,), generator=generator) for n in LENGTHS]


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(str(getattr(v, "value", v)) for v in o.values()))
def test_packed_equals_documents_one_by_one(options: dict) -> None:
    model, docs = build(**options), documents()
    alone = [model.loss(*pack([d])) for d in docs]
    torch.stack(alone).sum().backward()
    expected = {name: g.clone() for name, g in gradients(model).items()}
    model.zero_grad()
    packed = model.loss(*pack(docs, PADDING))
    packed.backward()
    assert packed.dtype == torch.float64
    torch.testing.assert_close(packed, torch.stack(alone).sum(), rtol=1e-10, atol=0)
    assert set(gradients(model)) == set(expected) == {name for name, _ in model.named_parameters()}
    for name, gradient in gradients(model).items():
        scale = expected[name].abs().max().item()
        # the key's bias shifts all scores of a query alike: its gradient is 0 in exact arithmetic
        torch.testing.assert_close(gradient, expected[name], rtol=1e-10, atol=1e-10 * scale + 1e-13, msg=name)


def test_loss_equals_cross_entropy_of_the_logits() -> None:
    model = build()
    batch = pack(documents(), PADDING)
    hidden = model(batch[0], *batch[2:])
    expected = F.cross_entropy(model.logits(hidden), batch[1], ignore_index=-100, reduction="sum")
    torch.testing.assert_close(model.loss(*batch), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("position", list(Position))
def test_a_document_does_not_see_its_neighbours(position: Position) -> None:
    model, docs = build(dtype=torch.float32, position=position), documents()
    changed = [documents(seed=1)[0], *docs[1:]]
    before, after = (model(b[0], *b[2:]) for b in (pack(docs, PADDING), pack(changed, PADDING)))
    first, real = LENGTHS[0], sum(LENGTHS)
    assert not torch.equal(before[:first], after[:first])
    assert torch.equal(before[first:real], after[first:real])


def test_a_token_does_not_see_the_future() -> None:
    model, docs = build(dtype=torch.float32), documents()
    changed = [*docs[:2], docs[2].clone(), docs[3]]
    changed[2][6] = (changed[2][6] + 1) % 61
    before, after = (model(b[0], *b[2:]) for b in (pack(docs), pack(changed)))
    at = LENGTHS[0] + LENGTHS[1] + 6
    assert torch.equal(before[:at], after[:at])
    assert not torch.equal(before[at:], after[at:])


@pytest.mark.parametrize(("position", "norm"), [(Position.rotary, Norm.rmsnorm), (Position.learned, Norm.layernorm)])
def test_padding_gets_no_gradient_and_its_nan_goes_nowhere(position: Position, norm: Norm) -> None:
    model = build(position=position, norm=norm, tie_embeddings=False)
    docs = documents(low=1)  # id 0 occurs in padding alone
    model.loss(*pack(docs, PADDING, pad_id=0)).backward()
    clean = {name: g.clone() for name, g in gradients(model).items()}
    assert clean["embedding.weight"][0].abs().max() == 0

    model.zero_grad()
    with torch.no_grad():
        model.embedding.weight[0] = torch.nan
    loss = model.loss(*pack(docs, PADDING, pad_id=0))
    loss.backward()
    assert loss.isfinite()
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, clean[name]), name


@pytest.mark.parametrize("position", list(Position))
def test_positions_of_padding_do_not_matter(position: Position) -> None:
    model = build(position=position)
    tokens, targets, positions, cu_seqlens, max_seqlen = pack(documents(), PADDING)
    beyond = positions.clone()
    beyond[-PADDING:] = 10**6
    expected = model.loss(tokens, targets, positions, cu_seqlens, max_seqlen)
    assert torch.equal(model.loss(tokens, targets, beyond, cu_seqlens, max_seqlen), expected)


def test_a_batch_of_padding_alone_costs_nothing() -> None:
    model = build()
    tokens = torch.zeros(6, dtype=torch.int64)
    cu_seqlens = torch.zeros(4, dtype=torch.int32)
    loss = model.loss(tokens, torch.full((6,), -100), torch.zeros(6, dtype=torch.int32), cu_seqlens, 16)
    loss.backward()
    assert loss == 0
    assert all(g.abs().max() == 0 for g in gradients(model).values())


def test_activation_checkpointing_is_bit_identical() -> None:
    model = build(dtype=torch.float32, dropout=0.2)
    results = []
    for switch in (False, True):
        model.activation_checkpointing = switch
        model.zero_grad()
        torch.manual_seed(3)
        loss = model.loss(*pack(documents(), PADDING))
        loss.backward()
        results.append((loss.detach(), {name: g.clone() for name, g in gradients(model).items()}))
    (plain_loss, plain), (checkpointed_loss, checkpointed) = results
    assert torch.equal(plain_loss, checkpointed_loss)
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def test_checkpointing_recomputes_each_block_once() -> None:
    calls = 0

    def counting(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        nonlocal calls
        calls += 1
        return reference_attention(q, k, v, cu_seqlens, max_seqlen)

    model = GPT(TINY, counting, activation_checkpointing=True)
    model.loss(*pack(documents())).backward()
    assert calls == 2 * TINY.n_layer


@pytest.mark.parametrize("position", list(Position))
def test_every_part_compiles_once_and_packed_batches_compile_nothing_again(position: Position) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = build(dtype=torch.float32, position=position)
    lengths = [LENGTHS, (16, 12), (1,) * 20, ()]  # one T, other documents and other amounts of padding
    batches = [pack(cut(n), 28 - sum(n), fixed=24) for n in lengths]
    expected = [losses_and_gradients(model, batch) for batch in batches]
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model.compile(backend=counter)
    for batch, (loss, grads) in zip(batches, expected, strict=True):
        compiled_loss, compiled = losses_and_gradients(model, batch)
        torch.testing.assert_close(compiled_loss, loss)
        for name, gradient in compiled.items():
            torch.testing.assert_close(gradient, grads[name], rtol=1e-4, atol=1e-5, msg=name)
    assert counter.frame_count == 5, "embedding, the first block, the others, final norm, softmax"


def test_a_block_breaks_around_an_attention_that_cannot_be_traced() -> None:
    def reads_the_lengths(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        assert len(cu_seqlens.tolist()) > 1
        return reference_attention(q, k, v, cu_seqlens, max_seqlen)

    model = build(dtype=torch.float32)
    expected = model.loss(*pack(documents(), PADDING))
    model.attention = reads_the_lengths
    torch._dynamo.reset()
    model.compile(backend="aot_eager")
    torch.testing.assert_close(model.loss(*pack(documents(), PADDING)), expected)


def test_embeddings_of_one_id_are_added_up_in_one_order() -> None:
    """Through an operator that a compiler leaves alone."""
    ids, grad = torch.tensor([3, 0, 3, 3]), torch.randn(4, 5)
    torch.library.opcheck(torch.ops.gpt.embedding_backward, (grad, ids, 6))
    expected = torch.zeros(6, 5).index_add(0, ids, grad)
    torch.testing.assert_close(torch.ops.gpt.embedding_backward(grad, ids, 6), expected)
    model = build(dtype=torch.float32, position=Position.learned)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model.compile(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    model.loss(*pack(documents(), PADDING)).backward()
    calls = [name for graph in graphs for name in operators(graph.graph)]
    assert calls.count("gpt.embedding_backward.default") == 2, "tokens and positions"
    assert not [name for name in calls if "index_put" in name or "scatter" in name or "embedding_dense" in name]


def cut(lengths: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(61, (n + 1,), generator=generator) for n in lengths]


def losses_and_gradients(model: GPT, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.loss(*batch)
    loss.backward()
    return loss.detach(), {name: g.clone() for name, g in gradients(model).items()}


def block_graphs(model: GPT, batch: Batch) -> tuple[torch.fx.Graph, torch.fx.Graph]:
    """A block's forward and backward graph under autocast, as Inductor lowers them."""
    from functorch.compile import make_boxed_func
    from torch._inductor.compile_fx import compile_fx

    graphs: dict[bool, torch.fx.Graph] = {}

    def keep(graph: torch.fx.GraphModule, inputs: object, is_backward: bool = False, **options: object) -> object:
        graphs[is_backward] = graph.graph
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=lambda graph, inputs: compile_fx(graph, inputs, inner_compile=keep))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(*batch)
    loss.backward()
    return graphs[False], graphs[True]


def operators(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def test_qkv_goes_into_fa2_packed_and_its_gradient_comes_out_packed() -> None:
    model, batch = build(dtype=torch.float32, position=Position.learned, nheads_q=3), pack(documents(), PADDING)
    expected = losses_and_gradients(model, batch)
    model.attention = fa2_attention
    loss, grads = losses_and_gradients(model, batch)
    assert torch.equal(loss, expected[0])
    assert all(torch.equal(grads[name], expected[1][name]) for name in grads)
    forward, backward = block_graphs(model, batch)
    assert "fa2.bwd_varlen_qkvpacked.default" in operators(backward)
    assert not [name for name in operators(forward) + operators(backward) if "cat" in name or "clone" in name]


def test_a_compiled_block_keeps_nothing_as_wide_as_its_input_in_fp32() -> None:
    model = build(dtype=torch.float32, position=Position.learned)
    forward, _ = block_graphs(model, pack(documents(), PADDING))
    kept = [node.meta["val"] for node in forward.output_node().args[0]]
    wide = [t for t in kept if isinstance(t, Tensor) and t.shape[0] == sum(LENGTHS) + PADDING and t.shape[-1] > 1]
    assert {t.dtype for t in wide} == {torch.bfloat16}


@pytest.mark.parametrize("position", list(Position))
def test_gradients_of_q_k_v_are_put_together_in_one_copy(position: Position) -> None:
    model = build(dtype=torch.float32, position=position, nheads_kv=2)
    model.attention = fa2_attention
    _, backward = block_graphs(model, pack(documents(), PADDING))
    halves = 2 if position is Position.rotary else 0  # rotation puts its halves together, inside a fused kernel
    assert operators(backward).count("aten.cat.default") == 1 + halves


@pytest.mark.parametrize("residual_fp32", [False, True])
@pytest.mark.parametrize("norm", list(Norm))
def test_the_residual_stream_is_in_the_autocast_dtype_unless_told_otherwise(residual_fp32: bool, norm: Norm) -> None:
    model = build(dtype=torch.float32, residual_fp32=residual_fp32, norm=norm)
    seen = []
    for module in (*model.blocks, model.norm):
        module.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    batch = pack(documents(), PADDING)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model(batch[0], *batch[2:])
    assert set(seen) == {torch.float32 if residual_fp32 else torch.bfloat16}
    assert hidden.dtype == torch.bfloat16, "as the loss's products read it"


def test_training_with_a_bf16_residual_stream_stays_within_bf16_noise() -> None:
    """100 steps: no farther from fp32 training than twice the distance of autocast with an fp32 stream, in the mean."""

    def curve(autocast: bool, **changes: object) -> Tensor:
        model = build(dtype=torch.float32, init_std=0.02, position=Position.learned, **changes)
        optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        losses = []
        for step in range(100):
            docs = documents(seed=step % 10)
            batch = pack([d.sort().values for d in docs], PADDING)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model.loss(*batch)
            (loss / sum(LENGTHS)).backward()
            optimiser.step()
            optimiser.zero_grad()
            losses.append(loss.detach() / sum(LENGTHS))
        return torch.stack(losses)

    exact, wide, narrow = curve(False), curve(True, residual_fp32=True), curve(True)
    assert exact[-10:].mean() < 0.8 * exact[:10].mean(), "it learns"
    noise = (wide - exact).abs().mean()
    assert 0 < (narrow - exact).abs().mean() < 2 * noise + 1e-3
    assert (narrow[-10:].mean() - exact[-10:].mean()).abs() < 0.01


def test_the_compiled_gelu_is_gelu_with_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(-30, 30, 2001, dtype=torch.float64).requires_grad_()
    expected = F.gelu(x, approximate="tanh")
    (expected_grad,) = torch.autograd.grad(expected.sum(), x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-3)):
        narrow = x.detach().to(dtype).requires_grad_()
        y = gelu_tanh(narrow)
        assert y.dtype == dtype
        (grad,) = torch.autograd.grad(y.sum(), narrow)
        if dtype == torch.bfloat16:  # judged where the rounded x lies
            expected = F.gelu(narrow.double(), approximate="tanh")
            (expected_grad,) = torch.autograd.grad(expected.sum(), narrow)
        torch.testing.assert_close(y.double(), expected.double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(grad.double(), expected_grad.double(), rtol=tolerance, atol=2 * tolerance)


def test_autocast_keeps_fp32_gradients_and_the_loss_close() -> None:
    model = build(dtype=torch.float32, mlp=Mlp.swiglu, norm=Norm.rmsnorm)
    batch = pack(documents(), PADDING)
    exact = model.loss(*batch)
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        seen.extend((q.dtype, k.dtype, v.dtype))
        return reference_attention(q, k, v, cu_seqlens, max_seqlen)

    model.attention = spy
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(*batch)
    loss.backward()
    assert set(seen) == {torch.bfloat16}
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.02, atol=0)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_q_k_v_are_views_of_one_projection() -> None:
    storages = set()

    def spy(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        assert (q.shape[1:], k.shape[1:], v.shape[1:]) == ((4, 6), (2, 6), (2, 6))
        storages.add(tuple(t.untyped_storage().data_ptr() for t in (q, k, v)))
        return reference_attention(q, k, v, cu_seqlens, max_seqlen)

    model = GPT(replace(TINY, position=Position.learned, nheads_kv=2, n_layer=1), spy)
    batch = pack(documents())
    model(batch[0], *batch[2:])
    (pointers,) = storages
    assert len(set(pointers)) == 1


def test_dropout_acts_in_training_only() -> None:
    model = build(dropout=0.5)
    batch = pack(documents())
    assert not torch.equal(model.loss(*batch), model.loss(*batch))
    model.eval()
    assert torch.equal(model.loss(*batch), model.loss(*batch))


def test_padded_vocabulary_does_not_change_the_loss() -> None:
    padded, exact = build(), build(vocab_multiple=1)
    state = padded.state_dict()
    state["embedding.weight"] = state["embedding.weight"][:61]
    exact.load_state_dict(state)
    batch = pack(documents())
    torch.testing.assert_close(padded.loss(*batch), exact.loss(*batch), rtol=1e-12, atol=0)
    padded.loss(*batch).backward()
    assert padded.embedding.weight.grad is not None
    assert padded.embedding.weight.shape[0] == 64
    assert padded.embedding.weight.grad[61:].abs().max() == 0


GPT3 = {  # layers, width, heads
    125e6: (12, 768, 12),
    350e6: (24, 1024, 16),
    760e6: (24, 1536, 16),
    1.3e9: (24, 2048, 16),
    2.7e9: (32, 2560, 32),
}


@pytest.mark.parametrize("nominal", GPT3)
def test_parameter_count_of_gpt3(nominal: float) -> None:
    n_layer, d_model, nheads_q = GPT3[nominal]
    config = GPTConfig(50257, n_layer=n_layer, d_model=d_model, nheads_q=nheads_q, position=Position.learned)
    with torch.device("meta"):
        model = GPT(config, reference_attention)
    # a layer: 12 d² weights, 9 d biases, 4 d of norms; then final norm, vocabulary padded to 50304, 2048 positions
    formula = n_layer * (12 * d_model**2 + 13 * d_model) + 2 * d_model + (50304 + 2048) * d_model
    assert model.n_params == formula == count_params(config)
    assert model.n_params == pytest.approx(nominal, rel=0.02)


@pytest.mark.parametrize("options", OPTIONS[::5])
def test_count_params_matches_the_model(options: dict) -> None:
    model = build(**options)
    assert count_params(model.config) == model.n_params


def test_initialisation() -> None:
    config = GPTConfig(
        vocab_size=512, n_layer=8, d_model=256, nheads_q=4, tie_embeddings=False, position=Position.learned
    )
    torch.manual_seed(0)
    model = GPT(config, reference_attention)
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            deep = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if deep else 0.02
            assert p.std().item() == pytest.approx(std, rel=0.03), name
            assert abs(p.mean().item()) < 0.05 * std, name
        else:
            assert torch.equal(p, torch.full_like(p, 1.0 if name.endswith("weight") else 0.0)), name


def test_meta_model_comes_to_life_by_reset_parameters() -> None:
    with torch.device("meta"):
        model = GPT(TINY, reference_attention)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.reset_parameters()
    expected = build(dtype=torch.float32)
    batch = pack(documents())
    assert model.loss(*batch).item() == pytest.approx(expected.loss(*batch).item(), rel=0.5)
    assert not [n for n, _ in model.named_buffers()], "a buffer would stay uninitialised"


def test_decay_groups_split_every_parameter_by_rank() -> None:
    model = build(position=Position.learned)
    matrices, others = model.decay_groups()
    names = {id(p): name for name, p in model.named_parameters()}
    assert len(matrices) + len(others) == len(names)
    assert all(names[id(p)].endswith("bias") or "norm" in names[id(p)] for p in others)
    assert {"embedding.weight", "position_embedding.weight"} <= {names[id(p)] for p in matrices}


def test_max_seqlen_beyond_the_positions_is_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"model.max_positions must be at least max_seqlen \(33\), got 32"):
        model.loss(*pack(documents(), max_seqlen=33))


def test_rotary_scores_depend_on_distance_alone() -> None:
    from model.rope import rotary_table, rotate

    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, generator=generator, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> Tensor:
        cos, sin = rotary_table(torch.tensor([at_q, at_k]), 8, 10_000.0)
        return (rotate(q, cos[:1], sin[:1]) * rotate(k, cos[1:], sin[1:])).sum()

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-5, atol=0)
    assert not torch.isclose(score(7, 3), score(7, 4), rtol=1e-3)

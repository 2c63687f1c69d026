"""fa2.layers.MultiheadAttention against torch.nn.MultiheadAttention: the same weights, outputs and gradients, and the
README's examples as they stand."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import fa2
from fa2.layers import MultiheadAttention

README = (Path(__file__).resolve().parents[2] / "fa2" / "README.md").read_text(encoding="utf-8")
SECTION = README.split("\n## A module\n")[1].split("\n## ")[0]
EXAMPLES = re.findall(r"^```python\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE)

E, HEADS = 48, 4
LENGTHS = [7, 1, 12, 5]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def cu(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def pair(bias: bool = True, **mask) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module and ours, in float64, with its weights, of which no bias is zero."""
    theirs = nn.MultiheadAttention(E, HEADS, bias=bias, batch_first=True, dtype=torch.float64)
    if bias:
        nn.init.normal_(theirs.in_proj_bias)
        nn.init.normal_(theirs.out_proj.bias)
    ours = MultiheadAttention(E, HEADS, bias=bias, dtype=torch.float64, **mask)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def hidden(seqlen: int, causal: bool, window: tuple[int, int]) -> Tensor | None:
    """torch's attn_mask: True where query i must not see key j."""
    i, j = torch.arange(seqlen)[:, None], torch.arange(seqlen)
    left, right = window[0], 0 if causal else window[1]
    mask = torch.zeros(seqlen, seqlen, dtype=torch.bool)
    if left >= 0:
        mask |= j < i - left
    if right >= 0:
        mask |= j > i + right
    return mask if mask.any() else None


def agree(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        torch.testing.assert_close(
            value, wanted[name], rtol=0, atol=1e-12 * wanted[name].detach().abs().max().item(), msg=name
        )


def gradients(module: nn.Module, x: Tensor, out: Tensor, dout: Tensor) -> dict[str, Tensor]:
    names = [name for name, _ in module.named_parameters()]
    values = torch.autograd.grad(out, [x, *module.parameters()], dout)
    return dict(zip(["x", *names], values, strict=True))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("causal", "window"), [(False, (-1, -1)), (True, (-1, -1)), (False, (3, 1)), (True, (4, -1))], ids=str
)
def test_packed_tokens_equal_torchs_padded_batch(bias, causal, window):
    theirs, ours = pair(bias, causal=causal, window_size=window)
    valid = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    padded = draw(len(LENGTHS), max(LENGTHS), E).requires_grad_()
    mask = hidden(max(LENGTHS), causal, window)
    want, _ = theirs(padded, padded, padded, key_padding_mask=~valid, attn_mask=mask, need_weights=False)

    packed, indices, cu_seqlens, longest, _ = fa2.unpad_input(padded.detach(), valid)
    packed.requires_grad_()
    out = ours(packed, cu_seqlens, longest)
    assert out.shape == packed.shape
    agree({"out": out}, {"out": want[valid]})

    dout = draw(*packed.shape, seed=1)
    wanted = gradients(theirs, padded, want[valid], dout)
    wanted["x"] = wanted["x"][valid]
    agree(gradients(ours, packed, out, dout), wanted)
    assert torch.equal(fa2.pad_input(out, indices, *valid.shape)[valid], out)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_dense_equals_packed_of_equal_lengths(kv_heads):
    ours = MultiheadAttention(E, HEADS, kv_heads, causal=True, window_size=(5, -1), dtype=torch.float64)
    x = draw(3, 9, E).requires_grad_()
    dense = ours(x)
    for longest in (9, None, 1000):
        packed = ours(x.flatten(0, 1), cu([9] * 3), longest)
        assert torch.equal(packed, dense.flatten(0, 1))
    dout = draw(*dense.shape, seed=1)
    agree(gradients(ours, x, packed, dout.flatten(0, 1)), gradients(ours, x, dense, dout))


def test_dense_equals_torch():
    theirs, ours = pair()
    x = draw(2, 9, E).requires_grad_()
    want, _ = theirs(x, x, x, need_weights=False)
    dout = draw(*want.shape, seed=1)
    agree(gradients(ours, x, ours(x), dout), gradients(theirs, x, want, dout))


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_grouped_heads_equal_expanded_weights(kv_heads):
    grouped = MultiheadAttention(E, HEADS, kv_heads, causal=True, dtype=torch.float64)
    nn.init.normal_(grouped.in_proj_bias)
    full = MultiheadAttention(E, HEADS, causal=True, dtype=torch.float64)

    def expanded(rows: Tensor) -> Tensor:
        heads = rows.unflatten(0, (-1, E // HEADS)).split([HEADS, kv_heads, kv_heads])
        return torch.cat([heads[0], *(part.repeat_interleave(HEADS // kv_heads, 0) for part in heads[1:])]).flatten(
            0, 1
        )

    full.load_state_dict({n: expanded(p) if n.startswith("in_proj") else p for n, p in grouped.state_dict().items()})
    x, dout = draw(sum(LENGTHS), E).requires_grad_(), draw(sum(LENGTHS), E, seed=1)
    out, want = (module(x, cu(LENGTHS), max(LENGTHS)) for module in (grouped, full))
    agree({"out": out}, {"out": want})
    # The gradient of a row is the sum over its copies, which autograd takes through `expanded`.
    leaves = {name: getattr(grouped, name).detach().requires_grad_() for name in ("in_proj_weight", "in_proj_bias")}
    replaced = {name: expanded(leaf) for name, leaf in leaves.items()}
    through = torch.func.functional_call(full, replaced, (x, cu(LENGTHS), max(LENGTHS)))
    wanted = dict(zip(leaves, torch.autograd.grad(through, leaves.values(), dout, retain_graph=True), strict=True))
    got = gradients(grouped, x, out, dout)
    agree({name: got[name] for name in leaves}, wanted)


def test_separate_projections_become_one():
    """The conversion that the docstring gives, against projections applied by hand."""
    q, k, v = nn.Linear(E, E), nn.Linear(E, E // 2), nn.Linear(E, E // 2)
    ours = MultiheadAttention(E, HEADS, HEADS // 2, causal=True)
    with torch.no_grad():
        ours.in_proj_weight.copy_(torch.cat([q.weight, k.weight, v.weight]))
        ours.in_proj_bias.copy_(torch.cat([q.bias, k.bias, v.bias]))
    x = draw(2, 9, E, dtype=torch.float32)
    heads = [project(x).unflatten(-1, (-1, E // HEADS)) for project in (q, k, v)]
    torch.testing.assert_close(ours(x), ours.out_proj(fa2.flash_attn_func(*heads, causal=True).flatten(-2)))


@pytest.mark.parametrize("bias", [True, False])
def test_the_same_seed_gives_torchs_parameters_and_the_state_dict_goes_both_ways(bias):
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, HEADS, bias=bias)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, HEADS, bias=bias)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    other = MultiheadAttention(E, HEADS, bias=bias)
    other.load_state_dict(ours.state_dict())
    theirs.load_state_dict(other.state_dict())
    x = draw(1, 5, E, dtype=torch.float32)
    assert torch.equal(other(x), ours(x))
    assert torch.equal(copy.deepcopy(ours)(x), ours(x))


def test_device_and_dtype_are_those_of_the_parameters():
    ours = MultiheadAttention(E, HEADS, 2, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in ours.parameters()} == {("meta", torch.bfloat16)}
    x = torch.empty(2, 5, E, device="meta", dtype=torch.bfloat16)
    assert ours(x).shape == x.shape
    with torch.autocast("cpu", torch.bfloat16):
        out = MultiheadAttention(E, HEADS)(draw(5, E, dtype=torch.float32), cu([5]))
    assert out.dtype == torch.bfloat16


def test_sequences_stay_apart_and_tokens_past_the_end_give_the_bias():
    ours = MultiheadAttention(E, HEADS, causal=True)
    nn.init.normal_(ours.out_proj.bias)
    x = draw(sum(LENGTHS) + 3, E, dtype=torch.float32)
    out = ours(x, cu(LENGTHS), max(LENGTHS))
    changed = x.clone()
    changed[:7] = 1
    assert torch.equal(ours(changed, cu(LENGTHS), max(LENGTHS))[7:], out[7:])
    assert torch.equal(out[-3:], ours.out_proj.bias.expand(3, E))


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_repeats_bit_for_bit(kv_heads):
    ours = MultiheadAttention(E, HEADS, kv_heads, causal=True, deterministic=True)
    x, dout = draw(25, E, dtype=torch.float32).requires_grad_(), draw(25, E, seed=1, dtype=torch.float32)
    first, second = (gradients(ours, x, ours(x, cu(LENGTHS)), dout) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("packed", [True, False])
def test_compiles_into_one_graph(kv_heads, packed):
    torch.compiler.reset()
    ours = MultiheadAttention(E, HEADS, kv_heads, causal=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for lengths in (LENGTHS, [5, 9, 2, 9]):
        x = draw(25, E, dtype=torch.float32).requires_grad_()
        arguments = (x, cu(lengths), 32) if packed else (x.unflatten(0, (5, 5)),)
        out, want = compiled(*arguments), ours(*arguments)
        torch.testing.assert_close(out, want)
        dout = draw(*want.shape, seed=1, dtype=torch.float32)
        got, wanted = gradients(ours, x, out, dout), gradients(ours, x, want, dout)
        for name, value in got.items():
            torch.testing.assert_close(value, wanted[name])


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_any_number_of_tokens_is_two_graphs(kv_heads):
    torch.compiler.reset()
    ours = MultiheadAttention(E, HEADS, kv_heads, causal=True)
    graphs = []
    compiled = torch.compile(ours, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward)
    for total in (10, 20, 31, 47):
        x, lengths = draw(total, E, dtype=torch.float32), cu([7, total - 7])
        torch.testing.assert_close(compiled(x, lengths), ours(x, lengths))
    assert len(graphs) == 2, "one for the first length, one for all others"


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu(kv_heads, compiled):
    """bfloat16 under autocast on the kernels, against float64 on the CPU."""
    exact = MultiheadAttention(256, HEADS, kv_heads, causal=True, dtype=torch.float64)
    ours = MultiheadAttention(256, HEADS, kv_heads, causal=True, device="cuda")
    ours.load_state_dict(exact.state_dict())
    x = draw(sum(LENGTHS), 256).requires_grad_()
    near = x.detach().float().cuda().requires_grad_()
    dout = draw(*x.shape, seed=1)
    call = torch.compile(ours, fullgraph=True) if compiled else ours
    with torch.autocast("cuda", torch.bfloat16):
        out = call(near, cu(LENGTHS).cuda(), max(LENGTHS))
    want = exact(x, cu(LENGTHS), max(LENGTHS))
    got = {"out": out, **gradients(ours, near, out, dout.to(out))}
    for name, wanted in {"out": want, **gradients(exact, x, want, dout)}.items():
        error = (got[name].detach().cpu().double() - wanted).abs().max()
        assert error <= 0.03 * wanted.detach().abs().max(), name


def test_a_step_moves_every_parameter():
    ours = MultiheadAttention(E, HEADS, 2)
    before = copy.deepcopy(ours.state_dict())
    optimiser = torch.optim.SGD(ours.parameters(), lr=0.1)
    x = draw(25, E, dtype=torch.float32)
    mse_loss(ours(x, cu(LENGTHS)), x).backward()
    optimiser.step()
    k_bias = slice(E, E + E // 2)  # softmax does not see a constant added to every score of a row
    for name, value in ours.state_dict().items():
        moved = value != before[name]
        if name == "in_proj_bias":
            moved[k_bias] = True
        assert moved.float().mean() > 0.9, name


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 4), {}, "embed_dim must be a positive integer, got 0"),
        ((48, 0), {}, "num_heads must be a positive integer, got 0"),
        ((48, 4.0), {}, r"num_heads must be a positive integer, got 4\.0"),
        ((50, 4), {}, r"embed_dim must be a multiple of num_heads \(4\), got 50"),
        ((48, 4, 3), {}, r"num_kv_heads must be a divisor of num_heads \(4\), got 3"),
        ((48, 4, 8), {}, r"num_kv_heads must be a divisor of num_heads \(4\), got 8"),
        ((48, 4, 0.1), {}, r"num_kv_heads must be a positive integer, got 0\.1"),
        ((48, 4), {"dropout": 0.1}, r"dropout must be 0\.0 \(attention dropout is not supported\), got 0\.1"),
        ((48, 4), {"window_size": 3}, r"window_size must be two integers \(left, right\), got 3"),
        ((48, 4), {"window_size": (-2, 0)}, r"window_size must be at least -1 on both sides .* got \(-2, 0\)"),
    ],
    ids=str,
)
def test_what_a_module_refuses(arguments, options, message):
    with pytest.raises(ValueError, match=f"^fa2: {message}$"):
        MultiheadAttention(*arguments, **options)


@pytest.mark.parametrize(
    ("shape", "arguments", "message"),
    [
        ((5, 47), (cu([5]),), r"x must be of shape \(total, embed_dim\) or .* with embed_dim 48, got \(5, 47\)"),
        ((48,), (cu([1]),), r"x must be of shape .* got \(48,\)"),
        ((5, 48), (), r"cu_seqlens must be given for x of shape \(total, embed_dim\), got None"),
        ((1, 5, 48), (cu([5]),), r"cu_seqlens must be None for x of shape .* got Tensor"),
        ((1, 5, 48), (None, 5), r"max_seqlen must be None for x of shape .* got int"),
        ((5, 48), (cu([5]).long(),), r"cu_seqlens(_q)? must be int32, got torch\.int64"),
        ((5, 48), (cu([6]),), r"cu_seqlens(_q)?\[-1\] must be at most the number of tokens \(5\), got 6"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_what_a_call_refuses(shape, arguments, message, kv_heads):
    with pytest.raises(ValueError, match=f"^fa2: {message}$"):
        MultiheadAttention(E, HEADS, kv_heads)(torch.zeros(shape), *arguments)


def test_it_says_what_it_is():
    text = repr(MultiheadAttention(E, HEADS, 2, causal=True))
    assert "embed_dim=48, num_heads=4, num_kv_heads=2, bias=True, causal=True, window_size=(-1, -1)" in text


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_the_readmes_examples_run(number):
    assert len(EXAMPLES) == 2
    exec(EXAMPLES[number], {})

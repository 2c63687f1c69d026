"""Products from 16-bit copies: autocast's results, gradients added up in fp32 where the optimiser looks for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from model.attention import reference_attention
from model.config import GPTConfig, Mlp, Position
from model.gpt import GPT
from model.linear import Linear, WeightCopies, add_product
from tests.model.accumulate import accumulate

CONFIG = GPTConfig(
    vocab_size=61, vocab_multiple=16, max_positions=32, n_layer=2, d_model=24, nheads_q=3, position=Position.learned
)
Batch = tuple[Tensor, Tensor, Tensor, Tensor, int]


def build(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(replace(CONFIG, **changes), reference_attention)


class CalledOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.added = False  # whether gpt.linear was given something to add

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        self.added |= str(func) == "gpt.linear.default" and args[3] is not None
        return func(*args, **(kwargs or {}))


def batch(seed: int, lengths: tuple[int, ...] = (9, 7)) -> Batch:
    ids = torch.randint(61, (17,), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    cu_seqlens = torch.zeros(6, dtype=torch.int32)
    cu_seqlens[1 : len(lengths) + 1] = torch.tensor(lengths).cumsum(0)
    cu_seqlens[len(lengths) + 1 :] = sum(lengths)
    return ids[:-1], ids[1:], positions, cu_seqlens, 16


def test_add_product_is_unrounded_and_in_place() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(5, 8, generator=generator).bfloat16() for _ in range(2))
    out = torch.full((8, 8), 3.0)
    address = out.data_ptr()
    add_product(out, a.t(), b)
    assert out.data_ptr() == address
    torch.testing.assert_close(out, 3 + a.t().float() @ b.float(), rtol=1e-6, atol=1e-6)
    torch.library.opcheck(torch.ops.gpt.add_product_, (out, a.t(), b))


def test_losses_are_autocasts_bit_for_bit_and_gradients_are_closer_to_exact() -> None:
    plain, copied, exact = build(), build(), build().double()
    batches = [batch(s) for s in range(3)]
    losses, rounded = accumulate(plain, batches, "cpu")
    copies = WeightCopies(copied, torch.bfloat16)
    buffers = {name: p.grad for name, p in copied.named_parameters()}
    copied_losses, unrounded = accumulate(copied, batches, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(losses, copied_losses, strict=True))
    assert rounded.keys() == unrounded.keys()
    for inputs in batches:
        exact.loss(*inputs).backward()
    for name, p in exact.named_parameters():
        assert p.grad is not None
        error, before = ((g[name] - p.grad).norm() for g in (unrounded, rounded))
        assert error < 0.02 * p.grad.norm() + 1e-6, name
        assert error < 1.1 * before + 1e-6, name
    assert all(p.grad is buffers[name] for name, p in copied.named_parameters())
    copies.zero_gradients()
    assert all(p.grad is buffers[name] and p.grad.abs().max() == 0 for name, p in copied.named_parameters())


def test_copies_follow_the_parameters_and_are_no_part_of_the_model() -> None:
    model = build()
    names = list(model.state_dict())
    copies = WeightCopies(model, torch.bfloat16)
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.mul_(2)
    copies.refresh()
    for module in model.modules():
        if isinstance(module, Linear):
            assert module.copy is not None
            assert torch.equal(module.copy, module.weight.detach().bfloat16())
    assert list(model.state_dict()) == names
    assert not list(model.buffers())
    copies.release()
    assert all(p.grad is None for p in model.parameters())
    expected = accumulate(build(), [batch(0)], "cpu")[0]
    with torch.no_grad():
        model.blocks[0].mlp.up.weight.div_(2)
    assert torch.equal(accumulate(model, [batch(0)], "cpu")[0][0], expected[0])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_blocks_add_into_the_buffers_without_a_break_or_a_second_compilation(checkpointing: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model = build()
    model.activation_checkpointing = checkpointing
    copies = WeightCopies(model, torch.bfloat16)
    batches = [batch(0), batch(1, (3, 5, 4, 4)), batch(2, (16,))]
    losses, expected = accumulate(model, batches, "cpu")
    copies.zero_gradients()
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    model.compile(backend=counter)
    compiled_losses, compiled = accumulate(model, batches, "cpu")
    # with checkpointing a block takes what it needs in one tensor; otherwise the first block has no sum to make
    assert counter.frame_count == (4 if checkpointing else 5), "embedding, blocks, final norm, softmax"
    torch.testing.assert_close(compiled_losses, losses, rtol=1e-3, atol=0)
    for name, gradient in compiled.items():
        assert (gradient - expected[name]).norm() < 0.02 * expected[name].norm() + 1e-6, name


@pytest.mark.parametrize(
    "changes", [{}, {"bias": False}, {"mlp": Mlp.swiglu}, {"dropout": 1e-9}, {"residual_fp32": True}]
)
def test_sums_and_gelu_in_the_products_change_nothing(changes: dict[str, Any]) -> None:
    """As where cuBLASLt serves, with the operators' CPU kernels in its place. Dropout and an fp32 residual stream leave
    the sums outside.
    """
    plain, fused = build(**changes), build(**changes)
    batches = [batch(0), batch(1, (3, 5, 4, 4))]
    WeightCopies(plain, torch.bfloat16)
    WeightCopies(fused, torch.bfloat16)
    assert not any(module.served for module in fused.modules() if isinstance(module, Linear)), "on a CPU"
    for module in fused.modules():
        if isinstance(module, Linear):
            module.served = True
    losses, expected = accumulate(plain, batches, "cpu")
    with CalledOperators() as called:
        fused_losses, gradients = accumulate(fused, batches, "cpu")
    assert called.added == (not {"dropout", "residual_fp32"} & set(changes))
    assert "gpt.linear.default" in called.names
    assert "gpt.product.default" in called.names
    assert ("gpt.gelu_backward_product.default" in called.names) == ("mlp" not in changes)
    torch.testing.assert_close(fused_losses, losses, rtol=1e-6, atol=0)
    assert expected.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 0.01 * expected[name].norm(), name
    torch._dynamo.reset()
    fused.compile(backend="aot_eager")
    compiled_losses, compiled = accumulate(fused, batches, "cpu")
    torch.testing.assert_close(compiled_losses, losses, rtol=1e-3, atol=0)
    for name, gradient in compiled.items():  # added to those of before
        assert (gradient - 2 * expected[name]).norm() < 0.04 * expected[name].norm() + 1e-6, name


def test_nothing_is_timed_where_nothing_is_trained() -> None:
    """Each new number of tokens would be: a text that grows word by word has many."""
    model = build()
    WeightCopies(model, torch.bfloat16)
    for module in model.modules():
        if isinstance(module, Linear):
            module.served = True
    with torch.no_grad(), CalledOperators() as called, torch.autocast("cpu", torch.bfloat16):
        model.loss(*batch(0))
    assert not [name for name in called.names if name.startswith("gpt.linear")]


def test_products_with_epilogues_are_operators() -> None:
    dy, weight, up = (torch.randn(*shape) for shape in ((6, 3), (3, 5), (6, 5)))
    bias, addend = torch.randn(3), torch.randn(6, 3)
    torch.library.opcheck(torch.ops.gpt.gelu_backward_product, (dy, weight, up))
    leaf = up.clone().requires_grad_()
    F.gelu(leaf, approximate="tanh").backward(dy @ weight)
    torch.testing.assert_close(torch.ops.gpt.gelu_backward_product(dy, weight, up), leaf.grad)
    torch.library.opcheck(torch.ops.gpt.product, (dy, weight))
    torch.testing.assert_close(torch.ops.gpt.product(dy, weight), dy @ weight)
    for b in (bias, None):
        torch.library.opcheck(torch.ops.gpt.linear, (up, weight, b, addend))
        torch.library.opcheck(torch.ops.gpt.linear, (up, weight, b, None))
        torch.testing.assert_close(torch.ops.gpt.linear(up, weight, b, None), F.linear(up, weight, b))
        torch.library.opcheck(torch.ops.gpt.linear_gelu, (up, weight, b))
        y = F.linear(up, weight, b)
        torch.testing.assert_close(torch.ops.gpt.linear(up, weight, b, addend), y + addend)
        torch.testing.assert_close(torch.ops.gpt.linear_gelu(up, weight, b), (F.gelu(y, approximate="tanh"), y))


def test_without_copies_it_is_nn_linear() -> None:
    torch.manual_seed(0)
    ours = Linear(6, 4)
    torch.manual_seed(0)
    theirs = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    assert torch.equal(ours(x), theirs(x))
    assert list(ours.state_dict()) == list(theirs.state_dict())

"""The chunked loss is cross-entropy, with exact gradients and without the logits in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.loss import linear_cross_entropy, softmax_in_place, softmax_out_of_place


def operands(n_tokens: int, d: int, vocab: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n_tokens, d, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocab, d, generator=generator, dtype=dtype).requires_grad_()
    return hidden, weight, torch.randint(vocab, (n_tokens,), generator=generator)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, vocab_size: int | None = None) -> Tensor:
    return F.cross_entropy((hidden @ weight.t())[:, :vocab_size], targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
def test_gradcheck(chunk_tokens: int) -> None:
    hidden, weight, targets = operands(7, 4, 9)
    targets[[1, 5]] = -100
    targets[targets == 8] = 0
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, chunk_tokens, 8), (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [5, 16, 64])
@pytest.mark.parametrize("vocab_size", [None, 29])
def test_equals_cross_entropy(chunk_tokens: int, vocab_size: int | None) -> None:
    hidden, weight, targets = operands(33, 8, 32)
    targets = targets % 29
    targets[:16] = -100  # whole chunks without a target
    expected = plain(hidden, weight, targets, vocab_size)
    expected_grads = torch.autograd.grad(expected * 0.3, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens, vocab_size)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss * 0.3, (hidden, weight)), expected_grads, rtol=1e-10, atol=1e-12
    )


def test_all_ignored_is_exactly_zero() -> None:
    hidden, weight, _ = operands(6, 4, 8)
    loss = linear_cross_entropy(hidden, weight, torch.full((6,), -100), 4)
    loss.backward()
    assert loss == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_nan_at_ignored_rows_goes_nowhere(poison: float) -> None:
    hidden, weight, targets = operands(12, 4, 8)
    targets[::3] = -100
    clean = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets, 5), (hidden, weight))
    with torch.no_grad():
        hidden[::3] = poison
    loss = linear_cross_entropy(hidden, weight, targets, 5)
    assert loss.isfinite()
    poisoned = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_nan_at_a_valid_row_is_not_hidden() -> None:
    hidden, weight, targets = operands(4, 4, 8)
    with torch.no_grad():
        hidden[2] = torch.nan
    assert linear_cross_entropy(hidden, weight, targets, 2).isnan()


def test_one_input_needs_gradients() -> None:
    hidden, weight, targets = operands(6, 4, 8)
    expected = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    (only_hidden,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets, 4), hidden)
    (only_weight,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets, 4), weight)
    torch.testing.assert_close((only_hidden, only_weight), expected)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets, 4).requires_grad


def test_backward_twice_gives_the_same_and_double_backward_is_refused() -> None:
    hidden, weight, targets = operands(6, 4, 8)
    loss = linear_cross_entropy(hidden, weight, targets, 4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    (third,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        third.sum().backward()


def test_weight_gradient_is_accumulated_in_fp32() -> None:
    """1024 chunks of one row: a bf16 sum would lose small contributions, an fp32 one is as good as one product."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1024, 16, generator=generator).bfloat16()
    weight = torch.randn(8, 16, generator=generator, requires_grad=True)
    targets = torch.randint(8, (1024,), generator=generator)
    grads = []
    for chunk_tokens in (1, 1024):
        with torch.autocast("cpu", torch.bfloat16):
            loss = linear_cross_entropy(hidden.float(), weight, targets, chunk_tokens)
        assert loss.dtype == torch.float32
        grads.append(torch.autograd.grad(loss, weight)[0])
    assert grads[0].dtype == torch.float32
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_have_the_inputs_dtype(dtype: torch.dtype) -> None:
    hidden, weight, targets = operands(6, 4, 8, dtype)
    loss = linear_cross_entropy(hidden, weight, targets, 4)
    loss.backward()
    assert loss.dtype == torch.float32
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.dtype == weight.grad.dtype == dtype


def test_no_tensor_of_all_logits_exists() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            self.elements = max([self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor))])
            return out

    hidden, weight, targets = operands(256, 4, 128)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, targets, 16).backward()
    assert largest.elements == 16 * 128


@pytest.mark.parametrize(("columns", "vocab_size"), [(32, 32), (32, 29), (47, 29), (128, 128), (128, 70), (128, 64)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_softmax_for_a_compiler_is_the_one_in_place(dtype: torch.dtype, columns: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (4 * torch.randn(11, columns, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.randint(vocab_size, (11,), generator=generator)
    targets[[0, 5]] = -100
    logits[5] = torch.nan
    logits[6, :vocab_size] = torch.randn(vocab_size, generator=generator).to(dtype) - 1e5  # one part far below another
    logits[6, -1] = logits[6, 0] = 5.0
    nats, dlogits = softmax_out_of_place(logits, targets, vocab_size, dtype)
    expected_nats, expected = softmax_in_place(logits.clone(), targets, vocab_size, dtype)
    exact = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(nats, expected_nats, rtol=exact, atol=0)
    torch.testing.assert_close(dlogits[targets == -100], torch.zeros(2, columns, dtype=dtype), rtol=0, atol=0)
    valid = targets != -100
    tolerance = max(exact, torch.finfo(dtype).eps)
    torch.testing.assert_close(dlogits[valid], expected[valid], rtol=tolerance, atol=tolerance)


def test_chunks_are_equal_so_that_a_compiled_softmax_meets_one_shape() -> None:
    shapes = []

    def spy(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        shapes.append(logits.shape[0])
        return softmax_in_place(logits, *rest)  # type: ignore[arg-type]

    hidden, weight, targets = operands(33, 8, 32)
    loss = linear_cross_entropy(hidden, weight, targets, 16, softmax=spy)
    assert shapes == [11, 11, 11]
    torch.testing.assert_close(loss, plain(hidden, weight, targets), rtol=1e-12, atol=0)


def test_logits_in_the_autocast_dtype_are_as_close_as_torchs_own() -> None:
    seen = []

    def spy(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        seen.append(logits.dtype)
        return softmax_in_place(logits, *rest)  # type: ignore[arg-type]

    hidden, weight, targets = operands(64, 16, 32, torch.float32)
    exact = torch.autograd.grad(plain(hidden, weight, targets), (hidden, weight))
    with torch.autocast("cpu", torch.bfloat16):
        torchs = F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")
        fp32 = linear_cross_entropy(hidden, weight, targets, 16, softmax=spy)
        rounded = linear_cross_entropy(hidden, weight, targets, 16, softmax=spy, logits_fp32=False)
    assert seen == [torch.float32] * 4 + [torch.bfloat16] * 4
    torch.testing.assert_close(rounded, torchs, rtol=1e-3, atol=0)
    torch.testing.assert_close(rounded, fp32, rtol=2e-3, atol=0)
    for got, want in zip(torch.autograd.grad(rounded, (hidden, weight)), exact, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()


@pytest.mark.gpu
def test_cuda_memory_and_precision() -> None:
    n_tokens, d, vocab, chunk = 16384, 256, 32768, 1024
    hidden, weight, targets = (t.detach().cuda() for t in operands(n_tokens, d, vocab, torch.float32))
    hidden.mul_(0.1).requires_grad_()
    weight.mul_(0.1).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets, chunk)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 3 * chunk * vocab * 4 + 8 * (n_tokens + vocab) * d * 4 < n_tokens * vocab * 2
    exact = linear_cross_entropy(hidden.detach().double(), weight.detach().double().requires_grad_(), targets, chunk)
    assert loss.item() == pytest.approx(exact.item(), rel=1e-4)
    grads = torch.autograd.grad(exact, exact.grad_fn.next_functions[1][0].variable)  # type: ignore[union-attr]
    error = (weight.grad - grads[0]).norm() / grads[0].norm()  # type: ignore[operator]
    assert error < 0.01

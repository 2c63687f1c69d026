"""The LayerNorm that is written for a compiler, against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.norm import LayerNorm, layer_norm

D = 96


def rows(kind: str, dtype: torch.dtype) -> Tensor:
    """(8, D): as they come; far from 0; with a first element, or another, far outside; all alike."""
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if kind == "far from 0":
        x += 300
    elif kind == "first far out":
        x[:, 0] = 3000
    elif kind == "another far out":
        x[:, 5] = -3000
    elif kind == "constant":
        x = torch.full_like(x, 7.25)
    return x.to(dtype)


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.mark.usefixtures("compiling")
@pytest.mark.parametrize("kind", ["plain", "far from 0", "first far out", "another far out", "constant"])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_it_is_layer_norm_with_its_gradients(
    kind: str, with_bias: bool, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x = rows(kind, dtype)
    weight, bias = torch.linspace(0.5, 2, D, dtype=weight_dtype), torch.linspace(-1, 1, D, dtype=weight_dtype)
    dout = torch.randn(8, D, generator=torch.Generator().manual_seed(1), dtype=weight_dtype)

    def results(of: str) -> list[Tensor]:
        exact = of == "exact"
        inputs = [t.to(torch.float64 if exact else t.dtype).requires_grad_() for t in (x, weight, bias)]
        if not with_bias:
            inputs.pop()
        arguments = (*inputs, None)[:3]
        out = F.layer_norm(arguments[0], (D,), *arguments[1:]) if exact else layer_norm(*arguments, 1e-5)
        return [out, *torch.autograd.grad(out, inputs, dout.to(out.dtype))]

    names = ("out", "dx", "dweight", "dbias")
    for name, ours, exact in zip(names, results("ours"), results("exact"), strict=False):
        assert ours.dtype == (dtype if name == "dx" else weight_dtype)
        tolerance = 1e-9 if weight_dtype == torch.float64 else 8e-3 if name == "dx" else 5e-4
        assert (ours.double() - exact).abs().max() <= tolerance * (2 + exact.abs().max()), name


def test_the_module_takes_the_form_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = LayerNorm(D)
    x = rows("plain", torch.float32).requires_grad_()
    eager = norm(x)
    assert eager.grad_fn.name() == "NativeLayerNormBackward0"
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert norm(x).grad_fn.name() == "_LayerNormBackward"
    torch.testing.assert_close(norm(x), eager)


def test_only_the_gradients_that_are_asked_for_are_made(compiling: None) -> None:
    weight = torch.ones(D)
    x = rows("plain", torch.float32).requires_grad_()
    (dx,) = torch.autograd.grad(layer_norm(x, weight, None, 1e-5).sum(), x)
    assert dx.abs().max() < 1e-5, "a row's sum is 0 whatever x is"

"""torch's flash operators on fa2: the translations against torch's math attention and the reference, what `activate`
registers and restores, and, on a GPU, scaled_dot_product_attention and varlen_attn themselves.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn

import fa2
from fa2.integrations import register_with_torch
from fa2.integrations import torch as hook

aten = torch.ops.aten
OPERATORS = [name for name in hook.TRANSLATIONS if hasattr(aten, name)]

# The schemas of torch 2.11, whatever torch runs this.
SCHEMAS_2_11 = {
    "_scaled_dot_product_flash_attention": "(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool"
    " is_causal=False, bool return_debug_mask=False, *, float? scale=None) -> (Tensor output, Tensor logsumexp, Tensor"
    " cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state, Tensor unused, Tensor debug)",
    "_scaled_dot_product_flash_attention_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor"
    " out, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool"
    " is_causal, Tensor philox_seed, Tensor philox_offset, *, float? scale=None) -> (Tensor, Tensor, Tensor)",
    "_flash_attention_forward": "(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt"
    " max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, SymInt?"
    " window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None) ->"
    " (Tensor output, Tensor softmax_logsumexp, Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    "_flash_attention_backward": "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor"
    " logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal,"
    " Tensor rng_state, Tensor unused, *, float? scale=None, SymInt? window_size_left=None, SymInt?"
    " window_size_right=None) -> (Tensor, Tensor, Tensor)",
}


@pytest.fixture
def active() -> Iterator[None]:
    register_with_torch()
    activate_flash_attention_impl("fa2")
    yield
    restore_flash_attention_impl(_raise_warn=False)


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def heads_first(b: int, h: int, s: int, d: int, layout: str, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """(b, h, s, d) in one of the layouts that models have."""
    if layout == "contiguous":
        return draw(b, h, s, d, seed=seed, dtype=dtype)
    if layout == "transposed":
        return draw(b, s, h, d, seed=seed, dtype=dtype).transpose(1, 2)
    return draw(b, s, 3, h, d, seed=seed, dtype=dtype)[:, :, 1].transpose(1, 2)  # "slice", of a qkv projection


def math_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """out and lse of (b, h, s, d) in plain PyTorch, causal at the bottom right."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


# --- the operator behind scaled_dot_product_attention


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
@pytest.mark.parametrize(("nheads_q", "nheads_kv"), [(2, 2), (4, 2)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "causal"), [(9, 9, True), (9, 13, False), (5, 9, True), (1, 7, True)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_operators_equal_math(
    layout: str, nheads_q: int, nheads_kv: int, seqlen_q: int, seqlen_k: int, causal: bool, scale: float | None
) -> None:
    q = heads_first(2, nheads_q, seqlen_q, 8, layout, 0)
    k, v = (heads_first(2, nheads_kv, seqlen_k, 8, layout, seed) for seed in (1, 2))
    result = hook.sdpa_forward(q, k, v, 0.0, causal, False, scale=scale)
    out, lse = result[:2]
    wanted = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted_out, wanted_lse = math_attention(*wanted, scale, causal)
    torch.testing.assert_close(out, wanted_out)
    torch.testing.assert_close(lse, wanted_lse)
    assert lse.shape == (2, nheads_q, seqlen_q)
    assert lse.is_contiguous()
    if seqlen_q == seqlen_k or not causal:
        sdpa = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=nheads_q != nheads_kv)
        torch.testing.assert_close(out, sdpa)
    dout = draw(*out.shape, seed=3)
    grads = hook.sdpa_backward(dout, q, k, v, out, lse, *result[2:6], 0.0, causal, *result[6:8], scale=scale)
    for grad, x in zip(grads, torch.autograd.grad(wanted_out, wanted, dout), strict=True):
        torch.testing.assert_close(grad, x)


def test_the_gradient_of_a_sum_has_no_strides_of_its_own() -> None:
    q, k, v = (heads_first(1, 2, 6, 8, "transposed", seed) for seed in range(3))
    out, lse, *rest = hook.sdpa_forward(q, k, v)
    dout = torch.ones((), dtype=q.dtype).expand(out.shape)
    grads = hook.sdpa_backward(dout, q, k, v, out, lse, *rest[:4], 0.0, False, *rest[4:6])
    again = hook.sdpa_backward(dout.contiguous(), q, k, v, out, lse, *rest[:4], 0.0, False, *rest[4:6])
    for grad, other in zip(grads, again, strict=True):
        torch.testing.assert_close(grad, other, rtol=0, atol=0)


def same_kind(ours: Any, torchs: Any) -> bool:
    """Of one shape, dtype and layout, or both the same number, or both absent."""
    if not isinstance(ours, Tensor) or not isinstance(torchs, Tensor):
        return bool(ours == torchs)
    return (ours.shape, ours.dtype, ours.stride()) == (torchs.shape, torchs.dtype, torchs.stride())


def meta(args: Any) -> list[Any]:
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x
            for x in args]  # fmt: skip


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "slice"])
def test_results_are_of_the_kind_that_tracing_promises(layout: str) -> None:
    q, k, v = (heads_first(2, 4, 9, 16, layout, seed, torch.float32) for seed in range(3))
    ours = hook.sdpa_forward(q, k, v, 0.0, True)
    torchs = aten._scaled_dot_product_flash_attention(*meta((q, k, v)), 0.0, True)
    assert all(itertools.starmap(same_kind, zip(ours, torchs, strict=True)))
    back = (torch.ones_like(ours[0]), q, k, v, *ours[:6], 0.0, True, *ours[6:8])
    assert all(
        itertools.starmap(
            same_kind,
            zip(
                hook.sdpa_backward(*back),
                aten._scaled_dot_product_flash_attention_backward(*meta(x if x is not None else q for x in back)),
                strict=True,
            ),
        )
    )
    t, h, d = 18, 4, 16
    q, k, v = (
        x.transpose(1, 2).reshape(t, h, d) if layout == "contiguous" else x[0].transpose(0, 1)[:9] for x in (q, k, v)
    )
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    args = (q, k, v, cu, cu, 5, 5, 0.0, True, False)
    ours = hook.flash_forward(*args)
    assert all(itertools.starmap(same_kind, zip(ours, aten._flash_attention_forward(*meta(args)), strict=True)))
    back = (torch.ones_like(ours[0]), q, k, v, *ours[:2], cu, cu, 5, 5, 0.0, True, *ours[2:4])
    assert all(
        itertools.starmap(
            same_kind, zip(hook.flash_backward(*back), aten._flash_attention_backward(*meta(back)), strict=True)
        )
    )


# --- the operator behind varlen_attn


CU_Q, CU_K = [0, 5, 5, 12, 13], [0, 6, 9, 16, 20]


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (2, 0), (3, 2), (None, 1), (40, 40)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("nheads_kv", [4, 2])
def test_packed_operators_equal_the_reference(
    window: tuple[int | None, int | None], causal: bool, nheads_kv: int
) -> None:
    q = draw(CU_Q[-1], 4, 8)
    k, v = (draw(CU_K[-1], nheads_kv, 8, seed=seed) for seed in (1, 2))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (CU_Q, CU_K))
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *rest = hook.flash_forward(q, k, v, cu_q, cu_k, 7, 7, 0.0, causal, False, scale=0.4, **sides)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse, _ = fa2.reference.flash_attn_varlen_func(
        *inputs,
        cu_q,
        cu_k,
        7,
        7,
        0.0,
        0.4,
        causal,
        tuple(-1 if x is None else x for x in window),
        return_attn_probs=True,
    )
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse)
    assert lse.shape == (4, CU_Q[-1])
    dout = draw(*out.shape, seed=5)
    grads = hook.flash_backward(dout, q, k, v, out, lse, cu_q, cu_k, 7, 7, 0.0, causal, *rest[:2], scale=0.4, **sides)
    for grad, x in zip(grads, torch.autograd.grad(wanted, inputs, dout), strict=True):
        torch.testing.assert_close(grad, x)
    into = torch.full_like(out, math.nan)
    lse_again = hook.flash_forward_into(into, q, k, v, cu_q, cu_k, 7, 7, 0.0, causal, False, scale=0.4, **sides)
    torch.testing.assert_close((into, lse_again), (out, lse), rtol=0, atol=0)


@pytest.mark.parametrize("window", [(-1, -1), (3, 1)])
def test_dense_layout_of_the_packed_operators(window: tuple[int, int]) -> None:
    q, k, v = (draw(2, s, 4, 8, seed=s) for s in (6, 9, 9))
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    out, lse, *rest = hook.flash_forward(q, k, v, None, None, 6, 9, 0.0, False, False, **sides)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    wanted, wanted_lse, _ = fa2.reference.flash_attn_func(*inputs, window_size=window, return_attn_probs=True)
    torch.testing.assert_close((out, lse), (wanted, wanted_lse))
    dout = draw(*out.shape, seed=5)
    grads = hook.flash_backward(dout, q, k, v, out, lse, None, None, 6, 9, 0.0, False, *rest[:2], **sides)
    torch.testing.assert_close(grads, torch.autograd.grad(wanted, inputs, dout))


def test_a_row_without_keys_is_0() -> None:
    q, k, v = (draw(1, 2, s, 8, seed=s) for s in (5, 3, 3))
    out, lse, *rest = hook.sdpa_forward(q, k, v, is_causal=True)
    assert out[:, :, :2].eq(0).all()
    assert lse[:, :, :2].eq(-math.inf).all()
    dq, dk, _ = hook.sdpa_backward(torch.ones_like(out), q, k, v, out, lse, *rest[:4], 0.0, True, *rest[4:6])
    assert dq[:, :, :2].eq(0).all()
    assert dk.isfinite().all()


# --- what falls through


REASONS: list[tuple[dict[str, Any], str]] = [
    ({"dropout_p": 0.1}, "dropout_p is not 0"),
    ({"return_debug_mask": True}, "return_debug_mask is given"),
    ({"alibi_slopes": torch.ones(2)}, "alibi_slopes is given"),
    ({"seqused_k": torch.ones(1, dtype=torch.int32)}, "seqused_k is given"),
    ({"block_table": torch.ones(1, 1, dtype=torch.int32)}, "block_table is given"),
    ({"num_splits": 2}, "num_splits is more than 1"),
    ({"something_of_a_later_torch": 1}, "something_of_a_later_torch is given"),
    ({"cum_seq_k": None}, "only one of cum_seq_q and cum_seq_k is given"),
    ({"scale": 0.0}, "scale is not positive"),
    ({"value": torch.ones(4, 2, 16)}, "key, value and query differ in headdim"),
]


class Original:
    """Stands where torch's own kernel does."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def call_boxed(self, keys: Any, *args: Any, **kwargs: Any) -> str:
        self.calls.append((keys, args, kwargs))
        return "torch's own"


def packed_arguments() -> dict[str, Any]:
    x, cu = torch.ones(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    arguments = {"query": x, "key": x, "value": x, "cum_seq_q": cu, "cum_seq_k": cu, "max_q": 4, "max_k": 4}
    return {**arguments, "dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_unsupported_arguments_fall_through_with_one_line(
    change: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "_said", set())
    original = Original()
    kernel = hook._or_torch(hook.flash_forward, original)
    arguments = {**packed_arguments(), **change}
    with caplog.at_level(logging.WARNING, "fa2"):
        for _ in range(2):
            assert kernel("keys", **arguments) == "torch's own"
    assert [record.getMessage() for record in caplog.records] == [
        f"fa2: torch's own flash attention runs where {reason}"
    ]
    assert len(original.calls) == 2
    assert original.calls[0][0] == "keys"
    assert original.calls[0][2] == arguments


def test_what_is_supported_does_not_fall_through() -> None:
    original = Original()
    kernel = hook._or_torch(hook.flash_forward, original)
    out, *_ = kernel("keys", **packed_arguments(), num_splits=1, seqused_k=None, alibi_slopes=None)
    assert out.shape == (4, 2, 8)
    assert not original.calls


def test_without_an_operator_of_torchs_own_it_is_an_error() -> None:
    kernel = hook._or_torch(hook.flash_forward, None)
    with pytest.raises(RuntimeError, match=r"fa2: not supported, .* here: dropout_p is not 0"):
        kernel("keys", **{**packed_arguments(), "dropout_p": 0.1})


def test_an_error_of_fa2_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_kernel(q: Tensor, headdim: int) -> None:
        raise RuntimeError("fa2: no kernel for this GPU")

    monkeypatch.setattr(hook, "_need_kernel", no_kernel)
    original = Original()
    with pytest.raises(RuntimeError, match="no kernel for this GPU"):
        hook._or_torch(hook.flash_forward, original)("keys", **packed_arguments())
    assert not original.calls


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 refuses a second kernel from Python")
def test_the_kernel_that_was_there_is_called_through_the_dispatcher(caplog: pytest.LogCaptureFixture) -> None:
    there = torch.library.Library("aten", "IMPL")

    def torchs(query: Tensor, *args: Any, **kwargs: Any) -> Any:
        return (query + args[5], *[query.new_zeros(())] * 4)  # args: key, value, ..., dropout_p

    try:
        there.impl("_flash_attention_forward", torchs, "CPU")
        activation = hook.activate()
        try:
            arguments = packed_arguments()
            own = aten._flash_attention_forward(**{**arguments, "dropout_p": 0.5})[0]
            ours = aten._flash_attention_forward(**arguments)[0]
        finally:
            activation.remove()
        back = aten._flash_attention_forward(**arguments)[0]
    finally:
        there._destroy()
    assert own.eq(1 + 4).all()
    assert ours.eq(1).all()
    assert back.eq(1 + 4).all()


# --- registration


@pytest.mark.parametrize("name", OPERATORS)
def test_translations_take_what_the_schemas_say(name: str) -> None:
    schemas = [getattr(aten, name).default._schema]
    if name in SCHEMAS_2_11:
        schemas.append(torch._C.parse_schema(f"aten::{name}{SCHEMAS_2_11[name]}"))
    parameters = list(inspect.signature(hook.TRANSLATIONS[name]).parameters.values())
    if name == "_flash_attention_forward_no_dropout_inplace":  # out, then what flash_forward takes
        parameters = [parameters[0], *inspect.signature(hook.flash_forward).parameters.values()]
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    for schema in schemas:
        assert [a.name for a in schema.arguments if not a.kwarg_only] == positional
    assert parameters[-1].kind is inspect.Parameter.VAR_KEYWORD


def flash_kernels() -> set[tuple[str, str]]:
    """(operator, key) of every flash operator that has a kernel of its own there."""
    return {
        (name, key)
        for key in hook.DISPATCH_KEYS
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)
        if "flash_attention" in name
    }


@pytest.fixture(params=[True, False])
def cudnn(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Whether the cuDNN backend is on before fa2 is activated."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(request.param)
    yield request.param
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_activation_registers_exactly_these_operators_and_restoring_removes_them(cudnn: bool) -> None:
    before = flash_kernels()
    register_with_torch()
    assert "fa2" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None
    assert flash_kernels() == before
    for _ in range(2):  # again after restoring
        activate_flash_attention_impl("fa2")
        try:
            assert current_flash_attention_impl() == "fa2"
            expected = {(f"aten::{name}", key) for name in OPERATORS for key in ("CUDA", "CPU")}
            assert flash_kernels() == before | expected
            assert not torch.backends.cuda.cudnn_sdp_enabled()
        finally:
            restore_flash_attention_impl()
        assert current_flash_attention_impl() is None
        assert flash_kernels() == before
        assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


def test_activating_twice_leaves_nothing_behind(cudnn: bool) -> None:
    before = flash_kernels()
    register_with_torch()
    activate_flash_attention_impl("fa2")
    activate_flash_attention_impl("fa2")
    restore_flash_attention_impl()
    assert flash_kernels() == before
    assert torch.backends.cuda.cudnn_sdp_enabled() == cudnn


@pytest.mark.parametrize(
    ("owner", "missing"), [(torch.nn.attention, "register_flash_attention_impl"), (torch.library, "get_kernel")]
)
def test_an_old_torch_is_named(owner: Any, missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, missing)
    with pytest.raises(RuntimeError, match=r"fa2: torch must be .* \(2.11 or later\), got 2"):
        register_with_torch()


# --- through the dispatcher and autograd, on a CPU


def test_varlen_attn_runs_and_differentiates_on_a_cpu(active: None) -> None:
    cu = torch.tensor([0, 5, 12, 13], dtype=torch.int32)
    inputs = [draw(13, 4, 8, seed=seed, dtype=torch.float32).requires_grad_() for seed in range(3)]
    dout = draw(13, 4, 8, seed=4, dtype=torch.float32)
    for window in ((-1, -1), (-1, 0), (2, 0)):
        out, lse = varlen_attn(*inputs, cu, cu, 7, 7, scale=0.4, window_size=window, return_aux=AuxRequest(lse=True))
        wanted, wanted_lse, _ = fa2.reference.flash_attn_varlen_func(
            *inputs, cu, cu, 7, 7, softmax_scale=0.4, window_size=window, return_attn_probs=True
        )
        torch.testing.assert_close((out, lse), (wanted, wanted_lse))
        grads = (torch.autograd.grad(x, inputs, dout) for x in (out, wanted))
        torch.testing.assert_close(*grads)


def test_varlen_attn_has_no_cpu_kernel_when_inactive() -> None:
    q, cu = draw(3, 1, 8, dtype=torch.float32), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(NotImplementedError):
        varlen_attn(q, q, q, cu, cu, 3, 3)


def test_the_flash_operator_differentiates_through_torchs_own_autograd(active: None) -> None:
    inputs = [heads_first(2, 4, 9, 8, "transposed", seed).requires_grad_() for seed in range(3)]
    out = aten._scaled_dot_product_flash_attention(*inputs, 0.0, True, scale=0.3)[0]
    wanted, _ = math_attention(*inputs, 0.3, True)
    dout = draw(*out.shape, seed=7)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs, dout) for x in (out, wanted)))


def test_sdpa_on_a_cpu_keeps_torchs_kernels(active: None) -> None:
    q = draw(1, 2, 5, 8, dtype=torch.float32)
    with torch.profiler.profile() as profile:
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert not [event.key for event in profile.key_averages() if "fa2" in event.key]


# --- on a GPU


def gpu_inputs(shape: tuple[int, ...], kv_shape: tuple[int, ...] | None = None) -> list[Tensor]:
    shapes = (shape, kv_shape or shape, kv_shape or shape)
    made = [draw(*s, seed=i, dtype=torch.bfloat16, device="cuda") for i, s in enumerate(shapes)]
    return [x.requires_grad_() for x in made]


def run(attend: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], set[str]]:
    """out and gradients, and the names of what ran."""
    dout = draw(*inputs[0].shape, seed=9, dtype=torch.bfloat16, device="cuda")
    attend(*inputs)  # builds and loads the extension outside the profile
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        out = attend(*inputs)
        grads = torch.autograd.grad(out, inputs, dout)
        torch.cuda.synchronize()
    return [out.detach(), *grads], {event.key for event in profile.key_averages()}


def both(attend: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results with torch's own kernels and with fa2's, checked to be what ran."""
    register_with_torch()
    torchs, names = run(attend, inputs)
    assert not [name for name in names if name.startswith("fa2::")]
    activate_flash_attention_impl("fa2")
    try:
        ours, names = run(attend, inputs)
    finally:
        restore_flash_attention_impl()
    forward, backward = ({name for name in names if name.startswith(f"fa2::{op}")} for op in ("fwd", "bwd"))
    assert forward, names
    assert backward, names
    assert not [name for name in names if "pytorch_flash" in name or "cudnn" in name], names
    _, names = run(attend, inputs)
    assert not [name for name in names if name.startswith("fa2::")]
    return torchs, ours


def assert_close_in_bf16(ours: list[Tensor], torchs: list[Tensor]) -> None:
    for x, y in zip(ours, torchs, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2 * float(y.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize(("nheads_kv", "headdim"), [(4, 64), (2, 128), (4, 80), (4, 36)])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "causal"), [(300, 300, True), (300, 420, False)])
def test_sdpa_on_a_gpu(layout: str, nheads_kv: int, headdim: int, seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "transposed":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=nheads_kv != 4)
        return out.transpose(1, 2) if layout == "transposed" else out

    def shape(h: int, s: int) -> tuple[int, ...]:
        return (2, s, h, headdim) if layout == "transposed" else (2, h, s, headdim)

    torchs, ours = both(attend, gpu_inputs(shape(4, seqlen_q), shape(nheads_kv, seqlen_k)))
    assert_close_in_bf16(ours, torchs)


@pytest.mark.gpu
def test_varlen_attn_on_a_gpu() -> None:
    cu = torch.tensor([0, 100, 100, 357, 500], dtype=torch.int32, device="cuda")
    inputs = gpu_inputs((500, 4, 64))
    for window in ((-1, -1), (-1, 0), (64, 0)):
        torchs, ours = both(lambda q, k, v, w=window: varlen_attn(q, k, v, cu, cu, 257, 257, window_size=w), inputs)
        assert_close_in_bf16(ours, torchs)


@pytest.mark.gpu
def test_lse_of_varlen_attn_on_a_gpu(active: None) -> None:
    cu = torch.tensor([0, 100, 357, 500], dtype=torch.int32, device="cuda")
    q, k, v = gpu_inputs((500, 4, 64))
    with torch.no_grad():
        _, lse = varlen_attn(q, k, v, cu, cu, 257, 257, return_aux=AuxRequest(lse=True))
    wanted = fa2.reference.flash_attn_varlen_func(q, k, v, cu, cu, 257, 257, return_attn_probs=True)[1]
    torch.testing.assert_close(lse, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
def test_dropout_falls_through_on_a_gpu(active: None, caplog: pytest.LogCaptureFixture) -> None:
    hook._said.clear()
    inputs = gpu_inputs((1, 2, 128, 64))
    with caplog.at_level(logging.WARNING, "fa2"), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*inputs, dropout_p=0.5)
        out.sum().backward()
    assert [record.getMessage() for record in caplog.records] == [
        "fa2: torch's own flash attention runs where dropout_p is not 0"
    ]
    assert inputs[0].grad is not None
    assert inputs[0].grad.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_sdpa_compiled_on_a_gpu(layout: str, active: None) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layout == "transposed":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)
        return out.transpose(1, 2) if layout == "transposed" else out

    torch._dynamo.reset()
    inputs = gpu_inputs((2, 128, 4, 64) if layout == "transposed" else (2, 4, 128, 64))
    compiled, names = run(torch.compile(attend, fullgraph=True), inputs)
    eager, _ = run(attend, inputs)
    assert [name for name in names if name.startswith("fa2::")], names
    assert_close_in_bf16(compiled, eager)


@pytest.mark.gpu
def test_varlen_attn_compiled_on_a_gpu(active: None) -> None:
    cu = torch.tensor([0, 100, 357, 500], dtype=torch.int32, device="cuda")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return varlen_attn(q * 2, k, v, cu, cu, 257, 257, window_size=(-1, 0))

    torch._dynamo.reset()
    inputs = gpu_inputs((500, 4, 64))
    compiled, names = run(torch.compile(attend, fullgraph=True), inputs)
    eager, _ = run(attend, inputs)
    assert [name for name in names if name.startswith("fa2::")], names
    assert_close_in_bf16(compiled, eager)

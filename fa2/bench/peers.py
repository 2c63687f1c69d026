"""Who is measured: fa2 and its peers, each as calls that take no argument. A peer that is not there says why.

torch's own are called as aten operators: under `sdpa_kernel` a compiled graph of another backend can run again from
torch's cache. `kernels` is what the profiler must see in the names of the kernels that ran.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

import fa2
from fa2.bench.cases import Case
from fa2.bench.correctness import tiles

aten = torch.ops.aten
Call = Callable[[], Any]


class Unavailable(Exception):
    """This peer cannot run this case; the message says why."""


@dataclass
class Calls:
    """`forward` and `backward` are the bare operators; `backward_autograd` goes through autograd, `both` is a step."""

    out: Tensor  # of one forward, in q's layout
    forward: Call
    backward: Call | None
    backward_autograd: Call
    both: Call


def _calls(
    x: dict[str, Tensor], attend: Callable[..., Tensor], forward: Call | None, backward: Call | None, view: Any = None
) -> Calls:
    """attend(q, k, v) is differentiable; `view` takes the tensors to the peer's layout."""
    view = view or (lambda t: t)
    q, k, v = (x[name].detach().requires_grad_() for name in ("q", "k", "v"))
    out = attend(view(q), view(k), view(v))
    dout = view(x["dout"])

    def no_grad_forward() -> None:
        with torch.no_grad():
            attend(view(q), view(k), view(v))

    return Calls(
        view(out).detach(),
        forward or no_grad_forward,
        backward,
        lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True),
        lambda: torch.autograd.grad(attend(view(q), view(k), view(v)), (q, k, v), dout),
    )


def _heads_first(t: Tensor) -> Tensor:
    return t.transpose(1, 2)


def ours(case: Case, x: dict[str, Tensor], deterministic: bool = False) -> Calls:
    ops = torch.ops.fa2
    q, k, v, dout = (x[name] for name in ("q", "k", "v", "dout"))
    mask = (case.headdim**-0.5, -1, 0 if case.causal else -1)
    if case.dense:
        attend = lambda q, k, v: fa2.flash_attn_func(q, k, v, causal=case.causal, deterministic=deterministic)  # noqa: E731
        attend(q, k, v)  # finds, builds and loads the extension
        out, lse = ops.fwd(q, k, v, *mask)
        return _calls(
            x,
            attend,
            lambda: ops.fwd(q, k, v, *mask),
            lambda: ops.bwd(dout, q, k, v, out, lse, *mask, deterministic),
        )
    c, longest = x["cu_seqlens"], max(case.lengths)
    lengths = (c, c, longest, longest)

    def attend_varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fa2.flash_attn_varlen_func(q, k, v, *lengths, causal=case.causal, deterministic=deterministic)

    attend_varlen(q, k, v)
    out, lse = ops.fwd_varlen(q, k, v, *lengths, *mask)
    return _calls(
        x,
        attend_varlen,
        lambda: ops.fwd_varlen(q, k, v, *lengths, *mask),
        lambda: ops.bwd_varlen(dout, q, k, v, out, lse, *lengths, *mask, deterministic),
    )


class _Sdpa(torch.autograd.Function):
    """An aten forward and its own backward, without SDPA's choice of backend between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Any, backward: Any) -> Tensor:
        result = forward(q, k, v)
        # Tensors are saved properly: kept on ctx, the output would hold its own node, and no run's memory were freed.
        ctx.save_for_backward(q, k, v, *(x for x in result if isinstance(x, Tensor)))
        ctx.others = [None if isinstance(x, Tensor) else (x,) for x in result]
        ctx.run = backward
        return result[0]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        q, k, v, *saved = ctx.saved_tensors
        tensors = iter(saved)
        result = [next(tensors) if other is None else other[0] for other in ctx.others]
        return *ctx.run(dout, q, k, v, result)[:3], None, None


def _aten_calls(x: dict[str, Tensor], forward: Any, backward: Any, view: Any = None) -> Calls:
    q, k, v, dout = ((view or (lambda t: t))(x[name]) for name in ("q", "k", "v", "dout"))
    result = forward(q, k, v)
    return _calls(
        x,
        lambda q, k, v: _Sdpa.apply(q, k, v, forward, backward),
        lambda: forward(q, k, v),
        lambda: backward(dout, q, k, v, result),
        view,
    )


def _needs_dense(case: Case) -> None:
    if not case.dense:
        raise Unavailable("takes no cu_seqlens")


def sdpa_flash(case: Case, x: dict[str, Tensor]) -> Calls:
    """FlashAttention-2 as torch ships it."""
    _needs_dense(case)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, case.causal, False)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Any) -> Any:
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = result
        return aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, case.causal, seed, offset
        )

    return _aten_calls(x, forward, backward, _heads_first)


def sdpa_cudnn(case: Case, x: dict[str, Tensor]) -> Calls:
    _needs_dense(case)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, case.causal, False)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Any) -> Any:
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = result
        return aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, case.causal
        )

    return _aten_calls(x, forward, backward, _heads_first)


EAGER_BYTES = 60e9  # scores, probabilities and their gradients must fit


def eager(case: Case, x: dict[str, Tensor]) -> Calls:
    """Three matrix operations and a mask, as a model without a fused kernel has them."""
    _needs_dense(case)
    scores = case.nheads_q * sum(n * n for n in case.lengths) * x["q"].element_size()
    if 5 * scores > EAGER_BYTES:
        raise Unavailable(f"its scores take {5 * scores / 1e9:.0f} GB")
    s = case.lengths[0]
    hidden = torch.ones(s, s, dtype=torch.bool, device=x["q"].device).triu(1) if case.causal else None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * case.headdim**-0.5) @ k.transpose(-1, -2)
        if hidden is not None:
            scores = scores.masked_fill_(hidden, -torch.inf)
        return scores.softmax(dim=-1) @ v

    return _calls(x, attend, None, None, _heads_first)


def varlen_attn(case: Case, x: dict[str, Tensor]) -> Calls:
    """The operators below torch.nn.attention.varlen.varlen_attn: FlashAttention-2 with cu_seqlens."""
    if case.dense:
        raise Unavailable("dense cases have SDPA flash, the same kernel")
    c, longest = x["cu_seqlens"], max(case.lengths)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return aten._flash_attention_forward(q, k, v, c, c, longest, longest, 0.0, case.causal, False)

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Any) -> Any:
        out, lse, seed, offset, _ = result
        return aten._flash_attention_backward(
            dout, q, k, v, out, lse, c, c, longest, longest, 0.0, case.causal, seed, offset
        )

    return _aten_calls(x, forward, backward)


# One compiled function, one buffer of document ids and one mask function for all cases: one graph, compiled once.
_compiled_flex: list[Any] = []
_documents: dict[tuple[str, int], tuple[Tensor, Any]] = {}


def _document_mask(T: int, device: torch.device) -> tuple[Tensor, Any]:
    document = torch.zeros(T, dtype=torch.int32, device=device)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    return document, seen


def flex(case: Case, x: dict[str, Tensor]) -> Calls:
    """FlexAttention, compiled, with a causal document mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.dense:
        raise Unavailable("measured on packed documents alone")
    device, T = x["q"].device, sum(case.lengths)
    key = (str(device), T)
    if key not in _documents:
        _documents[key] = _document_mask(T, device)
    document, seen = _documents[key]  # `document` is this case's until the next case is made
    index = torch.arange(len(case.lengths), dtype=torch.int32, device=device)
    document.copy_(index.repeat_interleave(torch.tensor(case.lengths, device=device)))
    if not _compiled_flex:
        # the backward is timed alone, again and again over one forward, so its saved buffers must survive it
        torch._functorch.config.donated_buffer = False
        _compiled_flex.append(torch.compile(flex_attention, dynamic=False))
    block_mask = create_block_mask(seen, None, None, T, T, device=str(device))
    return _calls(
        x,
        lambda q, k, v: _compiled_flex[0](q, k, v, block_mask=block_mask),
        None,
        None,
        lambda t: t.transpose(0, 1)[None] if t.dim() == 3 else t[0].transpose(0, 1),
    )


def _installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Unavailable(f"{module} is not installed")


def _flash_attn_package(module: Any, case: Case, x: dict[str, Tensor]) -> Calls:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if case.dense:
            out = module.flash_attn_func(q, k, v, causal=case.causal)
        else:
            c, longest = x["cu_seqlens"], max(case.lengths)
            out = module.flash_attn_varlen_func(q, k, v, c, c, longest, longest, causal=case.causal)
        return out[0] if isinstance(out, tuple) else out

    return _calls(x, attend, None, None)


def flash_attn(case: Case, x: dict[str, Tensor]) -> Calls:
    _installed("flash_attn")
    import flash_attn as module

    return _flash_attn_package(module, case, x)


def flash_attn_3(case: Case, x: dict[str, Tensor]) -> Calls:
    _installed("flash_attn_interface")
    import flash_attn_interface as module

    return _flash_attn_package(module, case, x)


def ours_sm80(case: Case, x: dict[str, Tensor]) -> Calls:
    """fa2's sm80 family, on a GPU whose dispatch prefers a newer one."""
    if sm80_is_newest():
        raise Unavailable("it is what fa2 runs on this GPU")

    def under_sm80(call: Call) -> Call:
        def run() -> Any:
            with tiles("large"):
                return call()

        return run

    calls = under_sm80(lambda: ours(case, x))()
    backward = calls.backward and under_sm80(calls.backward)
    later = [under_sm80(call) for call in (calls.backward_autograd, calls.both)]
    return Calls(calls.out, under_sm80(calls.forward), backward, *later)


def sm80_is_newest() -> bool:
    """Whether no kernel of a newer family serves this GPU."""
    if not torch.cuda.is_available():
        return True
    major, minor = torch.cuda.get_device_capability()
    sm = 10 * major + minor
    return not any(k.family != "sm80" and k.min_sm <= sm <= k.max_sm for k in fa2.kernels())


@dataclass(frozen=True)
class Peer:
    calls: Callable[[Case, dict[str, Tensor]], Calls]
    kernels: str  # a regular expression that some kernel of its forward must match
    title: str
    min_runs: int = 50


PEERS = {
    "fa2": Peer(ours, r"fa2.*attention_fwd|attention_fwd.*fa2", "fa2"),
    "fa2_sm80": Peer(ours_sm80, r"fa2.*sm80.*attention_fwd|attention_fwd.*fa2.*sm80", "fa2, sm80 kernels"),
    "sdpa_flash": Peer(sdpa_flash, r"flash_fwd", "SDPA flash (FlashAttention-2)"),
    "sdpa_cudnn": Peer(sdpa_cudnn, r"cudnn", "SDPA cuDNN"),
    "eager": Peer(eager, r"softmax", "eager", 9),  # up to 100 ms a run
    "varlen_attn": Peer(varlen_attn, r"flash_fwd", "torch varlen_attn (FlashAttention-2)"),
    "flex": Peer(flex, r"flex_attention|triton", "FlexAttention, document mask"),
    "flash_attn": Peer(flash_attn, r"flash", "flash_attn"),
    "flash_attn_3": Peer(flash_attn_3, r"flash|Flash", "flash_attn_interface (FlashAttention-3)"),
}

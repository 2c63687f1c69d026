"""A block's matrix products by cuBLASLt, each by the algorithm that is fastest here, with epilogues that torch lacks.

The epilogues add, make GELU, and multiply by its derivative: apart, each of these reads the widest tensors of a
transformer block from memory and writes one. And the library's own first choice, which torch takes, is not always its
fastest algorithm (on an H200 up to a tenth from it). The library is the one that torch has loaded, called through
ctypes: ten functions of a documented C interface ("Using the cuBLASLt API" in NVIDIA's documentation of cuBLAS), and no
extension to build. Where a product is met for the first time, what the library offers is timed beside torch's way,
once. The operators stand at the end; `linear.py` knows when to call them.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_WORKSPACE_bytes = 32 << 20  # what NVIDIA recommends on Hopper
_ALIGNMENT_bytes = 256  # of every pointer, which the heuristic takes for granted
_CANDIDATES = 8  # algorithms that are timed
_TIMED_RUNS = 7
_WORTH = 0.98  # what is not torch's way must be so much faster

# cudaDataType_t
_DTYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: 0}
_INPUTS = (torch.bfloat16, torch.float16)
_R_32F = 0
_COMPUTE_32F = 68  # cublasComputeType_t
# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_AUX_POINTER, _AUX_LD, _AUX_DTYPE, _BIAS_DTYPE = 11, 12, 22, 26
_MAX_WORKSPACE = 1


class Epilogue(IntEnum):
    """cublasLtEpilogue_t"""

    none = 1
    bias = 4
    gelu_aux = 32 | 128
    gelu_aux_bias = 32 | 128 | 4
    dgelu = 64 | 128


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Candidate(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@lru_cache
def _cublaslt() -> ctypes.CDLL:
    assert torch.version.cuda is not None, "why_unavailable was asked"
    return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")


def _call(function: str, *arguments: object) -> None:
    status = getattr(_cublaslt(), function)(*arguments)
    if status:
        raise RuntimeError(f"cuBLASLt: {function} must succeed, got status {status}")


@lru_cache
def why_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """A reason why this file cannot serve products of this dtype there, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"needs an NVIDIA GPU, got {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"has been measured on Hopper only, got {torch.cuda.get_device_name(device)}"
    if dtype not in _INPUTS:
        return f"needs bfloat16 or float16, got {dtype}"
    try:
        _cublaslt()
    except OSError as error:
        return f"needs cuBLASLt: {error}"
    return None


@lru_cache
def _handle(device: torch.device) -> c_void_p:
    handle = c_void_p()
    _call("cublasLtCreate", byref(handle))
    return handle


class _Product:
    """D (m x n) = [C +] A (m x k) B (k x n), with an epilogue; one shape, dtype and device.

    cuBLAS counts columns first: a row-major (n, m) is its m x n.

    Args:
        transposed: whether A is stored as k x m, B as n x k.
        dtype: of A and B; bias and what an epilogue keeps, too.
        out_dtype: of C and D.
    """

    def __init__(
        self,
        m: int,
        n: int,
        k: int,
        transposed: tuple[bool, bool],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        device: torch.device,
        epilogue: Epilogue,
    ) -> None:
        self.device = device
        self.handle = _handle(device)
        self.description, preference = c_void_p(), c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self.description), _COMPUTE_32F, _R_32F)
        self._set(_TRANSPOSE_A, c_int32(transposed[0]))
        self._set(_TRANSPOSE_B, c_int32(transposed[1]))
        self._set(_EPILOGUE, c_uint32(epilogue))
        # The heuristic may look at the pointers, too: until the first call any address of that alignment will do.
        anywhere = torch.empty(1, device=device)
        if epilogue & Epilogue.bias:
            self._set(_BIAS_POINTER, c_uint64(anywhere.data_ptr()))
            self._set(_BIAS_DTYPE, c_int32(_DTYPES[dtype]))
        if epilogue & 128:
            self._set(_AUX_POINTER, c_uint64(anywhere.data_ptr()))
            self._set(_AUX_LD, c_int64(m))
            self._set(_AUX_DTYPE, c_int32(_DTYPES[dtype]))
        self.layouts = [
            self._layout(dtype, *((k, m) if transposed[0] else (m, k))),
            self._layout(dtype, *((n, k) if transposed[1] else (k, n))),
            self._layout(out_dtype, m, n),
        ]
        _call("cublasLtMatmulPreferenceCreate", byref(preference))
        limit = c_uint64(_WORKSPACE_bytes)
        _call("cublasLtMatmulPreferenceSetAttribute", preference, _MAX_WORKSPACE, byref(limit), c_size_t(8))
        self.candidates = (_Candidate * _CANDIDATES)()
        found = c_int()
        a, b, c = self.layouts
        status = _cublaslt().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.description, a, b, c, c, preference, _CANDIDATES, self.candidates, byref(found)
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        self.found = 0 if status else found.value
        self.best: int | None = None  # candidate; past the last one for torch's way; None before it is timed

    def _set(self, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, byref(value), size)

    @staticmethod
    def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout, ld = c_void_p(), c_int64(rows)
        _call("cublasLtMatrixLayoutCreate", byref(layout), _DTYPES[dtype], c_uint64(rows), c_uint64(columns), ld)
        return layout

    def run(
        self,
        candidate: int,
        first: Tensor,
        second: Tensor,
        out: Tensor,
        addend: Tensor | None = None,
        bias: Tensor | None = None,
        aux: Tensor | None = None,
    ) -> None:
        if bias is not None:
            self._set(_BIAS_POINTER, c_uint64(bias.data_ptr()))
        if aux is not None:
            self._set(_AUX_POINTER, c_uint64(aux.data_ptr()))
        workspace = torch.empty(_WORKSPACE_bytes, dtype=torch.uint8, device=self.device)
        a, b, c = self.layouts
        alpha, beta = c_float(1.0), c_float(0.0 if addend is None else 1.0)
        _call(
            "cublasLtMatmul",
            self.handle,
            self.description,
            byref(alpha),
            c_void_p(first.data_ptr()),
            a,
            c_void_p(second.data_ptr()),
            b,
            byref(beta),
            c_void_p((out if addend is None else addend).data_ptr()),
            c,
            c_void_p(out.data_ptr()),
            c,
            byref(self.candidates[candidate].algorithm),
            c_void_p(workspace.data_ptr()),
            c_size_t(_WORKSPACE_bytes),
            c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )

    def choose(self, run: Callable[[int], object], apart: Callable[[], object]) -> int:
        """The fastest candidate, or the number of candidates where torch's way is as fast. Timed once, and the
        heuristic's first where nothing may be timed.

        Args:
            run: makes the product by a candidate, `apart` in torch's way; both may be called often.
        """
        if self.found == 0:
            return 0
        if self.best is None:
            if torch.cuda.is_current_stream_capturing():
                return 0
            ways = [*(lambda i=i: run(i) for i in range(self.found)), apart]
            times = self._milliseconds(ways)
            fastest = min(range(len(times)), key=times.__getitem__)
            self.best = fastest if times[fastest] < _WORTH * times[self.found] else self.found
        return self.best

    def _milliseconds(self, ways: Sequence[Callable[[], object]]) -> list[float]:
        """Of each, the median over rounds: the clock falls while the GPU warms up, for all of them alike."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(ways) * (_TIMED_RUNS + 1) + 1)]
        fails = [False] * len(ways)
        events[0].record()
        for i, event in enumerate(events[1:]):
            try:
                ways[i % len(ways)]()
            except RuntimeError:  # a candidate that cannot run after all
                fails[i % len(ways)] = True
            event.record()
        torch.cuda.synchronize(self.device)
        passed = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
        # without the first round, in which kernels are loaded
        return [
            math.inf if failed else statistics.median(passed[len(ways) + i :: len(ways)])
            for i, failed in enumerate(fails)
        ]


_product = lru_cache(maxsize=None)(_Product)


def _is_ready(x: Tensor) -> bool:
    return x.is_contiguous() and x.data_ptr() % _ALIGNMENT_bytes == 0


def _ready(x: Tensor | None) -> Tensor | None:
    if x is None or _is_ready(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _multiplied(
    x: Tensor,
    weight: Tensor,
    epilogue: Epilogue,
    apart: Callable[[], object],
    transposed: bool = True,
    addend: Tensor | None = None,
    bias: Tensor | None = None,
    aux: Tensor | None = None,
) -> Tensor | None:
    """[addend (T, m) +] x (T, k) times weight (m, k), or (k, m) where it is not `transposed`, with an epilogue; None
    where `apart`, which makes the same by torch, has to be called instead.
    """
    if x.shape[0] == 0 or why_unavailable(x.device, x.dtype) is not None:
        return None
    (T, k), m = x.shape, weight.shape[0 if transposed else 1]
    with torch.cuda.device(x.device):
        product = _product(m, T, k, (transposed, False), x.dtype, x.dtype, x.device, epilogue)
        out = torch.empty(T, m, dtype=x.dtype, device=x.device)
        x, weight, addend, bias, aux = (_ready(t) for t in (x, weight, addend, bias, aux))  # type: ignore[assignment]

        def run(candidate: int) -> None:
            product.run(candidate, weight, x, out, addend, bias, aux)

        chosen = product.choose(run, apart)
        if chosen == product.found:
            return None
        run(chosen)
        return out


def add_product(out: Tensor, dy: Tensor, x: Tensor) -> bool:
    """out += dyᵀ @ x, in fp32 and in place; False, and nothing done, where torch has to do it.

    Args:
        out: (m, k) fp32.
        dy: (T, m), 16 bits.
        x: (T, k), dtype of dy.
    """
    if dy.shape[0] == 0 or out.dtype != torch.float32 or why_unavailable(dy.device, dy.dtype) is not None:
        return False
    if not all(_is_ready(t) for t in (out, dy, x)):
        return False
    (T, m), k = dy.shape, x.shape[1]
    with torch.cuda.device(dy.device):
        product = _product(k, m, T, (False, True), dy.dtype, out.dtype, dy.device, Epilogue.none)
        timed = out if product.best is not None else torch.zeros_like(out)  # nothing but the product is added to out
        chosen = product.choose(
            lambda candidate: product.run(candidate, x, dy, timed, addend=timed),
            lambda: torch.addmm(timed, dy.t(), x, out_dtype=timed.dtype, out=timed),
        )
        if chosen == product.found:
            return False
        product.run(chosen, x, dy, out, addend=out)
        return True


@torch.library.custom_op("gpt::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    """[addend +] x @ weightᵀ + bias, rounded once where cuBLASLt does it.

    Args:
        x: (T, k).
        weight: (m, k), dtype of x; bias (m,) or None, likewise.
        addend: (T, m) or None, dtype of x.

    Returns:
        (T, m), dtype of x. The first call of a shape times the library's algorithms, and waits for the device; so it
        is with the other operators.
    """

    def apart() -> Tensor:
        out = F.linear(x, weight, bias)
        return out if addend is None else out + addend

    out = _multiplied(
        x, weight, Epilogue.none if bias is None else Epilogue.bias, apart, addend=addend, bias=bias
    )  # fmt: skip
    return apart() if out is None else out


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)


@torch.library.custom_op("gpt::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.

    Args:
        x: (T, m).
        weight: (m, k), dtype of x.

    Returns:
        (T, k), dtype of x.
    """

    def apart() -> Tensor:
        return x @ weight

    out = _multiplied(x, weight, Epilogue.none, apart, transposed=False)
    return apart() if out is None else out


@product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty(x.shape[0], weight.shape[1], dtype=x.dtype, device=x.device)


@torch.library.custom_op("gpt::linear_gelu", mutates_args=())
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gelu(up), up) with up = x @ weightᵀ + bias and GELU in its tanh form.

    Args:
        x: (T, k).
        weight: (m, k), dtype of x; bias (m,) or None, likewise.

    Returns:
        Both (T, m), dtype of x.
    """

    def apart() -> tuple[Tensor, Tensor]:
        up = F.linear(x, weight, bias)
        return F.gelu(up, approximate="tanh"), up

    up = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    out = _multiplied(
        x, weight, Epilogue.gelu_aux if bias is None else Epilogue.gelu_aux_bias, apart, bias=bias, aux=up
    )  # fmt: skip
    return apart() if out is None else (out, up)


@linear_gelu.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return out, torch.empty_like(out)


@torch.library.custom_op("gpt::gelu_backward_product", mutates_args=())
def gelu_backward_product(dy: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    """(dy @ weight) times the derivative at `up` of GELU in its tanh form.

    Args:
        dy: (T, d).
        weight: (d, F), dtype of dy.
        up: (T, F), dtype of dy.

    Returns:
        (T, F), dtype of dy.
    """

    def apart() -> Tensor:
        return torch.ops.aten.gelu_backward(dy @ weight, up, approximate="tanh")

    out = _multiplied(dy, weight, Epilogue.dgelu, apart, transposed=False, aux=up)
    return apart() if out is None else out


@gelu_backward_product.register_fake
def _(dy: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    return torch.empty(up.shape, dtype=up.dtype, device=up.device)

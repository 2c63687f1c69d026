"""Matrix products with epilogues that torch has no call for: cuBLASLt adds, makes GELU, multiplies by its derivative.

Apart, each of these reads the widest tensors of a transformer block from memory and writes one. The library is the one
that torch has loaded, called through ctypes: ten functions of a documented C interface ("Using the cuBLASLt API" in
NVIDIA's documentation of cuBLAS), and no extension to build. An epilogue does not always pay: where a product is met
for the first time, what the library offers is timed beside the two steps apart, once.
Three operators stand at the end; `linear.py` knows when to call them.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

_WORKSPACE_bytes = 32 << 20  # what NVIDIA recommends on Hopper
_ALIGNMENT_bytes = 256  # of every pointer, which the heuristic takes for granted
_CANDIDATES = 8  # algorithms that are timed
_TIMED_RUNS = 5
_WORTH = 0.97  # what is not the heuristic's first choice must be so much faster

# cudaDataType_t
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_R_32F = 0
_COMPUTE_32F = 68  # cublasComputeType_t
# cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t
_TRANSPOSE_A, _EPILOGUE, _BIAS_POINTER, _AUX_POINTER, _AUX_LD, _BIAS_DTYPE, _AUX_DTYPE = 3, 7, 8, 11, 12, 26, 22
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


def why_unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """A reason why the epilogues cannot serve products of this dtype there, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"needs an NVIDIA GPU, got {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"has been measured on Hopper only, got {torch.cuda.get_device_name(device)}"
    if dtype not in _DTYPES:
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
    """out (T, m) = [addend (T, m) +] x (T, k) @ W, with an epilogue; one shape, dtype and device.

    cuBLAS counts columns first: a row-major (T, m) is its m x T.

    Args:
        transposed: W is given as (m, k), a linear layer's weight; otherwise as (k, m).
    """

    def __init__(
        self,
        m: int,
        T: int,
        k: int,
        dtype: torch.dtype,
        device: torch.device,
        epilogue: Epilogue,
        transposed: bool,
    ) -> None:
        self.device = device
        self.handle = _handle(device)
        self.description, preference = c_void_p(), c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self.description), _COMPUTE_32F, _R_32F)
        self._set(_TRANSPOSE_A, c_int32(transposed))
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
        shapes = ((k, m) if transposed else (m, k), (k, T), (m, T))
        self.layouts = [self._layout(dtype, *shape) for shape in shapes]
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
        self.best: int | None = None  # candidate; past the last one for the steps apart; None before it is timed

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
        x: Tensor,
        weight: Tensor,
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
            c_void_p(weight.data_ptr()),
            a,
            c_void_p(x.data_ptr()),
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
        """The fastest candidate, or the number of candidates where the steps apart are faster. Timed once, and the
        heuristic's first where nothing may be timed.
        """
        if self.found == 0:
            return 0
        if self.best is None:
            if torch.cuda.is_current_stream_capturing():
                return 0
            times = [self._milliseconds(lambda i=i: run(i)) for i in range(self.found)]  # type: ignore[misc]
            times.append(self._milliseconds(apart))
            fastest = min(range(len(times)), key=times.__getitem__)
            self.best = fastest if times[fastest] < _WORTH * times[0] else 0
        return self.best

    def _milliseconds(self, call: Callable[[], object]) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_RUNS + 1)]
        try:
            call()
        except RuntimeError:  # a candidate that cannot run after all
            return math.inf
        for event in events:
            event.record()
            call()
        torch.cuda.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


_product = lru_cache(_Product)


def _ready(x: Tensor | None) -> Tensor | None:
    if x is None:
        return None
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT_bytes else x


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
    """The product with its epilogue; None where `apart`, which makes the same in steps, has to be called instead."""
    if x.shape[0] == 0 or why_unavailable(x.device, x.dtype) is not None:
        return None
    m = weight.shape[0 if transposed else 1]
    with torch.cuda.device(x.device):
        product = _product(m, *x.shape, x.dtype, x.device, epilogue, transposed)
        out = torch.empty(x.shape[0], m, dtype=x.dtype, device=x.device)
        x, weight, addend, bias, aux = (_ready(t) for t in (x, weight, addend, bias, aux))  # type: ignore[assignment]

        def run(candidate: int) -> None:
            product.run(candidate, x, weight, out, addend, bias, aux)

        chosen = product.choose(run, apart)
        if chosen == product.found:
            return None
        run(chosen)
        return out


@torch.library.custom_op("gpt::linear_add", mutates_args=())
def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
    """addend + x @ weightᵀ + bias, rounded once where cuBLASLt does it.

    Args:
        x: (T, k).
        weight: (m, k), dtype of x; bias (m,) or None, likewise.
        addend: (T, m), dtype of x.

    Returns:
        (T, m), dtype of x. The first call of a shape times the library's algorithms, and waits for the device; so it
        is with the other operators.
    """

    def apart() -> Tensor:
        return F.linear(x, weight, bias) + addend

    out = _multiplied(
        x, weight, Epilogue.none if bias is None else Epilogue.bias, apart, addend=addend, bias=bias
    )  # fmt: skip
    return apart() if out is None else out


@linear_add.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor) -> Tensor:
    return torch.empty(addend.shape, dtype=addend.dtype, device=addend.device)


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

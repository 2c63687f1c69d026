"""(dy @ W) · gelu'(up) in one product: cuBLASLt multiplies on the way out, which torch has no call for.

Apart, that multiplication reads two of the widest tensors of a transformer block from memory and writes a third. The
library is the one that torch has loaded, called through ctypes: eleven functions of a documented C interface ("Using
the cuBLASLt API" in NVIDIA's documentation of cuBLAS), and no extension to build.
Used by `linear.py`, which knows when.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

_WORKSPACE_bytes = 32 << 20  # what NVIDIA recommends on Hopper
_ALIGNMENT_bytes = 256  # of every pointer, which the heuristic takes for granted
_CANDIDATES = 8  # algorithms that are timed
_TIMED_RUNS = 5
_WORTH = 0.97  # another algorithm than the heuristic's first must be so much faster

# cudaDataType_t
_DTYPES = {torch.bfloat16: 14, torch.float16: 2}
_R_32F = 0
# cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t, cublasLtMatmulPreferenceAttributes_t
_COMPUTE_32F = 68
_EPILOGUE, _AUX_POINTER, _AUX_LD, _AUX_DTYPE = 7, 11, 12, 22
_DGELU = 64 | 128
_MAX_WORKSPACE = 1


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
    """A reason why the epilogue cannot serve products of this dtype there, or None."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"needs an NVIDIA GPU, got {device.type}"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return f"is faster for sure on Hopper only, got {torch.cuda.get_device_name(device)}"
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
    """out = (dy @ weight) · gelu'(up) for one shape, dtype and device.

    cuBLAS counts columns first: a row-major (T, F) is its F x T, and weight (d, F) its F x d.
    """

    def __init__(self, T: int, d: int, F: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self.handle = _handle(device)
        self.description, preference = c_void_p(), c_void_p()
        _call("cublasLtMatmulDescCreate", byref(self.description), _COMPUTE_32F, _R_32F)
        self._set(_EPILOGUE, c_uint32(_DGELU))
        self._set(_AUX_LD, c_int64(F))
        self._set(_AUX_DTYPE, c_int32(_DTYPES[dtype]))
        self.layouts = [self._layout(dtype, *shape) for shape in ((F, d), (d, T), (F, T))]
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
        self.best: int | None = None

    def _set(self, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _call("cublasLtMatmulDescSetAttribute", self.description, attribute, byref(value), size)

    @staticmethod
    def _layout(dtype: torch.dtype, rows: int, columns: int) -> c_void_p:
        layout = c_void_p()
        _call(
            "cublasLtMatrixLayoutCreate",
            byref(layout),
            _DTYPES[dtype],
            c_uint64(rows),
            c_uint64(columns),
            c_int64(rows),
        )
        return layout

    def run(self, candidate: int, dy: Tensor, weight: Tensor, up: Tensor, out: Tensor) -> None:
        self._set(_AUX_POINTER, c_uint64(up.data_ptr()))
        workspace = torch.empty(_WORKSPACE_bytes, dtype=torch.uint8, device=self.device)
        a, b, c = self.layouts
        one, zero = c_float(1.0), c_float(0.0)
        _call(
            "cublasLtMatmul",
            self.handle,
            self.description,
            byref(one),
            c_void_p(weight.data_ptr()),
            a,
            c_void_p(dy.data_ptr()),
            b,
            byref(zero),
            c_void_p(out.data_ptr()),
            c,
            c_void_p(out.data_ptr()),
            c,
            byref(self.candidates[candidate].algorithm),
            c_void_p(workspace.data_ptr()),
            c_size_t(_WORKSPACE_bytes),
            c_void_p(torch.cuda.current_stream(self.device).cuda_stream),
        )

    def choose(self, *tensors: Tensor) -> int:
        """The fastest candidate, timed once; the heuristic's first where nothing may be timed."""
        if self.best is None:
            if torch.cuda.is_current_stream_capturing():
                return 0
            times = [self._milliseconds(i, *tensors) for i in range(self.found)]
            fastest = min(range(self.found), key=times.__getitem__)
            self.best = fastest if times[fastest] < _WORTH * times[0] else 0
        return self.best

    def _milliseconds(self, candidate: int, *tensors: Tensor) -> float:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_TIMED_RUNS + 1)]
        self.run(candidate, *tensors)
        for event in events:
            event.record()
            self.run(candidate, *tensors)
        torch.cuda.synchronize(self.device)
        return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


_product = lru_cache(_Product)


def _ready(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % _ALIGNMENT_bytes else x


@torch.library.custom_op("gpt::gelu_backward_product", mutates_args=())
def gelu_backward_product(dy: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    """(dy @ weight) times the derivative at `up` of GELU in its tanh form; in one product where cuBLASLt has it.

    Args:
        dy: (T, d).
        weight: (d, F), dtype of dy.
        up: (T, F), dtype of dy.

    Returns:
        (T, F), dtype of dy. The first call of a shape times the library's algorithms, and waits for the device.
    """
    if why_unavailable(dy.device, dy.dtype) is None and dy.shape[0] > 0:
        with torch.cuda.device(dy.device):
            product = _product(*dy.shape, weight.shape[1], dy.dtype, dy.device)
            if product.found:
                out = torch.empty(up.shape, dtype=up.dtype, device=up.device)
                tensors = (_ready(dy), _ready(weight), _ready(up), out)
                product.run(product.choose(*tensors), *tensors)
                return out
    return torch.ops.aten.gelu_backward(dy @ weight, up, approximate="tanh")


@gelu_backward_product.register_fake
def _(dy: Tensor, weight: Tensor, up: Tensor) -> Tensor:
    return torch.empty(up.shape, dtype=up.dtype, device=up.device)

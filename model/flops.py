"""How much arithmetic a step is, and how much the device can do: the definitions behind mfu, mfu_exact and gemm_util.

- `mfu` = `paper_flops` per second over the datasheet's dense peak (`device_peak_tflops`): the FlashAttention-2 paper's
  formula, attention not halved for the causal mask.
- `mfu_exact` = `exact_flops` per second over the same peak: the work that is really needed.
- `gemm_util` = `exact_flops` per second over `sustained_matmul_flops`, which is measured and needs no table.

A multiply-add is two FLOPs. Tokens and Σ len² are those of real documents, never of padding.
"""

from __future__ import annotations

import re
import statistics
import time

import torch
from torch import Tensor

from model.config import GPTConfig, Mlp


def paper_flops(n_params: int, n_layer: int, d_model: int, tokens: int, sum_len_sq: int) -> int:
    """6·N·T + 12·n_layer·d_model·Σ len²: forward and backward of one step, as the paper counts.

    Args:
        n_params: N, all parameters, embeddings included.
        tokens: T, real tokens of the step.
        sum_len_sq: Σ len² over the step's documents (pieces).

    Source: FlashAttention-2 (arXiv 2307.08691), section 4.2, after Megatron-LM (arXiv 2104.04473).
    """
    return 6 * n_params * tokens + 12 * n_layer * d_model * sum_len_sq


def exact_flops(config: GPTConfig, tokens: int, sum_len_sq: int) -> int:
    """The matrix arithmetic that a step needs, forward and backward, nothing recomputed.

    Every matmul weight costs 6 a token: forward, gradient of the input, gradient of the weight. Counted are the linear
    layers and the read-out over the true vocabulary (rows that pad it are computed but not needed); not the look-up of
    embeddings, norms, biases. A document of len tokens has len·(len+1)/2 causal pairs, each 4·d_model forward (q·k and
    p·v) and twice that backward.

    Args:
        tokens: real tokens of the step, Σ len.
        sum_len_sq: Σ len² over the same document pieces.
    """
    causal_pairs = (sum_len_sq + tokens) // 2  # exact: len² + len is even
    return 6 * matmul_params(config) * tokens + 3 * 4 * config.d_model * config.n_layer * causal_pairs


def matmul_params(config: GPTConfig) -> int:
    """Weights that each token is multiplied with: the blocks' linear layers and the read-out's true rows."""
    if config.vocab_size is None:
        raise ValueError("model.vocab_size must be set before FLOPs are counted, got None")
    per_layer = sum(n * k for _, n, k, _ in gemm_shapes(config, 1))
    return config.n_layer * per_layer + config.vocab_size * config.d_model


def gemm_shapes(config: GPTConfig, n_tokens: int) -> list[tuple[int, int, int, int]]:
    """The model's four GEMM shapes, forward: qkv, attention output, MLP up (gate and value in one), MLP down.

    The logits' GEMM is left out: its rows are set by `loss_chunk_tokens`, and a yardstick should not move with it.

    Returns:
        [(m, n, k, calls)]: (m, k) @ (k, n), `calls` times in one micro-batch of n_tokens.
    """
    d_model, heads = config.d_model, config.nheads_q + 2 * config.kv_heads
    up = config.ff_width * (2 if config.mlp is Mlp.swiglu else 1)
    widths = [(heads * config.headdim, d_model), (d_model, d_model), (up, d_model), (d_model, config.ff_width)]
    return [(n_tokens, n, k, config.n_layer) for n, k in widths]


def sustained_matmul_flops(
    config: GPTConfig, n_tokens: int, device: torch.device | str, dtype: torch.dtype, seconds: float = 1.0
) -> float:
    """FLOP/s of plain matrix products on this device, in this model's shapes and proportions, kept up over `seconds`.

    One round is the twelve products of a block: four shapes, each forward (x @ Wᵀ), for the input's gradient (dy @ W)
    and for the weight's (dyᵀ @ x). Rounds run back to back in windows with a synchronisation at each end; the result is
    the median window's rate, so a first window on a cool chip does not set it. Operands are normal random numbers
    (zeros run faster: they draw less power) from a private generator: the global random state stays as it was.

    Args:
        n_tokens: rows of a micro-batch.
        device: where; synchronised.
        dtype: of operands and results.
        seconds: at least this long, after the warm-up.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(0)

    def operand(*shape: int) -> Tensor:
        # a tenth: products of products stay finite in every dtype
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(0.1)

    shapes = gemm_shapes(config, n_tokens)
    operands = [(operand(m, k), operand(n, k), operand(m, n)) for m, n, k, _ in shapes]
    flops_per_round = sum(3 * 2 * m * n * k for m, n, k, _ in shapes)

    def seconds_of(n_rounds: int) -> float:
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(n_rounds):
            for x, weight, dy in operands:
                torch.mm(x, weight.t())
                torch.mm(dy, weight)
                torch.mm(dy.t(), x)
        _synchronize(device)
        return time.perf_counter() - start

    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        seconds_of(1)  # picks the kernels
        # a tenth of the whole per window: long against launch and synchronisation, short enough for a median
        n_rounds = max(1, round(seconds / 10 / max(seconds_of(1), 1e-6)))
        windows: list[float] = []
        while sum(windows) < seconds or len(windows) < 3:
            windows.append(seconds_of(n_rounds))
    return flops_per_round * n_rounds / statistics.median(windows)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Dense bf16 TFLOP/s with fp32 accumulation, from NVIDIA's and AMD's datasheets (figures "with sparsity" halved). The
# first pattern that matches a whole word of the device's name wins, so the special comes before the general.
_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    (r"GB300|GB200", 2500.0),
    (r"B300|B200", 2250.0),
    (r"B100", 1750.0),
    (r"GH200", 989.4),
    (r"H[12]00 NVL", 835.5),
    (r"H[18]00 PCIe", 756.0),
    (r"H200|H100|H800", 989.4),
    (r"H20", 148.0),
    (r"A100|A800", 312.0),
    (r"A40", 149.7),
    (r"A30", 165.0),
    (r"A10", 125.0),
    (r"L40S", 362.05),
    (r"L40", 181.05),
    (r"L4", 121.0),
    (r"RTX 6000 Ada", 364.25),
    (r"RTX A6000", 154.8),
    (r"RTX 5090", 209.5),
    (r"RTX 4090 D", 147.6),
    (r"RTX 4090", 165.2),
    (r"RTX 3090 Ti", 80.0),
    (r"RTX 3090", 71.0),
    (r"MI300X", 1307.4),
)


def device_peak_tflops(name: str) -> float | None:
    """Dense bf16 peak of a GPU by the name torch gives it, in TFLOP/s; None where the table does not know it.

    A slice of a GPU (MIG) and laptop variants, which share a desktop card's name but not its speed, are not known.
    """
    if re.search(r"\bMIG\b|\bLaptop\b|\bMax-Q\b", name):
        return None
    return next((peak for pattern, peak in _PEAK_TFLOPS if re.search(rf"\b(?:{pattern})\b", name)), None)

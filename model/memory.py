"""What a training step keeps in memory, part by part, from the shape alone: the numbers of a dry run.

Weights, gradients and optimiser states are exact. Activations are what eager PyTorch saves for the backward pass; a
compiled block saves less. The allocator's rounding and cuBLAS workspaces come on top.
"""

from __future__ import annotations

from model.config import GPTConfig, Mlp, Norm, Position

# (bytes of a weight, bytes of a 16-bit or wider matmul operand)
_BYTES = {
    "32-true": (4, 4),
    "bf16-mixed": (4, 2),
    "bf16-true": (2, 2),
    "64-true": (8, 8),
}
_REFERENCE_SCORES = 3 * 4 * (1 << 24)  # blocks of fp32 scores that the reference attention has at once


def memory_estimate(
    config: GPTConfig,
    micro_batch_tokens: int,
    precision: str,
    activation_checkpointing: bool,
    attention: str,
    context: int = 0,
) -> dict[str, int]:
    """Bytes by part.

    Args:
        micro_batch_tokens: T, padding included.
        precision: 32-true, bf16-mixed, bf16-true or 64-true.
        activation_checkpointing: blocks keep their input only.
        attention: any backend; `eager` keeps each block's attention probabilities, `reference` some blocks of scores.
        context: tokens of a document, which `eager` needs to know.

    Returns:
        weights, gradients, optimiser (AdamW's two moments), activations (saved for the backward pass, and 16-bit copies
        of weights under mixed precision), logits (one chunk's, and the read-out's gradient).

    Raises:
        ValueError: an unknown precision.
    """
    if precision not in _BYTES:
        raise ValueError(f"precision must be one of {list(_BYTES)}, got {precision!r}")
    weight_bytes, operand_bytes = _BYTES[precision]
    residual_bytes = weight_bytes if config.residual_fp32 else operand_bytes
    n_tokens, n_params = micro_batch_tokens, count_params(config)
    block = n_tokens * _block_bytes_per_token(config, operand_bytes, weight_bytes)
    block_input = n_tokens * config.d_model * residual_bytes
    blocks = config.n_layer * block_input + block if activation_checkpointing else config.n_layer * block
    # into the final norm, in its weight's dtype; hidden states, their gradient
    ends = n_tokens * config.d_model * (weight_bytes + 2 * operand_bytes)
    if config.dropout > 0:
        ends += n_tokens * config.d_model
    copies = operand_bytes * _linear_weights(config) if operand_bytes < weight_bytes else 0
    scores = _REFERENCE_SCORES if attention == "reference" else 0
    if attention == "eager":
        probabilities = n_tokens * config.nheads_q * context * operand_bytes  # of one block, over all its pairs
        kept = 1 if activation_checkpointing else config.n_layer
        scores = (kept + 2) * probabilities  # and their gradient, before and after the softmax's backward
    exact_bytes = max(4, weight_bytes)
    logit_bytes = exact_bytes if config.logits_fp32 else operand_bytes
    chunk = min(n_tokens, config.loss_chunk_tokens)
    readout = config.padded_vocab_size * config.d_model
    return {
        "weights": weight_bytes * n_params,
        "gradients": weight_bytes * n_params,
        "optimiser": 2 * weight_bytes * n_params,
        "activations": blocks + ends + copies + scores,
        "logits": chunk * config.padded_vocab_size * (logit_bytes + operand_bytes)
        + readout * (exact_bytes + (operand_bytes if operand_bytes < weight_bytes else 0)),
    }


def count_params(config: GPTConfig) -> int:
    """All parameters of the model, a tied matrix counted once; what `GPT(config).n_params` says."""
    d_model = config.d_model
    heads = (config.nheads_q + 2 * config.kv_heads) * config.headdim
    up = config.ff_width * (2 if config.mlp is Mlp.swiglu else 1)
    norm = d_model * (2 if config.bias and config.norm is Norm.layernorm else 1)
    biases = heads + d_model + up + d_model if config.bias else 0
    total = _linear_weights(config) + config.n_layer * (2 * norm + biases) + norm
    total += config.padded_vocab_size * d_model * (1 if config.tie_embeddings else 2)
    return total + (config.max_positions * d_model if config.position is Position.learned else 0)


def _linear_weights(config: GPTConfig) -> int:
    heads = config.nheads_q + 2 * config.kv_heads
    matrices = 3 if config.mlp is Mlp.swiglu else 2
    return config.n_layer * config.d_model * (heads * config.headdim + config.d_model + matrices * config.ff_width)


def _block_bytes_per_token(config: GPTConfig, operand: int, weight: int) -> int:
    d_model, headdim = config.d_model, config.headdim
    heads_qk = config.nheads_q + config.kv_heads
    norms = 2 * (d_model * (weight + operand) + 8)  # what the norm reads and writes, mean and rstd
    qkv = (heads_qk + config.kv_heads) * headdim * operand
    rotated = heads_qk * headdim * operand if config.position is Position.rotary else 0
    attended = d_model * operand + 4 * config.nheads_q  # out, which the projection reads too, and lse
    mlp = config.ff_width * operand * (4 if config.mlp is Mlp.swiglu else 2)
    dropout_masks = 2 * d_model if config.dropout > 0 else 0
    return norms + qkv + rotated + attended + mlp + dropout_masks

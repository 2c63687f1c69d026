"""A GPT over unpadded tokens: `(T, d_model)`, documents side by side, attention told their limits by cu_seqlens.

Knows tensors, the shape in `config.py` and an attention callable; nothing of data files, optimisers or Lightning.
Every shape is static and nothing is read back from the device. Read next: `attention.py`, `loss.py`, `rope.py`.
Legend: T tokens, Hq query heads, Hkv key/value heads, D headdim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fa2
from model.attention import AttentionFn, fa2_attention, reference_attention, torch_attention
from model.config import GPTConfig, Mlp, Norm, Position
from model.linear import Linear, gelu_mlp
from model.loss import linear_cross_entropy, softmax_in_place, softmax_out_of_place
from model.rope import rotary_table, rotate

Rotary = tuple[Tensor, Tensor]  # (cos, sin) of the batch


def compute_dtype(x: Tensor) -> torch.dtype:
    """What a matrix product with `x` runs in: the autocast dtype under autocast, otherwise x's own."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm in its weight's dtype, whatever x is, that comes out as the next product reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(compute_dtype(x))


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm in its weight's dtype, whatever x is, that comes out as the next product reads it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(compute_dtype(x))


def _norm(config: GPTConfig) -> nn.Module:
    if config.norm is Norm.rmsnorm:
        return RMSNorm(config.d_model, eps=config.norm_eps)
    return LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class SelfAttention(nn.Module):
    """Causal self-attention inside each document, with grouped query heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.nheads_q, self.nheads_kv, self.headdim = config.nheads_q, config.kv_heads, config.headdim
        width_qkv = (self.nheads_q + 2 * self.nheads_kv) * self.headdim
        self.qkv = Linear(config.d_model, width_qkv, bias=config.bias)
        self.out = Linear(config.d_model, config.d_model, bias=config.bias)

    def forward(
        self,
        x: Tensor,
        rotary: Rotary | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attention: AttentionFn,
        addend: Tensor | None = None,
    ) -> Tensor:
        """[addend +] the projection of attention over x, (T, d_model); an addend is for where `out.adds` says so."""
        qkv = self.qkv(x).unflatten(-1, (-1, self.headdim))  # (T, Hq + 2 Hkv, D)
        if attention is fa2_attention and rotary is None and self.nheads_kv == self.nheads_q:
            # the projection as it is, and its gradient in one tensor: dq, dk and dv apart would be copied together
            qkv = qkv.unflatten(1, (3, self.nheads_q))
            out = fa2.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, causal=True)
        else:
            # one split, and q and k turned apart: the backward pass then puts their gradients together in one copy
            q, k, v = qkv.split((self.nheads_q, self.nheads_kv, self.nheads_kv), dim=1)
            if rotary is not None:
                q, k = rotate(q, *rotary), rotate(k, *rotary)
            out = attention(q, k, v, cu_seqlens, max_seqlen)
        return self.out(out.flatten(1), addend)


class FeedForward(nn.Module):
    """down(gelu(up(x))), or SwiGLU: down(silu(gate) · value) with gate and value from one projection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gated = config.mlp is Mlp.swiglu
        self.up = Linear(config.d_model, config.ff_width * (2 if self.gated else 1), bias=config.bias)
        self.down = Linear(config.ff_width, config.d_model, bias=config.bias)

    def forward(self, x: Tensor, addend: Tensor | None = None) -> Tensor:
        """[addend +] the MLP of x, (T, d_model); an addend is for where `down.adds` says so."""
        if not self.gated:
            return gelu_mlp(x, self.up, self.down, addend)
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value, addend)


class Block(nn.Module):
    """Pre-norm transformer block; the unit that is compiled and checkpointed.

    The projections of its branches add the residual stream to what they make, where they can. Otherwise the block
    leaves its last sum to the next one, where a compiler makes it on the way into the norm: a pass over memory less.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_attention = _norm(config)
        self.attention = SelfAttention(config)
        self.norm_mlp = _norm(config)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        branch: Tensor | None,
        rotary: Rotary | None,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attention: AttentionFn,
    ) -> tuple[Tensor, Tensor | None]:
        """From and to (residual stream, the branch that is still to be added to it), each (T, d_model)."""
        if branch is not None:
            x = x + branch
        if self.attention.out.adds(x) and self.mlp.down.adds(x) and self.dropout.p == 0:
            x = self.attention(self.norm_attention(x), rotary, cu_seqlens, max_seqlen, attention, x)
            return self.mlp(self.norm_mlp(x), x), None
        x = x + self.dropout(self.attention(self.norm_attention(x), rotary, cu_seqlens, max_seqlen, attention))
        return x, self.dropout(self.mlp(self.norm_mlp(x)))


@torch.library.custom_op("gpt::embedding_backward", mutates_args=())
def _embedding_backward(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    """(rows, d) sums of the rows of grad (T, d) with the same id."""
    return torch.ops.aten.embedding_dense_backward(grad.contiguous(), ids, rows, -1, False)


@_embedding_backward.register_fake
def _(grad: Tensor, ids: Tensor, rows: int) -> Tensor:
    return grad.new_empty(rows, grad.shape[1])


class _Embedding(torch.autograd.Function):
    """F.embedding with torch's own backward pass: compiled, rows of one id are added up in any order, by atomics."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = table.shape[0]
        return F.embedding(ids, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (ids,) = ctx.saved_tensors
        return None, torch.ops.gpt.embedding_backward(grad, ids, ctx.rows)


def embed(
    tokens: Tensor,
    positions: Tensor,
    cu_seqlens: Tensor,
    table: Tensor,
    position_table: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """What enters the first block, before dropout, and the positions, 0 on padding.

    Args:
        tokens, positions, cu_seqlens: as `GPT.forward`.
        table: (padded_vocab, d_model).
        position_table: (max_positions, d_model) of learned positions, or None.
        dtype: of the residual stream.

    Returns:
        (T, d_model), a position alone on padding; (T,) positions.
    """
    # Padding starts from 0 at position 0: its embedding could reach a gradient as 0 · NaN, and its position may lie
    # outside the table.
    real = torch.arange(tokens.shape[0], device=tokens.device) < cu_seqlens[-1]
    x = torch.where(real[:, None], _Embedding.apply(tokens, table), 0)
    positions = torch.where(real, positions, 0)
    if position_table is not None:
        x = x + _Embedding.apply(positions, position_table)
    return x.to(dtype), positions


class GPT(nn.Module):
    """Decoder-only transformer. Built on the current default device: `with torch.device("cuda"): GPT(...)`.

    Args:
        config: shape; `vocab_size` must be set.
        attention: backend from `model.attention.resolve_attention`.
        activation_checkpointing: keep only each block's input and recompute the rest in the backward pass. Also an
            attribute, free to change between steps.
    """

    def __init__(self, config: GPTConfig, attention: AttentionFn, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.attention = attention
        self.activation_checkpointing = activation_checkpointing
        self._softmax = softmax_in_place
        self._embed = embed
        self.embedding = nn.Embedding(config.padded_vocab_size, config.d_model)
        learned = config.position is Position.learned
        self.position_embedding = nn.Embedding(config.max_positions, config.d_model) if learned else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = _norm(config)
        # a tied model has no second parameter: one gradient, one optimiser state, one entry in a state dict
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.padded_vocab_size, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """GPT-3 initialisation, in place: also what makes a model of `to_empty` tensors usable."""
        std = self.config.init_std
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
        # 2 n_layer branches add up in the residual stream; this keeps its variance independent of depth
        for name, parameter in self.blocks.named_parameters():
            if name.endswith(("attention.out.weight", "mlp.down.weight")):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.n_layer))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        attentions: Sequence[AttentionFn] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm.

        Args:
            tokens: (T,) int64 below `vocab_size`; those at or past `cu_seqlens[-1]` are padding.
            positions: (T,) int32, 0 at the first token of each document; anything on padding.
            cu_seqlens: (max_docs + 1,) int32 document limits; repeats of the last value are empty documents.
            max_seqlen: at least the longest document; constant over a run.
            attentions: one backend for each block, for a cache of keys and values; None takes `self.attention`.

        Returns:
            (T, d_model); rows of padding hold finite values of no meaning.

        Raises:
            ValueError: max_seqlen exceeds the positions the model was built for.
        """
        if max_seqlen > self.config.max_positions:
            raise ValueError(
                f"model.max_positions must be at least max_seqlen ({max_seqlen}), got {self.config.max_positions}"
            )
        config, table = self.config, self.embedding.weight
        position_table = None if self.position_embedding is None else self.position_embedding.weight
        residual = table.dtype if config.residual_fp32 else compute_dtype(table)
        x, positions = self._embed(tokens, positions, cu_seqlens, table, position_table, residual)
        rotary = rotary_table(positions, config.headdim, config.rope_theta) if position_table is None else None
        x = self.dropout(x)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        branch = None
        for i, block in enumerate(self.blocks):
            rest = (rotary, cu_seqlens, max_seqlen, self.attention if attentions is None else attentions[i])
            if recompute:
                x = x if branch is None else x + branch  # one tensor to keep, not two
                x, branch = checkpoint(
                    block, x, None, *rest, use_reentrant=False, preserve_rng_state=config.dropout > 0
                )
            else:
                x, branch = block(x, branch, *rest)
        return self.norm(x if branch is None else x + branch)

    def loss(self, tokens: Tensor, targets: Tensor, positions: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Sum of nats over the valid targets, () fp32 (float64 for a float64 model); -100 in `targets` is ignored."""
        hidden = self(tokens, positions, cu_seqlens, max_seqlen)
        config = self.config
        return linear_cross_entropy(
            hidden,
            self.readout,
            targets,
            config.loss_chunk_tokens,
            config.vocab_size,
            self._softmax,
            config.logits_fp32,
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """torch.compile of every part between which a tensor must exist in memory anyway: embedding, blocks, final
        norm, and the loss's softmax. Static shapes, whole graphs; all blocks share one.

        A block may break around an attention that cannot be traced: the reference on a GPU, and one from elsewhere.

        Args:
            args, kwargs: further ones of torch.compile.
        """
        options = {"fullgraph": True, "dynamic": False, **kwargs}
        on_cpu = self.embedding.weight.device.type == "cpu"
        traceable = self.attention in (fa2_attention, torch_attention) or (
            on_cpu and self.attention is reference_attention
        )
        for block in self.blocks:
            block.compile(*args, **{**options, "fullgraph": options["fullgraph"] and traceable})
        self.norm.compile(*args, **options)
        self._embed = torch.compile(embed, *args, **options)
        self._softmax = torch.compile(softmax_out_of_place, *args, **options)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores (N, padded_vocab) of the next token; padded ids score −inf, as in the loss."""
        logits = F.linear(hidden, self.readout)
        logits[:, self.config.vocab_size :] = -torch.inf
        return logits

    @property
    def readout(self) -> Tensor:
        """The (padded_vocab, d_model) matrix that turns hidden states into logits."""
        return self.embedding.weight if self.head is None else self.head.weight

    @property
    def n_params(self) -> int:
        """All parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())

    @property
    def matmul_params(self) -> int:
        """Weights that every token is multiplied with, the read-out over the true vocabulary included."""
        linear = sum(m.weight.numel() for m in self.blocks.modules() if isinstance(m, nn.Linear))
        assert self.config.vocab_size is not None, "the constructor refuses a config without a vocabulary"
        return linear + self.config.vocab_size * self.config.d_model

    def decay_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(matrices, others): weight decay is for matrices, embeddings included; others are biases and norms."""
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        return matrices, others

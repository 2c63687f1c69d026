"""Multi-head self-attention as a module over unpadded tokens, with torch.nn.MultiheadAttention's weights.

Knows the public functions of `interface.py` alone. Positions (rotary, learned) are the model's affair.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fa2 import checks
from fa2.interface import (
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func,
)

# Where no max_seqlen is given. Not x's length: under torch.compile each length would make another graph.
ANY_LENGTH = 1 << 30


def _count(name: str, value: Any) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise checks.refused(name, "a positive integer", value) from None
    if count <= 0:
        raise checks.refused(name, "a positive integer", value)
    return count


class MultiheadAttention(nn.Module):
    """Self-attention over packed or dense tokens: project to q, k and v, attend, project back.

    Parameters, named and laid out as those of torch.nn.MultiheadAttention(embed_dim, num_heads), whose state_dict loads
    as it is, and initialised as it does (the same seed gives the same bits), where num_kv_heads is num_heads:

        in_proj_weight ((num_heads + 2 * num_kv_heads) * headdim, embed_dim): the rows of q, then k, then v, each
            head by head; so separate projections become torch.cat([q_proj.weight, k_proj.weight, v_proj.weight])
        in_proj_bias   ((num_heads + 2 * num_kv_heads) * headdim,), zeros at first
        out_proj       nn.Linear(embed_dim, embed_dim)

    Without grouped queries, the gradient of the projected qkv is one tensor that the kernel writes in place.

    Args:
        embed_dim: width of the tokens; a multiple of num_heads. headdim is embed_dim / num_heads, at most 256 on a GPU.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads, None: num_heads. Query head i attends to key head
            i // (num_heads / num_kv_heads).
        bias: whether both projections add one.
        causal, window_size, deterministic: as `fa2.flash_attn_func`.
        dropout: must be 0.0; there for the error's sake.
        device, dtype: of the parameters.

    Raises:
        ValueError: an argument breaks one of the rules above; the message names the argument and the rule.
    """

    in_proj_bias: nn.Parameter | None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        bias: bool = True,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        deterministic: bool = False,
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = _count("embed_dim", embed_dim)
        self.num_heads = _count("num_heads", num_heads)
        self.num_kv_heads = self.num_heads if num_kv_heads is None else _count("num_kv_heads", num_kv_heads)
        if self.embed_dim % self.num_heads:
            raise checks.refused("embed_dim", f"a multiple of num_heads ({num_heads})", embed_dim)
        if self.num_heads % self.num_kv_heads:
            raise checks.refused("num_kv_heads", f"a divisor of num_heads ({num_heads})", num_kv_heads)
        if dropout != 0.0:
            raise checks.refused("dropout", "0.0 (attention dropout is not supported)", dropout)
        checks.window(window_size, causal, 0)
        self.headdim = self.embed_dim // self.num_heads
        self.causal, self.deterministic = causal, deterministic
        self.window_size = (int(window_size[0]), int(window_size[1]))

        rows = (self.num_heads + 2 * self.num_kv_heads) * self.headdim
        self.in_proj_weight = nn.Parameter(torch.empty(rows, self.embed_dim, device=device, dtype=dtype))
        self.in_proj_bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        self.out_proj = nn.Linear(self.embed_dim, self.embed_dim, bias=bias, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """in_proj_weight as torch.nn.MultiheadAttention draws it, biases 0; out_proj.weight stays nn.Linear's."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
        """Attend within each sequence.

        Args:
            x: (total, embed_dim), sequences side by side without padding, or (batch, seqlen, embed_dim), equally long
                ones; in the parameters' dtype, or any under autocast. float16 or bfloat16 on a GPU.
            cu_seqlens: (sequences + 1,) int32 on x's device, where the sequences of a packed x begin and end; None for
                a dense x. Tokens at or past cu_seqlens[-1] attend to nothing: they give out_proj.bias, or 0. They must
                be finite, for the projections' weight gradients read them.
            max_seqlen: at least the longest sequence of a packed x, in tokens; None: any length, which costs nothing.
                Under torch.compile it is a constant of the graph: each value makes another.

        Returns:
            x's shape.

        Raises:
            ValueError: x or cu_seqlens is of another shape or dtype, or they do not belong together; on a CPU
                cu_seqlens's values are checked too.
            RuntimeError: no CUDA kernel serves these inputs.
        """
        if x.dim() not in (2, 3) or x.shape[-1] != self.embed_dim:
            rule = f"of shape (total, embed_dim) or (batch, seqlen, embed_dim) with embed_dim {self.embed_dim}"
            raise checks.refused("x", rule, tuple(x.shape))
        if x.dim() == 2 and cu_seqlens is None:
            raise checks.refused("cu_seqlens", "given for x of shape (total, embed_dim)", None)
        for name, given in (("cu_seqlens", cu_seqlens), ("max_seqlen", max_seqlen)):
            if x.dim() == 3 and given is not None:
                raise checks.refused(name, "None for x of shape (batch, seqlen, embed_dim)", type(given).__name__)
        longest = ANY_LENGTH if max_seqlen is None else max_seqlen

        heads, kv_heads = self.num_heads, self.num_kv_heads
        mask: dict[str, Any] = {
            "causal": self.causal,
            "window_size": self.window_size,
            "deterministic": self.deterministic,
        }
        projected = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (-1, self.headdim))
        if kv_heads == heads:
            qkv = projected.unflatten(-2, (3, heads))
            if cu_seqlens is None:
                out = flash_attn_qkvpacked_func(qkv, **mask)
            else:
                out = flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, longest, **mask)
        else:
            q, k, v = projected.split([heads, kv_heads, kv_heads], dim=-2)
            if cu_seqlens is None:
                out = flash_attn_func(q, k, v, **mask)
            else:
                out = flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **mask)
        return self.out_proj(out.flatten(-2))

    def extra_repr(self) -> str:
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
        return f"{text}, bias={self.in_proj_bias is not None}, causal={self.causal}, window_size={self.window_size}"

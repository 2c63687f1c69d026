"""The shape of a GPT. The trainer's schema is built from `GPTConfig`, so each key is defined once."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Norm(Enum):
    layernorm = "layernorm"
    rmsnorm = "rmsnorm"


class Mlp(Enum):
    gelu = "gelu"
    swiglu = "swiglu"


class Position(Enum):
    learned = "learned"
    rotary = "rotary"


# Keys of `GPTConfig` that say how a model is computed, and not what it is: its weights are the same.
COMPUTATION = ("loss_chunk_tokens", "residual_fp32", "logits_fp32")


def _require(ok: bool, key: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"model.{key} must be {rule}, got {value!r}")


@dataclass
class GPTConfig:
    """Architecture of a GPT. Defaults: the small model of the default run."""

    vocab_size: int | None = None  # ids; null takes the tokenizer's. Padded up to a multiple of `vocab_multiple`
    vocab_multiple: int = 128  # the embedding's rows are a multiple of this
    max_positions: int = 2048  # longest document piece the model can place; a table size for learned positions
    n_layer: int = 4
    d_model: int = 192
    nheads_q: int = 6  # query heads; headdim = d_model / nheads_q
    nheads_kv: int | None = None  # key/value heads (grouped-query attention); null: as many as query heads
    d_ff: int | None = (
        None  # width of the MLP; null: 4 d_model for gelu, 8/3 d_model up to a multiple of 128 for swiglu
    )
    norm: Norm = Norm.layernorm
    norm_eps: float = 1e-5
    mlp: Mlp = Mlp.gelu
    position: Position = Position.rotary
    rope_theta: float = 10_000.0
    bias: bool = True  # biases of linear layers and LayerNorm
    tie_embeddings: bool = True  # one matrix embeds tokens and reads out logits
    dropout: float = 0.0  # on the two residual branches of each block, and on the embedding
    init_std: float = 0.02  # GPT-3: normal(0, 0.02); output projections divided by sqrt(2 n_layer)
    loss_chunk_tokens: int = 4096  # tokens whose logits exist at once in the loss
    residual_fp32: bool = False  # under autocast: the residual stream in fp32 instead of the autocast dtype
    logits_fp32: bool = True  # under autocast: logits as accumulated, instead of rounded to the autocast dtype

    def __post_init__(self) -> None:
        sizes = ("vocab_multiple", "max_positions", "n_layer", "d_model", "nheads_q", "loss_chunk_tokens")
        for key in (*sizes, "norm_eps", "rope_theta", "init_std"):
            _require(getattr(self, key) > 0, key, "positive", getattr(self, key))
        for key in ("vocab_size", "nheads_kv", "d_ff"):
            value = getattr(self, key)
            _require(value is None or value > 0, key, "positive or null", value)
        _require(
            self.d_model % self.nheads_q == 0,
            "d_model",
            f"a multiple of model.nheads_q ({self.nheads_q})",
            self.d_model,
        )
        _require(
            self.nheads_q % self.kv_heads == 0,
            "nheads_kv",
            f"a divisor of model.nheads_q ({self.nheads_q})",
            self.nheads_kv,
        )
        if self.position is Position.rotary:
            _require(
                self.headdim % 2 == 0,
                "d_model",
                "such that headdim = d_model / nheads_q is even for rotary positions",
                self.d_model,
            )
        _require(0.0 <= self.dropout < 1.0, "dropout", "in [0, 1)", self.dropout)

    @property
    def headdim(self) -> int:
        return self.d_model // self.nheads_q

    @property
    def kv_heads(self) -> int:
        return self.nheads_kv if self.nheads_kv is not None else self.nheads_q

    @property
    def ff_width(self) -> int:
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.mlp is Mlp.gelu else -(-8 * self.d_model // (3 * 128)) * 128

    @property
    def padded_vocab_size(self) -> int:
        if self.vocab_size is None:
            raise ValueError("model.vocab_size must be set before the model is built, got None")
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

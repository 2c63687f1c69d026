"""From a RunConfig to its parts: device, precision, data, attention, model; and the checks that need several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from data.config import Source
from model.config import GPTConfig
from train.optim import decay_steps
from train.schema import Attention, RunConfig, Schedule

if TYPE_CHECKING:
    from data.prepare import Prepared
    from model.attention import AttentionFn
    from model.gpt import GPT

Say = Callable[[str], None]

_COMPUTE_DTYPE = {
    "32-true": torch.float32,
    "64-true": torch.float64,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
}


def check(config: RunConfig) -> None:
    """Rules between keys that no single config class can hold, checked before any work is done.

    Raises:
        ValueError: one sentence that names the key.
    """
    if config.optim.schedule is Schedule.wsd:
        decay_steps(config.optim, config.trainer.max_steps)
    device = resolve_device(config)
    compute_dtype(resolve_precision(config, device))
    copy_dtype(config)
    if config.attention is not Attention.auto:
        build_attention(config, lambda _: None)  # before hours of tokenizing, not after
    if device.type == "cuda" and config.trainer.devices > torch.cuda.device_count():
        raise ValueError(
            f"trainer.devices must be at most the {torch.cuda.device_count()} GPUs that are there, "
            f"got {config.trainer.devices}"
        )


def resolve_device(config: RunConfig) -> torch.device:
    """The kind of device the run uses: `auto` is a CUDA GPU where there is one, otherwise the CPU."""
    accelerator = config.trainer.accelerator
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise ValueError("trainer.accelerator must be cpu or auto on a machine without a CUDA GPU, got 'gpu'")
    if accelerator == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda")


def resolve_precision(config: RunConfig, device: torch.device) -> str:
    return config.trainer.precision or ("bf16-mixed" if device.type == "cuda" else "32-true")


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that matrix products and attention run in."""
    if precision not in _COMPUTE_DTYPE:
        # fp16 needs a loss scaler; bf16 has fp32's range and needs none.
        raise ValueError(f"trainer.precision must be one of {tuple(_COMPUTE_DTYPE)}, got {precision!r}")
    return _COMPUTE_DTYPE[precision]


def copy_dtype(config: RunConfig) -> torch.dtype | None:
    """The dtype of the copies of weights that products run from, or None for none.

    Raises:
        ValueError: `trainer.weight_copies=true` with several ranks, or where products run in the weights' own dtype.
    """
    wanted = config.trainer.weight_copies
    ranks = config.trainer.devices * config.trainer.num_nodes
    precision = resolve_precision(config, resolve_device(config))
    if wanted is None:
        wanted = ranks == 1 and precision == "bf16-mixed"
    if not wanted:
        return None
    if ranks > 1:
        raise ValueError(
            "trainer.weight_copies must be false with several ranks, whose reduction of gradients it would bypass, "
            f"got true with {ranks}"
        )
    if precision != "bf16-mixed":
        raise ValueError(f"trainer.weight_copies must be false unless trainer.precision is bf16-mixed, got {precision}")
    return compute_dtype(precision)


def build_data(config: RunConfig, say: Say = print, progress: bool = True) -> Prepared:
    """Tokenizer and token shards of the run, from the cache or made now."""
    from data.prepare import prepare

    return prepare(config.data, config.tokenizer, say=say, progress=progress)


def build_model_config(config: RunConfig, vocab_size: int) -> GPTConfig:
    """The model's shape with its vocabulary filled in.

    Raises:
        ValueError: the tokenizer has ids beyond `model.vocab_size`.
    """
    given = config.model.vocab_size
    if given is None:
        return replace(config.model, vocab_size=vocab_size)
    if given < vocab_size:
        raise ValueError(
            f"model.vocab_size must be at least the tokenizer's {vocab_size} ids "
            f"(token id {vocab_size - 1} would lie beyond it), got {given}"
        )
    return config.model


def build_attention(config: RunConfig, say: Say = print) -> tuple[str, AttentionFn]:
    from model.attention import resolve_attention

    device = resolve_device(config)
    dtype = compute_dtype(resolve_precision(config, device))
    return resolve_attention(
        config.attention.value, device, dtype, config.model.headdim, say, documents_fill_the_context(config)
    )


def documents_fill_the_context(config: RunConfig) -> bool:
    """Whether every document is batch.context tokens long, and micro-batches hold whole ones."""
    data, batch = config.data, config.batch
    return (
        data.source is Source.synthetic
        and data.synthetic_document_tokens == batch.context
        and batch.micro_batch_tokens % batch.context == 0
    )


def build_model(config: RunConfig, model_config: GPTConfig, attention: AttentionFn) -> GPT:
    """The GPT on the current default device, its blocks recomputed in the backward and compiled as the switches say.

    Compiling forgets what this process has compiled before: graphs of earlier models count against Dynamo's limit.
    """
    from model.gpt import GPT

    model = GPT(model_config, attention, config.trainer.activation_checkpointing)
    if use_compile(config):
        torch.compiler.reset()
        model.compile()
    return model


def use_compile(config: RunConfig) -> bool:
    if config.trainer.compile is None:
        return resolve_device(config).type == "cuda"
    return config.trainer.compile

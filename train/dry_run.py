"""What a run would need, from its configuration alone: no data is read, no model is built, nothing is written."""

from __future__ import annotations

from dataclasses import replace

from data.config import Source, TokenizerKind
from model.config import GPTConfig
from model.flops import exact_flops, paper_flops
from model.memory import count_params, memory_estimate
from train.schema import RunConfig

# Vocabularies of tokenizers that would otherwise have to be downloaded to be counted.
_HUB_VOCABULARIES = {"gpt2": 50_257, "openai-community/gpt2": 50_257}
_ASSUMED_VOCABULARY = 50_257


def dry_run(config: RunConfig) -> str:
    """The text that `dry_run=true` prints."""
    vocab_size, where_from = vocabulary(config)
    model = replace(config.model, vocab_size=vocab_size)
    precision, why = _precision(config)
    trainer, batch = config.trainer, config.batch
    ranks = trainer.devices * trainer.num_nodes
    micro_batches = batch.micro_batches(ranks)
    attention = config.attention.value
    memory = memory_estimate(
        model, batch.micro_batch_tokens, precision, trainer.activation_checkpointing, attention, batch.context
    )
    tokens = batch.global_batch_tokens
    full_documents = tokens * batch.context  # Σ len² when every document fills the context
    n_params = count_params(model)
    paper = paper_flops(n_params, model.n_layer, model.d_model, tokens, full_documents)
    exact = exact_flops(model, tokens, full_documents)
    checkpoint = memory["weights"] + memory["optimiser"]
    lines = [
        f"Dry run of {config.name}: nothing is read, built or written.",
        "",
        "Model",
        _row("shape", _shape(model)),
        _row("vocabulary", f"{vocab_size:,}, padded to {model.padded_vocab_size:,} ({where_from})"),
        _row("parameters", f"{n_params:,} ({_short(n_params)})"),
        "",
        "Step and run",
        _row(
            "tokens a step",
            f"{tokens:,} = {micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
            f" of {batch.micro_batch_tokens:,} on {ranks} rank{'s' if ranks > 1 else ''}; context {batch.context:,}",
        ),
        _row("steps", f"{trainer.max_steps:,}"),
        _row(
            "tokens in all", f"{tokens * trainer.max_steps:,} ({tokens * trainer.max_steps / n_params:.1f} a parameter)"
        ),
        _row("FLOPs a step", f"{exact:.3e} needed (mfu_exact), {paper:.3e} by the paper's formula (mfu)"),
        _row("FLOPs of the run", f"{exact * trainer.max_steps:.3e} needed"),
        _row("", "both for documents that fill the context: an upper bound, shorter ones attend less"),
        "",
        f"Memory of one rank, {precision} ({why})",
        *(_row(part, _bytes(size)) for part, size in memory.items()),
        _row("together", _bytes(sum(memory.values()))),
        _row("", "activations as eager PyTorch keeps them; torch.compile keeps less, the allocator rounds up"),
        "",
        "Disk",
        _row("one checkpoint", f"{_bytes(checkpoint)}; {trainer.keep_checkpoints + 1} at most are kept"),
    ]
    return "\n".join(lines)


def vocabulary(config: RunConfig) -> tuple[int, str]:
    """Size of the vocabulary and where it is known from, without making or loading the tokenizer."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size, "model.vocab_size"
    if config.data.source is Source.synthetic:
        return config.data.synthetic_vocab_size, "data.synthetic_vocab_size"
    tokenizer = config.tokenizer
    if tokenizer.kind is TokenizerKind.train:
        return tokenizer.vocab_size, "tokenizer.vocab_size"
    if tokenizer.kind is TokenizerKind.file:
        from data.tokenizer import Tokenizer

        assert tokenizer.path is not None, "TokenizerConfig refuses kind=file without a path"
        return Tokenizer.from_file(tokenizer.path).vocab_size, tokenizer.path
    if tokenizer.name in _HUB_VOCABULARIES:
        return _HUB_VOCABULARIES[tokenizer.name], tokenizer.name
    return _ASSUMED_VOCABULARY, f"assumed: {tokenizer.name} is not downloaded for a dry run; set model.vocab_size"


def _precision(config: RunConfig) -> tuple[str, str]:
    """The precision the run would take. `trainer.accelerator=gpu` plans for a GPU on a machine without one."""
    import torch

    if config.trainer.precision is not None:
        return config.trainer.precision, "trainer.precision"
    if config.trainer.accelerator == "gpu":
        return "bf16-mixed", "the default on a GPU"
    if config.trainer.accelerator == "auto" and torch.cuda.is_available():
        return "bf16-mixed", "the default on this GPU"
    return "32-true", "the default on this CPU; trainer.accelerator=gpu plans for a GPU"


def _shape(model: GPTConfig) -> str:
    heads = f"{model.nheads_q} heads of {model.headdim}"
    if model.kv_heads != model.nheads_q:
        heads += f" ({model.kv_heads} for keys and values)"
    return (
        f"{model.n_layer} layers, {model.d_model} wide, {heads}, MLP {model.ff_width} {model.mlp.value}, "
        f"{model.norm.value}, {model.position.value} positions up to {model.max_positions:,}"
    )


def _row(label: str, text: str) -> str:
    return f"  {label:<18}{text}"


def _short(count: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.2f}{unit}"
    return str(count)


def _bytes(size: int) -> str:
    if size >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    return f"{size / (1 << 20):.1f} MiB"

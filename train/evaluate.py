"""`python -m train.evaluate`: loss, perplexity and bits per byte of a trained model on any data.

The rule for first tokens: every document begins with the end-of-text token, so its first token of text is predicted
from that one and counts; the closing end-of-text token is predicted too, and its cost is charged to the text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.config import BatchConfig, DataConfig, Source, TokenizerConfig, TokenizerKind
from train import cli
from train.schema import EvaluateConfig, Split


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats a token
    n_targets: int
    n_bytes: int  # of UTF-8 text; 0 for synthetic tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond, a float is infinite

    @property
    def bits_per_byte(self) -> float | None:
        return self.loss * self.n_targets / math.log(2) / self.n_bytes if self.n_bytes else None


def run(config: EvaluateConfig) -> None:
    result = evaluate(config)
    print(f"split            {config.split.value}")
    print(f"tokens           {result.n_targets:,}")
    print(f"loss             {result.loss:.4f} nats a token")
    print(f"perplexity       {result.perplexity:.3f}")
    if result.bits_per_byte is not None:
        print(f"bits per byte    {result.bits_per_byte:.4f} over {result.n_bytes:,} bytes of UTF-8 text")
    print("Every document begins with the end-of-text token, from which its first token is predicted.")


def evaluate(config: EvaluateConfig) -> Evaluation:
    """One pass over the split, documents whole, in their order."""
    import torch

    from data.prepare import prepare
    from data.stream import validation_steps
    from train.checkpoint import from_plain, tokenizer_path
    from train.trained import open_trained

    assert config.checkpoint is not None, "EvaluateConfig refuses null"
    trained = open_trained(config.checkpoint, config.accelerator, config.precision, config.attention.value)
    if config.batch.context > trained.model.config.max_positions:
        raise ValueError(
            f"batch.context must be at most the model's {trained.model.config.max_positions} positions, "
            f"got {config.batch.context}"
        )
    run_tokenizer = from_plain(TokenizerConfig, trained.checkpoint["run_config"]["tokenizer"])
    if config.data.source is not Source.synthetic:
        trained.tokenizer()  # named error when it is gone
        run_tokenizer = TokenizerConfig(
            kind=TokenizerKind.file,
            path=str(tokenizer_path(trained.path)),
            end_of_text=run_tokenizer.end_of_text,
        )
    prepared = prepare(config.data, run_tokenizer, splits=(config.split.value,))
    dataset = prepared.validation if config.split is Split.validation else prepared.train
    nats = torch.zeros((), dtype=torch.float64, device=trained.device)
    n_targets = n_bytes = 0
    steps = validation_steps(dataset, config.batch, prepared.tokenizer.eot_id, rank=0, world_size=1)
    with torch.inference_mode(), trained.autocast():
        for i, step in enumerate(steps):
            if i == config.max_steps:
                break
            for batch in step.to(trained.device).micro_batches:
                nats += trained.model.loss(
                    batch.tokens, batch.targets, batch.positions, batch.cu_seqlens, batch.max_seqlen
                )
            n_targets += step.n_targets
            n_bytes += step.n_bytes
    if n_targets == 0:
        raise ValueError(f"split must have documents, {config.split.value} is empty")
    return Evaluation(nats.item() / n_targets, n_targets, n_bytes)


def offer_checkpoint(arguments: Sequence[str]) -> None:
    """Makes the checkpoint's data and batch the options that the config's defaults begin with."""
    from hydra.core.config_store import ConfigStore

    from train.checkpoint import find_checkpoint, from_plain, read_checkpoint

    data, batch = DataConfig(), BatchConfig()
    given = [argument.partition("=")[2] for argument in arguments if argument.startswith("checkpoint=")]
    if given:
        config = read_checkpoint(find_checkpoint(Path(given[-1])))["run_config"]
        data = from_plain(DataConfig, config["data"])
        batch = from_plain(BatchConfig, config["batch"])
    store = ConfigStore.instance()
    store.store(group="data", name="checkpoint", node=data)
    store.store(group="batch", name="checkpoint", node=batch)


COMMAND = cli.Command(
    "train.evaluate",
    "evaluate",
    EvaluateConfig,
    run,
    groups=("data",),
    literal=("checkpoint",),
    before=offer_checkpoint,
)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())

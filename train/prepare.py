"""`python -m train.prepare`: tokenize a run's data ahead of it, with the arguments of the run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from train import cli
from train.__main__ import GROUPS
from train.schema import RunConfig


def run(config: RunConfig) -> None:
    from data.prepare import prepare

    prepared = prepare(config.data, config.tokenizer, progress=config.trainer.progress_bar)
    for split, dataset in (("train", prepared.train), ("validation", prepared.validation)):
        print(f"{split}: {len(dataset):,} documents, {dataset.n_tokens:,} tokens, {dataset.n_bytes:,} bytes of text")
    print(f"vocabulary: {prepared.tokenizer.vocab_size:,}")
    print(f"in {prepared.directory}")


COMMAND = cli.Command("train.prepare", "config", RunConfig, run, groups=GROUPS)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())

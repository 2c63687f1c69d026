"""`python -m train`: compose the configuration, then train, or with `dry_run=true` say what training would need.

Read next: train/schema.py for every key, train/fit.py for the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from train import cli
from train.schema import RunConfig

GROUPS = ("model", "data", "tokenizer", "optim", "trainer", "logger", "experiment", "debug")


def run(config: RunConfig) -> None:
    # torch and Lightning take seconds to import: mistakes and help come before them
    if config.dry_run:
        from train.dry_run import dry_run

        print(dry_run(config))
    else:
        # Threads that spin while they wait take the cores from each other as soon as the machine has other work:
        # a step on two busy cores took 1.2 s with sleeping threads and 3 s with spinning ones.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from train.fit import fit

        fit(config)


COMMAND = cli.Command("train", "config", RunConfig, run, groups=GROUPS)


def main(argv: Sequence[str] | None = None) -> int:
    return cli.main(COMMAND, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Measures packing: `python -m train.bench_data` prints the figures and writes train/results/packing.json.

Batches built a second on one core (VarlenBatch tensors included) with short documents, and fill and attention cost of
the three packings on the standard library's source text.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data.config import BatchConfig, DataConfig, Packing, TokenizerConfig
from data.prepare import prepare
from data.shards import TokenDataset
from data.stats import gzip_bits_per_byte, packing_stats, unigram_bits_per_byte
from data.stream import TrainStream
from train.environment import commit, cpu_name

RESULTS = Path(__file__).resolve().parent / "results" / "packing.json"


def short_documents(count: int, seed: int = 0) -> TokenDataset:
    """Random documents of 32 to 252 tokens, uniformly."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(32, 253, count) + 1
    ends = np.cumsum(lengths)
    ids = rng.integers(1, 50_257, int(ends[-1])).astype(np.uint16)
    ids[ends - 1] = ids[ends - lengths] = 0
    return TokenDataset([ids], lengths, np.zeros_like(lengths), 50_257)


def build_speed(packing: Packing, repeats: int, steps: int) -> dict[str, Any]:
    """Real tokens a second in batches built on one core; each repeat times `steps` micro-batches of 32,768 tokens."""
    batch = BatchConfig(context=2048, micro_batch_tokens=32_768, global_batch_tokens=32_768, packing=packing)
    stream = TrainStream(short_documents(300_000), batch, seed=1, eot_id=0)
    for _ in range(50):
        next(stream)
    rates, cpu_rates = [], []
    for _ in range(repeats):
        tokens = 0
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            tokens += next(stream)[0].n_tokens
        rates.append(tokens / (time.perf_counter() - start) / 1e6)
        cpu_rates.append(tokens / (time.process_time() - cpu_start) / 1e6)
    return {
        "packing": packing.value,
        "documents": "32 to 252 tokens, uniform",
        "micro_batch_tokens": batch.micro_batch_tokens,
        "steps_per_repeat": steps,
        "n": repeats,
        "median_million_tokens_per_s": round(statistics.median(rates), 2),
        "min_million_tokens_per_s": round(min(rates), 2),
        "max_million_tokens_per_s": round(max(rates), 2),
        # What other processes on the machine cannot take away: for a reading on a busy machine.
        "median_million_tokens_per_cpu_s": round(statistics.median(cpu_rates), 2),
    }


def machine_facts() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "commit": commit(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.bench_data", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="timed repeats; the median is reported")
    parser.add_argument("--steps", type=int, default=300, help="micro-batches of one repeat")
    parser.add_argument("--cache-dir", default=DataConfig.cache_dir, help="where shards of the standard library lie")
    parser.add_argument("--output", type=Path, default=RESULTS, help="the JSON record")
    options = parser.parse_args(arguments)

    torch.set_num_threads(1)
    record: dict[str, Any] = {"command": "python -m train.bench_data", "machine": machine_facts()}
    record["speed"] = [build_speed(packing, options.repeats, options.steps) for packing in Packing]
    for row in record["speed"]:
        print(
            f"{row['packing']:>8}: {row['median_million_tokens_per_s']:7.1f} million tokens/s built on one core "
            f"(median of {row['n']}, {row['min_million_tokens_per_s']} to {row['max_million_tokens_per_s']}; "
            f"{row['median_million_tokens_per_cpu_s']} a CPU second)"
        )

    prepared = prepare(DataConfig(cache_dir=options.cache_dir), TokenizerConfig())
    record["stdlib"] = {
        "documents": len(prepared.train),
        "tokens": prepared.train.n_tokens,
        "data_fingerprint": prepared.fingerprint,
        "unigram_bits_per_byte": round(unigram_bits_per_byte(prepared.train, prepared.validation), 4),
        "gzip_bits_per_byte": round(gzip_bits_per_byte(prepared.validation_texts()), 4),
    }
    record["packing"] = []
    for context in (2048, 8192):
        for packing in Packing:
            batch = BatchConfig(
                context=context, micro_batch_tokens=context, global_batch_tokens=context, packing=packing
            )
            # Two epochs' worth, so that the bins that wait at the first start weigh little.
            steps = 2 * prepared.train.n_targets // context
            row = packing_stats(prepared.train, batch, seed=1, steps=steps)
            record["packing"].append(row)
            print(
                f"{packing.value:>8} at {context}: fill {row['fill']:.2%}, "
                f"{row['pieces_per_micro_batch']:.2f} pieces a micro-batch, "
                f"{row['continued_pieces']:.1%} of them without their document's beginning"
            )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

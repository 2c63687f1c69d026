from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

from data.config import BatchConfig, DataConfig, LongDocuments, Packing, TokenizerConfig
from data.prepare import prepare
from data.shards import TokenDataset
from data.stats import gzip_bits_per_byte, packing_stats, unigram_bits_per_byte


def test_unigram_by_hand():
    train = TokenDataset.from_documents([[0, 1, 1, 2, 0], [0, 1, 0]], vocab_size=4)
    validation = TokenDataset.from_documents([[0, 2, 3, 0]], vocab_size=4, n_bytes=[5])
    # Targets of training: 1 three times, 2 once, end of text twice; one added to each of the four ids.
    share = np.array([3, 4, 2, 1]) / 10
    wanted = -(math.log2(share[2]) + math.log2(share[3]) + math.log2(share[0])) / 5
    assert unigram_bits_per_byte(train, validation) == pytest.approx(wanted, rel=1e-12)
    assert math.isnan(unigram_bits_per_byte(train, train))


def test_gzip_is_of_the_joined_text():
    texts = ["äb" * 100, "c" * 50]
    joined = "".join(texts).encode()
    assert gzip_bits_per_byte(texts) == 8 * len(gzip.compress(joined, 9)) / len(joined)
    assert math.isnan(gzip_bits_per_byte([]))


def test_packing_stats_by_hand():
    # Rows of 4, one row a micro-batch, documents of 6 and 3 pairs in turns.
    documents = [[0, *range(1, n), 0] for n in (6, 3) * 50]
    data = TokenDataset.from_documents(documents, vocab_size=10)

    def stats(packing: Packing, policy: LongDocuments = LongDocuments.split):
        batch = BatchConfig(4, 4, 4, packing=packing, long_documents=policy)
        return packing_stats(data, batch, seed=0, steps=300)

    pad = stats(Packing.pad)
    assert pad["fill"] == pytest.approx(3 / 4, abs=0.02)
    assert pad["pieces_per_micro_batch"] == 1.0
    assert pad["continued_pieces"] == pytest.approx(1 / 3, abs=0.03)
    assert pad["documents_cut"] == 50
    assert pad["sum_len_sq_max_over_min"] == 4.0
    assert stats(Packing.concat)["fill"] == 1.0
    truncate = stats(Packing.best_fit, LongDocuments.truncate)
    assert (truncate["documents_truncated"], truncate["lost_targets"]) == (50, 100)
    drop = stats(Packing.best_fit, LongDocuments.drop)
    assert (drop["documents_dropped"], drop["lost_targets"], drop["fill"]) == (50, 300, 0.75)


def test_part_of_the_standard_library_packs_tightly(tmp_path):
    data = DataConfig(cache_dir=str(tmp_path), max_documents=120, validation_fraction=0.1, processes=1)
    prepared = prepare(data, TokenizerConfig(vocab_size=512, sample_bytes=200_000), lambda line: None)
    batch = BatchConfig(8192, 8192, 8192)
    steps = 4 * prepared.train.n_targets // 8192
    assert packing_stats(prepared.train, batch, seed=1, steps=steps)["fill"] > 0.98
    unigram = unigram_bits_per_byte(prepared.train, prepared.validation)
    assert gzip_bits_per_byte(prepared.validation_texts()) < unigram < 8


@pytest.mark.slow
def test_the_whole_standard_library_fills_99_5_percent_at_8k(tmp_path):
    prepared = prepare(DataConfig(cache_dir=str(tmp_path)), TokenizerConfig(), lambda line: None)
    batch = BatchConfig(8192, 8192, 8192)
    steps = 2 * prepared.train.n_targets // 8192
    assert packing_stats(prepared.train, batch, seed=1, steps=steps)["fill"] >= 0.995
    assert 2.4 < unigram_bits_per_byte(prepared.train, prepared.validation) < 3.2
    assert 1.2 < gzip_bits_per_byte(prepared.validation_texts()) < 2.0


def test_bench_writes_its_record(tmp_path, monkeypatch, capsys):
    import train.bench_data as bench

    class SmallConfig:
        cache_dir = str(tmp_path)

        def __new__(cls, cache_dir: str):
            return DataConfig(cache_dir=cache_dir, max_documents=60, validation_fraction=0.1, processes=1)

    monkeypatch.setattr(bench, "DataConfig", SmallConfig)
    monkeypatch.setattr(bench, "TokenizerConfig", lambda: TokenizerConfig(vocab_size=300, sample_bytes=50_000))
    monkeypatch.setattr(bench, "short_documents", lambda count: tiny_documents(3000))
    assert bench.main(["--repeats", "2", "--steps", "2", "--output", str(tmp_path / "out" / "packing.json")]) == 0
    record = json.loads((tmp_path / "out" / "packing.json").read_text())
    assert {"cpu", "python", "torch", "numpy", "commit"} <= set(record["machine"])
    assert [row["packing"] for row in record["speed"]] == ["best_fit", "concat", "pad"]
    assert all(row["n"] == 2 and row["median_million_tokens_per_s"] > 0 for row in record["speed"])
    assert {(row["context"], row["packing"]) for row in record["packing"]} >= {(8192, "best_fit"), (8192, "pad")}
    assert "million tokens/s" in capsys.readouterr().out


def tiny_documents(count: int) -> TokenDataset:
    rng = np.random.default_rng(0)
    lengths = rng.integers(33, 254, count)
    return TokenDataset([np.ones(lengths.sum(), dtype=np.uint16)], lengths, np.zeros_like(lengths), 50_257)


def test_short_documents_are_as_said():
    from train.bench_data import short_documents

    data = short_documents(2000)
    pairs = data.lengths - 1
    assert (pairs.min(), pairs.max()) == (32, 252)
    assert all(data.document(i)[0] == data.document(i)[-1] == 0 for i in range(50))

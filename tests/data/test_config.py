from __future__ import annotations

import pytest

from data.config import BatchConfig, DataConfig, Packing, Source, TokenizerConfig, TokenizerKind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataConfig(validation_fraction=1.0), r"data\.validation_fraction must be in \(0, 1\), got 1\.0"),
        (lambda: DataConfig(validation_tokens=0), r"data\.validation_tokens must be positive, got 0"),
        (lambda: DataConfig(processes=0), r"data\.processes must be positive or null, got 0"),
        (lambda: DataConfig(synthetic_vocab_size=1), r"data\.synthetic_vocab_size must be at least 2, got 1"),
        (lambda: DataConfig(synthetic_seed=-1), r"data\.synthetic_seed must be at least 0, got -1"),
        (lambda: DataConfig(source=Source.files), r"data\.paths must be a list of files, .*got \[\]"),
        (lambda: DataConfig(source=Source.hub), r"data\.hub_name must be a dataset name .*got None"),
        (lambda: TokenizerConfig(vocab_size=256), r"tokenizer\.vocab_size must be at least 257"),
        (lambda: TokenizerConfig(kind=TokenizerKind.file), r"tokenizer\.path must be a tokenizer\.json"),
        (lambda: TokenizerConfig(kind=TokenizerKind.hub), r"tokenizer\.name must be a model name"),
        (lambda: BatchConfig(context=4096), r"batch\.context must be at most batch\.micro_batch_tokens \(2048\)"),
        (lambda: BatchConfig(max_docs=0), r"batch\.max_docs must be positive or null, got 0"),
        (
            lambda: BatchConfig(context=1000, packing=Packing.pad),
            r"batch\.micro_batch_tokens must be a multiple of batch\.context \(1000\) for batch\.packing=pad, got 2048",
        ),
    ],
)
def test_bad_values_name_the_key(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_micro_batches_divide_the_global_batch():
    batch = BatchConfig(2048, 4096, 4096 * 12)
    assert [batch.micro_batches(n) for n in (1, 2, 3, 4, 6, 12)] == [12, 6, 4, 3, 2, 1]
    with pytest.raises(ValueError, match=r"batch\.global_batch_tokens must be a multiple of .* 4096 × 5, got 49152"):
        batch.micro_batches(5)


def test_max_docs_has_a_default():
    assert BatchConfig().resolved_max_docs() == 128
    assert BatchConfig(64, 64, 64).resolved_max_docs() == 16
    assert BatchConfig(max_docs=3).resolved_max_docs() == 3

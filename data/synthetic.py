"""Random tokens for throughput runs: documents with the lengths of real ones, and no text behind them."""

from __future__ import annotations

import numpy as np

from data.shards import TokenDataset
from data.tokenizer import IdTokenizer

# Web text under a vocabulary of 50,000 has a median near 600 tokens a document and a mean near 1,000.
MEDIAN_TARGETS, LOG_STD = 600.0, 1.0


def random_documents(
    tokens: int, document_targets: int | None, tokenizer: IdTokenizer, seed: tuple[int, ...], fingerprint: str
) -> TokenDataset:
    """Draws documents of about `tokens` targets in all, each of `document_targets` or of log-normal length."""
    rng = np.random.default_rng(seed)
    if document_targets is not None:
        targets = np.full(max(1, tokens // document_targets), document_targets, dtype=np.int64)
    else:
        mean = MEDIAN_TARGETS * np.exp(LOG_STD**2 / 2)
        drawn = rng.lognormal(np.log(MEDIAN_TARGETS), LOG_STD, size=int(1.1 * tokens / mean) + 16)
        targets = np.maximum(drawn, 2.0).astype(np.int64)
        targets = targets[: max(1, int(np.searchsorted(np.cumsum(targets), tokens, side="right")))]
    lengths = targets + 1
    ends = np.cumsum(lengths)
    ids = rng.integers(0, tokenizer.eot_id, size=int(ends[-1]), dtype=tokenizer.dtype)
    ids[ends - 1] = ids[ends - lengths] = tokenizer.eot_id
    return TokenDataset([ids], lengths, np.zeros_like(lengths), tokenizer.vocab_size, fingerprint)

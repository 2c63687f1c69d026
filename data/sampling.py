"""Which text a tokenizer is trained on: a bounded, reproducible sample of the training split."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

from data.config import DataConfig
from data.sources import Document, TextSource, in_validation

SAMPLED_UNITS = 16  # files read side by side


def sample_texts(source: TextSource, data: DataConfig, sample_bytes: int) -> Iterator[str]:
    """Training documents for the tokenizer, at most `sample_bytes` of them, the same ones every time.

    Files are taken in the order of their keys' hashes, so that the sample is no alphabetical prefix, and a few of them
    side by side, so that one large file does not make up the whole sample.
    """
    limit = data.max_documents
    documents = _interleaved(source) if limit is None else _in_order(source, limit)
    left = sample_bytes
    for document in documents:
        if not document.text or in_validation(document.key, data.validation_fraction):
            continue
        encoded = document.text.encode()
        yield document.text if len(encoded) <= left else encoded[:left].decode("utf-8", "ignore")
        left -= len(encoded)
        if left <= 0:
            return


def _in_order(source: TextSource, count: int) -> Iterator[Document]:
    for unit in source.units():
        for document in source.documents(unit):
            if document.text:
                yield document
                count -= 1
            if count == 0:
                return


def _interleaved(source: TextSource) -> Iterator[Document]:
    units = sorted(
        source.units(), key=lambda u: (hashlib.sha256(u.key.encode("utf-8", "surrogateescape")).digest(), u.path)
    )
    waiting = (source.documents(unit) for unit in units)
    active = [documents for _, documents in zip(range(SAMPLED_UNITS), waiting, strict=False)]
    while active:
        still_active = []
        for documents in active:
            document = next(documents, None)
            if document is not None:
                yield document
                still_active.append(documents)
            elif (following := next(waiting, None)) is not None:
                still_active.append(following)
        active = still_active

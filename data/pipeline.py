"""One run over a source: read, deduplicate, split, tokenize in other processes, write shards, finish with a manifest.

What is read and what becomes of it depends on the order of the source alone, not on the number of processes or on
interruptions. Read next: `workers.py`, `shards.py`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig
from data.progress import ProgressBar
from data.shards import HELD_OUT, SPLITS, ShardWriter, committed_shards, read_digests, read_index, write_json
from data.sources import Document, TextSource, in_validation
from data.tokenizer import Tokenizer
from data.workers import encode_in_order

FORMAT = 1  # raise it when shards or split rules change: old caches are then left alone
BATCH_BYTES = 1 << 19  # text sent to a tokenizer process at once
COUNTS = ("read", "empty", "undecodable", "duplicates")


@dataclass
class _Batch:
    """Documents that travel to a tokenizer process together; the unit of progress."""

    splits: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    position: tuple[int, int] = (0, 0)  # unit and document in it, where reading goes on after this batch
    read_bytes: int = 0


class Preparation:
    """One run over the source, from the last finished shard to the manifest."""

    def __init__(
        self,
        data: DataConfig,
        source: TextSource,
        identity: dict[str, Any],
        tokenizer: Tokenizer,
        facts: dict[str, Any],
        directory: Path,
        say: Callable[[str], None],
        progress: bool,
    ):
        self.data, self.source, self.identity, self.tokenizer = data, source, identity, tokenizer
        self.facts, self.directory, self.say, self.progress = facts, directory, say, progress
        self.units = source.units()
        self.counts = dict.fromkeys(COUNTS, 0)
        self.position = (0, 0)
        self.validation_tokens = 0
        self.validation_closed = False
        self.seen: set[bytes] = set()
        self.records = committed_shards(directory)
        if self.records:
            last = self.records[-1]["progress"]
            self.counts, self.position = last["counts"], tuple(last["position"])
            self.validation_tokens, self.validation_closed = last["validation_tokens"], last["validation_closed"]
            for record in self.records:
                self.seen.update(read_digests(directory, record["shard"]))

    def run(self) -> dict[str, Any]:
        start = time.monotonic()
        remaining = self.units[self.position[0] :]
        size = sum(unit.size for unit in remaining)
        processes = self._processes(size)
        resumed = f", going on after {len(self.records)} finished shards" if self.records else ""
        self.say(f"data: tokenizing {self.source.name} in {processes} process{'es' * (processes > 1)}{resumed}")
        # A compressed file's size says little about the text in it.
        known = not any(unit.path.endswith((".gz", ".parquet")) for unit in remaining)
        bar = ProgressBar("tokenizing", size if known else 0, self.progress)
        writer: ShardWriter | None = None
        try:
            batches = encode_in_order(self.tokenizer, self._batches(), lambda batch: batch.texts, processes)
            for batch, (ids, lengths) in batches:
                if writer is None and batch.splits:
                    writer = ShardWriter(self.directory, len(self.records), self.tokenizer.dtype)
                self._count(batch)
                bar.advance(batch.read_bytes)
                if writer is None:
                    continue
                self._write(writer, batch, ids, lengths)
                if writer.tokens["train"] >= self.data.shard_tokens:
                    self._commit(writer)
                    writer = None
            if writer is not None:
                self._commit(writer)
        finally:
            bar.close()
            if writer is not None:
                writer.close()
        if self.source.identity() != self.identity:
            raise ValueError(f"{self.source.name} must stay as it is while it is read, but it changed; run again")
        return self._finish(time.monotonic() - start)

    def _processes(self, size: int) -> int:
        if self.data.processes is not None:
            return self.data.processes
        if 0 < size < 4 * BATCH_BYTES:
            return 1  # starting processes would take longer
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def _batches(self) -> Iterator[_Batch]:
        # Batches close by bytes read, whatever becomes of the documents: shard borders then do not depend on timing.
        limit = min(BATCH_BYTES, self.data.shard_tokens)
        read = self.counts["read"]
        batch = _Batch(position=self.position)
        first_unit, first_row = self.position
        for u in range(first_unit, len(self.units)):
            row = first_row if u == first_unit else 0
            for document in self.source.documents(self.units[u], row):
                if self.data.max_documents is not None and read >= self.data.max_documents:
                    yield batch
                    return
                row += 1
                read += self._read(document, batch)
                batch.position = (u, row)
                if batch.read_bytes >= limit:
                    yield batch
                    batch = _Batch(position=batch.position)
            batch.position = (u + 1, 0)
        yield batch

    def _read(self, document: Document, batch: _Batch) -> int:
        """Adds a document to the batch, or counts why not; returns how many documents it counts for."""
        if document.text is None:
            batch.counts["undecodable"] += 1
            return 0
        text = document.text.encode()
        batch.read_bytes += len(text) + 1
        if not text.strip():
            batch.counts["empty"] += 1
            return 0
        batch.counts["read"] += 1
        digest = hashlib.blake2b(text, digest_size=16).digest()
        if self.data.deduplicate:
            if digest in self.seen:
                batch.counts["duplicates"] += 1
                return 1
            self.seen.add(digest)
        split = "train"
        if in_validation(document.key, self.data.validation_fraction):
            split = HELD_OUT if self.validation_closed else "validation"
        batch.splits.append(split)
        batch.digests.append(digest)
        # A held-out document is not worth encoding; its place in the lists stays.
        batch.texts.append(b"" if split == HELD_OUT else text)
        return 1

    def _write(self, writer: ShardWriter, batch: _Batch, ids: np.ndarray, lengths: np.ndarray) -> None:
        ends = np.cumsum(lengths).tolist()
        start = 0
        for split, text, digest, end in zip(batch.splits, batch.texts, batch.digests, ends, strict=True):
            document = ids[start:end]
            start = end
            if split == "validation" and not self._admit(len(document)):
                split = HELD_OUT
            if split == HELD_OUT:
                writer.hold_out(len(text), digest)
            else:
                writer.add(split, document, len(text), digest)

    def _count(self, batch: _Batch) -> None:
        for name, count in batch.counts.items():
            self.counts[name] += count
        self.position = batch.position

    def _admit(self, tokens: int) -> bool:
        """Takes whole validation documents up to the cap, and none after the first that no longer fits."""
        if self.validation_closed:
            return False
        if self.validation_tokens + tokens > self.data.validation_tokens:
            # A first document above the cap is passed over, so that it alone cannot empty the split.
            self.validation_closed = self.validation_tokens > 0
            return False
        self.validation_tokens += tokens
        return True

    def _commit(self, writer: ShardWriter) -> None:
        progress = {
            "counts": dict(self.counts),
            "position": list(self.position),
            "validation_tokens": self.validation_tokens,
            "validation_closed": self.validation_closed,
        }
        self.records.append(writer.commit(progress))

    def _finish(self, seconds: float) -> dict[str, Any]:
        totals: dict[str, dict[str, int]] = {split: {} for split in (*SPLITS, HELD_OUT)}
        for split, total in totals.items():
            for name in ("documents", "bytes", *(("tokens",) if split in SPLITS else ())):
                total[name] = sum(record["splits"][split][name] for record in self.records)
        contents = hashlib.sha256(f"{FORMAT} {self.tokenizer.fingerprint}".encode())
        for split in SPLITS:
            contents.update(split.encode())
            for record in self.records:
                contents.update(read_index(self.directory, record["shard"], split)["digest"].tobytes())
        import tokenizers

        manifest = {
            **self.facts,
            "fingerprint": contents.hexdigest()[:32],
            "tokenizer": {
                "fingerprint": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "end_of_text": self.tokenizer.end_of_text,
            },
            "dtype": self.tokenizer.dtype.name,
            "splits": totals,
            "counts": self.counts,
            "shards": [{"splits": record["splits"]} for record in self.records],
            "versions": {
                "python": platform.python_version(),
                "numpy": np.__version__,
                "tokenizers": tokenizers.__version__,
            },
            "seconds": round(seconds, 3),
        }
        write_json(self.directory / "manifest.json", manifest)
        return manifest

"""Documents to token shards, once: `prepare` finds the cache or fills it, and continues where it was interrupted.

Two names per data set. The cache key hashes what the contents follow from, short of reading them (source options, file
list with sizes and times, tokenizer): it decides reuse. The fingerprint hashes the documents themselves and the
tokenizer: it travels with checkpoints, and is the same on another machine with the same data.
Read next: `sources.py`, `shards.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, Source, TokenizerConfig, TokenizerKind
from data.progress import ProgressBar
from data.shards import (
    HELD_OUT,
    SPLITS,
    ShardWriter,
    TokenDataset,
    committed_shards,
    read_digests,
    read_index,
    tokens_path,
    write_json,
)
from data.sources import Document, TextSource, in_validation, open_source
from data.tokenizer import IdTokenizer, Tokenizer
from data.workers import encode_in_order

FORMAT = 1  # raise it when shards or split rules change: old caches are then left alone
BATCH_BYTES = 1 << 19  # text sent to a tokenizer process at once
SAMPLED_UNITS = 16  # files read side by side for the tokenizer's sample
Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    tokenizer: Tokenizer
    train: TokenDataset
    validation: TokenDataset
    manifest: dict[str, Any]
    fingerprint: str  # of contents and tokenizer, independent of paths, times and shard sizes
    directory: Path

    def validation_texts(self) -> Iterator[str]:
        for i in range(len(self.validation)):
            yield self.tokenizer.decode(self.validation.document(i))


def prepare(data: DataConfig, tokenizer: TokenizerConfig, say: Say = print, progress: bool = True) -> Prepared:
    """Tokenizes the configured source into shards below `data.cache_dir`, or finds them there.

    Safe to call from several processes at once: one works, the others wait for it. After a kill it continues at the
    last finished shard.

    Args:
        say: takes one line for each thing worth knowing.
        progress: shows a progress bar where stderr is a terminal.

    Raises:
        ValueError: the source, a split or the tokenizer is not usable; names the key.
    """
    if data.source is Source.synthetic:
        return _synthetic(data)
    source = open_source(data)
    identity = source.identity()
    cache = Path(data.cache_dir)
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"data.cache_dir must be a writable directory, got {data.cache_dir!r} ({error})") from None
    chosen = _tokenizer(source, identity, data, tokenizer, cache, say)
    facts = {
        "format": FORMAT,
        "source": {"kind": data.source.value, **identity},
        "tokenizer": chosen.fingerprint,
        "max_documents": data.max_documents,
        "deduplicate": data.deduplicate,
        "validation_fraction": data.validation_fraction,
        "validation_tokens": data.validation_tokens,
        "shard_tokens": data.shard_tokens,
    }
    directory = cache / "tokens" / _key(facts)
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory / "lock", say):
        manifest = _finished_manifest(directory)
        if manifest is None:
            manifest = _Preparation(data, source, identity, chosen, facts, directory, say, progress).run()
    prepared = Prepared(
        chosen,
        TokenDataset.open(directory, "train"),
        TokenDataset.open(directory, "validation"),
        manifest,
        manifest["fingerprint"],
        directory,
    )
    say(_summary(prepared))
    return prepared


def check_vocabulary(prepared: Prepared, vocab_size: int) -> None:
    """Refuses a model whose vocabulary lacks some of the tokenizer's ids.

    Raises:
        ValueError: names the largest id and the vocabulary.
    """
    largest = prepared.tokenizer.vocab_size - 1
    if largest >= vocab_size:
        raise ValueError(f"model.vocab_size must be above the tokenizer's largest token id {largest}, got {vocab_size}")


def _key(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    """Holds an exclusive lock that the system releases even after kill -9."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"data: waiting for another process that prepares the same ({path.parent})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# The tokenizer


def _tokenizer(
    source: TextSource, identity: dict[str, Any], data: DataConfig, config: TokenizerConfig, cache: Path, say: Say
) -> Tokenizer:
    if config.kind is TokenizerKind.file:
        return Tokenizer.from_file(config.path or "", config.end_of_text)
    if config.kind is TokenizerKind.hub:
        return Tokenizer.from_hub(config.name or "", config.end_of_text)
    facts = {
        "format": FORMAT,
        "source": {"kind": data.source.value, **identity},
        "max_documents": data.max_documents,
        "validation_fraction": data.validation_fraction,
        "vocab_size": config.vocab_size,
        "sample_bytes": config.sample_bytes,
        "end_of_text": config.end_of_text,
    }
    folder = cache / "tokenizers"
    folder.mkdir(exist_ok=True)
    path = folder / f"{_key(facts)}.json"
    with _locked(path.with_suffix(".lock"), say):
        if path.exists():
            return Tokenizer.from_file(path, config.end_of_text)
        say(f"data: training a byte-level BPE tokenizer of {config.vocab_size} ids on the training split")
        start = time.monotonic()
        trained = Tokenizer.train(sample_texts(source, data, config.sample_bytes), config)
        trained.save(path)
        say(f"data: tokenizer of {trained.vocab_size} ids trained in {time.monotonic() - start:.1f} s")
    return trained


def sample_texts(source: TextSource, data: DataConfig, sample_bytes: int) -> Iterator[str]:
    """Training documents for the tokenizer, at most `sample_bytes` of them, the same ones every time.

    Files are taken in the order of their keys' hashes, so that the sample is no alphabetical prefix, and a few of them
    side by side, so that one large file does not make up the whole sample.
    """
    if data.max_documents is not None:
        documents = _in_order(source, data.max_documents)
    else:
        documents = _interleaved(source)
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


# The shards


@dataclass
class _Batch:
    """Documents that travel to a tokenizer process together; the unit of progress."""

    splits: list[str] = field(default_factory=list)
    texts: list[bytes] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    position: tuple[int, int] = (0, 0)  # unit and document in it, where reading goes on after this batch
    read_bytes: int = 0


COUNTS = ("read", "empty", "undecodable", "duplicates")


class _Preparation:
    """One run over the source, from the last finished shard to the manifest."""

    def __init__(
        self,
        data: DataConfig,
        source: TextSource,
        identity: dict[str, Any],
        tokenizer: Tokenizer,
        facts: dict[str, Any],
        directory: Path,
        say: Say,
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
        size = sum(unit.size for unit in self.units[self.position[0] :])
        processes = self._processes(size)
        resumed = f", going on after {len(self.records)} finished shards" if self.records else ""
        self.say(f"data: tokenizing {self.source.name} in {processes} process{'es' * (processes > 1)}{resumed}")
        bar = ProgressBar("tokenizing", size, self.progress)
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
        self._check(totals)
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

    def _check(self, totals: dict[str, dict[str, int]]) -> None:
        name, counts = self.source.name, self.counts
        if not counts["read"]:
            raise ValueError(
                f"{name} must give at least one document, got none "
                f"({counts['empty']} empty and {counts['undecodable']} undecodable were skipped)"
            )
        if not totals["train"]["documents"]:
            raise ValueError(
                f"data.validation_fraction must leave documents for training, got {self.data.validation_fraction} "
                f"with all {counts['read'] - counts['duplicates']} documents of {name} in the validation split"
            )
        if totals["validation"]["documents"]:
            return
        if totals[HELD_OUT]["documents"]:
            raise ValueError(
                f"data.validation_tokens must hold at least one validation document, got {self.data.validation_tokens} "
                f"with {totals[HELD_OUT]['documents']} longer ones in {name}"
            )
        raise ValueError(
            f"data.validation_fraction must give at least one validation document, got {self.data.validation_fraction} "
            f"with none among the {counts['read'] - counts['duplicates']} documents of {name}"
        )


def _finished_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest, if every shard that it lists is there in full; otherwise what is left is thrown away."""
    path = directory / "manifest.json"
    if not path.exists():
        return None
    manifest = json.loads(path.read_text(encoding="utf-8"))
    width = np.dtype(manifest["dtype"]).itemsize
    for number, shard in enumerate(manifest["shards"]):
        for split in SPLITS:
            file = tokens_path(directory, number, split)
            if not file.exists() or file.stat().st_size != shard["splits"][split]["tokens"] * width:
                path.unlink()
                for record in directory.glob("[0-9]*.json"):
                    record.unlink()
                return None
    return manifest


def _summary(prepared: Prepared) -> str:
    counts, splits = prepared.manifest["counts"], prepared.manifest["splits"]
    line = f"data: {splits['train']['documents']:,} documents of {splits['train']['tokens']:,} tokens for training, "
    line += f"{splits['validation']['documents']:,} of {splits['validation']['tokens']:,} for validation"
    apart = [
        f"{count:,} {what}"
        for what, count in (
            ("undecodable", counts["undecodable"]),
            ("empty", counts["empty"]),
            ("duplicates", counts["duplicates"]),
            ("held out beyond data.validation_tokens", splits[HELD_OUT]["documents"]),
        )
        if count
    ]
    return line + (f"; left out: {', '.join(apart)}" if apart else "")


# Random tokens


def _synthetic(data: DataConfig) -> Prepared:
    """Draws documents of random ids in memory: nothing to read, nothing to cache."""
    tokenizer = IdTokenizer(data.synthetic_vocab_size)
    facts = {
        "kind": Source.synthetic.value,
        "tokens": data.synthetic_tokens,
        "document_tokens": data.synthetic_document_tokens,
        "vocab_size": data.synthetic_vocab_size,
        "seed": data.synthetic_seed,
        "validation_tokens": data.validation_tokens,
    }
    fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    sizes = {"train": data.synthetic_tokens, "validation": min(data.validation_tokens, data.synthetic_tokens)}
    datasets = {}
    for stream, (split, tokens) in enumerate(sizes.items()):
        rng = np.random.default_rng([data.synthetic_seed, stream])
        if data.synthetic_document_tokens is not None:
            targets = np.full(max(1, tokens // data.synthetic_document_tokens), data.synthetic_document_tokens)
        else:
            # Median 600, mean about 1,000: web text under a vocabulary of 50,000.
            targets = np.maximum(rng.lognormal(np.log(600.0), 1.0, size=tokens // 900 + 16), 2.0).astype(np.int64)
            targets = targets[: max(1, int(np.searchsorted(np.cumsum(targets), tokens, side="right")))]
        lengths = targets.astype(np.int64) + 1
        ends = np.cumsum(lengths)
        ids = rng.integers(0, max(tokenizer.eot_id, 1), size=int(ends[-1]), dtype=tokenizer.dtype)
        ids[ends - 1] = ids[ends - lengths] = tokenizer.eot_id
        datasets[split] = TokenDataset(
            [ids], lengths, np.zeros_like(lengths), tokenizer.vocab_size, f"{fingerprint}/{split}"
        )
    splits = {
        split: {"documents": len(dataset), "tokens": dataset.n_tokens, "bytes": 0} for split, dataset in datasets.items()
    }
    manifest = {
        "format": FORMAT,
        "source": facts,
        "fingerprint": fingerprint,
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size},
        "splits": splits | {HELD_OUT: {"documents": 0, "bytes": 0}},
        "counts": dict.fromkeys(COUNTS, 0),
        "shards": [],
    }
    return Prepared(
        tokenizer, datasets["train"], datasets["validation"], manifest, fingerprint, Path(data.cache_dir)
    )

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
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.config import DataConfig, Source, TokenizerConfig, TokenizerKind
from data.pipeline import COUNTS, FORMAT, Preparation
from data.sampling import sample_texts
from data.shards import (
    HELD_OUT,
    SPLITS,
    TokenDataset,
    tokens_path,
)
from data.sources import TextSource, open_source
from data.synthetic import random_documents
from data.tokenizer import IdTokenizer, Tokenizer

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


def prepare(
    data: DataConfig,
    tokenizer: TokenizerConfig,
    say: Say = print,
    progress: bool = True,
    splits: Sequence[str] = SPLITS,
) -> Prepared:
    """Tokenizes the configured source into shards below `data.cache_dir`, or finds them there.

    Safe to call from several processes at once: one works, the others wait for it. After a kill it continues at the
    last finished shard.

    Args:
        say: takes one line for each thing worth knowing.
        progress: shows a progress bar where stderr is a terminal.
        splits: those that must not be empty.

    Raises:
        ValueError: the source, a split or the tokenizer is not usable; names the key.
    """
    if data.source is Source.synthetic:
        return _synthetic(data)
    source = open_source(data)
    identity = source.identity()
    chosen = _tokenizer(source, identity, data, tokenizer, say)
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
    directory = _cache_folder(data, "tokens", _key(facts))
    with _locked(directory / "lock", say):
        manifest = _finished_manifest(directory)
        if manifest is None:
            manifest = Preparation(data, source, identity, chosen, facts, directory, say, progress).run()
    _check(manifest, source.name, data, splits)
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


def _cache_folder(data: DataConfig, *names: str) -> Path:
    folder = Path(data.cache_dir, *names)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "lock").touch()
    except OSError as error:
        raise ValueError(f"data.cache_dir must be a writable directory, got {data.cache_dir!r} ({error})") from None
    return folder


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


def _tokenizer(
    source: TextSource, identity: dict[str, Any], data: DataConfig, config: TokenizerConfig, say: Say
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
    path = _cache_folder(data, "tokenizers") / f"{_key(facts)}.json"
    with _locked(path.with_suffix(".lock"), say):
        if path.exists():
            return Tokenizer.from_file(path, config.end_of_text)
        say(f"data: training a byte-level BPE tokenizer of {config.vocab_size} ids on the training split")
        start = time.monotonic()
        trained = Tokenizer.train(sample_texts(source, data, config.sample_bytes), config)
        trained.save(path)
        say(f"data: tokenizer of {trained.vocab_size} ids trained in {time.monotonic() - start:.1f} s")
    return trained


def _check(manifest: dict[str, Any], name: str, data: DataConfig, splits: Sequence[str]) -> None:
    """Refuses a source without documents, or without any in a split that is asked for."""
    counts, totals = manifest["counts"], manifest["splits"]
    if not counts["read"]:
        raise ValueError(
            f"{name} must give at least one document, got none "
            f"({counts['empty']} empty and {counts['undecodable']} undecodable were skipped)"
        )
    distinct = counts["read"] - counts["duplicates"]
    if "train" in splits and not totals["train"]["documents"]:
        raise ValueError(
            f"data.validation_fraction must leave documents for training, got {data.validation_fraction} "
            f"with all {distinct} documents of {name} in the validation split"
        )
    if "validation" not in splits or totals["validation"]["documents"]:
        return
    if totals[HELD_OUT]["documents"]:
        raise ValueError(
            f"data.validation_tokens must hold at least one validation document, got {data.validation_tokens} "
            f"with {totals[HELD_OUT]['documents']} longer ones in {name}"
        )
    raise ValueError(
        f"data.validation_fraction must give at least one validation document, got {data.validation_fraction} "
        f"with none among the {distinct} documents of {name}; raise it"
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


def _synthetic(data: DataConfig) -> Prepared:
    """Random documents, in memory: nothing to read, nothing to cache."""
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
    datasets = {
        split: random_documents(
            tokens,
            data.synthetic_document_tokens,
            tokenizer,
            seed=(data.synthetic_seed, stream),
            fingerprint=f"{fingerprint}/{split}",
        )
        for stream, (split, tokens) in enumerate(sizes.items())
    }
    splits = {
        split: {"documents": len(dataset), "tokens": dataset.n_tokens, "bytes": 0}
        for split, dataset in datasets.items()
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
    return Prepared(tokenizer, datasets["train"], datasets["validation"], manifest, fingerprint, Path(data.cache_dir))

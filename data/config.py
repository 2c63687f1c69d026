"""The options of the data room. The trainer's schema is built from these classes, so each key is defined once.

Must not know Hydra: plain dataclasses that refuse bad values with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Source(Enum):
    stdlib = "stdlib"  # the running Python's own standard library, read in place
    files = "files"  # local .txt, .jsonl, .parquet files, folders or globs
    hub = "hub"  # a Hugging Face `datasets` name or local dataset folder
    synthetic = "synthetic"  # uniformly random tokens: throughput runs, no text


class TextErrors(Enum):
    strict = "strict"
    replace = "replace"
    skip = "skip"


class TokenizerKind(Enum):
    train = "train"  # byte-level BPE trained on the run's own training split
    file = "file"  # a tokenizer.json
    hub = "hub"  # a Hugging Face model name


class Packing(Enum):
    best_fit = "best_fit"
    concat = "concat"
    pad = "pad"


class LongDocuments(Enum):
    split = "split"
    truncate = "truncate"
    drop = "drop"


def _require(ok: bool, key: str, rule: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{key} must be {rule}, got {value!r}")


@dataclass
class DataConfig:
    """Where documents come from and how they are split and cached."""

    source: Source = Source.stdlib
    paths: list[str] = field(default_factory=list)  # files: paths, folders or globs
    text_column: str = "text"  # files (.jsonl, .parquet) and hub
    hub_name: str | None = None  # hub: dataset name or local folder
    hub_config: str | None = None  # hub: configuration (subset) of the dataset
    hub_split: str = "train"
    streaming: bool = False  # hub: read without downloading the whole dataset first
    max_documents: int | None = None  # stop reading after this many documents; null reads all
    errors: TextErrors = TextErrors.strict  # files: what to do with text that is not UTF-8
    deduplicate: bool = True  # drop exact duplicates of a document, by hash
    validation_fraction: float = 0.02  # share of documents, chosen by hash of their key
    validation_tokens: int = 131_072  # cap, so that one validation pass is short
    processes: int | None = None  # tokenizer processes; null takes the cores that are there
    shard_tokens: int = 100_000_000  # tokens of one shard file
    cache_dir: str = ".cache/data"  # tokenizers and shards, keyed by fingerprints
    synthetic_tokens: int = 16_777_216  # synthetic: tokens drawn
    synthetic_document_tokens: int | None = None  # synthetic: targets of each document; null draws log-normal lengths
    synthetic_vocab_size: int = 50_257  # synthetic: ids are drawn below this; the last one is end of text
    synthetic_seed: int = 0  # synthetic: what the random draw depends on

    def __post_init__(self) -> None:
        _require(
            0.0 < self.validation_fraction < 1.0,
            "data.validation_fraction",
            "in (0, 1)",
            self.validation_fraction,
        )
        for key in ("validation_tokens", "shard_tokens", "synthetic_tokens", "synthetic_vocab_size"):
            _require(getattr(self, key) > 0, f"data.{key}", "positive", getattr(self, key))
        _require(self.synthetic_vocab_size >= 2, "data.synthetic_vocab_size", "at least 2", self.synthetic_vocab_size)
        _require(self.synthetic_seed >= 0, "data.synthetic_seed", "at least 0", self.synthetic_seed)
        for key in ("max_documents", "processes", "synthetic_document_tokens"):
            value = getattr(self, key)
            _require(value is None or value > 0, f"data.{key}", "positive or null", value)
        if self.source is Source.files:
            _require(
                bool(self.paths),
                "data.paths",
                "a list of files, folders or globs for data.source=files",
                self.paths,
            )
        if self.source is Source.hub:
            _require(bool(self.hub_name), "data.hub_name", "a dataset name for data.source=hub", self.hub_name)


@dataclass
class TokenizerConfig:
    """Which tokenizer turns documents into ids."""

    kind: TokenizerKind = TokenizerKind.train
    vocab_size: int = 4096  # train: ids of the trained tokenizer, special token included
    sample_bytes: int = 16_777_216  # train: text it is trained on, at most
    path: str | None = None  # file: a tokenizer.json
    name: str | None = None  # hub: a model name
    end_of_text: str = "<|endoftext|>"  # the token that begins and ends every document

    def __post_init__(self) -> None:
        _require(
            self.vocab_size >= 257,
            "tokenizer.vocab_size",
            "at least 257 (256 bytes and one special token)",
            self.vocab_size,
        )
        _require(self.sample_bytes > 0, "tokenizer.sample_bytes", "positive", self.sample_bytes)
        if self.kind is TokenizerKind.file:
            _require(bool(self.path), "tokenizer.path", "a tokenizer.json for tokenizer.kind=file", self.path)
        if self.kind is TokenizerKind.hub:
            _require(bool(self.name), "tokenizer.name", "a model name for tokenizer.kind=hub", self.name)


@dataclass
class BatchConfig:
    """The three fixed numbers of a run (tokens of a micro-batch, context, max_docs) and how documents fill them."""

    context: int = 2048  # tokens of the longest document piece
    micro_batch_tokens: int = 2048  # T: tokens of one micro-batch on one rank, padding included
    global_batch_tokens: int = 2048  # tokens of one optimiser step over all ranks, padding included
    max_docs: int | None = None  # pieces of one micro-batch; null: micro_batch_tokens / 16, at least 16
    packing: Packing = Packing.best_fit
    long_documents: LongDocuments = LongDocuments.split  # documents longer than the context
    open_bins: int = 32  # best_fit: bins that wait for a fitting document

    def __post_init__(self) -> None:
        for key in ("context", "micro_batch_tokens", "global_batch_tokens", "open_bins"):
            _require(getattr(self, key) > 0, f"batch.{key}", "positive", getattr(self, key))
        _require(self.max_docs is None or self.max_docs > 0, "batch.max_docs", "positive or null", self.max_docs)
        _require(
            self.context <= self.micro_batch_tokens,
            "batch.context",
            f"at most batch.micro_batch_tokens ({self.micro_batch_tokens})",
            self.context,
        )
        if self.packing is not Packing.best_fit:
            _require(
                self.micro_batch_tokens % self.context == 0,
                "batch.micro_batch_tokens",
                f"a multiple of batch.context ({self.context}) for batch.packing={self.packing.value}",
                self.micro_batch_tokens,
            )

    def resolved_max_docs(self) -> int:
        """Pieces one micro-batch may hold; `cu_seqlens` has one entry more."""
        return self.max_docs if self.max_docs is not None else max(16, self.micro_batch_tokens // 16)

    def micro_batches(self, world_size: int) -> int:
        """Micro-batches of one optimiser step on each of `world_size` ranks.

        Raises:
            ValueError: the global batch is no multiple of what the ranks take at once.
        """
        at_once = self.micro_batch_tokens * world_size
        _require(
            self.global_batch_tokens % at_once == 0,
            "batch.global_batch_tokens",
            f"a multiple of batch.micro_batch_tokens × ranks = {self.micro_batch_tokens} × {world_size}",
            self.global_batch_tokens,
        )
        return self.global_batch_tokens // at_once

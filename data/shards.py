"""Token shards on disk and `TokenDataset`, the memory-mapped view of one split.

A document is stored as `[EOT] text tokens [EOT]`: n ids give n - 1 (input, target) pairs, so every text token is
predicted once, and so is the end. A shard holds a run of documents in arrival order; its `.json` is written last and
atomically, so a shard either counts as a whole or not at all. Read next: `prepare.py`, `packing.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SPLITS = ("train", "validation")
HELD_OUT = "held_out"  # validation documents beyond the cap: no tokens kept, only the digest, for deduplication
DOCUMENT = np.dtype([("length", "<u4"), ("n_bytes", "<u8"), ("digest", "V16")])


def write_json(path: Path, value: Any) -> None:
    """Replaces the file at once: a reader sees the old text or the new one."""
    partial = path.with_name(f"{path.name}.tmp")
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def tokens_path(directory: Path, shard: int, split: str) -> Path:
    return directory / f"{shard:05d}.{split}.bin"


def index_path(directory: Path, shard: int, split: str) -> Path:
    return directory / f"{shard:05d}.{split}.npy"


def record_path(directory: Path, shard: int) -> Path:
    return directory / f"{shard:05d}.json"


class ShardWriter:
    """Collects the documents of one shard; nothing counts before `commit`."""

    def __init__(self, directory: Path, shard: int, dtype: np.dtype):
        self.directory, self.shard, self.dtype = directory, shard, dtype
        self.tokens = dict.fromkeys(SPLITS, 0)
        self._rows: dict[str, list[tuple[int, int, bytes]]] = {split: [] for split in (*SPLITS, HELD_OUT)}
        self._hashes = {split: hashlib.sha256() for split in SPLITS}
        self._files = {split: open(tokens_path(directory, shard, split), "wb") for split in SPLITS}  # noqa: SIM115

    def add(self, split: str, ids: np.ndarray, n_bytes: int, digest: bytes) -> None:
        data = ids.astype(self.dtype, copy=False).tobytes()
        self._files[split].write(data)
        self._hashes[split].update(data)
        self.tokens[split] += len(ids)
        self._rows[split].append((len(ids), n_bytes, digest))

    def hold_out(self, n_bytes: int, digest: bytes) -> None:
        self._rows[HELD_OUT].append((0, n_bytes, digest))

    def documents(self) -> int:
        return sum(map(len, self._rows.values()))

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def commit(self, progress: dict[str, Any]) -> dict[str, Any]:
        """Makes the shard durable together with `progress`, where reading goes on after it."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        self.close()
        record: dict[str, Any] = {"shard": self.shard, "progress": progress, "splits": {}}
        for split, rows in self._rows.items():
            with open(index_path(self.directory, self.shard, split), "wb") as file:
                np.save(file, np.array(rows, dtype=DOCUMENT))
                file.flush()
                os.fsync(file.fileno())
            facts: dict[str, Any] = {"documents": len(rows), "bytes": sum(row[1] for row in rows)}
            if split in SPLITS:
                facts |= {"tokens": self.tokens[split], "sha256": self._hashes[split].hexdigest()}
            record["splits"][split] = facts
        write_json(record_path(self.directory, self.shard), record)
        return record


def committed_shards(directory: Path) -> list[dict[str, Any]]:
    """The records of the finished shards, from the first to the last without a gap."""
    records: list[dict[str, Any]] = []
    while record_path(directory, len(records)).exists():
        records.append(json.loads(record_path(directory, len(records)).read_text(encoding="utf-8")))
    return records


def read_digests(directory: Path, shard: int) -> list[bytes]:
    """Digests of every document of the shard, whatever its split."""
    packed = b"".join(read_index(directory, shard, split)["digest"].tobytes() for split in (*SPLITS, HELD_OUT))
    return [packed[i : i + 16] for i in range(0, len(packed), 16)]


def read_index(directory: Path, shard: int, split: str) -> np.ndarray:
    return np.load(index_path(directory, shard, split))


@dataclass
class TokenDataset:
    """The documents of one split: ids `[EOT] text [EOT]`, memory-mapped.

    Documents keep their arrival order over the shards. `starts` are offsets in the document's own shard.
    """

    shards: list[np.ndarray]  # uint16 or uint32
    lengths: np.ndarray  # (documents,) int64, ids of each document
    bytes: np.ndarray  # (documents,) int64, UTF-8 bytes of each text; 0 where ids stand for no text
    vocab_size: int
    fingerprint: str = ""  # of the contents and the tokenizer
    source: tuple[Path, str] | None = None  # directory and split, for reopening in another process

    def __post_init__(self) -> None:
        self.shard_of = np.zeros(len(self.lengths), dtype=np.int32)
        self.starts = np.cumsum(self.lengths) - self.lengths
        edges = np.cumsum([len(shard) for shard in self.shards])
        if len(self.shards) > 1:
            self.shard_of[:] = np.searchsorted(edges, self.starts, side="right")
            self.starts -= np.concatenate(([0], edges))[self.shard_of]
        assert (edges[-1] if len(edges) else 0) == self.lengths.sum(), "the index must cover the tokens"

    @classmethod
    def from_documents(
        cls, documents: list[list[int]], vocab_size: int, n_bytes: list[int] | None = None
    ) -> TokenDataset:
        """A dataset in memory, of documents that already begin and end with end of text."""
        flat = [np.asarray(d, dtype=np.uint32) for d in documents]
        lengths = np.array([len(d) for d in documents], dtype=np.int64)
        sizes = np.zeros(len(documents), dtype=np.int64) if n_bytes is None else np.asarray(n_bytes, dtype=np.int64)
        return cls([np.concatenate(flat)] if flat else [], lengths, sizes, vocab_size)

    @classmethod
    def open(cls, directory: Path, split: str) -> TokenDataset:
        """Maps the shards that the directory's manifest lists."""
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        shards, indices = [], []
        for number, shard in enumerate(manifest["shards"]):
            if shard["splits"][split]["documents"]:
                path = tokens_path(directory, number, split)
                # A plain view: slicing np.memmap itself costs ten times as much.
                shards.append(np.asarray(np.memmap(path, dtype=manifest["dtype"], mode="r")))
                indices.append(read_index(directory, number, split))
        index = np.concatenate(indices) if indices else np.zeros(0, DOCUMENT)
        return cls(
            shards,
            index["length"].astype(np.int64),
            index["n_bytes"].astype(np.int64),
            manifest["tokenizer"]["vocab_size"],
            f"{manifest['fingerprint']}/{split}",
            (directory, split),
        )

    def __reduce__(self):
        if self.source is not None:
            return TokenDataset.open, self.source
        return TokenDataset, (self.shards, self.lengths, self.bytes, self.vocab_size, self.fingerprint)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        """Stored ids, the end-of-text ids included."""
        return int(self.lengths.sum())

    @property
    def n_targets(self) -> int:
        return self.n_tokens - len(self)

    @property
    def n_bytes(self) -> int:
        return int(self.bytes.sum())

    def document(self, i: int) -> np.ndarray:
        start = self.starts[i]
        return self.shards[self.shard_of[i]][start : start + self.lengths[i]]

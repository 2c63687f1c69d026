"""Where documents come from: the standard library, local files, Hugging Face `datasets`.

A source lists its units (files) in a fixed order and reads the documents of one unit, from any document on. It knows
nothing of tokens or shards. Read next: `prepare.py`.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data.config import DataConfig, Source, TextErrors

SUFFIXES = (".txt", ".jsonl", ".parquet", ".txt.gz", ".jsonl.gz")


class Document(NamedTuple):
    key: str  # decides the split; the same on every machine
    text: str | None  # None: unreadable, to be skipped and counted


@dataclass(frozen=True)
class Unit:
    """What is read in one go and in order: a file, or a whole hub dataset."""

    key: str
    path: str
    size: int  # bytes, for the progress bar; 0 where unknown
    stamp: tuple[int, ...] = ()  # size, mtime and ctime in nanoseconds


class TextSource(Protocol):
    name: str  # for messages

    def units(self) -> list[Unit]: ...

    def documents(self, unit: Unit, start: int = 0) -> Iterator[Document]:
        """Documents of the unit in order, without the first `start`."""

    def identity(self) -> dict[str, Any]:
        """What names the contents, short of reading them: part of the cache's key."""


def in_validation(key: str, fraction: float) -> bool:
    """Splits by hash of the document's key, so that a document falls on the same side everywhere."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _unit(key: str, path: str) -> Unit:
    status = os.stat(path)
    # ctime also catches a rewrite that restores size and mtime; a false alarm costs one more preparation.
    return Unit(key, path, status.st_size, (status.st_size, status.st_mtime_ns, status.st_ctime_ns))


def _digest_units(units: list[Unit]) -> str:
    listing = json.dumps([(unit.key, unit.path, unit.stamp) for unit in units])
    return hashlib.sha256(listing.encode()).hexdigest()


def _walk(root: str, suffixes: tuple[str, ...], without: tuple[str, ...] = ()) -> list[Unit]:
    units = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in without]
        for name in files:
            if name.endswith(suffixes):
                path = os.path.join(folder, name)
                if os.path.isfile(path):
                    units.append(_unit(os.path.relpath(path, root).replace(os.sep, "/"), path))
    return sorted(units, key=lambda unit: unit.key)


class StdlibSource:
    """The running Python's standard library: one .py file is one document, its key the path below the root."""

    def __init__(self, root: str | None = None):
        self.root = root or sysconfig.get_path("stdlib")
        self.name = f"data.source=stdlib ({self.root})"

    def units(self) -> list[Unit]:
        return _walk(self.root, (".py",), without=("site-packages", "dist-packages"))

    def documents(self, unit: Unit, start: int = 0) -> Iterator[Document]:
        if start:
            return
        try:
            with tokenize.open(unit.path) as file:  # decodes as PEP 263 says
                text = file.read()
            text.encode()
        except (SyntaxError, UnicodeError, LookupError, OSError):
            yield Document(unit.key, None)
        else:
            yield Document(unit.key, text)

    def identity(self) -> dict[str, Any]:
        return {"root": self.root, "python": platform.python_version(), "units": _digest_units(self.units())}


class FilesSource:
    """Local .txt (a document each), .jsonl and .parquet (a document a row) files, folders and globs."""

    def __init__(self, paths: list[str], text_column: str = "text", errors: TextErrors = TextErrors.strict):
        self.paths, self.text_column, self.errors = paths, text_column, errors
        self.name = f"data.paths={paths}"

    def units(self) -> list[Unit]:
        units: dict[str, Unit] = {}
        for entry in self.paths:
            expanded = os.path.expanduser(entry)
            found: list[Unit] = []
            if os.path.isdir(expanded):
                found = _walk(expanded, SUFFIXES)
            elif os.path.isfile(expanded):
                found = [self._named(os.path.basename(expanded), expanded)]
            elif glob.has_magic(expanded):
                fixed = Path(expanded)
                while glob.has_magic(str(fixed)):
                    fixed = fixed.parent
                for match in sorted(glob.glob(expanded, recursive=True)):
                    if os.path.isfile(match):
                        found.append(self._named(os.path.relpath(match, fixed).replace(os.sep, "/"), match))
                    elif "**" not in expanded:
                        prefix = os.path.relpath(match, fixed).replace(os.sep, "/")
                        found += [_unit(f"{prefix}/{unit.key}", unit.path) for unit in _walk(match, SUFFIXES)]
            else:
                raise ValueError(f"data.paths must name files, folders or globs that exist, got {entry!r}")
            if not found:
                raise ValueError(f"data.paths must match at least one of {'/'.join(SUFFIXES)}, got {entry!r}")
            for unit in found:
                units.setdefault(os.path.realpath(unit.path), unit)
        return sorted(units.values(), key=lambda unit: (unit.key, unit.path))

    @staticmethod
    def _named(key: str, path: str) -> Unit:
        if not path.endswith(SUFFIXES):
            raise ValueError(f"data.paths must name {', '.join(SUFFIXES)} files, got {path!r}")
        return _unit(key, path)

    def documents(self, unit: Unit, start: int = 0) -> Iterator[Document]:
        if unit.path.endswith(".parquet"):
            yield from self._parquet(unit, start)
        elif unit.path.endswith((".jsonl", ".jsonl.gz")):
            yield from self._jsonl(unit, start)
        elif start == 0:
            with _open(unit.path) as file:
                yield Document(unit.key, self._decode(file.read(), unit.path, 0))

    def identity(self) -> dict[str, Any]:
        return {
            "text_column": self.text_column,
            "errors": self.errors.value,
            "units": _digest_units(self.units()),
        }

    def _decode(self, data: bytes, path: str, offset: int, where: str = "byte offset") -> str | None:
        if offset == 0 and data.startswith(b"\xef\xbb\xbf"):
            data, offset = data[3:], 3
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            if self.errors is TextErrors.skip:
                return None
            if self.errors is TextErrors.replace:
                return data.decode("utf-8", "replace")
            raise ValueError(
                f"data.paths must hold UTF-8 text (or set data.errors=replace|skip), got {path!r} with byte "
                f"0x{data[error.start]:02x} at {where} {offset + error.start}"
            ) from None

    def _jsonl(self, unit: Unit, start: int) -> Iterator[Document]:
        offset = 0
        with _open(unit.path) as file:
            for row, line in enumerate(file):
                if row >= start:
                    yield Document(f"{unit.key}:{row}", self._json_text(line, unit.path, row, offset))
                offset += len(line)

    def _json_text(self, line: bytes, path: str, row: int, offset: int) -> str | None:
        decoded = self._decode(line, path, offset)
        if decoded is None:
            return None
        if not decoded.strip():
            return ""
        try:
            fields = json.loads(decoded)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"data.paths must hold one JSON object a line, got {path!r} line {row + 1}: {error}"
            ) from None
        if not isinstance(fields, dict):
            raise ValueError(f"data.paths must hold one JSON object a line, got {path!r} line {row + 1}")
        if self.text_column not in fields:
            raise _missing_column(self.text_column, list(fields), f"{path!r} line {row + 1}")
        return self._text(fields[self.text_column], f"{path!r} line {row + 1}")

    def _text(self, value: Any, where: str) -> str | None:
        if value is None:
            return ""
        if not isinstance(value, str):
            raise ValueError(f"data.text_column must hold text, got {type(value).__name__} in {where}")
        try:
            value.encode()
        except UnicodeEncodeError as error:  # JSON can spell half a surrogate pair
            if self.errors is TextErrors.skip:
                return None
            if self.errors is TextErrors.replace:
                return value.encode("utf-8", "replace").decode()
            raise ValueError(
                f"data.paths must hold UTF-8 text (or set data.errors=replace|skip), got {where} with half a surrogate "
                f"pair at character {error.start}"
            ) from None
        return value

    def _parquet(self, unit: Unit, start: int) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(unit.path)
        except pa.ArrowInvalid as error:
            raise ValueError(f"data.paths must hold readable parquet files, got {unit.path!r} ({error})") from None
        with file:
            columns = file.schema_arrow.names
            if self.text_column not in columns:
                raise _missing_column(self.text_column, columns, repr(unit.path))
            kind = file.schema_arrow.field(self.text_column).type
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
                raise ValueError(f"data.text_column must hold text, got {kind} in {unit.path!r}")
            row = 0
            for group in range(file.num_row_groups):
                size = file.metadata.row_group(group).num_rows
                if row + size <= start:
                    row += size
                    continue
                for batch in file.iter_batches(1024, row_groups=[group], columns=[self.text_column]):
                    # As bytes: parquet does not promise that its strings are UTF-8.
                    for value in batch.column(0).cast(pa.large_binary()).to_pylist():
                        if row >= start:
                            where = f"row {row}, byte"
                            text = "" if value is None else self._decode(value, unit.path, 0, where)
                            yield Document(f"{unit.key}:{row}", text)
                        row += 1


class HubSource:
    """A Hugging Face dataset, by name or from a local folder, streamed or downloaded."""

    def __init__(
        self, name: str, config: str | None, split: str, text_column: str, streaming: bool, errors: TextErrors
    ):
        self.hub_name, self.config, self.split = name, config, split
        self.text_column, self.streaming, self.errors = text_column, streaming, errors
        self.name = f"data.hub_name={name}"
        self._texts = FilesSource([], text_column, errors)
        self._saved = any((Path(name) / file).is_file() for file in ("state.json", "dataset_dict.json"))

    def units(self) -> list[Unit]:
        return [Unit(f"{self.hub_name}/{self.config or ''}/{self.split}", self.hub_name, 0)]

    def documents(self, unit: Unit, start: int = 0) -> Iterator[Document]:
        dataset = self._load()
        columns = dataset.column_names
        if columns is not None and self.text_column not in columns:
            raise _missing_column(self.text_column, columns, self.hub_name)
        if columns is not None:
            dataset = dataset.select_columns([self.text_column])
        if start:
            dataset = dataset.skip(start)
        for row, fields in enumerate(dataset, start):
            if self.text_column not in fields:
                raise _missing_column(self.text_column, list(fields), self.hub_name)
            # The key leaves the name out: a local copy of the dataset is split as the hub's is.
            yield Document(f"{self.split}:{row}", self._texts._text(fields[self.text_column], f"{self.name} row {row}"))

    def identity(self) -> dict[str, Any]:
        facts = {"name": self.hub_name, "config": self.config, "split": self.split, "text_column": self.text_column}
        facts["errors"] = self.errors.value
        if os.path.isdir(self.hub_name):
            return facts | {"units": _digest_units(_walk(self.hub_name, ("",)))}
        builder = self._call("load_dataset_builder", self.hub_name, self.config)
        # The configuration id and the hash carry the revision and the data files that the name stands for today.
        return facts | {"config_id": builder.config_id, "hash": builder.hash, "version": str(builder.config.version)}

    def _load(self) -> Any:
        if not self._saved:
            return self._call("load_dataset", self.hub_name, self.config, split=self.split, streaming=self.streaming)
        dataset = self._call("load_from_disk", self.hub_name)
        if isinstance(dataset, dict):
            if self.split not in dataset:
                raise ValueError(f"data.hub_split must be one of {sorted(dataset)}, got {self.split!r}")
            dataset = dataset[self.split]
        return dataset.to_iterable_dataset() if self.streaming else dataset

    def _call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        try:
            import datasets
        except ImportError:
            raise ValueError("data.source must not be hub where `datasets` is not installed, got 'hub'") from None
        try:
            return getattr(datasets, function)(*args, **kwargs)
        except Exception as error:  # anything from connection errors to a wrong split, under many class names
            reason = " ".join(str(error).split())
            raise ValueError(
                f"data.hub_name must be a dataset that can be loaded, got {self.hub_name!r} "
                f"({type(error).__name__}: {reason})"
            ) from error


def _open(path: str) -> io.BufferedIOBase:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")


def _missing_column(column: str, columns: list[str], where: str) -> ValueError:
    return ValueError(f"data.text_column must be one of the columns {sorted(columns)} of {where}, got {column!r}")


def open_source(data: DataConfig) -> TextSource:
    """The text source that the configuration names."""
    if data.source is Source.stdlib:
        return StdlibSource()
    if data.source is Source.files:
        return FilesSource(list(data.paths), data.text_column, data.errors)
    if data.source is Source.hub:
        assert data.hub_name is not None, "DataConfig refuses a hub source without a name"
        return HubSource(data.hub_name, data.hub_config, data.hub_split, data.text_column, data.streaming, data.errors)
    raise ValueError(f"data.source must be stdlib, files or hub to hold text, got {data.source.value!r}")

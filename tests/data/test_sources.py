from __future__ import annotations

import gzip
import json
import os
import re
import sysconfig

import pytest

from data.config import DataConfig, Source, TextErrors
from data.sources import Document, FilesSource, HubSource, StdlibSource, in_validation, open_source


def read(source) -> list[Document]:
    return [document for unit in source.units() for document in source.documents(unit)]


def write_parquet(path, rows, column="text", row_group_size=3):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({column: rows, "id": list(range(len(rows)))}), path, row_group_size=row_group_size)


def test_stdlib_is_read_as_pep_263_says(tmp_path):
    (tmp_path / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\n")
    (tmp_path / "bom.py").write_bytes(b"\xef\xbb\xbfx = 1\r\n")
    (tmp_path / "broken.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "unknown.py").write_bytes(b"# coding: no-such-codec\n")
    (tmp_path / "rot.py").write_bytes(b"# coding: rot13\n")
    (tmp_path / "notes.txt").write_text("no source")
    for folder in ("site-packages", "dist-packages", "pkg/site-packages", "pkg/sub"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "module.py").write_text(f"# {folder}\n")
    documents = read(StdlibSource(str(tmp_path)))
    assert [d.key for d in documents] == [
        "bom.py",
        "broken.py",
        "latin.py",
        "pkg/sub/module.py",
        "rot.py",
        "unknown.py",
    ]
    texts = dict(documents)
    assert texts["latin.py"] == "# -*- coding: latin-1 -*-\nname = 'é'\n"
    assert texts["bom.py"] == "x = 1\n"
    assert texts["broken.py"] is texts["unknown.py"] is texts["rot.py"] is None


def test_stdlib_source_is_the_running_python():
    source = open_source(DataConfig())
    units = source.units()
    assert source.root == sysconfig.get_path("stdlib")
    assert [u.key for u in units] == sorted(u.key for u in units)
    assert "json/decoder.py" in {u.key for u in units}
    assert not any("site-packages" in u.key for u in units)


def test_split_depends_on_the_key_alone():
    assert [k for k in map(str, range(200)) if in_validation(k, 0.02)] == ["115", "143"]
    share = sum(in_validation(f"key {i}", 0.1) for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01
    small = {i for i in range(5000) if in_validation(str(i), 0.02)}
    assert small < {i for i in range(5000) if in_validation(str(i), 0.1)}


def test_files_of_every_kind(tmp_path):
    (tmp_path / "a.txt").write_text("one\ndocument", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"text": "r0"}\n\n{"text": "r\\u00e9"}\n{"text": null}\n', encoding="utf-8")
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write('{"text": "zipped"}\n')
    write_parquet(tmp_path / "d.parquet", [f"p{i}" for i in range(7)] + [None])
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "e.txt").write_bytes(b"\xef\xbb\xbfmarked")
    (tmp_path / "ignored.csv").write_text("x")
    documents = read(FilesSource([str(tmp_path)]))
    assert documents == [
        ("a.txt", "one\ndocument"),
        ("b.jsonl:0", "r0"),
        ("b.jsonl:1", ""),
        ("b.jsonl:2", "ré"),
        ("b.jsonl:3", ""),
        ("c.jsonl.gz:0", "zipped"),
        *((f"d.parquet:{i}", f"p{i}") for i in range(7)),
        ("d.parquet:7", ""),
        ("sub/e.txt", "marked"),
    ]


def test_globs_and_repeated_files(tmp_path):
    for name in ("x/a.txt", "x/b.txt", "y/c.txt", "y/d.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "t"}')
    keys = [u.key for u in FilesSource([f"{tmp_path}/*/*.txt", f"{tmp_path}/x/a.txt"]).units()]
    assert keys == ["x/a.txt", "x/b.txt", "y/c.txt"]
    assert [u.key for u in FilesSource([f"{tmp_path}/**/*.txt"]).units()] == keys
    assert [u.key for u in FilesSource([f"{tmp_path}/[x]"]).units()] == ["x/a.txt", "x/b.txt"]


@pytest.mark.parametrize("start", [0, 1, 3, 4, 6, 7, 9])
def test_reading_goes_on_from_any_document(tmp_path, start: int):
    rows = [f"row {i}" for i in range(8)]
    write_parquet(tmp_path / "d.parquet", rows)
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    for source in (FilesSource([str(tmp_path / "d.parquet")]), FilesSource([str(tmp_path / "d.jsonl")])):
        (unit,) = source.units()
        assert list(source.documents(unit, start)) == read(source)[start:]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_missing_column_lists_the_columns(tmp_path, suffix: str):
    path = tmp_path / f"d.{suffix}"
    if suffix == "parquet":
        write_parquet(path, ["a"], column="content")
    else:
        path.write_text('{"content": "a", "id": 1}\n')
    with pytest.raises(
        ValueError, match=r"data\.text_column must be one of the columns \['content', 'id'\] of .*'text'"
    ):
        read(FilesSource([str(path)]))
    assert read(FilesSource([str(path)], text_column="content"))[0].text == "a"


def test_text_that_is_not_utf8_names_file_and_offset(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(ValueError, match=r"data\.errors=replace\|skip.*latin\.txt' with byte 0xe9 at byte offset 3"):
        read(FilesSource([str(path)]))
    assert read(FilesSource([str(path)], errors=TextErrors.skip)) == [("latin.txt", None)]
    assert read(FilesSource([str(path)], errors=TextErrors.replace)) == [("latin.txt", "caf\ufffd au lait")]


def test_jsonl_offset_counts_from_the_start_of_the_file(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="at byte offset 24"):
        read(FilesSource([str(path)]))
    assert [d.text for d in read(FilesSource([str(path)], errors=TextErrors.skip))] == ["a", None, "b"]


def test_parquet_bytes_that_are_not_utf8(tmp_path):
    import pyarrow as pa

    invalid = pa.array([b"fine", b"a\xffb"], type=pa.binary()).view(pa.string())
    write_parquet(tmp_path / "d.parquet", invalid)
    with pytest.raises(ValueError, match=r"d\.parquet' with byte 0xff at row 1, byte 1"):
        read(FilesSource([str(tmp_path)]))
    assert [d.text for d in read(FilesSource([str(tmp_path)], errors=TextErrors.replace))] == ["fine", "a\ufffdb"]


def test_half_a_surrogate_pair_in_json(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"text": "a\\ud800"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl' line 1 with half a surrogate pair at character 1"):
        read(FilesSource([str(tmp_path)]))
    assert read(FilesSource([str(tmp_path)], errors=TextErrors.replace))[0].text == "a?"


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ('{"text": "a"}\nnot json\n', "one JSON object a line, got .* line 2"),
        ("[1, 2]\n", "one JSON object a line, got .* line 1"),
        ('{"text": 3}\n', r"data\.text_column must hold text, got int in .* line 1"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, contents: str, message: str):
    (tmp_path / "d.jsonl").write_text(contents)
    with pytest.raises(ValueError, match=message):
        read(FilesSource([str(tmp_path)]))


def test_bad_parquet(tmp_path):
    (tmp_path / "d.parquet").write_text("no parquet")
    with pytest.raises(ValueError, match=r"readable parquet files, got .*d\.parquet"):
        read(FilesSource([str(tmp_path)]))
    write_parquet(tmp_path / "d.parquet", ["a"])
    with pytest.raises(ValueError, match=r"data\.text_column must hold text, got int64"):
        read(FilesSource([str(tmp_path)], text_column="id"))


def test_paths_that_name_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"data\.paths must name files, folders or globs that exist, got '/no/such'"):
        FilesSource(["/no/such"]).units()
    with pytest.raises(ValueError, match=r"data\.paths must match at least one of"):
        FilesSource([str(tmp_path)]).units()
    with pytest.raises(ValueError, match=r"data\.paths must match at least one of"):
        FilesSource([f"{tmp_path}/*.txt"]).units()
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ValueError, match=r"data\.paths must name \.txt, .* files, got .*x\.csv"):
        FilesSource([str(tmp_path / "x.csv")]).units()


def test_identity_follows_every_change_of_a_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first")
    source = FilesSource([str(tmp_path)])
    seen = [source.identity()]
    assert source.identity() == seen[0]
    before = os.stat(path)
    path.write_text("other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same mtime: ctime still tells
    seen.append(source.identity())
    (tmp_path / "b.txt").write_text("more")
    seen.append(source.identity())
    seen.append(FilesSource([str(tmp_path)], text_column="other").identity())
    assert all(a != b for i, a in enumerate(seen) for b in seen[:i])


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


def hub(path, streaming=False, **kwargs) -> HubSource:
    options = {"config": None, "split": "train", "text_column": "text", "errors": TextErrors.strict} | kwargs
    return HubSource(str(path), streaming=streaming, **options)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_hub_reads_a_local_folder(tmp_path, hub_cache, suffix: str, streaming: bool):
    rows = [f"row {i}" for i in range(6)]
    folder = tmp_path / "set"
    folder.mkdir()
    if suffix == "parquet":
        write_parquet(folder / "train.parquet", rows)
    else:
        (folder / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    source = hub(folder, streaming)
    assert read(source) == [(f"train:{i}", row) for i, row in enumerate(rows)]
    assert list(source.documents(source.units()[0], 4)) == read(source)[4:]
    with pytest.raises(ValueError, match=r"data\.text_column must be one of the columns .*'text'.* got 'body'"):
        read(hub(folder, streaming, text_column="body"))
    with pytest.raises(ValueError, match=r"data\.hub_name must be a dataset that can be loaded.*nope"):
        read(hub(folder, streaming, split="nope"))


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_reads_a_saved_dataset(tmp_path, hub_cache, streaming: bool):
    dataset = hub_cache.Dataset.from_dict({"text": ["a", "b"], "id": [1, 2]})
    dataset.save_to_disk(tmp_path / "one")
    hub_cache.DatasetDict({"train": dataset}).save_to_disk(tmp_path / "several")
    for name in ("one", "several"):
        assert [d.text for d in read(hub(tmp_path / name, streaming))] == ["a", "b"]
    with pytest.raises(ValueError, match=re.escape("data.hub_split must be one of ['train'], got 'test'")):
        read(hub(tmp_path / "several", streaming, split="test"))


def test_hub_identity_follows_the_files(tmp_path, hub_cache):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    first = hub(tmp_path).identity()
    assert hub(tmp_path).identity() == first
    (tmp_path / "train.jsonl").write_text('{"text": "b"}\n')
    assert hub(tmp_path).identity() != first


def test_hub_name_that_cannot_be_loaded(hub_cache):
    with pytest.raises(ValueError, match=r"data\.hub_name must be a dataset that can be loaded, got 'no/such-set'"):
        hub("no/such-set").identity()


def test_synthetic_is_no_text_source():
    with pytest.raises(ValueError, match=r"data\.source must be stdlib, files or hub"):
        open_source(DataConfig(source=Source.synthetic))

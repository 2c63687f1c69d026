from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.config import DataConfig, Source, TextErrors, TokenizerConfig, TokenizerKind
from data.prepare import check_vocabulary, prepare
from data.shards import TokenDataset
from data.sources import in_validation
from data.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = TokenizerConfig(vocab_size=300)


def quiet(line: str) -> None:
    pass


def document_text(i: int) -> str:
    return f"document {i}\n" + f"value_{i % 7} = {i * i}\n" * (1 + i % 5)


@pytest.fixture
def corpus(tmp_path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part in range(4):
        rows = [json.dumps({"text": document_text(i)}) for i in range(part * 50, part * 50 + 50)]
        (folder / f"part{part}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def config(corpus: Path, **changes) -> DataConfig:
    options = {
        "source": Source.files,
        "paths": [str(corpus)],
        "cache_dir": str(corpus.parent / "cache"),
        "validation_fraction": 0.1,
        "processes": 1,
    }
    return DataConfig(**(options | changes))


def contents(prepared) -> list[list[int]]:
    return [
        dataset.document(i).tolist() for dataset in (prepared.train, prepared.validation) for i in range(len(dataset))
    ]


def test_documents_are_stored_whole_and_in_order(corpus: Path):
    prepared = prepare(config(corpus), SMALL, quiet)
    eot = prepared.tokenizer.eot_id
    keys = [f"part{i // 50}.jsonl:{i % 50}" for i in range(200)]
    for dataset, wanted in ((prepared.train, False), (prepared.validation, True)):
        texts = [document_text(i) for i, key in enumerate(keys) if in_validation(key, 0.1) is wanted]
        assert len(dataset) == len(texts)
        assert dataset.bytes.tolist() == [len(text.encode()) for text in texts]
        for i, text in enumerate(texts):
            ids = dataset.document(i)
            assert ids[0] == ids[-1] == eot
            assert eot not in ids[1:-1]
            assert prepared.tokenizer.decode(ids) == text
        assert dataset.n_tokens == sum(map(len, map(dataset.document, range(len(dataset)))))
    assert list(prepared.validation_texts()) == texts
    assert prepared.train.shards[0].dtype == np.uint16


def test_manifest_says_what_was_done(corpus: Path):
    prepared = prepare(config(corpus), SMALL, quiet)
    manifest = json.loads((prepared.directory / "manifest.json").read_text())
    assert manifest == prepared.manifest
    assert manifest["source"]["kind"] == "files"
    assert manifest["tokenizer"]["fingerprint"] == prepared.tokenizer.fingerprint
    assert manifest["counts"] == {"read": 200, "empty": 0, "undecodable": 0, "duplicates": 0}
    assert manifest["splits"]["train"]["tokens"] == prepared.train.n_tokens
    assert set(manifest["versions"]) == {"python", "numpy", "tokenizers"}
    assert len(manifest["shards"][0]["splits"]["train"]["sha256"]) == 64


def test_second_call_reuses_the_shards(corpus: Path):
    first = prepare(config(corpus), SMALL, quiet)
    (stamp,) = [os.stat(p).st_mtime_ns for p in first.directory.glob("*.train.bin")]
    lines: list[str] = []
    second = prepare(config(corpus), SMALL, lines.append)
    assert second.directory == first.directory
    assert os.stat(first.directory / "00000.train.bin").st_mtime_ns == stamp
    assert len(lines) == 1
    assert "for training" in lines[0]


@pytest.mark.parametrize(
    "change",
    [
        {"validation_fraction": 0.2},
        {"validation_tokens": 200},
        {"max_documents": 150},
        {"deduplicate": False},
        {"text_column": "body"},
        {"errors": TextErrors.skip},
        {"shard_tokens": 500},
    ],
    ids=str,
)
def test_another_data_option_is_another_cache(corpus: Path, change: dict):
    for path in corpus.iterdir():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row | {"body": row["text"].upper()}) + "\n" for row in rows))
    first = prepare(config(corpus), SMALL, quiet)
    assert prepare(config(corpus, **change), SMALL, quiet).directory != first.directory


def test_another_tokenizer_is_another_cache(corpus: Path):
    first = prepare(config(corpus), SMALL, quiet)
    second = prepare(config(corpus), replace(SMALL, vocab_size=320), quiet)
    assert second.directory != first.directory
    assert second.fingerprint != first.fingerprint
    sampled = prepare(config(corpus), replace(SMALL, sample_bytes=500), quiet)
    assert sampled.tokenizer.fingerprint != first.tokenizer.fingerprint


def test_changed_file_is_prepared_again(corpus: Path):
    first = prepare(config(corpus), SMALL, quiet)
    path = corpus / "part2.jsonl"
    before = os.stat(path)
    path.write_text(path.read_text().replace("document 100", "DOCUMENT 100"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = prepare(config(corpus), SMALL, quiet)
    assert second.fingerprint != first.fingerprint
    assert any("DOCUMENT 100" in second.tokenizer.decode(ids) for ids in contents(second))


def test_fingerprint_is_of_the_contents(corpus: Path, tmp_path):
    first = prepare(config(corpus), SMALL, quiet)
    moved = tmp_path / "moved"
    corpus.rename(moved)
    options = {"paths": [str(moved)], "cache_dir": str(tmp_path / "other"), "shard_tokens": 700, "processes": 2}
    second = prepare(config(corpus, **options), SMALL, quiet)
    assert second.fingerprint == first.fingerprint
    assert contents(second) == contents(first)
    assert len(second.train.shards) > 3


def test_missing_shard_is_made_again(corpus: Path):
    first = prepare(config(corpus, shard_tokens=700), SMALL, quiet)
    wanted = contents(first)
    (first.directory / "00001.train.bin").unlink()
    assert contents(prepare(config(corpus, shard_tokens=700), SMALL, quiet)) == wanted
    os.truncate(first.directory / "00002.train.bin", 10)
    assert contents(prepare(config(corpus, shard_tokens=700), SMALL, quiet)) == wanted


def test_exact_duplicates_are_dropped_and_counted(corpus: Path):
    text = (corpus / "part0.jsonl").read_text()
    (corpus / "part9.jsonl").write_text(text)
    prepared = prepare(config(corpus), SMALL, quiet)
    assert prepared.manifest["counts"]["duplicates"] == 50
    assert len(prepared.train) + len(prepared.validation) == 200
    kept = prepare(config(corpus, deduplicate=False), SMALL, quiet)
    assert len(kept.train) + len(kept.validation) == 250


def test_duplicates_are_found_across_an_interruption(corpus: Path):
    (corpus / "part9.jsonl").write_text((corpus / "part0.jsonl").read_text())
    options = config(corpus, shard_tokens=700)
    prepared = prepare(options, SMALL, quiet)
    wanted = contents(prepared)
    (prepared.directory / "manifest.json").unlink()
    last = max(prepared.directory.glob("[0-9]*.json"))
    last.unlink()
    again = prepare(options, SMALL, quiet)
    assert again.manifest["counts"] == prepared.manifest["counts"]
    assert contents(again) == wanted


def test_empty_and_undecodable_documents_are_counted(corpus: Path):
    (corpus / "odd.jsonl").write_bytes(b'{"text": " \\n"}\n{"text": ""}\n{"text": "\xff"}\n{"text": "kept"}\n')
    prepared = prepare(config(corpus, errors=TextErrors.skip), SMALL, quiet)
    assert prepared.manifest["counts"] == {"read": 201, "empty": 2, "undecodable": 1, "duplicates": 0}


def test_validation_cap_holds_whole_documents_out(corpus: Path):
    full = prepare(config(corpus), SMALL, quiet)
    # Small shards make small batches: some are read after the cap is reached, some before.
    cap = full.validation.n_tokens // 2
    capped = prepare(config(corpus, validation_tokens=cap, shard_tokens=700), SMALL, quiet)
    assert 0 < capped.validation.n_tokens <= full.validation.n_tokens // 2
    held_out = capped.manifest["splits"]["held_out"]["documents"]
    assert held_out == len(full.validation) - len(capped.validation) > 0
    # The training split does not depend on the cap.
    assert capped.train.lengths.tolist() == full.train.lengths.tolist()


def test_max_documents_reads_no_further(corpus: Path):
    (corpus / "part3.jsonl").write_text("no json")  # never reached
    prepared = prepare(config(corpus, max_documents=120), SMALL, quiet)
    assert prepared.manifest["counts"]["read"] == 120


def test_stdlib_is_the_default_source(tmp_path):
    data = DataConfig(
        cache_dir=str(tmp_path), max_documents=60, processes=1, validation_fraction=0.2, validation_tokens=10**6
    )
    prepared = prepare(data, SMALL, quiet)
    assert len(prepared.train) > 10
    assert len(prepared.validation) > 2


def test_tokenizer_file(corpus: Path, tmp_path):
    Tokenizer.train(["abc abc"], TokenizerConfig(vocab_size=257, end_of_text="</s>")).save(tmp_path / "t.json")
    given = TokenizerConfig(kind=TokenizerKind.file, path=str(tmp_path / "t.json"), end_of_text="</s>")
    prepared = prepare(config(corpus), given, quiet)
    assert prepared.tokenizer.vocab_size == 257
    assert prepared.tokenizer.decode(prepared.train.document(0)).startswith("document")


def test_vocabulary_above_65536_makes_uint32_shards(corpus: Path, tmp_path):
    from tokenizers import Tokenizer as Inner

    Tokenizer.train(["abc"], SMALL).save(tmp_path / "t.json")
    inner = Inner.from_file(str(tmp_path / "t.json"))
    inner.add_tokens([f"<unused {i}>" for i in range(66_000)] + ["value_3"])
    inner.save(str(tmp_path / "large.json"))
    prepared = prepare(
        config(corpus), TokenizerConfig(kind=TokenizerKind.file, path=str(tmp_path / "large.json")), quiet
    )
    assert prepared.train.shards[0].dtype == np.uint32
    assert max(shard.max() for shard in prepared.train.shards) > 65_535
    with pytest.raises(ValueError, match=r"model\.vocab_size must be above .* id 66259, got 50257"):
        check_vocabulary(prepared, 50_257)
    check_vocabulary(prepared, 66_260)


def test_synthetic_documents(tmp_path):
    data = DataConfig(
        source=Source.synthetic,
        synthetic_tokens=100_000,
        synthetic_document_tokens=512,
        synthetic_vocab_size=1000,
        cache_dir=str(tmp_path / "never made"),
    )
    prepared = prepare(data, TokenizerConfig(), quiet)
    assert (prepared.train.lengths == 513).all()
    assert prepared.train.n_targets == 100_000 // 512 * 512
    assert prepared.train.document(3)[0] == prepared.train.document(3)[-1] == prepared.tokenizer.eot_id == 999
    assert (prepared.train.document(3)[1:-1] < 999).all()
    assert not (tmp_path / "never made").exists()
    same = prepare(data, TokenizerConfig(), quiet)
    assert same.fingerprint == prepared.fingerprint
    np.testing.assert_array_equal(same.train.shards[0], prepared.train.shards[0])
    other = prepare(replace(data, synthetic_seed=1), TokenizerConfig(), quiet)
    assert other.fingerprint != prepared.fingerprint
    assert (other.train.shards[0] != prepared.train.shards[0]).any()
    drawn = prepare(replace(data, synthetic_document_tokens=None), TokenizerConfig(), quiet).train
    assert 0.8 < drawn.n_targets / 100_000 <= 1.0
    assert len(set(drawn.lengths.tolist())) > 50


def test_dataset_reopens_in_another_process(corpus: Path):
    import pickle

    prepared = prepare(config(corpus), SMALL, quiet)
    pickled = pickle.dumps(prepared.train)
    assert len(pickled) < 1000  # the path, not the tokens
    copy = pickle.loads(pickled)
    assert [d.tolist() for d in map(copy.document, range(len(copy)))] == contents(prepared)[: len(copy)]
    memory = TokenDataset.from_documents([[0, 5, 0], [0, 6, 7, 0]], vocab_size=8)
    assert pickle.loads(pickle.dumps(memory)).document(1).tolist() == [0, 6, 7, 0]


# Errors


def test_empty_dataset(tmp_path):
    (tmp_path / "a.txt").write_text(" \n")
    data = DataConfig(source=Source.files, paths=[str(tmp_path / "a.txt")], cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"data\.paths.* must give at least one document, got none \(1 empty and 0"):
        prepare(data, SMALL, quiet)


def test_empty_splits(corpus: Path):
    with pytest.raises(ValueError, match=r"data\.validation_fraction must give at least one validation document"):
        prepare(config(corpus, validation_fraction=1e-6), SMALL, quiet)
    with pytest.raises(ValueError, match=r"data\.validation_fraction must leave documents for training"):
        prepare(config(corpus, validation_fraction=1 - 1e-9), SMALL, quiet)
    with pytest.raises(ValueError, match=r"data\.validation_tokens must hold at least one validation document, got 3"):
        prepare(config(corpus, validation_tokens=3), SMALL, quiet)


def test_only_the_splits_that_are_asked_for_must_hold_documents(corpus: Path):
    options = config(corpus, validation_fraction=1e-6)
    prepared = prepare(options, SMALL, quiet, splits=("train",))
    assert (len(prepared.train), len(prepared.validation)) == (200, 0)
    with pytest.raises(ValueError, match="at least one validation document"):
        prepare(options, SMALL, quiet)


def test_unwritable_cache_names_the_key(corpus: Path):
    file = corpus / "part0.jsonl"
    with pytest.raises(ValueError, match=r"data\.cache_dir must be a writable directory, got .*part0\.jsonl/cache"):
        prepare(config(corpus, cache_dir=f"{file}/cache"), SMALL, quiet)


def test_files_that_change_while_they_are_read(corpus: Path, monkeypatch):
    import data.pipeline

    original = data.pipeline.encode_in_order

    def meddled(*args):
        yield from original(*args)
        (corpus / "part1.jsonl").write_text('{"text": "changed"}\n')

    monkeypatch.setattr(data.pipeline, "encode_in_order", meddled)
    with pytest.raises(ValueError, match=r"data\.paths.* must stay as it is while it is read"):
        prepare(config(corpus), SMALL, quiet)


# Interruption and company. The child slows down after each shard, so that the kill falls between two of them.

CHILD = """
import sys, time
import data.pipeline
from data.config import DataConfig, Source, TokenizerConfig
from data.prepare import prepare
commit = data.pipeline.Preparation._commit
def slow(self, writer):
    commit(self, writer)
    time.sleep(float(sys.argv[4]))
data.pipeline.Preparation._commit = slow
config = DataConfig(source=Source.files, paths=[sys.argv[1]], cache_dir=sys.argv[2], validation_fraction=0.1,
                    processes=int(sys.argv[3]), shard_tokens=700)
prepared = prepare(config, TokenizerConfig(vocab_size=300), progress=False)
print("fingerprint", prepared.fingerprint)
"""


def child(corpus: Path, cache: Path, processes: int, pause: float) -> subprocess.Popen:
    command = [sys.executable, "-c", CHILD, str(corpus), str(cache), str(processes), str(pause)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("processes", [1, 2])
def test_killed_preparation_goes_on(corpus: Path, tmp_path, processes: int):
    wanted = prepare(config(corpus, shard_tokens=700), SMALL, quiet)
    cache = tmp_path / "killed"
    process = child(corpus, cache, processes, pause=0.3)
    deadline = time.monotonic() + 60
    while not list(cache.glob("tokens/*/00001.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (directory,) = cache.glob("tokens/*")
    finished = sorted(directory.glob("[0-9]*.json"))
    assert 2 <= len(finished) < len(wanted.train.shards)
    assert not (directory / "manifest.json").exists()
    stamps = {path: os.stat(path).st_mtime_ns for path in finished}
    bins = {p: os.stat(p).st_mtime_ns for f in finished for p in directory.glob(f"{f.stem}.*.bin")}
    # A torn shard, as a kill in the middle of a write leaves it.
    (directory / f"{len(finished):05d}.train.bin").write_bytes(b"torn")

    lines: list[str] = []
    options = config(corpus, shard_tokens=700, cache_dir=str(cache), processes=processes)
    prepared = prepare(options, SMALL, lines.append)
    assert any(f"going on after {len(finished)} finished shards" in line for line in lines)
    assert contents(prepared) == contents(wanted)
    assert prepared.fingerprint == wanted.fingerprint
    assert prepared.manifest["counts"] == wanted.manifest["counts"]
    assert prepared.manifest["shards"] == wanted.manifest["shards"]
    assert all(os.stat(path).st_mtime_ns == stamp for path, stamp in (stamps | bins).items())


def test_two_processes_prepare_the_same(corpus: Path, tmp_path):
    wanted = prepare(config(corpus, shard_tokens=700), SMALL, quiet)
    cache = tmp_path / "shared"
    pair = [child(corpus, cache, processes=1, pause=0.05) for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in pair]
    assert all(process.returncode == 0 for process in pair)
    assert all(f"fingerprint {wanted.fingerprint}" in output for output in outputs)
    # One of them did the work; whether the other had to wait depends on when it came.
    assert sum("data: tokenizing" in output for output in outputs) == 1


def test_threads_wait_for_each_other(corpus: Path):
    lines: list[str] = []
    results = []

    def work():
        results.append(prepare(config(corpus, shard_tokens=300), SMALL, lines.append).fingerprint)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1
    assert sum("data: tokenizing" in line for line in lines) == 1


def test_data_and_its_processes_need_no_heavy_import():
    code = (
        "import sys, data.workers, data.prepare; print(sorted({'lightning', 'hydra', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "[]"
    code = "import sys, data.workers; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).strip() == "False"

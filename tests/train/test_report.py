"""The report of a run directory: whole, torn, and empty; nothing in it comes from outside."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from train.report import METRICS_COLUMNS, main, write_report


def write_run(run_dir: Path) -> None:
    run_dir.mkdir(parents=True)
    lines = [",".join(METRICS_COLUMNS)]
    for step in range(10, 201, 10):
        val = ("3.2", "2.05") if step % 100 == 0 else ("", "")
        lines.append(f"{step},{step * 2048},{8 - step / 50},{val[0]},{val[1]},0.003,0.9,8500.0,,,0.61,0,{step / 4}")
    (run_dir / "metrics.csv").write_text("\n".join(lines) + "\n")
    (run_dir / "config.yaml").write_text("name: tiny\ndata:\n  text_column: '<script>'\n")
    (run_dir / "environment.json").write_text(json.dumps({"gpu": None, "torch": "2.13.0", "compile": False}))
    (run_dir / "packing.json").write_text(json.dumps({"fill": 0.9971, "documents_cut": 12345}))
    manifest = {
        "source": {"kind": "stdlib", "root": "/lib", "units": "f00"},
        "splits": {"train": {"documents": 1700, "tokens": 9000, "bytes": 31000}, "validation": {"documents": 35}},
        "counts": {"read": 1754, "duplicates": 7},
        "shards": [{"splits": {}}],
    }
    (run_dir / "data.json").write_text(json.dumps(manifest))
    summary = {"status": "finished", "n_params": 2_566_272, "gzip_bits_per_byte": 1.63, "unigram_bits_per_byte": 2.79}
    (run_dir / "summary.json").write_text(json.dumps(summary | {"val_bits_per_byte": 2.05}))
    (run_dir / "samples.txt").write_text("def main():\n    return <b>1</b> & 2\n")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("report") / "tiny"
    write_run(run_dir)
    assert write_report(run_dir) == run_dir / "report.html"
    assert (run_dir / "curves.png").read_bytes().startswith(b"\x89PNG")
    return (run_dir / "report.html").read_text()


def test_page_shows_every_part(page: str) -> None:
    for curve in ("Loss", "Utilisation", "Throughput", "Validation", "Learning rate", "Gradient norm"):
        assert re.search(rf"<svg.*?>{curve}<", page, re.DOTALL), curve
    text = re.sub(r"\s+", " ", re.sub(r"<svg.*?</svg>|<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))
    for shown in (
        "finished · 200 steps · 410k tokens · 50 s",
        "2.050 validation bits per byte",
        "61.0% gemm_util",
        "8.5k tokens a second",
        "2.57M parameters",
        "gzip -9 1.630",
        "fill 0.9971",
        "documents cut 12,345",
        "source stdlib root /lib training 1,700 documents, 9,000 tokens, 31,000 bytes validation 35 documents",
        "left out 7 duplicates",
        "torch 2.13.0 compile no",
        "No step had a non-finite loss",
    ):
        assert shown in text, shown


def test_page_needs_nothing_from_outside(page: str) -> None:
    assert not re.search(r"<(script|link|img|iframe)\b", page)
    assert not re.search(r"(src|href)=\"(?!#)", page.replace("xlink:href", "href"))
    assert "url(http" not in page
    assert "@import" not in page


def test_text_of_the_run_is_escaped(page: str) -> None:
    assert "return &lt;b&gt;1&lt;/b&gt; &amp; 2" in page
    assert "text_column: &#x27;&lt;script&gt;&#x27;" in page


def test_a_killed_run_has_a_report(tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    write_run(run_dir)
    for name in ("summary.json", "environment.json", "packing.json", "samples.txt", "data.json"):
        (run_dir / name).unlink()
    metrics = run_dir / "metrics.csv"
    metrics.write_text(metrics.read_text() + "210,4300")  # torn in the middle of a row
    (run_dir / "packing.json").write_text('{"fill": ')
    page = write_report(run_dir).read_text()
    assert "not finished · 200 steps" in page
    assert "Packing" not in page


def test_a_run_killed_after_it_was_resumed(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": 120, "loss": 1.5}))
    page = write_report(tmp_path / "run").read_text()
    assert "not finished · 200 steps" in page
    assert "<b>4.000</b><span>training loss" in page


def test_a_run_killed_before_its_first_row(tmp_path: Path) -> None:
    run_dir = tmp_path / "early"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("name: early\n")
    assert "No metrics were written yet" in write_report(run_dir).read_text()
    assert not (run_dir / "curves.png").exists()


def test_skipped_steps_are_said(tmp_path: Path) -> None:
    run_dir = tmp_path / "skips"
    write_run(run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"skipped_steps": 2, "nonfinite_steps": [17, 18]}))
    assert (
        "2 steps had a non-finite loss or gradient and were skipped: steps 17, 18." in write_report(run_dir).read_text()
    )


def test_same_run_same_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    assert write_report(tmp_path / "run").read_bytes() == write_report(tmp_path / "run").read_bytes()


def test_command_writes_it_and_refuses_other_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a=b")
    assert main([f"run={tmp_path}/a=b"]) == 0
    assert capsys.readouterr().out.strip() == f"{tmp_path}/a=b/report.html"
    assert main([f"run={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        f"train.report: error: {tmp_path} is no run directory: it has neither metrics.csv nor config.yaml\n"
    )

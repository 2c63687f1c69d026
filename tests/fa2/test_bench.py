"""The benchmark on a CPU: its cases, its peers' calls, its arithmetic, its options, the README's tables; and that the
differential test notices what is wrong."""

from __future__ import annotations

import json
import random
import re

import pytest
import torch

from fa2.bench import __main__ as bench
from fa2.bench import cases, correctness, machine, peers, readme, timing
from fa2.bench.correctness import Problem

TINY = "--device cpu --tokens 64 --seqlen 32,64 --headdim 256 --mask causal --runs 3 --peers fa2,eager,sdpa_flash"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench")
    assert bench.main([*TINY.split(), "--suite", "paper", "--host-overhead", "--out", str(out)]) == 0
    assert (out / "bench.png").stat().st_size > 1000
    return json.loads((out / "bench.json").read_text())


def test_record(record):
    assert {"device", "torch", "commit", "date"} <= set(record["machine"])
    assert [row["case"] for row in record["rows"]] == ["256 causal 32", "256 causal 64"]
    for row in record["rows"]:
        assert set(row["both"]) == {"fa2", "eager"}
        assert set(row["backward"]) == {"fa2"}, "eager has no bare backward"
        assert row["forward"]["fa2"]["n"] == 3
    assert any("sdpa_flash" in line for line in record["left_out"]), "what is missing is said"
    assert record["deterministic"][0]["cost"] > 0
    calls = ["operator forward", "operator backward", "function", "function and backward"]
    assert list(record["host_us"]) == [*calls, "SDPA flash", "SDPA flash and backward"]
    assert min(record["host_us"].values()) > 0


def test_packed_cases_run(capsys):
    words = "--device cpu --tokens 256 --headdim 128 --runs 1 --rounds 1 --peers fa2 --suite packed --no-deterministic"
    assert bench.main(words.split()) == 0
    assert "1 of 256 between 2 x 128 of 1" in capsys.readouterr().out


def test_flops():
    (case,) = cases.paper([128], ["full"], [2048])
    assert case.flops("forward") == 4 * 8 * 16 * 2048 * 2048 * 128
    assert case.flops("both") == 3.5 * case.flops("forward")
    (half,) = cases.paper([128], ["causal"], [2048])
    assert half.flops("backward") == 1.25 * case.flops("forward")
    for packed in cases.packed():
        assert sum(packed.lengths) == 32768
        assert min(packed.lengths) > 0
    assert len({case.name for case in cases.packed()}) == 5


def test_aten_peers_give_sdpas_gradients_and_free_their_memory():
    """The wrapper of torch's own forward and backward operators, with the pair that a CPU has."""
    aten = torch.ops.aten
    (case,) = cases.paper([128], ["causal"], [64], 128)
    x = case.tensors("cpu", torch.float32)
    calls = peers._aten_calls(
        x,
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True),
        lambda g, q, k, v, r: aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, *r, 0.0, True),
        peers._heads_first,
    )
    ours = peers.ours(case, x)
    torch.testing.assert_close(calls.out, ours.out)
    for mine, theirs in zip(ours.both(), calls.both(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(ours.backward_autograd(), calls.backward_autograd(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(ours.backward(), calls.backward(), strict=True):
        torch.testing.assert_close(mine, theirs.transpose(1, 2), rtol=1e-4, atol=1e-4)
    assert ours.backward_autograd()[0].shape == x["q"].shape


def test_a_document_mask_is_packed_attention():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    document, seen = peers._document_mask(128, torch.device("cpu"))
    case = cases.Case("packed", "", (40, 88), 2, 2, 16, True)
    x = case.tensors("cpu", torch.float32)
    document.copy_(torch.tensor([0] * 40 + [1] * 88))
    mask = create_block_mask(seen, None, None, 128, 128, device="cpu")
    q, k, v = (x[n].transpose(0, 1)[None] for n in "qkv")
    out = flex_attention(q, k, v, block_mask=mask)[0].transpose(0, 1)
    torch.testing.assert_close(out, peers.ours(case, x).out)


def test_medians_spread_and_means():
    ticks = iter([5.0] * 4 + [1.0, 2.0, 3.0, 4.0, 6.0, 8.0])
    watch = timing.Stopwatch("cpu")
    watch.times = lambda call, runs: [next(ticks) for _ in range(runs) if call() is None]
    readings = watch.interleaved({"a": lambda: None}, 2, {"a": 4})
    assert readings == {"a": {"ms": 5.0, "spread": 0.0, "n": 4}}
    rows = [
        {"suite": "paper", "case": str(s), "seqlen": s}
        | {part: {"fa2": {"tflops": 100.0 * over}, "eager": {"tflops": 100.0}} for part in bench.PARTS}
        for s, over in ((512, 9.0), (1024, 2.0), (2048, 0.5))
    ]
    mean = bench.geometric_means(rows)["paper/eager"]["forward"]
    assert mean == {"mean": 1.0, "least": 0.5, "least_at": "2048", "points": 2}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--headdim 100", "--headdim must divide 2048 and be at most 256, got 100"),
        ("--mask diagonal", "--mask must be of causal, full, got diagonal"),
        ("--peers nobody", "--peers must be of fa2, "),
        ("--suite everything", "--suite must be of packed, gqa, paper, got everything"),
        ("--seqlen 3000", r"--seqlen must divide --tokens \(16384\), got 3000"),
        ("--runs 2", r"--runs must be at least --rounds \(3\), got 2"),
    ],
)
def test_bad_options_are_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as error:
        bench.main(["--device", "cpu", *words.split()])
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as error:
        bench.main([])
    assert error.value.code == 2
    assert "--device must be cpu where torch sees no CUDA device" in capsys.readouterr().err
    assert correctness.main([]) == 2


# --- the differential test


def a_problem() -> Problem:
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(90, 2, 16, generator=g).bfloat16() for _ in range(4))
    return Problem(q, k, v, dout, [50, 0, 30], [50, 0, 30], True)


def test_what_is_right_passes():
    p = a_problem()
    assert max(correctness.ratios(p, correctness.run(p)).values()) <= 1
    for seed in range(8):
        p = correctness.draw(random.Random(seed), "cpu", 60)
        assert max(correctness.ratios(p, correctness.run(p)).values()) <= 1, p


@pytest.mark.parametrize("name", correctness.NAMES)
@pytest.mark.parametrize("fault", ["scaled", "one row", "nan", "past the end"])
def test_what_is_wrong_fails(name, fault):
    p = a_problem()
    got = dict(zip(correctness.NAMES, correctness.run(p), strict=True))
    x = got[name].clone()
    rows = x.T if name == "lse" else x
    if fault == "scaled":
        x += 0.03 * (1 if name == "lse" else x)
    elif fault == "one row":
        rows[17] += 0.5
    elif fault == "nan":
        rows[3, 1] = torch.nan
    else:
        rows[85] = 0.3
    got[name] = x
    assert not correctness.ratios(p, tuple(got.values()))[name] <= 1


def test_record_of_the_differential_test(tmp_path, capsys, monkeypatch):
    path = tmp_path / "record.json"
    small = correctness.draw
    monkeypatch.setattr(correctness, "draw", lambda rng, device: small(rng, device, 40))
    assert correctness.main(["--device", "cpu", "--draws", "3", "--out", str(path)]) == 0
    made = json.loads(path.read_text())
    assert (made["draws"], made["failures"]) == (3, [])
    assert "3 draws" in capsys.readouterr().out
    monkeypatch.setattr(correctness, "ratios", lambda p, got: dict.fromkeys(correctness.NAMES, 2.0))
    assert correctness.main(["--device", "cpu", "--draws", "2"]) == 1
    assert "FAILED draw 0: newest kernels" in capsys.readouterr().out


# --- the README


def test_readme_agrees_with_the_records():
    text = readme.README.read_text(encoding="utf-8")
    assert sorted(re.findall(r"<!-- table: (\w+) -->", text)) == sorted(readme.TABLES)
    assert readme.readme_tables(text) == text, "run python -m fa2.bench.readme"


def test_tables_are_made_from_records(record, tmp_path):
    for name, (path, _, _) in readme.TABLES.items():
        if name == "llama":  # test_bench_llama.py's
            continue
        (tmp_path / path).parent.mkdir(exist_ok=True)
        found = record if path.endswith("bench.json") else correctness.differential(0, 0, "cpu")
        (tmp_path / path).write_text(json.dumps({"machine": machine.describe("cpu"), **found}))
        made = readme.readme_tables(f"<!-- table: {name} -->\nold\n<!-- end -->", tmp_path)
        assert "old" not in made
        assert made.count("|") > 4
    host = record["host_us"]
    made = readme.host_table({"machine": machine.describe("cpu"), **record})
    assert f" {host['function'] / host['SDPA flash']:.2f} |" in made
    assert "--host-overhead" in readme.host_table({"rows": []})
    with pytest.raises(KeyError):
        readme.readme_tables("<!-- table: nothing -->\n<!-- end -->", tmp_path)


@pytest.mark.gpu
def test_peers_run_on_a_gpu(tmp_path):
    """Every peer that torch ships is there, runs the kernels it should and gives fa2's numbers."""
    names = "fa2,sdpa_flash,sdpa_cudnn,eager,varlen_attn"
    words = f"--tokens 1024 --seqlen 512,1024 --headdim 128 --runs 6 --peers {names} --host-overhead --out {tmp_path}"
    assert bench.main(words.split()) == 0
    made = json.loads((tmp_path / "bench.json").read_text())
    measured = {name for row in made["rows"] for name in row["backward_autograd"]}
    assert {"fa2", "sdpa_flash", "varlen_attn", "eager"} <= measured, made["left_out"]
    assert made["matmul_tflops"][0] > 10
    assert "driver" in made["machine"]
    assert set(made["geometric_means"]["packed/varlen_attn"]) == set(bench.PARTS)

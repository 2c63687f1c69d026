"""`python -m fa2.bench.llama` on a CPU: its record and table; it stops where an attention is not what it says."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

pytest.importorskip("transformers")

from fa2.bench import llama, readme
from fa2.integrations import transformers as hook

TINY = "--device cpu --model tiny --layers 1 --batch 2 --seqlen 64 --rounds 1 --runs 1 --packed"


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / "results" / "llama_h200.json"
    assert llama.main([*TINY.split(), "--out", str(path)]) == 0
    return json.loads(path.read_text())


def test_record(record):
    assert {"device", "torch", "commit", "date", "transformers"} <= set(record["machine"])
    assert {part: tuple(found) for part, found in record["parts"].items()} == {
        "eager": ("sdpa", "sdpa_flash", "fa2"),
        "packed": ("sdpa", "fa2"),
    }
    assert (record["left_out"], record["error"]) == ([], None)
    assert record["model"]["num_hidden_layers"] == 1
    assert sum(record["documents"]) == 128
    for found in record["parts"].values():
        assert found["sdpa"]["gradients_differ"] == 0
        for name, reading in found.items():
            assert reading["n"] == 1
            assert reading["tokens_per_s"] == pytest.approx(128e3 / reading["ms"], rel=1e-4)
            assert reading["loss"] == pytest.approx(found["sdpa"]["loss"], rel=1e-3)
            assert reading["gradients_differ"] < 0.03
            assert reading["speed_over"].keys() == found.keys() - {name}
    assert record["parts"]["eager"]["fa2"]["gradients_differ"] > 0, "another attention computed it"


def test_table(record, tmp_path):
    record["parts"]["eager"]["fa2"]["kernels"] = ["void fa2::sm90::attention_fwd<bf16, F<128> >(fa2::Arguments)"]
    path, command, _ = readme.TABLES["llama"]
    marked = "<!-- table: llama -->\n<!-- end -->"
    assert command in readme.readme_tables(marked, tmp_path)
    (tmp_path / path).write_text(json.dumps(record))
    made = readme.readme_tables(marked, tmp_path)
    ratio = record["parts"]["eager"]["fa2"]["speed_over"]["sdpa_flash"]
    assert re.search(rf"\| eager \| sdpa, flash forced \| [\d.]+ \| \d+ \| {ratio:.3f} \|", made)
    assert len(re.findall(r"^\| (?:eager|packed) \|", made, re.MULTILINE)) == 5
    assert "fa2, eager: `fa2::sm90::attention_fwd`" in made


@pytest.fixture
def sdpa_calls(monkeypatch):
    """--compile without inductor: keyword arguments of the calls of sdpa in the graphs that are made."""
    seen = []

    def backend(graph, inputs):
        sdpa = torch.nn.functional.scaled_dot_product_attention
        seen.extend(node.kwargs for node in graph.graph.nodes if node.target is sdpa)
        return graph.forward

    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: compile_module(self, backend=backend, **kw))
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=False):  # the bench sets it, for its whole process
        yield seen
    torch._dynamo.reset()


def test_compiled_sdpa_has_no_mask(sdpa_calls, tmp_path):
    """So that its flash kernels can run: the CPU's take a mask, the GPU's do not."""
    path = tmp_path / "llama.json"
    assert llama.main([*TINY.split(), "--layers", "2", "--compile", "--out", str(path)]) == 0
    made = json.loads(path.read_text())
    assert set(made["parts"]["compiled"]) == {"sdpa", "sdpa_flash", "fa2"}
    assert made["left_out"] == []
    assert [(call["attn_mask"], call["is_causal"]) for call in sdpa_calls[:2]] == [(None, True)] * 2


def test_a_peer_that_cannot_run_is_left_out(sdpa_calls, monkeypatch, tmp_path, capsys):
    no_cpu_kernel = SimpleNamespace(FLASH_ATTENTION=SDPBackend.EFFICIENT_ATTENTION)
    monkeypatch.setattr(llama, "SDPBackend", no_cpu_kernel)
    path = tmp_path / "results" / "llama_h200.json"
    assert llama.main([*TINY.split(), "--compile", "--out", str(path)]) == 0
    made = json.loads(path.read_text())
    assert set(made["parts"]["eager"]) == set(made["parts"]["compiled"]) == {"sdpa", "fa2"}
    assert made["error"] is None
    assert [line.split(": ")[:2] for line in made["left_out"]] == [["eager", "sdpa_flash"], ["compiled", "sdpa_flash"]]
    assert "compiled  sdpa_flash  is left out: " in capsys.readouterr().out
    table = readme.llama_table(made)
    assert "Left out: compiled: sdpa_flash: " in table
    assert len(re.findall(r"^\| (?:eager|packed|compiled) \|", table, re.MULTILINE)) == 6


def test_what_was_measured_before_a_failure_is_recorded(sdpa_calls, monkeypatch, tmp_path, capsys):
    right = hook.flash_attn_func

    def attend(*args, **kwargs):
        if torch.compiler.is_compiling():
            raise RuntimeError("out of luck")
        return right(*args, **kwargs)

    monkeypatch.setattr(hook, "flash_attn_func", attend)
    path = tmp_path / "results" / "llama_h200.json"
    assert llama.main([*TINY.split(), "--compile", "--out", str(path)]) == 1
    made = json.loads(path.read_text())
    assert made["error"].startswith("compiled: ")
    assert f"\nfa2: {made['error']}\n" in capsys.readouterr().err
    assert made["parts"]["eager"]["fa2"]["ms"] > 0
    assert "fa2" not in made["parts"]["compiled"]
    table = readme.llama_table(made)
    assert f"The run stopped: {made['error']}." in table
    assert len(re.findall(r"^\| (?:eager|packed|compiled) \|", table, re.MULTILINE)) == 5


def test_the_commands_of_the_readme_parse(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    words = readme.TABLES["llama"][1].split()
    assert words[:3] == ["python", "-m", "fa2.bench.llama"]
    args = llama.options(words[3:])
    assert args.parts == ["eager", "packed", "compiled"]
    assert args.out.name == readme.TABLES["llama"][0]


def test_the_model_has_the_size_of_llama_3_2_1b():
    from transformers import AutoModelForCausalLM, LlamaConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**llama.MODELS["1b"], tie_word_embeddings=True))
    assert sum(x.numel() for x in model.parameters()) == 1_235_814_400


@pytest.mark.parametrize("wrong", ["no mask", "scale"])
def test_a_wrong_attention_is_noticed(monkeypatch, capsys, wrong):
    right = hook.flash_attn_func

    def attend(q, k, v, softmax_scale, causal, **rest):
        factor = 4 if wrong == "scale" else 1
        return right(q, k, v, softmax_scale=factor * softmax_scale, causal=wrong == "scale", **rest)

    monkeypatch.setattr(hook, "flash_attn_func", attend)
    assert llama.main(TINY.split()) == 1
    rule = r"fa2: the \w+ of the first step must be within .* of sdpa's.*, got .* with fa2, eager\n"
    assert re.fullmatch(rule, capsys.readouterr().err)


FLASH = ["void pytorch_flash::flash_fwd_kernel<Traits>()", "void pytorch_flash::flash_bwd_convert_dq_kernel<Traits>()"]
OURS = ["void fa2::sm90::attention_fwd<bf16>()", "void fa2::sm80::attention_bwd<bf16>()", "fa2::sm90::reset(int*)"]
CUDNN = ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_kernel0"]
OTHERS = ["nvjet_sm90_tst_128x256", "cudaLaunchKernel", "triton_poi_fused__scaled_dot_product_flash_attention_0"]


@pytest.mark.parametrize(("name", "ran"), [("sdpa", CUDNN), ("sdpa", FLASH), ("sdpa_flash", FLASH), ("fa2", OURS)])
def test_attention_kernels(name, ran):
    assert llama.attention_kernels(name, [*OTHERS, *ran]) == ran


@pytest.mark.parametrize(
    ("name", "ran", "message"),
    [
        ("sdpa", [], "the attention kernels of sdpa must match '' once at least, got none"),
        ("sdpa_flash", CUDNN, "the attention kernels of sdpa_flash must match 'flash_fwd' once at least, got cudnn"),
        ("fa2", OURS[:1], "the attention kernels of fa2 must match 'fa2.*attention_bwd' once at least, got void fa2"),
        ("fa2", [*OURS, *FLASH], "every attention kernel of fa2 must match 'fa2::', got void pytorch_flash"),
        ("sdpa_flash", [*FLASH, *CUDNN], "every attention kernel of sdpa_flash must match 'flash_.*', got cudnn"),
    ],
)
def test_kernels_of_another_attention_are_noticed(name, ran, message):
    with pytest.raises(llama.Differs, match=message):
        llama.attention_kernels(name, [*OTHERS, *ran])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model 70b", "--model must be of 1b, tiny, got 70b"),
        ("--layers 0", "--layers must be at least 1, got 0"),
        ("--batch 0", "--batch must be at least 1, got 0"),
        ("--runs 2", r"--runs must be at least --rounds \(3\), got 2"),
    ],
)
def test_bad_options_are_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as error:
        llama.main(["--device", "cpu", *words.split()])
    assert error.value.code == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as error:
        llama.main([])
    assert error.value.code == 2
    assert "--device must be cpu where torch sees no CUDA device, got cuda" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_each_attention_runs_its_kernels(tmp_path):
    path = tmp_path / "llama.json"
    words = "--model tiny --batch 2 --seqlen 512 --rounds 1 --runs 2 --packed --compile"
    assert llama.main([*words.split(), "--out", str(path)]) == 0
    made = json.loads(path.read_text())
    assert made["left_out"] == []
    for part, found in made["parts"].items():
        for name, reading in found.items():
            assert reading["kernels"], f"{part}, {name}"
            assert reading["peak_gb"] > 0

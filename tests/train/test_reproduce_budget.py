"""The time budget of a step: names to classes, and a trace whose parts add up to its wall time."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from train import cli
from train.reproduce import budget, cell, plot, rows, tables
from train.reproduce.__main__ import COMMAND
from train.reproduce.budget import STEP, read_trace
from train.reproduce.kernels import Class, class_of_kernel, class_of_range

NAMES: list[tuple[str, Class]] = [
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_NNN", Class.gemm),
    ("nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNT", Class.gemm),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(Params)", Class.gemm),
    (
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off",
        Class.gemm,
    ),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(cublasSplitKParams<float>)", Class.gemm),
    ("ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_64x3_nt", Class.gemm),
    ("triton_tem_fused_addmm_3", Class.gemm),
    (
        "void fa2::sm90::attention_fwd<__nv_bfloat16, fa2::sm90::FwdConfig<128> >(fa2::sm90::FwdArguments)",
        Class.attention,
    ),
    ("void fa2::sm80::attention_bwd<__nv_bfloat16, fa2::sm80::BwdConfig<128> >(fa2::BwdParams)", Class.attention),
    ("void fa2::schedule_tiles<128, true, 90, 0>(int const*, int const*, int, int, int*)", Class.attention),
    ("fa2::sm90::reset_handed_out(int*)", Class.attention),
    (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, cutlass::bfloat16_t",
        Class.attention,
    ),
    ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>", Class.attention),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0", Class.attention),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_27_64x128x128_4x1x1_kernel0_0", Class.attention),
    ("triton_poi_fused__to_copy_add_gelu_2", Class.elementwise),
    ("triton_red_fused__to_copy_native_layer_norm_native_layer_norm_backward_5", Class.elementwise),
    ("triton_per_fused_add_native_layer_norm_0", Class.elementwise),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3> >",
        Class.elementwise,
    ),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
        "at::native::sum_functor<float, float, float>::operator()",
        Class.elementwise,
    ),
    ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, c10::BFloat16, float, 9>", Class.elementwise),
    ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int, 2>", Class.elementwise),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
        "(at::native::(anonymous namespace)::ADAM_MODE)1, false>, float, double>",
        Class.optimiser,
    ),
    (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float, (at::native::NormType)1>",
        Class.clipping,
    ),
    ("void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float, 1>", Class.clipping),
    ("void thrust::THRUST_300001_SM_900_NS::cuda_cub::core::detail::_kernel_agent<Agent>(long)", Class.elementwise),
    ("fused_linear_cross_entropy_kernel", Class.loss),
    ("Memcpy HtoD (Pinned -> Device)", Class.data),
    ("Memcpy DtoH (Device -> Pageable)", Class.logging),
    ("Memcpy DtoD (Device -> Device)", Class.elementwise),
    ("Memset (Device)", Class.elementwise),
    ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", Class.unknown),
]


@pytest.mark.parametrize(("name", "kind"), NAMES)
def test_kernels_by_their_names(name: str, kind: Class) -> None:
    assert class_of_kernel(name) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_LinearCrossEntropy", Class.loss),
        ("autograd::engine::evaluate_function: _LinearCrossEntropyBackward", Class.loss),
        ("Optimizer.step#AdamW.step", Class.optimiser),
        ("Optimizer.zero_grad#AdamW.zero_grad", Class.optimiser),
        ("aten::_foreach_norm", Class.clipping),
        ("gpt::eager_attention_backward", Class.attention),
        ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", Class.accumulation),
        ("aten::mm", None),
    ],
)
def test_ranges_by_their_names(name: str, kind: Class | None) -> None:
    assert class_of_range(name) is kind


class Trace:
    """A Chrome trace as torch's profiler writes it."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
        self._correlation = 0

    def host(self, name: str, begin: float, end: float, cat: str = "cpu_op", tid: int = 1) -> None:
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid})

    def kernel(self, name: str, begin: float, end: float, launched: float, cat: str = "kernel") -> None:
        self._correlation += 1
        arguments = {"correlation": self._correlation}
        launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 5}
        self.events.append({**launch, "args": arguments})
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": arguments})


GEMM, ATTENTION = "nvjet_sm90_tst_128x256", "void fa2::sm90::attention_fwd<>()"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4>"


@pytest.fixture
def trace() -> dict[str, Any]:
    """A step of 1000 µs, from 10_000 on."""
    t = Trace()
    t.host(STEP, 10_000, 11_000, cat="user_annotation")
    t.kernel(GEMM, 9_000, 9_900, 8_900)  # of the step before
    t.kernel("Memcpy HtoD (Pinned -> Device)", 10_020, 10_030, 10_010, cat="gpu_memcpy")
    t.kernel(GEMM, 10_050, 10_250, 10_040)
    t.kernel(ATTENTION, 10_240, 10_350, 10_042)  # began while the product still ran
    t.kernel("mystery_kernel", 10_360, 10_370, 10_050)
    t.host("_LinearCrossEntropy", 10_060, 10_080)
    t.kernel(GEMM, 10_370, 10_470, 10_061)
    t.kernel(ELEMENTWISE, 10_470, 10_500, 10_070)
    t.host("aten::_foreach_norm", 10_100, 10_110)
    t.kernel("void at::native::lpnorm_cleanup<>", 10_500, 10_520, 10_105)
    t.host("Optimizer.step#AdamW.step", 10_120, 10_140, cat="user_annotation")
    t.kernel(ELEMENTWISE, 10_520, 10_600, 10_125)
    t.kernel(ELEMENTWISE, 10_600, 10_650, 10_150)
    t.kernel("Memcpy DtoH (Device -> Pageable)", 10_700, 10_705, 10_690, cat="gpu_memcpy")
    return {"traceEvents": t.events}


MICROSECONDS = {
    Class.gemm: 200,
    Class.attention: 100,  # the ten that it shared belong to the one that began first
    Class.loss_gemm: 100,
    Class.loss: 30,
    Class.clipping: 20,
    Class.optimiser: 80,
    Class.elementwise: 50,
    Class.unknown: 10,
    Class.data: 20 + 10 + 20,  # idle, copy, idle until the first kernel
    Class.logging: 50 + 5 + 295,  # idle after the last kernel, copy, idle until the end
    Class.gaps: 10,
}


def test_the_parts_add_up_to_the_step(trace: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    budget = read_trace(json.loads(path.read_text()))
    assert budget.wall == pytest.approx(1e-3)
    assert {k: round(1e6 * s, 3) for k, s in budget.seconds.items()} == MICROSECONDS
    assert sum(budget.seconds.values()) == pytest.approx(budget.wall)
    assert budget.kernels[Class.unknown] == [("mystery_kernel", pytest.approx(1e-5), 1)]
    assert budget.kernels[Class.gemm] == [(GEMM, pytest.approx(2e-4), 1)], "the step before is left out"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda events: [e for e in events if e.get("name") != STEP], "with the range 'reproduce.step'"),
        (lambda events: [e for e in events if e.get("cat") in (None, "user_annotation")], "recorded none"),
    ],
)
def test_traces_without_a_step_or_kernels(trace: dict[str, Any], broken: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_trace({"traceEvents": broken(trace["traceEvents"])})


def test_a_kernel_of_unknown_launch_is_what_its_name_says(trace: dict[str, Any]) -> None:
    """It runs long after the host asked for it: in what range the host is meanwhile says nothing."""
    events = trace["traceEvents"]
    step = {"ph": "X", "cat": "kernel", "name": ATTENTION, "ts": 10_650, "dur": 20, "args": {"correlation": 999}}
    late = {"ph": "X", "cat": "cpu_op", "name": "_LinearCrossEntropy", "ts": 10_640, "dur": 50, "tid": 1}
    seconds = read_trace({"traceEvents": [*events, step, late]}).seconds
    assert round(1e6 * seconds[Class.attention]) == MICROSECONDS[Class.attention] + 20


def test_table_sentences_and_picture(trace: dict[str, Any], tmp_path: Path) -> None:
    cell = {
        "row": "1.3b_2k",
        "data": "dense",
        "attention": "fa2",
        "model": {"n_layer": 24, "d_model": 2048, "padded_vocab_size": 50304},
        "n_params": 1_300_000_000,
        "block_matmul_params": 1_200_000_000,
        "gemm_widths": [[6144, 2048], [2048, 2048], [8192, 2048], [2048, 8192]],
        "micro_batch_tokens": 32768,
        "tokens": 2048,
        "sum_len_sq": 2048**2,
        "step_seconds": [1e-3],
        "matmul_tflops": [680.0, 670.0],
        "peak_tflops": 989.4,
        "budget": {**read_trace(trace).as_record(), "copy_bytes_per_s": 4e12, "timed_step_s": 1e-3},
    }
    text = tables.budget_table(cell)
    assert "| optimiser | 0.1 | 8.0% |" in text
    assert "| the step | 1.0 | 100.0% |" in text
    assert "Unknown kernels: `mystery_kernel`." in text
    assert "You lose 8.0% to the optimiser." in text
    assert "40.0% of the step is matrix products and attention." in text
    assert plot.plot_budget(cell, tmp_path / "budget.png")
    assert (tmp_path / "budget.png").stat().st_size > 5000
    for flops, moved in plot.intensities(cell).values():
        assert flops / moved > 0


def test_the_ranges_of_a_real_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no kernels: some of its operators play them. The trainer's own ranges tell what they belong to."""
    monkeypatch.chdir(tmp_path)
    for module in ("train.callbacks.throughput", "train.reproduce.probe"):
        monkeypatch.setattr(f"{module}.sustained_matmul_flops", lambda *args: 1e11)
    monkeypatch.setattr("train.reproduce.probe._copy_bytes_per_second", lambda device: 1e10)
    names = {"aten::mm": GEMM, "aten::addmm": GEMM, "aten::_fused_adamw_": ELEMENTWISE, "aten::native_layer_norm": "?"}
    names |= {"aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION, "aten::linalg_vector_norm": ELEMENTWISE}

    def with_kernels(trace: dict[str, Any]) -> budget.Budget:
        played = Trace()
        for event in trace["traceEvents"]:
            if event.get("cat") == "cpu_op" and event["name"] in names:
                begin = float(event["ts"])
                played.kernel(names[event["name"]], begin, begin + float(event["dur"]), begin)
        return read_trace({"traceEvents": [*trace["traceEvents"], *played.events]})

    monkeypatch.setattr("train.reproduce.probe.budget.read_trace", with_kernels)
    arguments = ["rows=debug", "attention=sdpa_flash", "documents=dense", "steps=1", "warm_steps=1"]
    (chosen,) = rows.cells(cli.build(COMMAND, [*arguments, f"output={tmp_path}"]))
    trainer = replace(chosen.config.trainer, max_steps=3)
    result = cell.measure(replace(chosen, budget=True, config=replace(chosen.config, trainer=trainer)), time.time())
    assert result["status"] == "ok", result["reason"]
    seconds = result["budget"]["seconds"]
    for kind in (Class.gemm, Class.attention, Class.loss_gemm, Class.clipping, Class.optimiser, Class.unknown):
        assert seconds[kind.value] > 0, kind
    assert sum(seconds.values()) == pytest.approx(result["budget"]["wall_s"])
    assert result["budget"]["timed_step_s"] == pytest.approx(result["step_seconds"][0])
    launches = {kind: sum(k["launches"] for k in found) for kind, found in result["budget"]["kernels"].items()}
    assert launches["attention"] == 2 * 2, "micro-batches times layers"
    assert launches["optimiser"] == 2, "AdamW's groups"
    assert launches["loss, its GEMM"] >= 2 * 2

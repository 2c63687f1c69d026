"""`python -m fa2.bench.llama`: a training step of a Hugging Face Llama with three attentions, in one process.

One model, one batch, one optimizer; between steps only `attn_implementation` changes. Random weights, nothing is
downloaded. Method: `timing.py`. Before anything is timed, each attention's first step must give sdpa's loss and
gradients, and the profiler must see the kernels that belong to it. A peer that cannot run is left out, and what stops
the run is named, both in the record.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fa2.bench import cases, machine, timing
from fa2.bench.record import first_line, rounded
from fa2.integrations import register_with_transformers

# LlamaConfig's fields. 1b: Llama 3.2's, 1.24B parameters.
MODELS: dict[str, dict[str, Any]] = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}


@dataclass(frozen=True)
class Attention:
    implementation: str  # transformers' attn_implementation
    title: str
    kernels: tuple[str, ...]  # regular expressions, each of which some attention kernel of the step must match
    only: str = ""  # and one that all of them must match


# The name of the forced backend holds no "flash": transformers takes such names for the flash_attn package.
ATTENTIONS = {
    "sdpa": Attention("sdpa", "sdpa, transformers' default", ("",)),
    "sdpa_flash": Attention("sdpa_forced", "sdpa, flash forced", ("flash_fwd", "flash_bwd"), "flash_(fwd|bwd)"),
    "fa2": Attention("fa2", "fa2", ("fa2.*attention_fwd", "fa2.*attention_bwd"), "fa2::"),
}
PARTS = {
    "eager": ("sdpa", "sdpa_flash", "fa2"),
    "packed": ("sdpa", "fa2"),  # the flash backend takes no mask, and sdpa's documents are one
    "compiled": ("sdpa", "sdpa_flash", "fa2"),
}
MUST_RUN = ("sdpa", "fa2")  # what the others are compared with, and what is measured
# Inductor names its own kernels after all that is fused into them, attention's neighbours too.
_ATTENTION_KERNEL = re.compile(r"^(?!triton_).*(fa2::|flash|fmha|attention|sdpa|cudnn)", re.IGNORECASE)
DIGITS = 6  # in the record: a loss keeps what the comparison saw
LOSS_TOLERANCE = 1e-3  # relative; bf16's noise is some 1e-5
# Relative, in norm. bf16's noise is 0.02 here; no causal mask makes 1.3, a softmax_scale 1.25 times too large 0.27.
GRADIENT_TOLERANCE = 0.1
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


class Differs(Exception):
    """An attention ran other kernels than its own, or gave another result."""


def register() -> None:
    """The attentions that transformers does not bring: fa2, and sdpa held to torch's flash backend.

    Raises:
        ImportError: transformers is not installed, or older than 5.4.
    """
    register_with_transformers()
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forced(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register(ATTENTIONS["sdpa_flash"].implementation, forced)
    AttentionMaskInterface.register(ATTENTIONS["sdpa_flash"].implementation, sdpa_mask)


def full_batch(batch: int, seqlen: int, vocab_size: int, device: str) -> dict[str, Any]:
    tokens = torch.randint(vocab_size, (batch, seqlen), device=device)
    return {"input_ids": tokens, "labels": tokens}


def packed_batch(lengths: Sequence[int], vocab_size: int, device: str) -> dict[str, Any]:
    """Documents side by side in one row, with the four lengths that only fa2 reads; sdpa goes by position_ids."""
    tokens = torch.randint(vocab_size, (1, sum(lengths)), device=device)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    cu_seq_lens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    return {
        "input_ids": tokens,
        "labels": tokens.masked_fill(positions == 0, -100),
        "position_ids": positions,
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


class Bench:
    """One model and its optimizer, and what has been measured of them: part -> attention -> readings."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoModelForCausalLM, LlamaConfig

        self.args = args
        self.device: str = args.device
        self.on_gpu = self.device.startswith("cuda")
        self.started = time.monotonic()
        register()
        shape = {**MODELS[args.model], "num_hidden_layers": args.layers or MODELS[args.model]["num_hidden_layers"]}
        config = LlamaConfig(**shape, max_position_embeddings=args.seqlen, tie_word_embeddings=True, use_cache=False)
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        default = self.model.config._attn_implementation
        if default != ATTENTIONS["sdpa"].implementation:
            raise Differs(f"transformers' default attention must be sdpa, got {default}")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        full = full_batch(args.batch, args.seqlen, config.vocab_size, self.device)
        self.batches = dict.fromkeys(args.parts, full)
        self.lengths: Sequence[int] = ()
        if "packed" in args.parts:
            self.lengths = next(c for c in cases.packed(args.batch * args.seqlen) if "log-normal" in c.name).lengths
            self.batches["packed"] = packed_batch(self.lengths, config.vocab_size, self.device)
        self.initial = [x.detach().to("cpu", copy=True) for x in self.model.parameters()]
        self.found: dict[str, dict[str, dict[str, Any]]] = {part: {} for part in args.parts}
        self.left_out: list[str] = []
        self.error: str | None = None  # what stopped the run

    def compile(self) -> None:
        """Each layer, from here on; the layers share one graph for each attention.

        Not the whole model: transformers makes its masks before the first layer, and where that is traced it cannot
        look whether documents are packed. sdpa then gets a mask in place of is_causal, and no flash kernel takes one.
        """
        torch.compiler.config.force_disable_caches = True  # their keys leave out the backend of sdpa
        for layer in self.model.model.layers:
            layer.compile(fullgraph=True, dynamic=False)

    def forward_backward(self, part: str, attention: str) -> Tensor:
        """The loss; the gradients stay in the parameters."""
        self.model.set_attn_implementation(ATTENTIONS[attention].implementation)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(**self.batches[part]).loss
        loss.backward()
        return loss.detach()

    def step(self, part: str, attention: str) -> None:
        self.forward_backward(part, attention)
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """Of the attentions' inputs, all layers in one tensor."""
        named = [(name, x.grad) for name, x in self.model.named_parameters()]
        return {p: torch.cat([g.flatten() for name, g in named if p in name]).float() for p in PROJECTIONS}

    def check(self, part: str) -> None:
        """Loss and gradients at the initial weights against sdpa's, and the names of the attention kernels.

        Raises:
            Differs: the loss, the gradients or the kernels are not what they should be.
        """
        with torch.no_grad():
            for x, initial in zip(self.model.parameters(), self.initial, strict=True):
                x.copy_(initial)
        want: dict[str, Tensor] = {}
        for name in PARTS[part]:
            begun = time.monotonic()
            try:
                loss = float(self.forward_backward(part, name))
            except Exception as error:
                if name in MUST_RUN:
                    raise
                self.left_out.append(f"{part}: {name}: {first_line(error)}")
                print(f"{part:<9} {name:<11} is left out: {first_line(error)}", flush=True)
                continue
            seconds, got = time.monotonic() - begun, self.gradients()
            want = want or got
            difference = max(float((got[p] - want[p]).norm() / want[p].norm()) for p in PROJECTIONS)
            reading: dict[str, Any] = {"loss": loss, "gradients_differ": difference, "first_step_s": seconds}
            self.found[part][name] = reading
            text = f"loss {loss:.5f}, gradients differ by {difference:.2%}, {seconds:.1f} s"
            print(f"{part:<9} {name:<11} {text}", flush=True)
            sdpas = self.found[part]["sdpa"]["loss"]
            if not abs(loss - sdpas) <= LOSS_TOLERANCE * abs(sdpas):
                rule = f"within {LOSS_TOLERANCE:.1%} of sdpa's ({sdpas:.4f})"
                raise Differs(f"the loss of the first step must be {rule}, got {loss:.4f} with {name}, {part}")
            if not difference <= GRADIENT_TOLERANCE:
                rule = f"within {GRADIENT_TOLERANCE:.0%} of sdpa's"
                raise Differs(
                    f"the gradients of the first step must be {rule}, got a difference of {difference:.1%} with "
                    f"{name}, {part}"
                )
            ran = timing.kernel_names(partial(self.forward_backward, part, name)) if self.on_gpu else None
            reading["kernels"] = [] if ran is None else attention_kernels(name, ran)
            for kernel in reading["kernels"]:
                print(f"    {kernel[:110]}", flush=True)

    def peak(self, part: str, name: str) -> float:
        """GB allocated at most in one step."""
        if not self.on_gpu:
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step(part, name)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 1e9

    def measure(self, part: str) -> None:
        names = tuple(self.found[part])
        self.step(part, names[0])  # makes the optimizer's state, which every peak is to hold
        for name in names:
            self.found[part][name]["peak_gb"] = round(self.peak(part, name), 2)
        calls = {name: partial(self.step, part, name) for name in names}
        times = timing.Stopwatch(self.device).interleaved(calls, self.args.rounds, dict.fromkeys(names, self.args.runs))
        tokens = self.batches[part]["input_ids"].numel()
        for name, reading in times.items():
            self.found[part][name] |= {**reading, "tokens_per_s": 1e3 * tokens / reading["ms"]}
        for name in names:
            over = {peer: times[peer]["ms"] / times[name]["ms"] for peer in names if peer != name}
            self.found[part][name]["speed_over"] = over
            print(row_text(part, name, self.found[part][name]), flush=True)

    def run(self) -> dict[str, Any]:
        import transformers

        facts = machine.describe(self.device) | {"transformers": transformers.__version__}
        parameters = sum(x.numel() for x in self.model.parameters())
        print(f"{facts['device']}, torch {torch.__version__}, transformers {transformers.__version__}")
        print(f"Llama, {parameters / 1e9:.2f}B parameters, bf16, {self.args.batch} x {self.args.seqlen} tokens a step")
        try:
            for part in self.args.parts:
                if part == "compiled":
                    self.compile()
                self.check(part)
                self.measure(part)
        except Differs as error:
            self.error = str(error)
        except Exception as error:  # its traceback now; the record is for what has been measured before it
            traceback.print_exc()
            self.error = f"{part}: {first_line(error)}"
        facts["after"] = machine.gpu_state()
        names = ("model", "batch", "seqlen", "rounds", "runs", "parts")
        layers = len(self.model.model.layers)
        return {
            "machine": facts,
            "options": {name: getattr(self.args, name) for name in names},
            "model": {"parameters": parameters, **MODELS[self.args.model], "num_hidden_layers": layers},
            "documents": list(self.lengths),
            "parts": rounded(self.found, DIGITS),
            "left_out": self.left_out,
            "error": self.error,
            "seconds": round(time.monotonic() - self.started, 1),
        }


def attention_kernels(name: str, ran: Sequence[str]) -> list[str]:
    """Of the kernels of a step, those of its attention.

    Raises:
        Differs: some are not the attention's own, or one of its own is missing.
    """
    attention = ATTENTIONS[name]
    found = [kernel[:160] for kernel in ran if _ATTENTION_KERNEL.match(kernel)]
    text = ", ".join(found)[:600] or "none"
    for pattern in attention.kernels:
        if not any(re.search(pattern, kernel) for kernel in found):
            raise Differs(f"the attention kernels of {name} must match {pattern!r} once at least, got {text}")
    if foreign := [kernel for kernel in found if not re.search(attention.only, kernel)]:
        raise Differs(f"every attention kernel of {name} must match {attention.only!r}, got {', '.join(foreign)[:600]}")
    return found


def row_text(part: str, name: str, reading: dict[str, Any]) -> str:
    over = ", ".join(f"{ratio:.3f}x {peer}" for peer, ratio in reading["speed_over"].items())
    return (
        f"{part:<9} {name:<11} {reading['ms']:8.1f} ms (±{reading['spread']:.1%}) {reading['tokens_per_s']:9.0f} "
        f"tokens/s  {over}  peak {reading['peak_gb']:.1f} GB"
    )


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m fa2.bench.llama", description="A Llama's training step with fa2.")
    p.add_argument("--model", default="1b", help=f"of {', '.join(MODELS)} (default %(default)s)")
    p.add_argument("--layers", type=int, help="instead of the model's own number")
    p.add_argument("--batch", type=int, default=4, help="sequences of a step (default %(default)s)")
    p.add_argument("--seqlen", type=int, default=4096, help="default %(default)s")
    p.add_argument("--rounds", type=int, default=3, help="each attention once a round (default %(default)s)")
    p.add_argument("--runs", type=int, default=12, help="steps of each reading over all rounds (default %(default)s)")
    p.add_argument("--compile", action="store_true", help="also under torch.compile: some minutes more")
    p.add_argument("--packed", action="store_true", help="also documents of many lengths, as many tokens in one row")
    p.add_argument("--device", default="cuda", help="cpu tries the script, its figures mean nothing")
    p.add_argument("--out", type=Path, help="write the record here, JSON")
    args = p.parse_args(argv)
    if args.model not in MODELS:
        p.error(f"--model must be of {', '.join(MODELS)}, got {args.model}")
    for name in ("layers", "batch", "seqlen", "rounds"):
        if (value := getattr(args, name)) is not None and value < 1:
            p.error(f"--{name} must be at least 1, got {value}")
    if args.runs < args.rounds:
        p.error(f"--runs must be at least --rounds ({args.rounds}), got {args.runs}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        p.error(f"--device must be cpu where torch sees no CUDA device, got {args.device}")
    args.parts = ["eager", *(["packed"] if args.packed else []), *(["compiled"] if args.compile else [])]
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    try:
        record = Bench(args).run()
    except ImportError as error:
        print(error, file=sys.stderr)
        return 2
    except Differs as error:
        print(f"fa2: {error}", file=sys.stderr)
        return 1
    print(f"{record['seconds']:.0f} s; {record['machine']}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if record["error"]:
        print(f"fa2: {record['error']}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m fa2.bench`: fa2 beside its peers, on this GPU. A table on the screen, a JSON record and a plot in `--out`.

Method: `timing.py`; the cases: `cases.py`; the peers: `peers.py`. Only ratios within one run count.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fa2
from fa2.bench import cases, machine, peers, timing
from fa2.bench.cases import Case
from fa2.bench.plot import plot
from fa2.bench.record import first_line, rounded

DIGITS = 4  # of a reading in the record
PARTS = {"forward": "forward", "backward": "backward", "backward_autograd": "backward", "both": "both"}
SUITES = {
    "packed": ("fa2", "fa2_sm80", "varlen_attn", "flex", "flash_attn", "flash_attn_3"),
    "gqa": ("fa2", "fa2_sm80", "sdpa_flash", "sdpa_cudnn", "flash_attn", "flash_attn_3"),
    "paper": ("fa2", "fa2_sm80", "sdpa_flash", "sdpa_cudnn", "eager", "flash_attn", "flash_attn_3"),
}


class Bench:
    """One run of the benchmark: what it was asked, what it has measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device: str = args.device
        self.started = time.monotonic()
        self.watch = timing.Stopwatch(self.device)
        self.rows: list[dict[str, Any]] = []
        self.left_out: list[str] = []
        self.kernels: dict[str, list[str]] = {}
        self.refused: set[tuple[str, str]] = set()  # (suite, peer): not there, or it ran other kernels

    def time_left(self) -> bool:
        return time.monotonic() - self.started < self.args.seconds

    def drop(self, suite: str, peer: str, why: str) -> None:
        self.refused.add((suite, peer))
        self.left_out.append(f"{suite}: {peer}: {why}")
        print(f"  {peer} is left out of {suite}: {why}", flush=True)

    def calls(self, case: Case, x: dict[str, Tensor]) -> dict[str, peers.Calls]:
        """The peers that can run this case, each checked against fa2's numbers and, once a suite, by kernel name."""
        found: dict[str, peers.Calls] = {}
        for name in SUITES[case.suite]:
            if name not in self.args.peers or (case.suite, name) in self.refused:
                continue
            peer = peers.PEERS[name]
            try:
                calls = peer.calls(case, x)
                for part in self.args.parts:  # what fails, fails here
                    if (call := getattr(calls, part)) is not None:
                        call()
            except peers.Unavailable as reason:
                if "GB" in str(reason):
                    self.left_out.append(f"{case.suite}: {case.name}: {name}: {reason}")
                else:
                    self.drop(case.suite, name, str(reason))
                continue
            except Exception as error:
                if name == "fa2":
                    raise
                self.drop(case.suite, name, first_line(error))
                continue
            key = f"{case.suite}/{name}"
            if self.watch.on_gpu and key not in self.kernels:
                ran = timing.kernel_names(calls.forward)
                self.kernels[key] = [n[:160] for n in ran]
                if ran and not any(re.search(peer.kernels, n) for n in ran):
                    problem = f"none of its kernels matches {peer.kernels!r}: {', '.join(ran)[:300]}"
                    if name == "fa2":
                        raise RuntimeError(f"fa2: {problem}")
                    self.drop(case.suite, name, problem)
                    continue
            if "fa2" in found:
                want = found["fa2"].out.float()
                difference = float((calls.out.float() - want).norm() / want.norm())
                if not difference < 2e-2:
                    self.drop(case.suite, name, f"its output differs from fa2's by {difference:.1e}")
                    continue
            found[name] = calls
        return found

    def measure(self, case: Case) -> None:
        torch.manual_seed(0)
        x = case.tensors(self.device)
        found = self.calls(case, x)
        row: dict[str, Any] = {
            "suite": case.suite,
            "case": case.name,
            "headdim": case.headdim,
            "causal": case.causal,
            "seqlen": case.lengths[0] if case.dense else max(case.lengths),
            "sequences": len(case.lengths),
            "nheads_q": case.nheads_q,
            "nheads_kv": case.nheads_kv,
        }
        runs = {name: min(self.args.runs, peers.PEERS[name].min_runs) for name in found}
        for part in self.args.parts:
            calls = {name: call for name, c in found.items() if (call := getattr(c, part)) is not None}
            row[part] = self.watch.interleaved(calls, self.args.rounds, runs)
            for reading in row[part].values():
                reading["tflops"] = case.flops(PARTS[part]) / reading["ms"] / 1e9
        self.rows.append(row)
        print(f"{case.suite:<6} {case.name:<38} {_row_text(row)}", flush=True)

    def suite(self, name: str) -> list[Case]:
        if name == "paper":
            return cases.paper(self.args.headdim, self.args.mask, self.args.seqlen, self.args.tokens)
        tokens = 2 * self.args.tokens if name == "packed" else self.args.tokens // 2
        found = cases.packed(tokens) if name == "packed" else cases.gqa(tokens)
        return [c for c in found if c.headdim in self.args.headdim and "causal" in self.args.mask]

    def determinism(self) -> list[dict[str, Any]]:
        """The bare backward with a fixed order of dq over the one without, for each headdim."""
        result = []
        seqlen = min(8192, self.args.tokens)
        for headdim in self.args.headdim:
            for mask in self.args.mask:
                if not self.time_left():
                    self.left_out.append(f"deterministic {headdim} {mask}: out of time")
                    continue
                (case,) = cases.paper([headdim], [mask], [seqlen], self.args.tokens)
                x = case.tensors(self.device)
                calls = {str(fixed): peers.ours(case, x, fixed).backward for fixed in (False, True)}
                timed = {name: call for name, call in calls.items() if call is not None}
                found = self.watch.interleaved(timed, self.args.rounds, dict.fromkeys(timed, self.args.runs))
                cost = found["True"]["ms"] / found["False"]["ms"]
                result.append({"headdim": headdim, "mask": mask, "seqlen": seqlen, "cost": cost, **found["True"]})
                print(f"deterministic backward, {headdim} {mask} {seqlen}: {cost:.2f} of the time", flush=True)
        return result

    def host_overhead(self) -> dict[str, float]:
        """Microseconds of the host for one small call: the bare operators, and through autograd beside SDPA's flash."""
        case = Case("host", "host", (64, 64), 4, 4, 64, True)
        x = case.tensors(self.device)
        calls = peers.ours(case, x)
        assert calls.backward is not None, "fa2 has a bare backward"
        named = {"operator forward": calls.forward, "operator backward": calls.backward}
        q, k, v = (x[name].detach().requires_grad_() for name in ("q", "k", "v"))
        Q, K, V = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))

        def ours() -> Tensor:
            return fa2.flash_attn_func(q, k, v, causal=True)

        def sdpa() -> Tensor:
            return F.scaled_dot_product_attention(Q, K, V, is_causal=True)

        dout, DOUT = x["dout"], x["dout"].transpose(1, 2)
        named |= {
            "function": ours,
            "function and backward": lambda: torch.autograd.grad(ours(), (q, k, v), dout),
            "SDPA flash": sdpa,
            "SDPA flash and backward": lambda: torch.autograd.grad(sdpa(), (Q, K, V), DOUT),
        }
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            found = {name: round(timing.host_microseconds(call, self.device), 1) for name, call in named.items()}
        print("host, µs a call: " + ", ".join(f"{name} {us:.0f}" for name, us in found.items()), flush=True)
        return found

    def run(self) -> dict[str, Any]:
        record: dict[str, Any] = {"machine": machine.describe(self.device), "options": _options(self.args)}
        ceiling = [timing.matmul_ceiling(self.device, *self.args.matmul)]
        print(f"{record['machine']['device']}, torch {torch.__version__}; matmul, sustained: {ceiling[0]:.0f} TFLOP/s")
        print("TFLOP/s forward | backward | both, of fa2 (% of the matmul) and as fa2 over each peer")
        if self.args.host_overhead:  # before any profiler is attached
            record["host_us"] = self.host_overhead()
        for name in SUITES:
            if name == "paper" and self.args.deterministic:  # the sweep is the longest: it comes last
                record["deterministic"] = self.determinism()
            for case in self.suite(name) if name in self.args.suite else []:
                if self.time_left():
                    self.measure(case)
                else:
                    self.left_out.append(f"{name}: {case.name}: out of time")
        ceiling.append(timing.matmul_ceiling(self.device, *self.args.matmul))
        record["matmul_tflops"] = rounded(ceiling, DIGITS)
        record["machine"]["after"] = machine.gpu_state()
        record |= {"kernels": self.kernels, "left_out": self.left_out, "rows": rounded(self.rows, DIGITS)}
        record["geometric_means"] = geometric_means(record["rows"])
        record["seconds"] = round(time.monotonic() - self.started, 1)
        return record


def _options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("suite", "headdim", "mask", "seqlen", "peers", "parts", "rounds", "runs", "tokens")
    return {name: getattr(args, name) for name in names}


def _row_text(row: dict[str, Any]) -> str:
    parts = []
    for part in ("forward", "backward", "both"):
        readings = row.get(part, {})
        if "fa2" not in readings:
            parts.append(" ".join(f"{name} {r['tflops']:.0f}" for name, r in readings.items()))
            continue
        ours = readings["fa2"]["tflops"]
        over = " ".join(f"{name} {ours / r['tflops']:.2f}x" for name, r in readings.items() if name != "fa2")
        parts.append(f"{ours:4.0f} {over}")
    return " | ".join(parts)


def table(record: dict[str, Any]) -> str:
    """All readings in TFLOP/s, with the percentage of the sustained matmul for fa2."""
    ceiling = statistics.mean(record["matmul_tflops"])
    lines = [f"{'TFLOP/s':<45} {'part':<18}" + " ".join(f"{n:>12}" for n in ("fa2", "% matmul", "peers …"))]
    for row in record["rows"]:
        for part in PARTS:
            readings = row.get(part, {})
            if "fa2" not in readings:
                continue
            ours = readings["fa2"]
            others = " ".join(f"{n} {r['tflops']:.0f} (±{r['spread']:.0%})" for n, r in readings.items() if n != "fa2")
            share = ours["tflops"] / ceiling
            lines.append(
                f"{row['suite']:<6} {row['case']:<38} {part:<18} {ours['tflops']:>11.0f} {share:>12.0%}  {others}"
            )
    return "\n".join(lines)


def geometric_means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of fa2's speed over each peer's, per suite and part, with the smallest ratio and its case: "paper/sdpa_flash",
    and "paper/sdpa_flash/fa2_sm80" for its sm80 kernels.

    Of the paper's sweep 1k to 16k count: shorter sequences are in the table, not in the mean.
    """
    result: dict[str, dict[str, Any]] = {}
    for suite in SUITES:
        chosen = [row for row in rows if row["suite"] == suite and (suite != "paper" or row["seqlen"] >= 1024)]
        for ours in ("fa2", "fa2_sm80"):
            for peer in (name for name in peers.PEERS if not name.startswith("fa2")):
                for part in PARTS:
                    over = {
                        row["case"]: row[part][ours]["tflops"] / row[part][peer]["tflops"]
                        for row in chosen
                        if ours in row.get(part, {}) and peer in row[part]
                    }
                    if not over:
                        continue
                    worst = min(over, key=over.__getitem__)
                    key = f"{suite}/{peer}" if ours == "fa2" else f"{suite}/{peer}/{ours}"
                    result.setdefault(key, {})[part] = {
                        "mean": round(math.exp(statistics.mean(map(math.log, over.values()))), 3),
                        "least": round(over[worst], 3),
                        "least_at": worst,
                        "points": len(over),
                    }
    return result


def _list(kind: Any) -> Any:
    return lambda text: [kind(word) for word in text.split(",") if word]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m fa2.bench", description="fa2's speed beside its peers.")
    p.add_argument("--suite", type=_list(str), default=list(SUITES), help="of paper, packed, gqa, or all (default)")
    p.add_argument("--headdim", type=_list(int), default=[128, 64, 256], help="default 128,64,256")
    p.add_argument("--mask", type=_list(str), default=list(cases.MASKS), help="of causal, full (default both)")
    p.add_argument("--seqlen", type=_list(int), default=list(cases.SEQLENS), help="of the paper's sweep, 512 to 16384")
    p.add_argument("--peers", type=_list(str), default=list(peers.PEERS), help=f"of {', '.join(peers.PEERS)}")
    p.add_argument("--parts", type=_list(str), default=list(PARTS), help=f"of {', '.join(PARTS)} (default all)")
    p.add_argument("--rounds", type=int, default=3, help="each peer once a round (default %(default)s)")
    p.add_argument("--runs", type=int, default=51, help="of each reading over all rounds (default %(default)s)")
    p.add_argument("--tokens", type=int, default=16384, help="of the paper's sweep; packed has twice, gqa half of them")
    p.add_argument(
        "--seconds", type=float, default=290.0, help="begin no new case after this long (default %(default)s)"
    )
    p.add_argument(
        "--quick", action="store_true", help="2k and 8k, fa2, SDPA flash and varlen_attn, 12 runs: half a minute"
    )
    p.add_argument("--no-deterministic", dest="deterministic", action="store_false", help="leave out what order costs")
    p.add_argument("--host-overhead", action="store_true", help="also the host's µs a call")
    p.add_argument("--device", default="cuda", help="cpu tries the script, its figures mean nothing")
    p.add_argument("--out", type=Path, help="folder for bench.json and bench.png")
    return p


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    args.suite = list(SUITES) if args.suite == ["all"] else args.suite
    if args.quick:
        args.seqlen = [s for s in args.seqlen if s in (2048, 8192)]
        args.peers = [n for n in args.peers if n in ("fa2", "sdpa_flash", "varlen_attn")]
        args.runs, args.deterministic = min(args.runs, 12), False
    for name, known in (
        ("suite", SUITES),
        ("mask", cases.MASKS),
        ("peers", peers.PEERS),
        ("parts", PARTS),
        ("seqlen", None),
    ):
        for value in getattr(args, name):
            if known is not None and value not in known:
                p.error(f"--{name} must be of {', '.join(known)}, got {value}")
    for headdim in args.headdim:
        if headdim <= 0 or headdim > 256 or 2048 % headdim:
            p.error(f"--headdim must divide 2048 and be at most 256, got {headdim}")
    for seqlen in args.seqlen if "paper" in args.suite else []:
        if seqlen <= 0 or args.tokens % seqlen:
            p.error(f"--seqlen must divide --tokens ({args.tokens}), got {seqlen}")
    if args.rounds < 1 or args.runs < args.rounds:
        p.error(f"--runs must be at least --rounds ({args.rounds}), got {args.runs}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        p.error("--device must be cpu where torch sees no CUDA device, got cuda")
    args.matmul = (1.0, 8192) if args.device.startswith("cuda") else (0.05, 256)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = options(argv)
    record = Bench(args).run()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "bench.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        plot(record, args.out / "bench.png")
    print()
    print(table(record))
    for line in record["left_out"]:
        print(f"left out: {line}")
    print(
        f"\nmatmul before and after: {record['matmul_tflops']} TFLOP/s; {record['seconds']:.0f} s; {record['machine']}"
    )
    print("fa2 over its peers, geometric means (paper: 1k to 16k):")
    for key, parts in record["geometric_means"].items():
        text = ", ".join(
            f"{part} {e['mean']:.3f} (least {e['least']:.2f} at {e['least_at']})" for part, e in parts.items()
        )
        print(f"  {key}: {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

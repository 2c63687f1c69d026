"""One cell of the table: a run of `train.fit` with a probe, in a process of its own.

A process of its own, so that an out-of-memory, a crashed kernel, compiled graphs and leftovers of the allocator stay in
their cell. Its result comes back through a file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from model.flops import gemm_shapes
from train import build
from train.reproduce.record import device, device_memory
from train.reproduce.rows import (
    GIB,
    PACKED_TEXT,
    Cell,
    does_not_fit,
    needed_bytes,
    not_applicable,
    what_fits,
)
from train.run_dir import write_json

Result = dict[str, Any]


def outcome(cell: Cell) -> Result:
    """The cell's entry in the record: measured, or the reason why it is not."""
    described = describe(cell)
    if reason := not_applicable(cell):
        return described | {"status": "not_applicable", "reason": reason}
    if reason := does_not_fit(cell, device_memory(device())):
        return described | {"status": "does_not_fit", "reason": reason}
    try:
        # here, so that what is done once (building fa2's kernels, tokenizing) belongs to no cell's start
        build.build_attention(cell.config, lambda line: None)
        if cell.data == "packed":
            build.build_data(cell.config)
    except ValueError as error:
        return described | {"status": "refused", "reason": str(error)}
    return described | run_apart(cell)


def describe(cell: Cell) -> Result:
    """What the record says of a cell before it has run."""
    batch, model, capacity = cell.config.batch, cell.model, device_memory(device())
    needs = f"needs about {needed_bytes(cell) / GIB:.0f} GiB"
    shape = ("n_layer", "d_model", "nheads_q", "headdim", "vocab_size", "padded_vocab_size")
    return {
        "row": cell.row,
        "data": cell.data,
        "attention": cell.attention,
        "recipe": cell.is_recipe,
        "overrides": list(cell.overrides),
        "context": batch.context,
        "micro_batch_tokens": batch.micro_batch_tokens,
        "global_batch_tokens": batch.global_batch_tokens,
        "max_docs": batch.resolved_max_docs(),
        "documents": PACKED_TEXT if cell.data == "packed" else f"random tokens, every document {batch.context}",
        "warm_steps": cell.warm_steps,
        "model": {key: getattr(model, key) for key in shape},
        "block_matmul_params": model.n_layer * sum(n * k for _, n, k, _ in gemm_shapes(model, 1)),
        "gemm_widths": [[n, k] for _, n, k, _ in gemm_shapes(model, 1)],
        "needs": needs if capacity is None else f"{needs} of {capacity / GIB:.0f}; {what_fits(cell, capacity)}",
    }


def run_apart(cell: Cell) -> Result:
    """`measure` in a process of its own.

    Returns:
        `status` ok with the figures; or out_of_memory, refused (an error that names a rule) or crashed, with `reason`.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        process = multiprocessing.get_context("spawn").Process(target=_child, args=(cell, path, time.time()))
        process.start()
        try:
            process.join()
        except BaseException:
            process.terminate()
            process.join()
            raise
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return {"status": "crashed", "reason": f"its process ended with code {process.exitcode}"}


def _child(cell: Cell, path: Path, started: float) -> None:
    write_json(path, measure(cell, started))


def measure(cell: Cell, started: float) -> Result:
    """Runs the cell here; an error is a result like any other.

    Args:
        started: when the cell's process was begun, on the clock of `time.time`.
    """
    # as `python -m train` does, before torch starts its threads
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from train.fit import fit
    from train.reproduce.probe import Probe

    probe = Probe(cell.attention, cell.warm_steps, cell.steps, cell.budget, started)
    try:
        fit(cell.config, probe)
    except ValueError as error:
        return {"status": "refused", "reason": str(error)}
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or "ALLOC_FAILED" in str(error):  # the latter is cuBLAS's
            return {"status": "out_of_memory", "reason": _first_line(error)}
        traceback.print_exc()
        return {"status": "crashed", "reason": f"{type(error).__name__}: {_first_line(error)}"}
    return {"status": "ok", **probe.result, **_of_run(cell)}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


def _of_run(cell: Cell) -> Result:
    """What the run's directory says about it: surroundings and packing."""
    run_dir = Path(cell.config.run_root) / cell.config.name
    surroundings = json.loads((run_dir / "environment.json").read_text(encoding="utf-8"))
    packing = json.loads((run_dir / "packing.json").read_text(encoding="utf-8"))
    kept = ("fill", "pieces_per_micro_batch", "sum_len_sq_mean", "documents", "documents_cut")
    return {
        **{key: surroundings[key] for key in ("precision", "compile")},
        "packing": {key: packing[key] for key in kept},
    }

"""One cell of the table: a run of `train.fit` with a probe, in a process of its own.

A process of its own, so that an out-of-memory, a crashed kernel, compiled graphs and leftovers of the allocator stay in
their cell. Its result comes back through a file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import threading
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

_RULES = (ValueError, OSError, ModuleNotFoundError)  # what says in words why a cell cannot run
# Where memory ends outside of torch's allocator calls: cuBLAS and cuDNN, the driver and Triton, an extension's tensors.
_NO_MEMORY = ("ALLOC_FAILED", "out of memory", "aoti_torch_empty_strided")


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
    except _RULES as error:
        return described | {"status": "refused", "reason": str(error)}
    except Exception as error:
        return described | _crashed(error)
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
        # The child inherits that it ignores Ctrl-C, which is for this process: it would answer with a traceback.
        in_main_thread = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        process.start()
        try:
            if in_main_thread:
                signal.signal(signal.SIGINT, before)
            process.join()
        except BaseException:
            process.kill()  # Lightning would finish the step on SIGTERM
            process.join()
            raise
        if path.exists():
            return json.loads(path.read_text(encoding="utf-8"))
    return {"status": "crashed", "reason": f"its process ended with code {process.exitcode}"}


def _child(cell: Cell, path: Path, started: float) -> None:
    threading.Thread(target=_leave_with_parent, daemon=True, name="parent").start()
    write_json(path, measure(cell, started))


def _leave_with_parent() -> None:
    """A cell that outlived a killed command would hold the GPU, and slow whatever is measured next."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a cell is a child"
    parent.join()
    os._exit(1)


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
    except _RULES as error:
        return {"status": "refused", "reason": str(error)}
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError" or any(sign in str(error) for sign in _NO_MEMORY):
            return {"status": "out_of_memory", "reason": _first_line(error)}
        return _crashed(error)
    return {"status": "ok", **probe.result, **_of_run(cell)}


def _crashed(error: Exception) -> Result:
    traceback.print_exception(error)
    return {"status": "crashed", "reason": f"{type(error).__name__}: {_first_line(error)}"}


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

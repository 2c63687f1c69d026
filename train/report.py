"""The page that says what a run did: `report.html` (self-contained) and `curves.png`, from the run directory alone.

`fit` writes the files below as it goes, this module only reads them, and any of them may be missing: a killed run
has a report too (`python -m train.report run=runs/default`).

| file | what it holds |
| --- | --- |
| `metrics.csv` | header and rows of `METRICS_COLUMNS`; an empty cell is "not measured at this step" (most rows have no `val_loss`). `time`: seconds of training since step 0, summed over resumes. `mfu`, `mfu_exact`, `gemm_util`: fractions of 1. `loss`, `val_loss`: nats per token. `skipped_steps`: non-finite steps so far |
| `config.yaml` | the resolved config |
| `environment.json` | one flat object, shown as it is: `python`, `torch`, `cuda`, `lightning`, `gpu` (name), `gpus` (number), `driver`, `cpu`, `cpu_cores`, `hostname`, `commit` (of this repository, with "+changes" when dirty), `attention` (resolved), `precision`, `compile`, `command` |
| `packing.json` | `data.stats.packing_stats(...)`, one flat object, shown as it is |
| `data.json` | the manifest of the prepared data, or the part of it worth showing: source, documents, tokens, bytes, duplicates dropped |
| `summary.json` | headline figures, all optional: `status` (finished, interrupted, failed), `steps`, `tokens`, `seconds`, `n_params`, `loss`, `val_loss`, `val_bits_per_byte`, `unigram_bits_per_byte`, `gzip_bits_per_byte`, `tokens_per_s`, `mfu`, `mfu_exact`, `gemm_util`, `skipped_steps`, `nonfinite_steps` (list of steps), `checkpoint` (path), `peak_memory_bytes` |
| `samples.txt` | what the model wrote, plain text |

JSON numbers are raw (no units, no formatting); NaN and infinity are written as null.
"""

from __future__ import annotations

METRICS_COLUMNS = (
    "step",
    "tokens",
    "loss",
    "val_loss",
    "val_bits_per_byte",
    "lr",
    "grad_norm",
    "tokens_per_s",
    "mfu",
    "mfu_exact",
    "gemm_util",
    "skipped_steps",
    "time",
)

"""`python -m train.reproduce`: the FlashAttention-2 paper's table of GPT training throughput, on one GPU.

Reading order: `rows.py` (what is run), `cell.py` (one run, measured by `probe.py`), `kernels.py` and `budget.py` (what
ran on the GPU, and where a step's time went), `record.py` (what is written), `tables.py`, `plot.py`, `__main__.py`.
"""

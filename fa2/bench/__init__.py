"""fa2's own evidence: `python -m fa2.bench` (speed beside the peers), `python -m fa2.bench.llama` (a Hugging Face
Llama's training step), `python -m fa2.bench.correctness` (random problems against float64), `python -m
fa2.bench.readme` (the tables of fa2/README.md, made from the records in `results/`).

Reading order: `cases.py` (what is run), `peers.py` (by whom), `timing.py` (how), `__main__.py`.
"""

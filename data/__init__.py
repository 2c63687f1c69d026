"""Text to packed batches: sources, tokenizers, token shards, packing, exactly resumable streams.

Must not know models, Lightning or Hydra. Read next: `config.py`, `batch.py`, `packing.py`.
"""

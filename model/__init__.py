"""A GPT as plain `nn.Module`s over unpadded tokens; its FLOP count, its loss, its sampling.

Must not know data, Lightning or Hydra. Read next: `config.py`, `gpt.py`, `attention.py`, `flops.py`.
"""

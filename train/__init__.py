"""`python -m train`: compose the config, build data and model, fit with Lightning.

The only room that knows Lightning and Hydra.

Read next: `__main__.py`, `schema.py`, `module.py`, `datamodule.py`.
"""

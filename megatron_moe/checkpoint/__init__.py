"""Checkpoints: save a step, find the one to load, verify it and load it.

`folder` and `plan` need no torch, so that a wrong `--load` is reported before anything is allocated. `writer` and
`dist` call the engine's dist_checkpointing.
"""

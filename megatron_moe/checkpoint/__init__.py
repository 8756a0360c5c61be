"""What survives a run: save, find, check and load.

`folder` and `compare` need no torch, so a wrong `--load` is told before anything is allocated; `dist` is the only file
that names the engine's dist_checkpointing.
"""

"""The one hand on megatron-core: every patch, import hook and adapter of it and of torch's internals.

Each file is about one subsystem. A patch is a named function or context manager; its docstring says what it changes,
why, since which release of the engine and until when. Releases are those of megatron-core that `setup.py` names, 0.16.1
and 0.19.2. Importing the package loads neither torch nor the engine.
"""

"""Data: tokenizers, indexed and mock datasets, micro-batches.

In the order in which a text meets them: tokenizers (`tokenizer_choice` builds one from the flags), `index_file` (the
files on disk), `checks` (the data flags, and what is checked before anything is allocated), `datasets` (the engine's
datasets), `batches` (micro-batches). `datasets` and `batches` import torch, the others do not.
"""

"""Data: tokenizers, a corpus, preprocessing, indexed and mock datasets, micro-batches.

The modules in the order in which a text meets them: `corpus`, `train_tokenizer`, `tokenizers`, `documents`,
`preprocess`, `sidecar` and `index_file` (the files on disk), `sources` and `checks` (the data flags and the checks
before anything is allocated), `fingerprint` (whether a resumed run reads the same data), `datasets` (the engine's
datasets), `batches` (micro-batches). `datasets` and `batches` import torch, the others do not.
"""

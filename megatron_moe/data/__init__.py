"""Tokens: tokenizers, the corpus, preprocessing, indexed and mock datasets, one micro-batch.

The modules in the order that a text meets them: `corpus`, `train_tokenizer`, `tokenizers`, `documents`, `preprocess`,
`sidecar` and `index_file` (the files on disk), `sources` and `checks` (the data flags and the checks before anything is
allocated), `datasets` (the engine's datasets), `batches` (one micro-batch). Only the last two import torch.
"""

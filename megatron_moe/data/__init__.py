"""Data: tokenizers, a corpus, preprocessing, indexed and mock datasets, micro-batches.

The modules in the order in which a text meets them: `corpus`, `train_tokenizer`, `tokenizers`, `inputs` (files,
folders, shards), `documents` (their records), `encoding` (a shard becomes a part), `workers`, `work_folder` (what
outlives a kill), `preprocess`, `dataset_writer`, `merge` and `index_file` (the files on disk), `sources` and `checks`
(the data flags and the checks before anything is allocated), `fingerprint` (whether a resumed run reads the same data),
`datasets` (the engine's datasets), `batches` (micro-batches). `datasets` and `batches` import torch, the others do not.
"""

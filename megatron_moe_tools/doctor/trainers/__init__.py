"""The doctor for trainers that are not ours: the same comparison with one process, through a small protocol."""

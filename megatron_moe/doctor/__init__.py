"""Does this layout train the same model? A small copy of a run, on gloo ranks of this machine, against one process."""

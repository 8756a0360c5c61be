"""Loss to optimizer: one step, the loop around it, evaluation and the run as a whole."""

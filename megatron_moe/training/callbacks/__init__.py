"""The callbacks of every run."""

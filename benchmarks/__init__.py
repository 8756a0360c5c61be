"""Comparisons with other implementations, each checked against an oracle before it is timed."""

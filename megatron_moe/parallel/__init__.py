"""Who my neighbours are: process groups, collectives with their backward, seeds."""

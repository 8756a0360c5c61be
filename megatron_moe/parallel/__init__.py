"""Parallelism: process groups, collectives with their backward, seeds."""

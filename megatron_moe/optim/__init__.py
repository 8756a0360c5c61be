"""Optimizers: Adam and Muon inside the engine's, parameter groups, schedule, QK-clip, average of weights."""

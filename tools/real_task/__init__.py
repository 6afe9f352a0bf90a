"""Variants of training on a task, at equal numbers of forwards: ``tools/bench.py real-task``."""

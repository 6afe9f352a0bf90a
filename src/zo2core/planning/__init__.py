"""Plans of a run: its host and device memory, and how often segments are written back.

``plan`` takes a ``RunRequest`` and returns a ``RunSpec``. A new part of memory is a row of the
plan in ``memory.py``.
"""

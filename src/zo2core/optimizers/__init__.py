"""Optimizers that change one segment at a time, as soon as its gradients are computed; their
states.

Each satisfies ``BlockUpdate``. A new one is a file here, with a row in ``OPTIMIZERS`` of
``registry.py``, which has the names by which users choose them.
"""

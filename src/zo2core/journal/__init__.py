"""The journal of a run: records of its steps, and the file that has them; snapshots of what no
record says.

A new kind of record is a function to encode and one to decode it in ``records.py``.
"""

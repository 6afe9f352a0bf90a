"""Golden trajectories: what runs of every kind compute, to the bit, so that code can be moved
without moving a result.
"""

"""Methods: how a batch becomes a change of the weights, by sweeps.

Zeroth order and first order. A new one is a file here: its options, its steps, and the state
that they change.
"""

"""Estimators: which evaluations a zeroth-order step has, and the update from their losses.

Noise and perturbations, by which weights are evaluated, are here, too. A new estimator is a
file here that satisfies ``ZOEstimator``, with a row in ``ESTIMATORS`` of ``registry.py``.
"""

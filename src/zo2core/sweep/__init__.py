"""What happens at a segment in a sweep: replay, perturbation, forward, gradient, activations.

Visitors make the visits of a sweep, and perturbers what they evaluate. A new way to bring
weights to a version is a ``Perturber``; methods are in ``methods/``.
"""

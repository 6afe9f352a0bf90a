"""The directions that an estimator needs, held against those that a noise generator draws."""

from __future__ import annotations

from zo2core.errors import OptionError
from zo2core.protocols import CounterNoise, NoiseGenerator, ZOEstimator


def require_distribution(estimator: ZOEstimator, noise: NoiseGenerator) -> None:
    """Refuse noise that does not say to have the distribution that an estimator needs.

    Raises:
        OptionError: naming both.
    """
    needed = estimator.distribution
    if needed is None or (isinstance(noise, CounterNoise) and noise.distribution is needed):
        return
    raise OptionError(
        "noise",
        found=noise.name,
        expected=f"{needed.value} noise, which the estimator {estimator.options.get('name')} needs",
        remedy=f"pass noise=PhiloxNoise(Distribution.{needed.name})",
    )

"""Noise generators, which draw z."""

from zo2core.noise.choice import choose_noise as choose_noise
from zo2core.noise.philox import PhiloxNoise as PhiloxNoise
from zo2core.noise.sequential import SequentialNoise as SequentialNoise

"""Noise generators: where z comes from."""

from zo2core.noise.philox import PhiloxNoise as PhiloxNoise
from zo2core.noise.sequential import SequentialNoise as SequentialNoise

"""Methods: how a batch becomes a change of the weights, by sweeps that a runner makes."""

"""Methods: how a batch becomes a change of the weights, by sweeps that a runner makes."""

from zo2core.methods.backprop import Backprop as Backprop
from zo2core.methods.backprop import OptimizerFactory as OptimizerFactory
from zo2core.methods.zeroth_order import Sweeps as Sweeps
from zo2core.methods.zeroth_order import ZerothOrder as ZerothOrder

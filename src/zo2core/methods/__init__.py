"""Methods: how a batch becomes a change of the weights, by sweeps that a runner makes."""

from zo2core.methods.first_order import AtSnapshot as AtSnapshot
from zo2core.methods.first_order import FirstOrder as FirstOrder
from zo2core.methods.first_order import LossScaling as LossScaling
from zo2core.methods.zeroth_order import ZerothOrder as ZerothOrder

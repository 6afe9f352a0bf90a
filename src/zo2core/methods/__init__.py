"""Methods: how a batch becomes a change of the weights, by sweeps that a runner makes."""

from zo2core.methods.backprop import Backprop as Backprop
from zo2core.methods.fused_backprop import GradientPolicy as GradientPolicy
from zo2core.methods.loss_scale import LossScaling as LossScaling
from zo2core.methods.row_shards import AllRows as AllRows
from zo2core.methods.row_shards import RowShards as RowShards
from zo2core.methods.row_shards import WorkerRows as WorkerRows
from zo2core.methods.zeroth_order import Sweeps as Sweeps
from zo2core.methods.zeroth_order import ZerothOrder as ZerothOrder

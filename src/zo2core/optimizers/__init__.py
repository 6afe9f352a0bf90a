"""Optimizers that change one segment at a time, as soon as the gradients of that segment are computed."""

from zo2core.optimizers.badam import BAdam as BAdam
from zo2core.optimizers.delayed import Delayed as Delayed
from zo2core.optimizers.lomo import LOMO as LOMO
from zo2core.optimizers.lomo import AdaLOMO as AdaLOMO
from zo2core.optimizers.optimizer_states import OptimizerStates as OptimizerStates
from zo2core.optimizers.optimizer_states import StateMemory as StateMemory
from zo2core.optimizers.optimizer_states import StatesInStores as StatesInStores
from zo2core.optimizers.optimizer_states import copied_state as copied_state
from zo2core.optimizers.optimizer_states import form_of as form_of
from zo2core.optimizers.optimizer_states import require_finite as require_finite
from zo2core.optimizers.optimizer_states import require_optimizer_state as require_optimizer_state
from zo2core.optimizers.optimizer_states import state_bytes as state_bytes
from zo2core.optimizers.optimizer_states import unusable_state as unusable_state
from zo2core.optimizers.registry import OPTIMIZERS as OPTIMIZERS
from zo2core.optimizers.registry import make_block_update as make_block_update
from zo2core.optimizers.torch_optimizer import OptimizerFactory as OptimizerFactory
from zo2core.optimizers.torch_optimizer import TorchOptimizer as TorchOptimizer
from zo2core.optimizers.torch_optimizer import make_optimizer as make_optimizer

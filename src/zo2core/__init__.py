"""Zeroth-order fine-tuning of models larger than their device: versioned blocks and a journal.

Importing this package imports nothing else, since torch takes a second. A name is imported when it
is first used.
"""

import typing as _typing

if _typing.TYPE_CHECKING:
    from zo2core.checkpoint.shards import SafetensorsReader as SafetensorsReader
    from zo2core.checkpoint.shards import find_tensors as find_tensors
    from zo2core.engine import Engine as Engine
    from zo2core.errors import ZO2Error as ZO2Error
    from zo2core.estimators.evolution import EvolutionStrategies as EvolutionStrategies
    from zo2core.estimators.fzoo import FZOO as FZOO
    from zo2core.estimators.guard import Guarded as Guarded
    from zo2core.estimators.guard import GuardPolicy as GuardPolicy
    from zo2core.estimators.noise import PhiloxNoise as PhiloxNoise
    from zo2core.estimators.noise import SequentialNoise as SequentialNoise
    from zo2core.estimators.perturbation import DensePerturbation as DensePerturbation
    from zo2core.estimators.perturbation import LowRankPerturbation as LowRankPerturbation
    from zo2core.estimators.two_point import MeZOSGD as MeZOSGD
    from zo2core.estimators.two_point import MultiQueryRGE as MultiQueryRGE
    from zo2core.estimators.two_point import PerRowRGE as PerRowRGE
    from zo2core.estimators.wrappers import Clipped as Clipped
    from zo2core.journal.journal import Journal as Journal
    from zo2core.journal.journal import branch_journal as branch_journal
    from zo2core.kernels import Distribution as Distribution
    from zo2core.methods.first_order import FirstOrder as FirstOrder
    from zo2core.methods.zeroth_order import ZerothOrder as ZerothOrder
    from zo2core.optimizers.delayed import Delayed as Delayed
    from zo2core.optimizers.lomo import LOMO as LOMO
    from zo2core.optimizers.lomo import AdaLOMO as AdaLOMO
    from zo2core.optimizers.loss_scaling import LossScaling as LossScaling
    from zo2core.optimizers.torch_optimizer import BAdam as BAdam
    from zo2core.optimizers.torch_optimizer import TorchOptimizer as TorchOptimizer
    from zo2core.planning.memory import DevicePlan as DevicePlan
    from zo2core.planning.memory import HostPlan as HostPlan
    from zo2core.planning.memory import MemoryPolicy as MemoryPolicy
    from zo2core.planning.speeds import WriteBackPolicy as WriteBackPolicy
    from zo2core.protocols import BlockModel as BlockModel
    from zo2core.protocols import BlockSource as BlockSource
    from zo2core.protocols import BlockUpdate as BlockUpdate
    from zo2core.protocols import Device as Device
    from zo2core.protocols import DifferentiableModel as DifferentiableModel
    from zo2core.protocols import Forward as Forward
    from zo2core.protocols import NoiseGenerator as NoiseGenerator
    from zo2core.protocols import Objective as Objective
    from zo2core.protocols import Scheduler as Scheduler
    from zo2core.protocols import ZOEstimator as ZOEstimator
    from zo2core.run import CustomSource as CustomSource
    from zo2core.run import EngineOptions as EngineOptions
    from zo2core.schedulers.devices import CudaDevice as CudaDevice
    from zo2core.schedulers.devices import HostDevice as HostDevice
    from zo2core.schedulers.overlapped import OverlappedScheduler as OverlappedScheduler
    from zo2core.schedulers.profiling import Timeline as Timeline
    from zo2core.schedulers.profiling import Trace as Trace
    from zo2core.schedulers.serial import SerialScheduler as SerialScheduler
    from zo2core.shared import SharedBase as SharedBase
    from zo2core.sources import SegmentStore as SegmentStore
    from zo2core.types import Batch as Batch
    from zo2core.types import BlockLayout as BlockLayout
    from zo2core.types import Evaluation as Evaluation
    from zo2core.types import Lane as Lane
    from zo2core.types import ParameterSpec as ParameterSpec
    from zo2core.types import SegmentKind as SegmentKind
    from zo2core.types import StepResult as StepResult
    from zo2core.types import Update as Update
    from zo2core.workers.workers import Workers as Workers
else:
    from zo2core.exports import exports as _exports

    __all__, __getattr__, __dir__ = _exports(__name__)

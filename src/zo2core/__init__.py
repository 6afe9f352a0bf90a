"""Zeroth-order fine-tuning of models larger than their device: versioned blocks and a journal."""

from zo2core.devices import CudaDevice as CudaDevice
from zo2core.devices import HostDevice as HostDevice
from zo2core.engine import ZOEngine as ZOEngine
from zo2core.errors import BatchError as BatchError
from zo2core.errors import CheckpointError as CheckpointError
from zo2core.errors import ClosedError as ClosedError
from zo2core.errors import DataError as DataError
from zo2core.errors import DeviceError as DeviceError
from zo2core.errors import JournalError as JournalError
from zo2core.errors import NonFiniteLossError as NonFiniteLossError
from zo2core.errors import OptionError as OptionError
from zo2core.errors import OutputError as OutputError
from zo2core.errors import UnsupportedModelError as UnsupportedModelError
from zo2core.errors import ZO2Error as ZO2Error
from zo2core.estimators import MeZOSGD as MeZOSGD
from zo2core.journal import Journal as Journal
from zo2core.noise import SequentialNoise as SequentialNoise
from zo2core.schedulers import SerialScheduler as SerialScheduler
from zo2core.sources import PinnedSource as PinnedSource
from zo2core.types import BlockLayout as BlockLayout
from zo2core.types import Evaluation as Evaluation
from zo2core.types import EvaluationResult as EvaluationResult
from zo2core.types import ParameterSpec as ParameterSpec
from zo2core.types import SegmentKind as SegmentKind
from zo2core.types import StepResult as StepResult
from zo2core.types import Update as Update

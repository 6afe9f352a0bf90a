"""Hugging Face models for zo2core: open a checkpoint, declare an architecture.

Importing this package imports nothing else, since torch and transformers take seconds. A name is imported when it is first
used. A star import imports all names but Lightning's modules, which need the extra ``zo2core[lightning]``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zo2adapters.commands.train import train as train
    from zo2adapters.edge.lowering import write_program as write_program
    from zo2adapters.edge.running import ProgramState as ProgramState
    from zo2adapters.edge.running import ProgramStep as ProgramStep
    from zo2adapters.edge.running import TrainingProgram as TrainingProgram
    from zo2adapters.frameworks.arguments import ZOArguments as ZOArguments
    from zo2adapters.frameworks.backprop_grpo_mixin import BackpropGRPOMixin as BackpropGRPOMixin
    from zo2adapters.frameworks.backprop_trainer_mixin import BackpropTrainerMixin as BackpropTrainerMixin
    from zo2adapters.frameworks.full_trainer_mixin import FullBackpropTrainerMixin as FullBackpropTrainerMixin
    from zo2adapters.frameworks.lightning_modules import BackpropLightningModule as BackpropLightningModule
    from zo2adapters.frameworks.lightning_modules import FullBackpropLightningModule as FullBackpropLightningModule
    from zo2adapters.frameworks.lightning_modules import ZOLightningModule as ZOLightningModule
    from zo2adapters.frameworks.trainer_mixin import ZOTrainerMixin as ZOTrainerMixin
    from zo2adapters.models.architecture import Architecture as Architecture
    from zo2adapters.models.called_forward import CalledForward as CalledForward
    from zo2adapters.models.checkpoint import open_checkpoint as open_checkpoint
    from zo2adapters.models.hf import HFBlockModel as HFBlockModel
    from zo2adapters.models.monolithic import MonolithicMeZO as MonolithicMeZO
    from zo2adapters.models.packing import pack as pack
    from zo2adapters.models.peft_model import Adapter as Adapter
    from zo2adapters.models.precision import Precision as Precision
    from zo2adapters.tasks.generation import Sampling as Sampling
    from zo2adapters.tasks.generation import generate as generate
    from zo2adapters.tasks.objectives import ChoiceError as ChoiceError
    from zo2adapters.tasks.objectives import ChoiceF1Error as ChoiceF1Error
    from zo2adapters.tasks.objectives import ChoiceLoss as ChoiceLoss
    from zo2adapters.tasks.objectives import PreferenceLoss as PreferenceLoss
    from zo2adapters.tasks.objectives import choice_batch as choice_batch
    from zo2adapters.tasks.objectives import preference_batch as preference_batch
    from zo2adapters.tasks.scoring import Scored as Scored
    from zo2adapters.tasks.scoring import score as score

_MODULES = {
    "train": "zo2adapters.commands.train",
    "write_program": "zo2adapters.edge.lowering",
    "ProgramState": "zo2adapters.edge.running",
    "ProgramStep": "zo2adapters.edge.running",
    "TrainingProgram": "zo2adapters.edge.running",
    "BackpropLightningModule": "zo2adapters.frameworks.lightning_modules",
    "BackpropGRPOMixin": "zo2adapters.frameworks.backprop_grpo_mixin",
    "BackpropTrainerMixin": "zo2adapters.frameworks.backprop_trainer_mixin",
    "ZOArguments": "zo2adapters.frameworks.arguments",
    "FullBackpropLightningModule": "zo2adapters.frameworks.lightning_modules",
    "FullBackpropTrainerMixin": "zo2adapters.frameworks.full_trainer_mixin",
    "ZOLightningModule": "zo2adapters.frameworks.lightning_modules",
    "ZOTrainerMixin": "zo2adapters.frameworks.trainer_mixin",
    "Architecture": "zo2adapters.models.architecture",
    "CalledForward": "zo2adapters.models.called_forward",
    "open_checkpoint": "zo2adapters.models.checkpoint",
    "HFBlockModel": "zo2adapters.models.hf",
    "MonolithicMeZO": "zo2adapters.models.monolithic",
    "pack": "zo2adapters.models.packing",
    "Adapter": "zo2adapters.models.peft_model",
    "Precision": "zo2adapters.models.precision",
    "Sampling": "zo2adapters.tasks.generation",
    "generate": "zo2adapters.tasks.generation",
    "ChoiceError": "zo2adapters.tasks.objectives",
    "ChoiceF1Error": "zo2adapters.tasks.objectives",
    "ChoiceLoss": "zo2adapters.tasks.objectives",
    "PreferenceLoss": "zo2adapters.tasks.objectives",
    "choice_batch": "zo2adapters.tasks.objectives",
    "preference_batch": "zo2adapters.tasks.objectives",
    "Scored": "zo2adapters.tasks.scoring",
    "score": "zo2adapters.tasks.scoring",
}

if not TYPE_CHECKING:  # type checkers take the aliases above
    __all__ = [name for name in _MODULES if not name.endswith("LightningModule")]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])

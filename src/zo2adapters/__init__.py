"""Hugging Face models for zo2core: open a checkpoint, declare an architecture.

Importing this package imports nothing else, since torch and transformers take seconds. A name is
imported when it is first used. A star import imports all names but Lightning's modules, which need
the extra ``zo2core[lightning]``.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zo2adapters.commands.train import train as train
    from zo2adapters.edge.program import ProgramState as ProgramState
    from zo2adapters.edge.program import ProgramStep as ProgramStep
    from zo2adapters.edge.program import TrainingProgram as TrainingProgram
    from zo2adapters.edge.program import write_program as write_program
    from zo2adapters.frameworks.arguments import LightningArguments as LightningArguments
    from zo2adapters.frameworks.arguments import StreamedArguments as StreamedArguments
    from zo2adapters.frameworks.lightning_modules import (
        StreamedLightningModule as StreamedLightningModule,
    )
    from zo2adapters.frameworks.trainer_mixins import BackpropGRPOMixin as BackpropGRPOMixin
    from zo2adapters.frameworks.trainer_mixins import BackpropTrainerMixin as BackpropTrainerMixin
    from zo2adapters.frameworks.trainer_mixins import (
        FullBackpropTrainerMixin as FullBackpropTrainerMixin,
    )
    from zo2adapters.frameworks.trainer_mixins import StreamedGRPOMixin as StreamedGRPOMixin
    from zo2adapters.frameworks.trainer_mixins import StreamedTrainerMixin as StreamedTrainerMixin
    from zo2adapters.frameworks.trainer_mixins import ZOTrainerMixin as ZOTrainerMixin
    from zo2adapters.models.architecture import Architecture as Architecture
    from zo2adapters.models.architecture import Precision as Precision
    from zo2adapters.models.batches import pack as pack
    from zo2adapters.models.checkpoint import open_checkpoint as open_checkpoint
    from zo2adapters.models.hf import CalledForward as CalledForward
    from zo2adapters.models.hf import HFBlockModel as HFBlockModel
    from zo2adapters.models.monolithic import MonolithicMeZO as MonolithicMeZO
    from zo2adapters.models.peft_adapter import Adapter as Adapter
    from zo2adapters.tasks.generation import Sampling as Sampling
    from zo2adapters.tasks.generation import generate as generate
    from zo2adapters.tasks.objectives import ChoiceError as ChoiceError
    from zo2adapters.tasks.objectives import ChoiceF1Error as ChoiceF1Error
    from zo2adapters.tasks.objectives import ChoiceLoss as ChoiceLoss
    from zo2adapters.tasks.objectives import PreferenceLoss as PreferenceLoss
    from zo2adapters.tasks.objectives import Scored as Scored
    from zo2adapters.tasks.objectives import score as score
    from zo2adapters.tasks.rows import choice_batch as choice_batch
    from zo2adapters.tasks.rows import preference_batch as preference_batch
else:
    from zo2core.exports import exports

    __all__, __getattr__, __dir__ = exports(__name__, left_out="LightningModule")

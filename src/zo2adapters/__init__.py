"""Hugging Face models for zo2core: open a checkpoint, declare an architecture."""

from zo2adapters.models.architecture import Architecture as Architecture
from zo2adapters.models.checkpoint import open_checkpoint as open_checkpoint
from zo2adapters.models.hf import HFBlockModel as HFBlockModel
from zo2adapters.models.monolithic import MonolithicMeZO as MonolithicMeZO
from zo2adapters.tasks.generation import Sampling as Sampling
from zo2adapters.tasks.generation import generate as generate
from zo2adapters.tasks.scoring import Scored as Scored
from zo2adapters.tasks.scoring import score as score

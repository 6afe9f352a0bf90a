"""Hugging Face models for zo2core: open a checkpoint, declare an architecture."""

from zo2adapters.checkpoint import open_checkpoint as open_checkpoint
from zo2adapters.generation import Sampling as Sampling
from zo2adapters.generation import generate as generate
from zo2adapters.hf import Architecture as Architecture
from zo2adapters.hf import HFBlockModel as HFBlockModel
from zo2adapters.monolithic import MonolithicMeZO as MonolithicMeZO
from zo2adapters.scoring import Scored as Scored
from zo2adapters.scoring import score as score

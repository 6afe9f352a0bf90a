"""Hugging Face models for zo2core: open a checkpoint, declare an architecture."""

from zo2adapters.checkpoint import open_checkpoint as open_checkpoint
from zo2adapters.hf import Architecture as Architecture
from zo2adapters.hf import HFBlockModel as HFBlockModel
from zo2adapters.monolithic import MonolithicMeZO as MonolithicMeZO

"""The model of somebody else's trainer: opened in the precision that its arguments ask for."""

from __future__ import annotations

from pathlib import Path

import torch

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.precision import Precision
from zo2core import OptionError


def open_for(model: HFBlockModel | Path | str, autocast: torch.dtype | None) -> HFBlockModel:
    """The model that a trainer is to train.

    Args:
        model: A model directory, a hub id, or what ``open_checkpoint`` gave.
        autocast: The 16 bits that the trainer's arguments ask to compute in; None: the weights' own dtype.

    Returns:
        The model, in mixed precision where 16 bits are asked for.

    Raises:
        OptionError: if the model was opened in another precision, or is whole in memory.
        ZO2Error: as ``open_checkpoint`` says.
    """
    if isinstance(model, (str, Path)):
        precision = "exact" if autocast is None else Precision(stored=torch.float32, computed=autocast)
        return open_checkpoint(model, precision=precision)
    if not isinstance(model, HFBlockModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}",
            expected="a model directory, a hub id, or what open_checkpoint gives",
            remedy="pass the path: the model need not be in memory",
        )
    if model.autocast != autocast:
        raise OptionError(
            "bf16, fp16",
            found=f"a model that computes {_in_words(model.autocast)}",
            expected=f"one that computes {_in_words(autocast)}, as the arguments say",
            remedy="pass bf16=False to a model in exact precision, or open it with precision='mixed'",
        )
    return model


def _in_words(autocast: torch.dtype | None) -> str:
    return "in the dtype of its weights" if autocast is None else f"in {autocast} beside float32 weights"

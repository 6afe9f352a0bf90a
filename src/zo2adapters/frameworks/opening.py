"""Opens the model of a trainer in the precision that the trainer's arguments ask for."""

from __future__ import annotations

from pathlib import Path

import torch

from zo2adapters.models.checkpoint import open_checkpoint
from zo2adapters.models.head_model import HFHeadModel
from zo2adapters.models.heads import CAUSAL_LM
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.peft_model import Adapter
from zo2adapters.models.precision import Precision
from zo2core.errors import CheckpointError, OptionError

_REWARD_MODEL = (
    "To begin a reward model, save AutoModelForSequenceClassification.from_pretrained(model, num_labels=1) and pass its "
    "directory"
)
# For each dtype of autocast, or none: a trainer's arguments, and the options of open_checkpoint.
_ARGUMENTS = {
    None: "bf16=False, fp16=False",
    torch.bfloat16: "bf16=True, fp16=False",
    torch.float16: "bf16=False, fp16=True",
}
_OPTIONS = {
    None: "precision='exact'",
    torch.bfloat16: "precision='mixed', dtype='bfloat16'",
    torch.float16: "precision='mixed', dtype='float16'",
}


def open_for(
    model: HFBlockModel | Path | str, autocast: torch.dtype | None, head: str, *, adapter: Adapter | None = None
) -> HFBlockModel:
    """Open a trainer's model, or check a model that is open already."""
    if isinstance(model, (str, Path)):
        precision = "exact" if autocast is None else Precision(stored=torch.float32, computed=autocast)
        try:
            model = open_checkpoint(model, precision=precision, head=head, adapter=adapter)
        except OptionError as error:
            if autocast is None or error.where != "precision":
                raise
            half = str(autocast).removeprefix("torch.")
            remedy = f"pass {_ARGUMENTS[None]}; to compute in 16 bits, also a model from open_checkpoint with dtype={half!r}"
            raise OptionError("bf16, fp16", found=error.found, expected=error.expected, remedy=remedy) from error
        except CheckpointError as error:
            if head == CAUSAL_LM.name:
                raise
            raise CheckpointError(
                error.where, found=error.found, expected=error.expected, remedy=f"{error.remedy}. {_REWARD_MODEL}"
            ) from error
    if not isinstance(model, HFBlockModel):
        raise OptionError(
            "model",
            found=f"a {type(model).__name__}",
            expected="a model directory, a hub id, or a model from open_checkpoint",
            remedy="pass the path, since the model is not loaded as a whole",
        )
    if head != CAUSAL_LM.name and not (
        isinstance(model, HFHeadModel) and model.kind.name == head and model.config.num_labels == 1
    ):
        raise OptionError(
            "model",
            found=f"a {type(model.skeleton).__name__} with num_labels={model.config.num_labels}",
            expected=f"a reward model: opened with head={head!r}, with num_labels=1 in its config",
            remedy=_REWARD_MODEL,
        )
    if model.autocast != autocast:
        raise OptionError(
            "bf16, fp16",
            found=f"a model that computes {_precision(model.autocast)}",
            expected=f"a model that computes {_precision(autocast)}, as the arguments say",
            remedy=f"pass {_ARGUMENTS[model.autocast]}, or open the model with {_OPTIONS[autocast]}",
        )
    return model


def _precision(autocast: torch.dtype | None) -> str:
    return "in the dtype of its weights" if autocast is None else f"in {autocast} with float32 weights"

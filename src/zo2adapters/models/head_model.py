"""Models with heads for classes, numbers or spans, or masked language models. Each model is its own objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from zo2adapters.models.footprint import forward_bytes
from zo2adapters.models.heads import CAUSAL_LM, Head
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.packing import check_inputs
from zo2core import Batch
from zo2core.errors import BatchError, UnsupportedModelError


class HFHeadModel(HFBlockModel):
    """A Hugging Face model with another head than a causal language model's, and its own ``Objective``."""

    takes_single_tokens: ClassVar[bool] = False  # these heads take all hidden states

    def stacked(self, batches: Sequence[Batch]) -> Batch | None:
        """Return None: losses of these heads are computed one stream at a time. See the contract."""
        return None

    def __init__(self, head: Head, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, targets=head.targets, **options)
        assert head is not CAUSAL_LM, "HFBlockModel is a causal language model"
        assert self.loss_chunk is None, "chunks are for next-token losses"
        self.kind = head
        config = self.config
        labels = {"labels": config.num_labels, "problem": config.problem_type}
        self._decisive = {"head": head.name, **labels, "pad": getattr(config, "pad_token_id", None)}

    @property
    def description(self) -> Mapping[str, Any]:
        """The settings that determine the forward, including the head."""
        return {**super().description, **self._decisive}

    def prepared(self, batch: Batch) -> Batch:
        """Check a batch and its labels. See the contract."""
        for name in self.kind.targets:
            if name not in batch:
                raise BatchError(
                    f"batch[{name!r}]", found=f"no {name}", expected=f"the targets of {self.kind.name}", remedy="add it"
                )
        inputs = {name: value for name, value in batch.items() if name not in self.kind.targets}
        check_inputs(inputs, self.config, self.longest_row)
        self.kind.check(batch, self.config)
        return self._prepared(batch)

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Split a batch into micro-batches of at most ``rows`` rows, without those that have no counted label."""
        if not {"input_ids", *self.kind.targets} <= batch.keys():
            return [batch]  # ``prepared`` refuses it
        total = len(batch["input_ids"])
        rows = total if rows is None else rows
        micro_batches = [
            {
                name: value[start : start + rows] if value.dim() and len(value) == total else value
                for name, value in batch.items()
            }
            for start in range(0, total, rows)
        ]
        return [micro_batch for micro_batch in micro_batches if self.kind.count(micro_batch)]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the mean over all labels, computed in float64 unless there is one micro-batch. See the contract."""
        if len(outputs) == 1:
            return outputs[0]
        counts = [self.kind.count(micro_batch) for micro_batch in micro_batches]
        summed = torch.stack([loss.double() * count for loss, count in zip(outputs, counts, strict=True)]).sum()
        return (summed / sum(counts)).to(outputs[0].dtype)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Refuse to predict next tokens."""
        raise UnsupportedModelError(
            f"model type {self.config.model_type}",
            found=f"a head for {self.kind.name}",
            expected="a causal language model, to generate or to score",
            remedy="open the checkpoint without head",
        )

    def forward_bytes(self, batch: Batch) -> int:
        """Give the bytes by formula. See the contract."""
        rows, tokens = batch["input_ids"].shape
        has_vocabulary = self.kind.name == "masked-lm"
        return forward_bytes(self.config, rows, tokens, loss_chunk=None if has_vocabulary else 0)

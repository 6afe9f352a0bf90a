"""Checks that read all weights of a base checkpoint: against the digests in a journal, and for non-finite values."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.progress_bar import progress_bar
from zo2core import Journal
from zo2core.errors import CheckpointError
from zo2core.kernels.encoding import decoded
from zo2core.sources.loader import verify_base

_CHUNK = 1 << 20  # elements read at once


def verify_with_progress(model: HFBlockModel, journal: Journal, *, quiet: bool = False) -> Mapping[str, str]:
    """Call ``verify_base`` with a progress bar."""
    total = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    with progress_bar(total=total, unit="B", desc="base", quiet=quiet) as bar:
        return verify_base(model, journal, bar.update)


def require_finite_base(model: HFBlockModel, where: object) -> None:
    """Refuse a checkpoint with a weight that is not finite. Called when a loss is not finite, to find the cause."""
    for layout in model.layouts:
        for spec in layout.parameters:
            length = _CHUNK if spec.encoding is None else max(spec.stored_numel, 1)  # encoded parameters are read whole
            for start in range(0, spec.stored_numel, length):
                values = torch.empty(min(length, spec.stored_numel - start), dtype=spec.stored_dtype)
                model.weights.read_into(spec.name, values, start)
                values = values if spec.encoding is None else decoded(spec, values)
                non_finite = (~values.isfinite()).nonzero()
                if len(non_finite):
                    index = int(non_finite[0])
                    raise CheckpointError(
                        f"{where}: {spec.name}",
                        found=f"{values[index].item()} at element {start + index}",
                        expected="finite weights in the checkpoint",
                        remedy="download the checkpoint again, or choose a dtype with a larger range",
                    )

"""Checks that read a base checkpoint whole: against the digests in a journal, and for weights that are not finite."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from tqdm import tqdm

from zo2adapters.models.hf import HFBlockModel
from zo2core import CheckpointError, Journal
from zo2core.kernels.encoding import decoded
from zo2core.sources.base_digests import verify_base

_CHUNK = 1 << 20  # elements read at a time


def verify_with_progress(model: HFBlockModel, journal: Journal, *, quiet: bool = False) -> Mapping[str, str]:
    """As ``verify_base``, whose digests that the journal has not are returned.

    Args:
        model: Whose base.
        journal: Journal of a run on it.
        quiet: Whether to show no progress bar.

    Raises:
        CheckpointError: if the base is another than it was, or cannot be read.
    """
    total = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="base", disable=quiet, file=sys.stderr, dynamic_ncols=True
    ) as bar:
        return verify_base(model, journal, bar.update)


def require_finite_base(model: HFBlockModel, where: object) -> None:
    """Read a model's weights as they are on disk, and refuse the first that is not finite. For when a loss is not.

    Args:
        model: Opened.
        where: What the user calls it.

    Raises:
        CheckpointError: naming the parameter and the number in it.
    """
    for layout in model.layouts:
        for spec in layout.parameters:
            length = _CHUNK if spec.encoding is None else max(spec.stored_numel, 1)  # what is encoded is read whole
            for start in range(0, spec.stored_numel, length):
                values = torch.empty(min(length, spec.stored_numel - start), dtype=spec.stored_dtype)
                model.weights.read_into(spec.name, values, start)
                values = values if spec.encoding is None else decoded(spec, values)
                wrong = (~values.isfinite()).nonzero()
                if len(wrong):
                    place = int(wrong[0])
                    raise CheckpointError(
                        f"{where}: {spec.name}",
                        found=f"{values[place].item()} at element {start + place}",
                        expected="finite weights in the checkpoint",
                        remedy="get the checkpoint again, or choose a dtype that holds its numbers",
                    )

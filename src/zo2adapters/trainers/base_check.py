"""Read a base checkpoint whole and compare it with what a journal keeps of it, with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tqdm import tqdm

from zo2adapters.models.hf import HFBlockModel
from zo2core import Journal, verify_base


def verify_with_progress(model: HFBlockModel, journal: Journal, *, quiet: bool = False) -> Mapping[str, str]:
    """As ``verify_base``, whose digests that the journal has not are returned.

    Args:
        model: Whose base.
        journal: Of a run on it.
        quiet: Whether to show no progress bar.

    Raises:
        CheckpointError: if the base is another than it was, or cannot be read.
    """
    total = sum(spec.nbytes for layout in model.layouts for spec in layout.parameters)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="base", disable=quiet, file=sys.stderr, dynamic_ncols=True
    ) as bar:
        return verify_base(model, journal, bar.update)

"""The progress bar of long work other than training steps: evaluations, exports, conversions, reads of a whole base."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress_bar(*, total: int, unit: str, desc: str | None = None, quiet: bool = False) -> Any:
    """Open a bar on standard error, which is shown in a terminal only.

    Args:
        total: Number of units of the whole work.
        unit: What is counted; B for bytes, which are shown in MB and GB.
        desc: What is done, in a word; None: nothing stands before the bar.
        quiet: Whether to show no bar in a terminal either, as workers other than the first.
    """
    hidden = True if quiet else None  # None: hidden unless standard error is a terminal
    return tqdm(
        total=total, unit=unit, unit_scale=unit == "B", desc=desc, file=sys.stderr, disable=hidden, dynamic_ncols=True
    )

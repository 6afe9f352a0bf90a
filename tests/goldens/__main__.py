"""Make goldens anew: ``python -m tests.goldens``, or ``python -m tests.goldens NAME ...`` for those
whose names contain one.

Run it from the root of the repository where a mended fault changes results, and say in the commit
what changed and why. It prints the goldens that changed. On another machine than that of the file
all of them are made anew.
"""

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def main(parts: list[str]) -> None:
    """Make the goldens whose names contain one of these texts, or all."""
    import torch
    from transformers.utils import logging

    from goldens.stored import CASES, difference, load, make, store

    torch.set_num_threads(1)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    before = load()
    moved = difference(before["machine"])
    if moved is not None and parts:
        sys.exit(f"{moved}. What to do: make all of them.")
    chosen = [name for name in CASES if not parts or any(part in name for part in parts)]
    if not chosen:
        sys.exit(f"no golden has {' or '.join(parts)} in its name")
    goldens = {name: value for name, value in before["goldens"].items() if name in CASES}
    goldens |= {name: make(name) for name in chosen}
    for name in sorted(goldens.keys() | before["goldens"].keys()):
        old, new = (those.get(name, {}) for those in (before["goldens"], goldens))
        if old != new:
            print(
                f"{name}: {', '.join(key for key in (new or old) if old.get(key) != new.get(key))}"
            )
    store(goldens)


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.path[:0] = [str(path) for path in (TESTS, TESTS / "support", TESTS.parent / "tools")]
    main(sys.argv[1:])

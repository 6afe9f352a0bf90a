"""Which files belong to a model's directory.

A model may come from a stranger. A link in its directory could have any file of this machine read, and carried into an
export. The directory itself may be reached by a link, which whoever named it has made. Links inside it are followed where
they stay inside, and where the directory is one of the hub's cache, whose files are links to the blobs of the same model.
"""

from __future__ import annotations

import os
from pathlib import Path

from zo2core.errors import CheckpointError


def require_own_file(path: Path, directory: Path) -> Path:
    """Refuse a file that a link in a model's directory takes from elsewhere. Whether there is a file is not asked.

    Args:
        path: A file of the directory.
        directory: The model's.

    Returns:
        The path with all links followed.

    Raises:
        CheckpointError: if it leads out of the directory, and is no blob of the same model in the hub's cache.
    """
    target, root = (Path(os.path.realpath(given)) for given in (path, directory))
    cached = root.parent.parent  # in the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION
    is_snapshot = root.parent.name == "snapshots" and cached.name.startswith("models--")
    if target.is_relative_to(root) or (is_snapshot and target.is_relative_to(cached / "blobs")):
        return target
    raise CheckpointError(
        path,
        found=f"a link to {target}",
        expected="a file of the model's own directory",
        remedy="do not use this model unless you know why it links there; then put a copy in the link's place",
    )

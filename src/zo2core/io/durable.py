"""Directories and files whose names and bytes survive a power failure once a call returns."""

from __future__ import annotations

import os
from pathlib import Path


def make_directory(path: Path) -> None:
    """Make a directory, unless it exists, and those above it that are missing. On return their names are durable.

    Raises:
        OSError: if the system refuses.
    """
    missing = [directory for directory in (path, *path.parents) if not directory.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in missing:
        sync_path(directory.parent)


def sync_path(path: Path) -> None:
    """Wait until a file's data, or a directory's names, are on disk.

    Raises:
        OSError: if the system refuses.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

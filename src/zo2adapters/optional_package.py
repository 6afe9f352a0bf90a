"""Packages of an extra: imported where they are installed, else asked for by name."""

from __future__ import annotations

import importlib
from typing import Any

from zo2core import MissingPackageError


def optional_package(name: str, *, install: str) -> Any:
    """Import a package.

    Args:
        name: The module.
        install: What pip takes to install it.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            name, found="no such package", expected="it installed", remedy=f"pip install '{install}'"
        ) from error

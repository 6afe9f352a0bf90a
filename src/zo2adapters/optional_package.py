"""Import packages of extras, or raise an error that says how to install them."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from zo2core.errors import MissingPackageError


def optional_package(name: str, *, install: str) -> Any:
    """Import a package.

    Args:
        name: Name of the module.
        install: What to pass to ``pip install``.

    Raises:
        MissingPackageError: if it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        extra = install.removeprefix("zo2core")
        remedy = f"pip install '{install}'" + (
            f"; in a clone: pip install '.{extra}'" if extra != install else ""
        )
        raise MissingPackageError(name, "no such package", "it installed", remedy) from error


def executorch(module: str) -> Any:
    """Import a module of ExecuTorch, without the warnings that it gives on import.

    Args:
        module: Name of the module within the package.

    Raises:
        MissingPackageError: if ExecuTorch is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optional_package(f"executorch.{module}", install="zo2core[executorch]")

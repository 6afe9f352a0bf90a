"""Import packages of extras, or raise an error that says how to install them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
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
        raise _missing(name, install) from error


def require_package(name: str, *, install: str) -> None:
    """Refuse a package that is not installed, without importing it. See ``optional_package``."""
    if name in sys.modules:
        is_there = sys.modules[name] is not None
    else:
        is_there = importlib.util.find_spec(name) is not None
    if not is_there:
        raise _missing(name, install)


def _missing(name: str, install: str) -> MissingPackageError:
    extra = install.removeprefix("zo2core")
    remedy = f"pip install '{install}'" + (
        f"; in a clone: pip install '.{extra}'" if extra != install else ""
    )
    return MissingPackageError(name, "no such package", "it installed", remedy)


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

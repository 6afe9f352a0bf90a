"""The optional package ExecuTorch, imported without its warnings."""

from __future__ import annotations

import warnings
from typing import Any

from zo2adapters.optional_package import optional_package


def executorch(module: str) -> Any:
    """Import a module of ExecuTorch.

    Args:
        module: Name of the module within the package.

    Raises:
        MissingPackageError: if ExecuTorch is not installed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optional_package(f"executorch.{module}", install="zo2core[executorch]")

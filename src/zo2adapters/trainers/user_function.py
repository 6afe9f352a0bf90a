"""A function of the user's own, in a file of theirs: ``--objective FILE.py:function``."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch

from zo2core import OptionError, open_regular


def user_function(name: str) -> Any:
    """Import a function by ``FILE.py:function``.

    The source is compiled here. Python's import would take a ``.pyc`` that lies in ``__pycache__`` beside the file, of whose
    content a digest of the source says nothing.

    Raises:
        OptionError: if there is none.
    """
    path, _, function = name.rpartition(":")
    try:
        spec = importlib.util.spec_from_file_location("zo2_objective", path)
        assert spec is not None, "a path that ends in .py has a loader"
        module = importlib.util.module_from_spec(spec)
        with open_regular(path) as file:
            code = compile(file.read(), path, "exec")
        sys.modules[spec.name] = module  # where its own classes look for it
        exec(code, module.__dict__)  # noqa: S102 - a program that the user named
        found = getattr(module, function)
        if not callable(found):
            raise TypeError(f"{function} is a {type(found).__name__}, no function")
    except Exception as error:  # any: it is somebody else's program
        raise OptionError(
            "objective",
            found=f"{name}, which cannot be imported ({type(error).__name__}: {error})"[:300],
            expected="FILE.py:function, a function of the model and a batch that returns a number",
            remedy="check the path and the name",
        ) from error

    def one_number(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        value = found(model, batch)
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value
        shown = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise OptionError("objective", found=f"{shown} from {function}", expected="a 0-d tensor", remedy="return one number")

    return one_number

"""What the file system shows of a command before torch is imported: paths in use, missing files,
the first rows of files, functions that a file does not have, and that there is no GPU.
"""

from __future__ import annotations

import ctypes
import os
import runpy
from importlib.util import find_spec
from pathlib import Path

from zo2adapters.models.model_files import require_model
from zo2adapters.tasks.registry import function_file
from zo2adapters.tasks.rewards import function_source
from zo2adapters.tasks.row_options import RowFormat, first_format
from zo2adapters.trainers.options import TrainOptions
from zo2core.errors import CheckpointError, DeviceError, OutputError, system_errors_as
from zo2core.io.durable import require_new_file
from zo2core.ranges import require_device_name


def require_files(options: TrainOptions, *, has_rows: bool = True) -> None:
    """Refuse files of a run that are missing or cannot be used, and rows that do not go with its
    options.
    """
    model_options = options.model_options
    require_model(options.model)
    for path in (model_options.adapter, model_options.architecture):
        if path is not None:
            require_there(path)
    for name in options.rewards.names:
        if name.file is not None:
            function_source(name.file, name.name)
    if (file := function_file(options.objective)) is not None:
        function_source(file, options.objective.rpartition(":")[2], option="objective")
    data = evaluation = None
    if has_rows:
        takes_labels = options.takes_labels
        data = first_format(options.data, options.rows, takes_labels=takes_labels)
        if options.evaluation is not None:
            evaluation = first_format(options.evaluation, options.rows, takes_labels=takes_labels)
    # of a row to train on, answers are not read
    options.require_rows(None if data is RowFormat.ANSWERS else data, evaluation)


def require_there(path: Path) -> None:
    """Refuse a path that does not exist."""
    remedy = "check the path"
    with system_errors_as(CheckpointError, path, expected="a readable file", remedy=remedy):
        path.stat()


def require_free_file(path: Path | None) -> None:
    """Refuse a new file at a path in use, or in a directory that cannot be written."""
    if path is not None:
        expected, remedy = "a new file in a directory that can be written", "pass another path"
        with system_errors_as(OutputError, path, expected=expected, remedy=remedy):
            require_new_file(path)


def require_device(device: str) -> None:
    """Refuse a GPU where torch can have none."""
    require_device_name(device)
    if device != "cpu" and _has_no_gpu():
        raise DeviceError(
            "device",
            f"{device}, and 0 CUDA device(s)",
            "that GPU and a torch built for CUDA",
            "leave it out to compute on the CPU, or install torch for CUDA",
        )


def _has_no_gpu() -> bool:
    """Whether torch is built for CPUs alone, or there is no driver of CUDA; other devices are left
    to torch.
    """
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return False
    built = runpy.run_path(str(Path(torch.origin).with_name("version.py")))
    if built.get("hip") is not None:
        return False
    if built.get("cuda") is None or os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return True
    return False

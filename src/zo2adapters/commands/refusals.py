"""Errors as one line each: errors of the system become typed errors, and options are called what the user typed."""

from __future__ import annotations

import errno
import re
from dataclasses import is_dataclass
from typing import Any

from zo2adapters.commands.options import option_names
from zo2core.errors import DeviceError, MemoryBudgetError, OutputError, ZO2Error, reason

# The library's name of an option, to its name on the command line.
_FLAGS = {
    "memory.host": "memory",
    "memory.device": "device_memory",
    "memory.activations": "activation_memory",
    "memory.least_activations": "activation_memory",
    "adapter.frozen": "adapter_frozen",
    "adapters": "adapter",
    "adapter.seed": "seed",
    "perturbation": "rank",
    "perturbation.rank": "rank",
    "perturbation.period": "period",
    "perturbation.stack": "stack",
    "write_back.every": "write_back_every",
    "write_back.snapshot_every": "snapshot_every",
    "write_back.terabytes_per_1000_steps": "write_limit_tb",
    "clip": "max_grad_norm",
    "optimizer": "method",
    "export_dtype": "output_dtype",
    "run_directory": "run",  # the field cannot be called so: a command has a method of that name
}
_QUOTED = re.compile(r"`([\w.]+)`")
# Options that reduce the memory a command takes.
_MEMORY_OPTIONS = ("micro_batch_size", "loss_chunk", "sequence_length", "batch_size", "tokens", "dtype")
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "bad allocation", "calculation overflowed")
_NO_EXCEPTION = ("without exception set", "without setting an exception")  # an extension had no memory for an exception


def as_zo2_error(error: Exception) -> ZO2Error | None:
    """Convert an error of the system to a typed error; None for an unexpected error, which is a defect of this program."""
    if isinstance(error, ZO2Error):
        return error
    message = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    is_short = isinstance(error, RuntimeError) and any(words in message.lower() for words in _OUT_OF_MEMORY)
    is_short |= isinstance(error, SystemError) and any(words in message for words in _NO_EXCEPTION)
    is_short |= isinstance(error, SyntaxError) and error.filename == "<unknown>"  # parsed for docstrings, imported before
    if is_short or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return MemoryBudgetError(
            "device memory" if type(error).__name__ == "OutOfMemoryError" else "host memory",
            found=f"none left ({message})",
            expected="enough for these options",
            remedy="free memory",
        )
    if isinstance(error, RuntimeError) and "start new thread" in message:
        return DeviceError(
            "threads",
            found="that no more can be started",
            expected="a few more",
            remedy="raise ulimit -u, or the control group's pids.max",
        )
    if isinstance(error, OSError):
        path = error.filename if isinstance(error.filename, str) else None
        return OutputError(
            "standard output" if path is None else path[:300],
            found=reason(error),
            expected="a usable path" if path is not None else "an output that can be written",
            remedy="check the path, its disk and your permissions" if path is not None else "redirect the output elsewhere",
        )
    return None


def error_line(error: ZO2Error, command: Any) -> str:
    """Format an error as one line, with options as flags."""
    names = set(option_names(command)) if is_dataclass(command) else set()
    flags = {name: _flag(name) for name in names}
    flags |= {name: flags[option] for name, option in _FLAGS.items() if option in names}
    where = error.where if error.is_of_path else flags.get(error.where, error.where)
    remedy = error.remedy
    if isinstance(error, MemoryBudgetError) and names:
        reducing = [_flag(name) for name in _MEMORY_OPTIONS if name in names]
        remedy = "allow or free more" + (f", or reduce it with {', '.join(reducing)}" if reducing else "")
    line = f"{where}: found {error.found}; expected {error.expected}. What to do: {remedy}."
    line = _QUOTED.sub(lambda quoted: flags.get(quoted[1], quoted[0]), line)
    return " ".join(line.split())


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")

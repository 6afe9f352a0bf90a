"""Errors as a command line words them: the system's refusals get a type, and options are called what the user typed."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from zo2core import DeviceError, MemoryBudgetError, OutputError, ZO2Error
from zo2core.errors import reason

# What the library calls an option, where the command line has another name for it.
_FLAGS = {
    "memory.host": "memory",
    "memory.device": "device_memory",
    "memory.activations": "activation_memory",
    "memory.least_activations": "activation_memory",
    "adapter.frozen": "adapter_frozen",
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
    "deadline": "step_deadline",
    "export_dtype": "output_dtype",
    "key": "key_file",
    "run_directory": "run",  # which is what a command does
}
_QUOTED = re.compile(r"`([\w.]+)`")
_LESS = ("micro_batch_size", "loss_chunk", "sequence_length", "batch_size", "tokens", "dtype")  # takes less memory
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "bad_alloc", "bad allocation", "calculation overflowed")
_UNSAID = ("without exception set", "without setting an exception")  # of an extension that could not even say so


def refusal_of(error: Exception) -> ZO2Error | None:
    """The typed error that says what the system refused; None for an error that nobody expects, a defect of this program."""
    if isinstance(error, ZO2Error):
        return error
    said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    is_short = isinstance(error, RuntimeError) and any(words in said.lower() for words in _OUT_OF_MEMORY)
    is_short |= isinstance(error, SystemError) and any(words in said for words in _UNSAID)
    is_short |= isinstance(error, SyntaxError) and error.filename == "<unknown>"  # parsed for docstrings, imported before
    if is_short or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return MemoryBudgetError(
            "device memory" if isinstance(error, torch.OutOfMemoryError) else "host memory",
            found=f"no more of it ({said})",
            expected="room for what the options ask for",
            remedy="free memory",
        )
    if isinstance(error, RuntimeError) and "start new thread" in said:
        return DeviceError(
            "threads",
            found="no more of them",
            expected="room for a few more",
            remedy="raise ulimit -u, or the control group's pids.max",
        )
    if isinstance(error, OSError):
        path = error.filename if isinstance(error.filename, str) else None
        return OutputError(
            "standard output" if path is None else path[:300],
            found=reason(error),
            expected="a path that can be used" if path is not None else "somebody who takes what is written",
            remedy="check the path, its disk and your rights there" if path is not None else "write it somewhere else",
        )
    return None


def worded(error: ZO2Error, command: Any) -> str:
    """An error as one line, in the words of the command line.

    Args:
        error: To tell. It is about an option if ``where`` is the option's name; texts have options between backquotes.
        command: The command whose options are called by their flags; anything else has none.
    """
    names = set(option_names(command)) if is_dataclass(command) else set()
    flags = {name: _flag(name) for name in names}
    flags |= {name: flags[option] for name, option in _FLAGS.items() if option in names}
    where = error.where if error.is_of_path else flags.get(error.where, error.where)
    remedy = error.remedy
    if isinstance(error, MemoryBudgetError) and names:
        less = [_flag(name) for name in _LESS if name in names]
        remedy = "allow or free more" + (f", or take less with {', '.join(less)}" if less else "")
    line = f"{where}: found {error.found}; expected {error.expected}. What to do: {remedy}."
    line = _QUOTED.sub(lambda quoted: flags.get(quoted[1], quoted[0]), line)
    return " ".join(line.split())


def option_names(command: Any) -> Iterator[str]:
    """The names of a command's options, those of its groups among them."""
    for option in fields(command):
        value = getattr(command, option.name, None)
        if is_dataclass(value) and not isinstance(value, type):
            yield from option_names(value)
        else:
            yield _FLAGS.get(option.name, option.name)


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")

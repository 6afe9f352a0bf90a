"""Errors as a command line words them: the system's refusals get a type, and options are called what the user typed."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from zo2core import DeviceError, MemoryBudgetError, OutputError, ZO2Error, reason

# What the library calls a policy's field, and how the command line calls it.
_POLICIES = {
    "memory.host": "memory",
    "memory.device": "device_memory",
    "memory.activations": "activation_memory",
    "memory.least_activations": "activation_memory",
    "adapter.frozen": "adapter_frozen",
    "perturbation.rank": "rank",
    "perturbation.period": "period",
    "perturbation.stack": "stack",
    "write_back.every": "write_back_every",
    "write_back.snapshot_every": "snapshot_every",
    "write_back.terabytes_per_1000_steps": "write_limit_tb",
    "adapter.seed": "seed",
}
# So called where an error is; words elsewhere.
_PLACES = {"perturbation": "rank", "export_dtype": "output_dtype", "key": "key_file"}
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
        error: To tell.
        command: The command whose options are called by their names; anything else has none.
    """
    names = set(option_names(command)) if is_dataclass(command) else set()
    called = {**_POLICIES, **_PLACES}
    where = error.where
    if not error.is_of_path:
        where = called.get(where, where)
        where = _option(where) if where in names or where in called.values() else where
    found, expected, remedy = error.found, error.expected, error.remedy
    if isinstance(error, MemoryBudgetError) and names:
        less = [_option(name) for name in _LESS if name in names]
        remedy = "allow or free more" + (f", or take less with {', '.join(less)}" if less else "")
    texts = []
    for text in (found, expected, remedy):
        for name, option in _POLICIES.items():
            text = text.replace(name, _option(option))
        known = [name for name in names if "_" in name or (name == error.where and not error.is_of_path)]
        texts.append(re.sub(rf"(?<![\w\-/.])({'|'.join(known) or '(?!)'})(?![\w/.])", lambda m: _option(m[1]), text))
    line = f"{where}: found {texts[0]}; expected {texts[1]}. What to do: {texts[2]}."
    return " ".join(line.split())


def option_names(command: Any) -> Iterator[str]:
    """The names of a command's options, those of its groups among them."""
    for option in fields(command):
        value = getattr(command, option.name, None)
        if is_dataclass(value) and not isinstance(value, type):
            yield from option_names(value)
        else:
            yield "run" if option.name == "run_directory" else option.name


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")

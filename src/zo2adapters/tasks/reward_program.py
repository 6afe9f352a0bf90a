"""The program of a limited process that computes rewards: the ready ones, and functions in files of
the user.

A reward is a function of the prompt, the completion and the row, which returns a number, of which
larger is better.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any

Reward = Callable[[Any, str, Mapping[str, Any]], Any]

_UNWINDING_SECONDS = 1.0  # in which code that is interrupted has to end
_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
_loaded: dict[tuple[str, str], types.ModuleType] = {}  # modules of the user, by path and source


def exact_match(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is the row's completion or one of its answers, without spaces around;
    else 0.
    """
    right = _answers(row, "exact-match")
    return float(completion.strip() in [str(answer).strip() for answer in right])


def arithmetic(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the last number in the completion equals the last one in the row's answer or completion;
    else 0.
    """
    right = _NUMBER.findall(str(_answers(row, "arithmetic")[0]))
    numbers = _NUMBER.findall(completion)
    if not right:
        raise ValueError("the row's answer has no number")
    return float(bool(numbers) and _value(numbers[-1]) == _value(right[-1]))


def regular_expression(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the whole completion, without spaces around, matches the row's ``pattern``; else 0."""
    return float(
        re.fullmatch(_column(row, "pattern", "regex"), completion.strip(), re.DOTALL) is not None
    )


def json_schema(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """1 if the completion is JSON of the row's ``schema``, 0.5 if it is other JSON, else 0.

    A schema comes with the rows, so that a stranger may have written it. Nothing is fetched for it.
    """
    schema = _column(row, "schema", "json-schema")
    jsonschema, referencing = map(importlib.import_module, ("jsonschema", "referencing"))
    try:
        value = json.loads(completion)
    except (ValueError, RecursionError):
        return 0.0
    schema = json.loads(schema) if isinstance(schema, str) else schema
    # Without a registry of its own, jsonschema opens the URLs of references: http, ftp, and file.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    try:
        return 1.0 if validator.is_valid(value) else 0.5
    except referencing.exceptions.Unresolvable as error:
        raise ValueError(f"the schema refers to {error.ref!r}, which is not in it") from error


def length(prompt: object, completion: str, row: Mapping[str, Any]) -> float:
    """Minus the completion's characters, divided by 100: with a small weight it prefers short
    completions.
    """
    return -len(completion) / 100


READY: dict[str, Reward] = {
    "exact-match": exact_match,
    "arithmetic": arithmetic,
    "regex": regular_expression,
    "json-schema": json_schema,
    "length": length,
}

_RIGHT = ("answers", "answer", "completion")  # columns of right answers, of which the first is read
# of a row that ready rewards read
COLUMNS: dict[str, tuple[str, ...]] = {
    "exact-match": _RIGHT,
    "arithmetic": _RIGHT,
    "regex": ("pattern",),
    "json-schema": ("schema",),
    "length": (),
}


def answer(request: dict[str, Any]) -> list[float | str]:
    """Compute a reward for several completions."""
    reward = READY[request["name"]] if request["file"] is None else _function(**request)
    values: list[float | str] = []
    for call in request["calls"]:
        values.append(_called(reward, *call, seconds=request["seconds"]))
        if isinstance(values[-1], str):
            break
    return values


def _function(*, name: str, file: str, source: str, start_seconds: float, **_: object) -> Reward:
    """The user's function.

    The source is the text that the parent read, whose digest it has recorded.
    """
    if (file, source) not in _loaded:
        module = types.ModuleType("zo2_reward")
        module.__file__ = file
        sys.modules[module.__name__] = module  # classes of the module look it up there
        with _at_most(start_seconds):
            exec(compile(source, file, "exec"), module.__dict__)  # noqa: S102 - the user named this program
        _loaded[file, source] = module
    function: Reward = getattr(_loaded[file, source], name)
    if not callable(function):
        raise TypeError(f"{name} is not a function")
    return function


def _called(
    reward: Reward, prompt: object, completion: str, row: Mapping[str, Any], *, seconds: float
) -> float | str:
    try:
        with _at_most(seconds):
            return _number(reward(prompt, completion, row))
    except MemoryError:
        raise
    except Exception as error:  # the user's program may raise anything
        name = type(error).__name__
        with contextlib.suppress(Exception), _at_most(seconds):
            return f"{name}: {' '.join(str(error).split())[:300]}"
        return f"{name}, which gives no text"


def _number(value: Any) -> float | str:
    """A reward as a number, or as a text that says what it is instead.

    Its methods are the user's program, too.
    """
    try:
        if isinstance(value, (str, bytes)):  # which float() would parse
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return f"{type(value).__name__} {str(value)[:40]!r}, which is not a number"


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Interrupt Python code after a time, and end the process if it goes on; the parent ends code
    in C.
    """
    is_told = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal is_told
        if is_told:
            os.kill(os.getpid(), signal.SIGXCPU)
        is_told = True
        raise TimeoutError(f"it takes longer than {seconds:g} s")

    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds, _UNWINDING_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


def _answers(row: Mapping[str, Any], reward: str) -> list[Any]:
    answers = next((row[column] for column in _RIGHT if column in row), None)
    if answers is None:
        raise ValueError(f"{reward} needs a row with completion, answer or answers")
    return answers if isinstance(answers, list) else [answers]


def _column(row: Mapping[str, Any], name: str, reward: str) -> Any:
    if name not in row:
        raise ValueError(f"{reward} needs a row with {name}")
    return row[name]


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", ""))

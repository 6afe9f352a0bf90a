"""Work in the threads of torch's OpenMP library.

These threads wait busily for a few milliseconds after each of torch's operations. Others would take
turns with them on the same cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch

from zo2core.kernels import native

_RUN = ctypes.CFUNCTYPE(None)
_TURNS = 8  # parts for each thread, so that all end at about the same time
_PAUSE_SOFT = 1  # omp_pause_soft of omp.h: threads end, and settings stay


def thread_count() -> int:
    """The number of threads in which kernels run: those of torch's library, or one without it."""
    has_threads = native.library() is not None and native.torch_threads() is not None
    return torch.get_num_threads() if has_threads else 1


def run_together(
    functions: Sequence[Callable[[], object]], failed: Callable[[], object] | None = None
) -> None:
    """Run functions that need no gradients at the same time, in the threads of torch's library.

    They begin in their order, each when a thread has ended another one: all run one after the other
    where there is one thread. After an exception none begins. It is raised once all have ended; an
    interrupt before others.

    Args:
        functions: The functions. Those that wait for each other are at most as many as threads.
        failed: Called after an exception, so that no function waits for the one that raised it.
    """
    threads = thread_count()
    if threads == 1 or len(functions) < 2:
        for function in functions:
            function()
        return
    errors: list[BaseException] = []
    parts = _bounds(len(functions), min(len(functions), threads * _TURNS))
    runs = [_caught(functions[first:last], errors, failed) for first, last in parts]
    for run in runs:
        next(run)
    calls = [_RUN(run.__next__) for run in runs]
    addresses = (ctypes.c_void_p * len(calls))(
        *(ctypes.cast(call, ctypes.c_void_p).value for call in calls)
    )
    native.functions().zo2core_run_each(addresses, len(calls), threads)
    for error in errors:
        if not isinstance(error, Exception):
            raise error
    if errors:
        raise errors[0]


def _caught(
    functions: Sequence[Callable[[], object]],
    errors: list[BaseException],
    failed: Callable[[], object] | None,
) -> Iterator[None]:
    """Run functions between the first value and the second, and keep what one of them raises.

    OpenMP's threads cannot raise it. It is a generator so that it is resumed within the ``try``: an
    interrupt at the beginning of a function that C calls would be printed and ignored.
    """
    try:
        yield
        with torch.inference_mode():
            for function in functions:
                if not errors:
                    function()
    except GeneratorExit:  # it was never resumed
        return
    except BaseException as error:
        errors.append(error)
        if failed is not None:
            failed()
    yield


def run_in_parts(run: Callable[[int, int], None], rows: int, most_parts: int) -> None:
    """Run a function of the first row and the end of the last one on parts of all rows.

    Args:
        run: The function.
        rows: All rows.
        most_parts: So many parts have work enough for a thread.
    """
    threads = thread_count()
    parts = min(rows, most_parts, threads * _TURNS)
    if threads == 1 or parts < 2:
        run(0, rows)
    else:
        run_together([partial(run, first, last) for first, last in _bounds(rows, parts)])


def _bounds(count: int, parts: int) -> Iterable[tuple[int, int]]:
    """The first number and the end of each of some parts of so many numbers."""
    return pairwise(count * part // parts for part in range(parts + 1))


def end_openmp_team() -> None:
    """End the OpenMP threads of the calling thread, which start again when it next computes.

    Once a process has more OpenMP threads than processors, GNU's library puts them to sleep at the
    end of each operation instead of letting them wait actively: a step of a small model then takes
    a quarter longer. Threads that take turns call this before they wait. Other libraries than
    OpenMP 5.0 are left alone.
    """
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_pause_resource(_PAUSE_SOFT, openmp.omp_get_initial_device())
    except (OSError, AttributeError, TypeError):
        return

"""The OpenMP threads with which PyTorch computes on the CPU: each thread that calls PyTorch gets a team of its own."""

from __future__ import annotations

import ctypes

_PAUSE_SOFT = 1  # omp_pause_soft of omp.h: threads end, and settings stay


def end_openmp_team() -> None:
    """End the OpenMP threads of the calling thread, which start again when it next computes.

    Once a process has more OpenMP threads than processors, GNU's library puts them to sleep at the end of each operation
    instead of letting them wait actively: a step of a small model then takes a quarter longer. Threads that take turns
    call this before they wait. Other libraries than OpenMP 5.0 are left alone.
    """
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_pause_resource(_PAUSE_SOFT, openmp.omp_get_initial_device())
    except (OSError, AttributeError, TypeError):
        return

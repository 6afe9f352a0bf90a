"""The properties of a machine on which a plan depends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of the machine on which a plan depends.

    Args:
        in_place: Whether segments are computed on in their buckets, in host memory.
        on_host: Whether the device's memory is host memory: on the CPU, also with simulated copies.
        device_free: Returns the free device memory in bytes.
        neighbours: Number of workers on this host, which divide the free memory.
    """

    in_place: bool = True
    on_host: bool = True
    device_free: Callable[[], int] = lambda: 0
    neighbours: int = 1

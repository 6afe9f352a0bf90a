"""A simulated device: copies run in threads of their own, with a given delay, into poisoned memory.

A missing wait, which fails on a GPU once in a while, fails here every time. The memory that a copy
fills is set to 255 (NaN in every floating-point dtype) until the copy is done. Compute runs in the
caller's thread, or in a further thread in the order of its launch.
"""

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from zo2core import HostDevice
from zo2core.protocols import Transfer, Wait
from zo2core.types import Event, Lane

TIMEOUT = 30.0  # seconds after which a wait counts as a deadlock


class ThreadEvent(threading.Event):
    """An event that a thread sets."""

    seconds = float("nan")

    @property
    def passed(self) -> bool:
        return self.is_set()

    def set(self) -> None:
        self.seconds = time.perf_counter()
        super().set()

    def block(self) -> None:
        if not self.wait(TIMEOUT):
            raise TimeoutError(f"an event has not passed within {TIMEOUT} seconds")


class ThreadedStreams:
    """Streams as threads, one for each lane.

    Args:
        delay: Returns the seconds that a copy takes in addition to the copying itself, from its
            lane and bytes.
        asynchronous: Whether compute runs in a thread, too; see ``compute``.
        without: Waits that are left out.
        poison: Whether a copy's target is set to 255 until the copy is done.
    """

    def __init__(
        self,
        delay: Callable[[Lane, int], float],
        *,
        asynchronous: bool = False,
        without: Collection[Wait] = (),
        poison: bool = True,
    ) -> None:
        self._delay, self._without, self._poison = delay, frozenset(without), poison
        lanes = [Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT]
        lanes += [Lane.REPLAY] if asynchronous else []
        self._lanes = {
            lane: ThreadPoolExecutor(1, thread_name_prefix=f"zo2-{lane.value}") for lane in lanes
        }
        self.errors: list[BaseException] = []  # errors of compute

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]
    ) -> Transfer:
        started, done = ThreadEvent(), ThreadEvent()

        def run() -> None:
            for why, event in after.items():
                self.wait(event, why)
            started.set()
            if self._poison:
                target.fill_(255)
            time.sleep(self._delay(lane, target.numel()))
            target.copy_(source)
            done.set()

        self._lanes[lane].submit(run)
        return Transfer(target, source, started, done)

    def compute(self, work: Callable[[], None]) -> None:
        """Queue compute, as a kernel launch does."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self._lanes[Lane.REPLAY].submit(run)

    def mark(self) -> Event:
        event = ThreadEvent()
        if Lane.REPLAY in self._lanes:
            self._lanes[Lane.REPLAY].submit(event.set)
        else:
            event.set()
        return event

    def order(self, event: Event, why: Wait) -> None:
        if Lane.REPLAY in self._lanes:
            self._lanes[Lane.REPLAY].submit(self.wait, event, why)
        else:
            self.wait(event, why)

    def wait(self, event: Event, why: Wait) -> None:
        if why not in self._without:
            assert isinstance(event, ThreadEvent)
            event.block()

    def drain(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown()


class ThreadedDevice:
    """The CPU as a device behind a bus, whose streams run copies and compute."""

    in_place = False
    torch_device = torch.device("cpu")

    def __init__(self, streams: ThreadedStreams) -> None:
        self.streams = streams
        self.allocated: list[int] = []  # bytes of each allocation of device memory
        self._host = HostDevice()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        return self._host.host_memory(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate ordinary memory, and count it as the device's."""
        self.allocated.append(nbytes)
        return self._host.host_memory(nbytes)

    def free_memory(self) -> int:
        return psutil.virtual_memory().available

    def close(self) -> None:
        self.streams.drain()

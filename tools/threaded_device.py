"""A device without a GPU: copies run in threads of their own, as slowly as asked for, into poisoned memory.

What a missing wait would break on a GPU, once in a while, breaks here each time. Memory that a copy is about to fill is full
of 255 (NaN in every floating-point dtype) until it is done. Compute is the caller's own, or goes to a third thread as
kernels do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

import psutil
import torch

from zo2core import HostDevice
from zo2core.protocols import Transfer, Wait
from zo2core.types import Event, Lane

TIMEOUT = 30.0  # seconds: nothing waits longer unless it waits for ever


class ThreadEvent:
    """An event that a thread lets pass."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._seconds = float("nan")

    @property
    def passed(self) -> bool:
        """Whether it has passed."""
        return self._event.is_set()

    @property
    def seconds(self) -> float:
        """When it passed."""
        return self._seconds

    def set(self) -> None:
        """Let the event pass."""
        self._seconds = time.perf_counter()
        self._event.set()

    def block(self) -> None:
        """Wait until the event has passed."""
        if not self._event.wait(TIMEOUT):
            raise TimeoutError("an event that never passes")


class ThreadedStreams:
    """Queues of work as threads.

    Args:
        delay: Gives the seconds that a copy of so many bytes takes in a lane, beside the copying itself.
        asynchronous: Whether compute goes to a thread, too; see ``compute``.
        without: Waits that are left out.
        poison: Whether a copy's target is full of 255 until the copy is done.
    """

    def __init__(
        self,
        delay: Callable[[Lane, int], float],
        *,
        asynchronous: bool = False,
        without: Collection[Wait] = (),
        poison: bool = True,
    ) -> None:
        self._delay = delay
        self._without = frozenset(without)
        self._poison = poison
        copies = [Lane.UPLOAD, Lane.OFFLOAD, Lane.ACTIVATIONS_IN, Lane.ACTIVATIONS_OUT]
        lanes = [*copies, *([Lane.REPLAY] if asynchronous else [])]
        self._lanes = {lane: ThreadPoolExecutor(1, thread_name_prefix=f"zo2-{lane.value}") for lane in lanes}
        self.errors: list[BaseException] = []  # of compute

    def copy(self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Mapping[Wait, Event]) -> Transfer:
        """Start a copy. See the contract."""
        begun, done = ThreadEvent(), ThreadEvent()

        def run() -> None:
            for why, event in after.items():
                if why not in self._without:
                    _block(event)
            begun.set()
            if self._poison:
                target.fill_(255)
            time.sleep(self._delay(lane, target.numel()))
            target.copy_(source)
            done.set()

        self._lanes[lane].submit(run)
        return Transfer(target, source, begun, done)

    def compute(self, work: Callable[[], None]) -> None:
        """Issue compute, as a kernel is launched."""

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self.errors.append(error)

        self._lanes[Lane.REPLAY].submit(run)

    def mark(self) -> Event:
        """Return an event that passes after the compute issued so far."""
        event = ThreadEvent()
        if Lane.REPLAY in self._lanes:
            self._lanes[Lane.REPLAY].submit(event.set)
        else:
            event.set()
        return event

    def order(self, event: Event, why: Wait) -> None:
        """Let compute wait. See the contract."""
        if why in self._without:
            return
        if Lane.REPLAY in self._lanes:
            self._lanes[Lane.REPLAY].submit(_block, event)
        else:
            _block(event)

    def wait(self, event: Event, why: Wait) -> None:
        """Let the host wait. See the contract."""
        if why not in self._without:
            _block(event)

    def drain(self) -> None:
        """Wait for all work."""
        for lane in self._lanes.values():
            lane.shutdown()


class ThreadedDevice:
    """The CPU, as if it were behind a bus.

    Args:
        streams: Its queues of work.
    """

    in_place = False
    torch_device = torch.device("cpu")

    def __init__(self, streams: ThreadedStreams) -> None:
        self.streams = streams
        self.allocated: list[int] = []  # bytes of device memory, one an allocation
        self._host = HostDevice()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """Allocate ordinary memory."""
        return self._host.host_memory(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Allocate ordinary memory, and count it as the device's."""
        self.allocated.append(nbytes)
        return self._host.host_memory(nbytes)

    def free_memory(self) -> int:
        """Return what the system has."""
        return psutil.virtual_memory().available

    def close(self) -> None:
        """Wait for all work."""
        self.streams.drain()


def _block(event: Event) -> None:
    assert isinstance(event, ThreadEvent)
    event.block()

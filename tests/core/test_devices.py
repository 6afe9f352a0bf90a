"""What compute devices promise.

The CUDA runtime is a recording stand-in: what is locked, what is queued in which order.
"""

import contextlib
import gc
import mmap
import time
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from zo2adapters import open_checkpoint
from zo2core import CudaDevice, Engine, HostDevice
from zo2core.errors import DeviceError
from zo2core.protocols import Wait
from zo2core.types import Lane


class FakeRuntime:
    """cudart, as far as page-locking goes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}  # address -> bytes
        self.forgotten = MagicMock()  # errors that nobody else is to be told of

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if self.code == 0:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.locked[address]
        return 0


class FakeEvent:
    """An event that knows where it was recorded."""

    log: list[str]
    numbers: Iterator[int]

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.name = "nothing"

    def record(self, stream: SimpleNamespace | None = None) -> None:
        self.name = f"{'compute' if stream is None else stream.name} {next(self.numbers)}"
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.name}")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 1500.0  # milliseconds


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is queued, in order."""
    lines: list[str] = []
    names = cycle(["upload", "offload", "activations in", "activations out"])

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name, wait_event=lambda event: lines.append(f"{name} waits for {event.name}")
        )

    monkeypatch.setattr(FakeEvent, "log", lines, raising=False)
    monkeypatch.setattr(FakeEvent, "numbers", count(1), raising=False)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream(next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream("compute"))
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: lines.append("host waits for all"))

    @contextlib.contextmanager
    def entered(stream: SimpleNamespace) -> Iterator[None]:
        lines.append(f"into {stream.name}")
        yield
        lines.append(f"out of {stream.name}")

    monkeypatch.setattr(torch.cuda, "stream", entered)
    return lines


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("zo2core.schedulers.devices._clear_error", fake.forgotten)
    return fake


def test_host_memory_is_page_aligned_and_of_exact_size() -> None:
    for nbytes in (0, 1, 5000):
        arena = HostDevice().host_memory(nbytes)
        assert arena.numel() == nbytes
        assert arena.data_ptr() % mmap.PAGESIZE == 0 or nbytes == 0


def test_cuda_locks_exactly_the_arena_and_lets_go_of_it_once_all_work_is_done(
    runtime: FakeRuntime, log: list[str]
) -> None:
    device = CudaDevice()
    first, second = device.host_memory(3 * 2**20 + 5), device.host_memory(64)
    assert runtime.locked == {first.data_ptr(): 3 * 2**20 + 5, second.data_ptr(): 64}
    assert first.data_ptr() % mmap.PAGESIZE == 0
    device.close()
    assert log[-1] == "host waits for all"
    device.close()
    assert runtime.locked == {}
    device = CudaDevice()
    memory = device.host_memory(4096)
    assert list(runtime.locked) == [memory.data_ptr()]
    del device  # which nobody closed
    gc.collect()
    assert not runtime.locked


def test_cuda_copies_in_a_lanes_stream_between_events_after_what_it_awaits(
    runtime: FakeRuntime, log: list[str]
) -> None:
    streams = CudaDevice().streams
    computed = streams.mark()
    del log[:]
    target, source = torch.zeros(4), torch.ones(4)
    transfer = streams.copy(Lane.UPLOAD, target, source, {Wait.EVALUATED: computed})
    assert log == [
        "upload waits for compute 2",
        "record upload 3",
        "into upload",
        "out of upload",
        "record upload 4",
    ]
    assert torch.equal(target, source)
    assert transfer.target is target, "what is in flight is kept alive"
    assert transfer.source is source
    del log[:]
    streams.order(transfer.done, Wait.UPLOADED)
    streams.wait(transfer.done, Wait.SENT)
    assert log == ["compute waits for upload 4", "host waits for upload 4"]
    assert transfer.done.passed
    began = time.perf_counter()
    assert began < transfer.done.seconds < began + 2, "the GPU's clock is held against the host's"


@pytest.mark.usefixtures("runtime")
@pytest.mark.parametrize("nbytes", [0, 2, 3, 7])
def test_cuda_copies_all_of_what_is_issued_in_turns(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zo2core.schedulers.devices._COPY_BYTES", 3)
    target, source = torch.zeros(nbytes, dtype=torch.uint8), torch.arange(nbytes, dtype=torch.uint8)
    CudaDevice().streams.copy(Lane.OFFLOAD, target, source, {})
    assert torch.equal(target, source)


def test_memory_that_cannot_be_locked_is_a_typed_error(runtime: FakeRuntime) -> None:
    device = CudaDevice()
    runtime.code = 2
    with pytest.raises(DeviceError, match=r"code 2 for 4096 bytes.*ulimit -l"):
        device.host_memory(4096)
    runtime.forgotten.assert_called_once()


@pytest.mark.usefixtures("runtime")
def test_a_missing_gpu_is_a_typed_error(base: Path) -> None:
    with pytest.raises(DeviceError, match=r"cuda:1: found 1 CUDA device"):
        Engine(open_checkpoint(base), device="cuda:1")

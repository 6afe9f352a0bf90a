"""What compute devices promise. The CUDA runtime is a recording stand-in: which memory is locked, and let go again."""

from __future__ import annotations

import mmap

import pytest
import torch
from models import save_model, small_config

from zo2adapters import open_checkpoint
from zo2core import CudaDevice, DeviceError, HostDevice, MeZOSGD, ZOEngine


class FakeRuntime:
    """cudart, as far as page-locking goes."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}  # address -> bytes

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if self.code == 0:
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return fake


def test_host_memory_is_page_aligned_and_of_exact_size() -> None:
    for nbytes in (0, 1, 5000):
        arena = HostDevice().host_memory(nbytes)
        assert arena.numel() == nbytes
        assert arena.data_ptr() % mmap.PAGESIZE == 0 or nbytes == 0


def test_cuda_locks_exactly_the_arena_and_lets_go_of_it(runtime: FakeRuntime) -> None:
    device = CudaDevice()
    first, second = device.host_memory(3 * 2**20 + 5), device.host_memory(64)
    assert runtime.locked == {first.data_ptr(): 3 * 2**20 + 5, second.data_ptr(): 64}
    assert first.data_ptr() % mmap.PAGESIZE == 0
    device.close()
    device.close()
    assert runtime.locked == {}


def test_memory_that_cannot_be_locked_is_a_typed_error(runtime: FakeRuntime) -> None:
    device = CudaDevice()
    runtime.code = 2
    with pytest.raises(DeviceError, match=r"code 2 for 4096 bytes.*ulimit -l"):
        device.host_memory(4096)


def test_a_missing_gpu_is_a_typed_error(runtime: FakeRuntime, tmp_path_factory: pytest.TempPathFactory) -> None:
    base = save_model(tmp_path_factory.mktemp("base"), small_config("opt"))
    with pytest.raises(DeviceError, match=r"cuda:1: found 1 CUDA device"):
        ZOEngine(open_checkpoint(base), MeZOSGD(lr=1e-3, zo_eps=1e-3), device="cuda:1")

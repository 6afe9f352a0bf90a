"""The places in which the paper's tables are measured: a GPU, or a CPU with two tiers of memory in place of host and GPU.

    cuda    host memory and a GPU
    bus     host memory behind a bus, simulated by threads that copy at its rate, and host memory
    disk    a checkpoint on disk and a scratch file, to which every block is written back in every step, and host memory

Each builds the engine in a variant and counts the memory of the device.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from make_checkpoint import make_checkpoint
from measuring import Noise, Usage, timed
from synthetic import block_model
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import PretrainedConfig

from paper.tables import Variant
from zo2adapters import HFBlockModel, open_checkpoint
from zo2core import (
    CudaDevice,
    DevicePlan,
    Engine,
    HostDevice,
    HostPlan,
    MemoryPolicy,
    MeZOSGD,
    OverlappedScheduler,
    Trace,
    WriteBackPolicy,
    ZerothOrder,
)
from zo2core.errors import OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.profiling import Span, Sweep
from zo2core.types import Lane

LR, ZO_EPS = 1e-7, 1e-3  # the paper's learning rate; MeZO's scale
NOTES = {
    "cuda": "memory is torch.cuda.max_memory_allocated over a step",
    "bus": "no GPU: the CPU takes its place, behind a simulated bus of {rate:g} GB/s in each direction; the "
    "simulated device has {memory:.0f} MB, of which buffers and tensors are counted",
    "disk": "no GPU: disk and host memory in the roles of host and GPU, every block read and written back each step; "
    "{memory:.0f} MB count as the device's, and buffers and tensors are counted",
}


class AllocatingScheduler(OverlappedScheduler):
    """Allocates device memory for each block that arrives, and frees it when the block has left.

    Freeing waits for all uses of the memory, as ``cudaFree`` does. On a GPU torch's whole cache is emptied, so that the
    memory returns to the driver.
    """

    def _bring(self, index: int) -> Any:
        if not self._device.in_place and index not in self._own:
            slot, nothing = self._free[0], torch.empty(0, dtype=torch.uint8)
            for why, event in slot.last_uses.items():
                self._device.streams.wait(event, why)
            self._release_arrived()
            nbytes, slot.memory, slot.last_uses = len(slot.memory), nothing, {}
            if self._device.torch_device.type == "cuda":
                torch.cuda.empty_cache()
            slot.memory = self._device.empty(nbytes)
        return super()._bring(index)


class Traffic(Trace):
    """Sums the bytes that sweeps move, instead of writing a trace."""

    def __init__(self) -> None:
        self.nbytes = dict.fromkeys((Lane.READ, Lane.UPLOAD, Lane.OFFLOAD, Lane.WRITE), 0)

    def add(self, spans: Iterable[Span], sweep: Sweep | None = None) -> None:
        for span in spans:
            if span.lane in self.nbytes:
                self.nbytes[span.lane] += span.nbytes

    def close(self) -> None:
        pass  # there is no file


class Offloaded(NamedTuple):
    """An engine, ready to run."""

    engine: Engine
    parts: ExitStack  # to be closed after the engine
    traffic: Traffic


class Place:
    """A place in which both sides are measured; ``rate`` is that of the simulated bus each way, in bytes a second."""

    def __init__(
        self, on: str, *, host_memory: int, device_memory: int, rate: float = 1e9, folder: Path | None = None
    ) -> None:
        self._on, self._host_memory, self._device_memory, self._rate = on, host_memory, device_memory, rate
        self.torch_device = torch.device("cuda", 0) if on == "cuda" else torch.device("cpu")
        name = f"{torch.cuda.get_device_name(0)}; " if on == "cuda" else ""
        self.note = name + NOTES[on].format(rate=rate / 1e9, memory=device_memory / 1e6)
        self._usage = Usage()
        self._folder = tempfile.TemporaryDirectory(dir=folder)

    def free_memory(self) -> int:
        """Bytes of the device that are free: on a GPU the driver's, after torch's cache was emptied."""
        gc.collect()
        if self._on != "cuda":
            return self._device_memory - self._usage.now
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> HFBlockModel:
        """A model of this geometry; on disk, the files of the previous one are removed."""
        if self._on != "disk":
            return block_model(config, dtype)
        parent = Path(self._folder.name).parent
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(dir=parent)
        make_checkpoint(config, Path(self._folder.name) / "base", dtype=dtype)
        return open_checkpoint(Path(self._folder.name) / "base")

    def offload(self, model: HFBlockModel, variant: Variant, noise: Noise) -> Offloaded | None:
        """An engine in a variant; None if the variant does not exist here."""
        parts, traffic, given = ExitStack(), Traffic(), dict[str, Any]()
        buckets, kept = None, 0
        if self._on == "disk":
            if variant in (Variant.ALLOCATING, Variant.RESIDENT):
                return None
            # With one bucket it does not read ahead, so nothing overlaps.
            run, buckets = Path(tempfile.mkdtemp(dir=self._folder.name)), 1 if variant is Variant.SERIAL else 3
            given = {"journal": run / "journal.jsonl", "write_back": WriteBackPolicy(directory=run, every=1)}
        elif (nbytes := sum(whole_pages(layout.nbytes) for layout in model.layouts)) > self._host_memory:
            found, expected = f"{self._host_memory} bytes", f"{nbytes}"
            raise OptionError("host-memory", found=found, expected=expected, remedy="measure smaller models with --sizes")
        if variant is Variant.RESIDENT:
            kept = sum(not layout.resident for layout in model.layouts)
        device = parts.enter_context(closing(self._device()))
        parts.callback(model.weights.close)
        plan: Any = "auto" if device.in_place or variant is Variant.SERIAL else DevicePlan((), 1 << 50, kept, 1 << 50)
        memory = MemoryPolicy(host=HostPlan((), 1 << 50, buckets, keep_noise=False), device=plan)
        method = ZerothOrder(MeZOSGD(lr=LR, zo_eps=ZO_EPS), noise=noise(model.layouts, device.torch_device))
        scheduler = AllocatingScheduler if variant is Variant.ALLOCATING else OverlappedScheduler
        with mock.patch("zo2core.schedulers.OverlappedScheduler", scheduler):
            engine = Engine(
                model,
                method,
                device=device,
                memory=memory,
                overlap=variant is not Variant.SERIAL or self._on == "disk",
                trace=traffic,
                **given,
            )
        return Offloaded(engine, parts, traffic)

    def _device(self) -> Any:
        """A device that counts its memory; that of the host too, if it is the device."""
        if self._on == "cuda":
            return CudaDevice(0)
        streams = ThreadedStreams(lambda lane, nbytes: nbytes / self._rate, poison=False)
        device: Any = HostDevice() if self._on == "disk" else ThreadedDevice(streams)
        empty, host_memory = device.empty, device.host_memory

        def counted(allocate: Callable[[int], torch.Tensor], nbytes: int, *, counts: bool) -> torch.Tensor:
            memory = allocate(nbytes)
            self._usage.hold(memory, counts=counts)
            return memory

        device.empty = lambda nbytes: counted(empty, nbytes, counts=True)
        device.host_memory = lambda nbytes: counted(host_memory, nbytes, counts=self._on == "disk")
        return device

    def peak_bytes(self, run: Callable[[], object], held: Iterable[torch.Tensor]) -> int:
        """The peak bytes of the device while ``run`` runs, including the tensors in ``held``."""
        if self._on != "cuda":
            return self._usage.peak_of(run, held)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        timed(run)
        return int(torch.cuda.max_memory_allocated(self.torch_device))

    def close(self) -> None:
        self._folder.cleanup()

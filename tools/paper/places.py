"""The places in which the paper's tables are measured: a GPU, or a CPU with two tiers of memory in place of host and GPU.

    Cuda    host memory and a GPU
    Bus     host memory behind a bus, simulated by threads that copy at its rate, and host memory
    Disk    a checkpoint on disk, and host memory

Each builds the engine with a variant's parts and counts the memory of the device.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

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
    Engine,
    HostDevice,
    Journal,
    MeZOSGD,
    OverlappedScheduler,
    SegmentStore,
    SerialScheduler,
    Trace,
    ZerothOrder,
)
from zo2core.errors import OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.profiling import Span, Sweep, Timeline
from zo2core.protocols import BlockSource, Device, Scheduler
from zo2core.sources.loader import laid_out_as_on_disk
from zo2core.sources.slot_file import Scratch
from zo2core.types import Lane

LR, ZO_EPS = 1e-7, 1e-3  # the paper's learning rate; MeZO's scale


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


def _all_kept(source: BlockSource, device: Device, timeline: Timeline) -> OverlappedScheduler:
    blocks = sum(not layout.resident for layout in source.layouts)
    return OverlappedScheduler(source, device, kept=blocks, timeline=timeline)


def _overlapped(source: BlockSource, device: Device, timeline: Timeline) -> OverlappedScheduler:
    return OverlappedScheduler(source, device, timeline=timeline)


SCHEDULERS: dict[Variant, Callable[[BlockSource, Device, Timeline], Scheduler]] = {
    Variant.FULL: _overlapped,  # keeps no block on the device, like the paper's
    Variant.SERIAL: lambda source, device, timeline: SerialScheduler(source, device, timeline=timeline),
    Variant.ALLOCATING: lambda source, device, timeline: AllocatingScheduler(source, device, timeline=timeline),
    Variant.EAGER: _overlapped,
    Variant.RESIDENT: _all_kept,
}


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
    parts: ExitStack  # the engine's parts, to be closed after it
    traffic: Traffic


class Place:
    """A place in which both sides are measured: by default host memory that plays a device, with models without files.

    Args:
        device_memory: Bytes of the simulated device.
        note: Is printed with the results.
    """

    torch_device = torch.device("cpu")

    def __init__(self, device_memory: int, note: str) -> None:
        self.note = note
        self._device_memory = device_memory
        self._usage = Usage()

    def free_memory(self) -> int:
        """Bytes of the device that are free: those of the simulated one without those that are counted."""
        gc.collect()
        return self._device_memory - self._usage.now

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> HFBlockModel:
        """A model of this geometry."""
        return block_model(config, dtype)

    def offload(self, model: HFBlockModel, variant: Variant, noise: Noise) -> Offloaded | None:
        """An engine with a variant's parts; None if the variant does not exist here."""
        raise NotImplementedError

    def peak_bytes(self, run: Callable[[], object], held: Iterable[torch.Tensor]) -> int:
        """The peak bytes of the device while ``run`` runs, including the tensors in ``held``."""
        return self._usage.peak_of(run, held)

    def close(self) -> None:
        """Remove files. It may be called twice."""


def _offloaded(
    model: HFBlockModel,
    variant: Variant,
    noise: Noise,
    source: BlockSource,
    device: Device,
    timeline: Timeline,
    **given: Any,
) -> Offloaded:
    parts, traffic = ExitStack(), Traffic()
    for part in (model.weights, device, *given.values(), source):
        parts.callback(part.close)
    engine = Engine(
        model,
        ZerothOrder(MeZOSGD(lr=LR, zo_eps=ZO_EPS), noise=noise(model.layouts, device.torch_device)),
        source=source,
        scheduler=SCHEDULERS[variant](source, device, timeline),
        device=device,
        timeline=timeline,
        trace=traffic,
        **given,
    )
    return Offloaded(engine, parts, traffic)


def _from_host(device: Device, model: HFBlockModel, variant: Variant, noise: Noise, host_memory: int) -> Offloaded:
    """An engine with blocks in host memory.

    Raises:
        OptionError: if they do not fit.
    """
    nbytes, timeline = sum(whole_pages(layout.nbytes) for layout in model.layouts), Timeline()
    if nbytes > host_memory:
        raise OptionError(
            "host-memory", found=f"{host_memory} bytes", expected=f"{nbytes}", remedy="measure smaller models with --sizes"
        )
    source = SegmentStore(model.weights, model.layouts, device.host_memory, timeline=timeline)
    return _offloaded(model, variant, noise, source, device, timeline)


class Cuda(Place):
    """Host memory and a GPU.

    Args:
        host_memory: Bytes that may be page-locked.
    """

    torch_device = torch.device("cuda", 0)

    def __init__(self, host_memory: int) -> None:
        self._host_memory = host_memory
        name, nbytes = torch.cuda.get_device_name(0), torch.cuda.get_device_properties(0).total_memory
        super().__init__(nbytes, f"{name}, {nbytes / 1e9:.1f} GB; memory is torch.cuda.max_memory_allocated over a step")

    def free_memory(self) -> int:
        """The driver's free bytes, after torch's cache was emptied."""
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def offload(self, model: HFBlockModel, variant: Variant, noise: Noise) -> Offloaded | None:
        """An engine with blocks in page-locked memory."""
        return _from_host(CudaDevice(0), model, variant, noise, self._host_memory)

    def peak_bytes(self, run: Callable[[], object], held: Iterable[torch.Tensor]) -> int:
        """The peak of torch's allocator."""
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        timed(run)
        return int(torch.cuda.max_memory_allocated(self.torch_device))


class _BusDevice(ThreadedDevice):
    """A device that counts its memory, without the host's."""

    def __init__(self, streams: ThreadedStreams, usage: Usage) -> None:
        super().__init__(streams)
        self._usage = usage

    def empty(self, nbytes: int) -> torch.Tensor:
        memory = super().empty(nbytes)
        self._usage.hold(memory)
        return memory

    def host_memory(self, nbytes: int) -> torch.Tensor:
        memory = super().host_memory(nbytes)
        self._usage.hold(memory, counts=False)
        return memory


class Bus(Place):
    """Host memory behind a simulated bus, and host memory in place of the device's.

    Args:
        host_memory: Bytes of the memory behind the bus.
        device_memory: Bytes of the simulated device.
        rate: Bytes a second of the bus in each direction.
    """

    def __init__(self, host_memory: int, device_memory: int, rate: float) -> None:
        super().__init__(
            device_memory,
            f"no GPU: the CPU takes its place, behind a simulated bus of {rate / 1e9:g} GB/s in each direction; "
            f"the simulated device has {device_memory / 1e6:.0f} MB, of which buffers and tensors are counted",
        )
        self._host_memory, self._rate = host_memory, rate

    def offload(self, model: HFBlockModel, variant: Variant, noise: Noise) -> Offloaded | None:
        """An engine whose copies take as long as on the bus, in addition to the copying itself."""
        streams = ThreadedStreams(lambda lane, nbytes: nbytes / self._rate, poison=False)
        return _from_host(_BusDevice(streams, self._usage), model, variant, noise, self._host_memory)


class _CountedHost(HostDevice):
    """A host that counts all its memory, because it is the device."""

    def __init__(self, usage: Usage) -> None:
        super().__init__()
        self._usage = usage

    def host_memory(self, nbytes: int) -> torch.Tensor:
        memory = super().host_memory(nbytes)
        self._usage.hold(memory)
        return memory


class Disk(Place):
    """A checkpoint on disk and a scratch file, to which every block is written back in every step, and host memory.

    Args:
        folder: For the files; a temporary directory is made there.
        device_memory: Bytes of host memory that count as the device's.
    """

    def __init__(self, folder: Path | None, device_memory: int) -> None:
        super().__init__(
            device_memory,
            "no GPU: disk and host memory in the roles of host and GPU, every block read and written back each step; "
            f"{device_memory / 1e6:.0f} MB count as the device's; memory is buffers and tensors, counted",
        )
        self._folder = tempfile.TemporaryDirectory(dir=folder)
        self._made = 0

    def model(self, config: PretrainedConfig, dtype: torch.dtype) -> HFBlockModel:
        """A model with files; those of the previous model are removed."""
        parent = Path(self._folder.name).parent
        self._folder.cleanup()
        self._folder = tempfile.TemporaryDirectory(dir=parent)
        self._made = 0
        make_checkpoint(config, Path(self._folder.name) / "base", dtype=dtype)
        return open_checkpoint(Path(self._folder.name) / "base")

    def offload(self, model: HFBlockModel, variant: Variant, noise: Noise) -> Offloaded | None:
        """An engine with blocks on disk; with one bucket it does not read ahead, so nothing overlaps."""
        if variant in (Variant.ALLOCATING, Variant.RESIDENT):
            return None
        self._made += 1
        run = Path(self._folder.name) / f"run-{self._made}"
        run.mkdir()
        device, journal = _CountedHost(self._usage), Journal(run / "journal.jsonl")
        layouts, timeline = laid_out_as_on_disk(model.layouts, model.weights), Timeline()
        source = SegmentStore(
            model.weights,
            layouts,
            device.host_memory,
            buckets=1 if variant is Variant.SERIAL else 3,
            scratch=Scratch(run, layouts, journal.chain),
            write_back_every=1,
            timeline=timeline,
        )
        return _offloaded(model, variant, noise, source, device, timeline, journal=journal)

    def close(self) -> None:
        """Remove the checkpoint and the scratch file."""
        self._folder.cleanup()

"""Noise generators, which draw z: by a counter, or sequentially as torch draws MeZO's numbers.

Sequential generators are torch's own, and a compiled one that gives the same bits on the CPU. torch
promises no particular numbers: they have changed between versions, and depend on the processor. So
the compiled generator is used only where it has just been compared with this torch on this machine.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import add
from typing import TypeAlias

import torch
from torch import Tensor

from zo2core.errors import OptionError
from zo2core.kernels import dispatch, fill
from zo2core.protocols import SEEDS_IN_TURN, NoiseGenerator
from zo2core.types import BlockLayout, Distribution, ParameterSpec, divide_tied, packed_bytes

_SEEDS = (0, 1, 2**31 + 5, 2**63 - 1)
_SIZES = (*range(1, 100), 1023, 1024, 1025, 7, 4096 + 9)  # compared one after the other
_BITS = {2: torch.int16, 4: torch.int32}


class TorchGenerator:
    """torch's generator of standard normal numbers.

    Args:
        seed: Seed of 64 bits.
        device: Device that draws.
    """

    __slots__ = ("_generator",)

    def __init__(self, seed: int, device: torch.device) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)

    def fill(self, out: Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""
        out.normal_(generator=self._generator)

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of ``count`` elements."""
        self.fill(torch.empty(count, dtype=dtype, device=self._generator.device))

    def copy(self) -> TorchGenerator:
        """Return a generator that continues with the same numbers."""
        other = object.__new__(TorchGenerator)
        other._generator = self._generator.clone_state()
        return other


class CompiledGenerator:
    """torch's CPU generator, compiled, for numbers of 32 and 16 bits.

    ``agrees`` says whether it may be used.

    Args:
        seed: Seed of 64 bits.
    """

    __slots__ = ("_library", "_state")

    def __init__(self, seed: int) -> None:
        self._library = dispatch.functions()
        self._state = ctypes.create_string_buffer(self._library.zo2core_twister_size())
        self._library.zo2core_twister_seed(self._state, seed)

    def fill(self, out: Tensor) -> None:
        """Write the next numbers to a contiguous tensor."""
        self._library.zo2core_twister_fill(
            self._state, dispatch.DTYPES[out.dtype], out.data_ptr(), out.numel()
        )

    def skip(self, count: int, dtype: torch.dtype) -> None:
        """Advance as ``fill`` would with a tensor of ``count`` elements."""
        self._library.zo2core_twister_skip(self._state, dispatch.DTYPES[dtype], count)

    def copy(self) -> CompiledGenerator:
        """Return a generator that continues with the same numbers."""
        other = object.__new__(CompiledGenerator)
        other._library = self._library
        other._state = type(self._state).from_buffer_copy(self._state)
        return other


Generator: TypeAlias = TorchGenerator | CompiledGenerator


def seeded(seed: int, device: torch.device, dtypes: Collection[torch.dtype]) -> Generator:
    """The fastest generator that draws a device's numbers in these dtypes."""
    if device.type == "cpu" and all(agrees(dtype) for dtype in dtypes):
        return CompiledGenerator(seed)
    return TorchGenerator(seed, device)


@cache
def agrees(dtype: torch.dtype) -> bool:
    """Whether the compiled generator is installed and gives torch's bits in a dtype on this
    machine. Compared once.
    """
    if dispatch.library() is None or dtype not in dispatch.DTYPES:
        return False
    for seed in _SEEDS:
        reference = TorchGenerator(seed, torch.device("cpu"))
        compiled = CompiledGenerator(seed)
        for size in _SIZES:
            expected, drawn = torch.empty(2, size, dtype=dtype)
            reference.fill(expected)
            compiled.fill(drawn)
            bits = _BITS[dtype.itemsize]
            if not torch.equal(drawn.view(bits), expected.view(bits)):
                return False
    return True


@cache
def numbers_drawn(device: torch.device) -> dict[str, str]:
    """Version of torch, and a checksum of what it draws on a device: other versions or processors
    may draw other numbers.
    """
    checksum = 0
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        drawn = torch.empty(1 << 16, dtype=dtype, device=device)
        TorchGenerator(0, device).fill(drawn)
        checksum = zlib.crc32(drawn.view(bits).cpu().numpy().tobytes(), checksum)
    return {"torch": torch.__version__, "crc32": f"{checksum:08x}"}


_RANGE = 32768  # elements that counter-based noise draws at a time: a multiple of Philox's groups


class PhiloxNoise:
    """z by Philox4x32-10: every number is a function of seed, parameter and element alone.

    Trade-off: the numbers are not MeZO's, but as good, and so cheap that they are drawn again at
    each use instead of being kept; any thread and any device can draw any range.
    ``kernels/reference.py`` documents the order of the numbers.

    Args:
        distribution: Distribution of the numbers.
    """

    def __init__(self, distribution: Distribution = Distribution.GAUSSIAN) -> None:
        self.distribution = distribution
        # by number of elements: parameters of equal size share a list
        self._chunks: dict[int, list[tuple[int, int]]] = {}

    @property
    def name(self) -> str:
        """Name of the generator, the same on every machine."""
        return f"philox4x32-10-{self.distribution.value}"

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Divide a parameter into cache-sized chunks."""
        numel = parameter.numel
        if numel not in self._chunks:
            self._chunks[numel] = [
                (start, min(start + _RANGE, numel)) for start in range(0, max(numel, 1), _RANGE)
            ]
        return self._chunks[numel]

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write a range of a parameter's z."""
        fill(out, self.distribution, seed, parameter.index, start)

    def retain(self, seeds: Collection[int]) -> None:
        """Do nothing: nothing is kept."""


# Note: Drawing in chunks. torch's CPU `normal_` of 16 or more elements fills the tensor with
# uniforms and transforms them in groups of 16, the last of which overlaps the one before; so chunks
# whose lengths are multiples of 16, the last at least 16, give the numbers of one call. Below 16
# elements it draws one by one and keeps a spare value in the generator's state.
# elements: 1 MiB in fp32, which a core's caches hold; passing it to a thread costs tens of
# microseconds
CHUNK = 1 << 18
MEMORY = 256 << 20  # bytes by default, enough for 20,000 updates or more
# measured bytes of a CPU generator, torch's or ours; 2496 are the Mersenne twister's
GENERATOR = 2750
STREAM = 700  # measured further bytes for each seed


class _Stream:
    """One seed's generator, its position, and copies of it to return to."""

    __slots__ = ("_start", "copies", "generator", "lock", "position", "run")

    def __init__(self, start: Callable[[], Generator]) -> None:
        self._start = start
        self.generator = start()
        # parameter in drawing order, and element, that the generator draws next
        self.position = (0, 0)
        self.copies: dict[int, Generator] = {}  # parameter -> the generator before it
        # parameter of the copy at the start of the segment being drawn; others are for jumps
        self.run: int | None = None
        self.lock = threading.Lock()

    def keep(self, parameter: int) -> None:
        """Keep a copy of the generator, which is at the start of a parameter."""
        if parameter not in self.copies:
            self.copies[parameter] = self.generator.copy()

    def begin_run(self, parameter: int) -> None:
        """Keep a copy until the next segment begins."""
        if self.run != parameter:
            if self.run is not None:
                del self.copies[self.run]
            self.run = parameter
            self.keep(parameter)

    def nearest(self, parameter: int) -> int:
        """The last parameter, up to a given one, to whose start the generator can return."""
        return max((kept for kept in self.copies if kept <= parameter), default=0)

    def return_to(self, parameter: int) -> None:
        """Return to the start of a parameter that has a copy, or of the first one."""
        if parameter in self.copies:
            self.generator = self.copies[parameter].copy()
        else:
            self.generator = self._start()
        self.position = (parameter, 0)


class SequentialNoise:
    """MeZO's z: ``torch.normal`` from a generator that is seeded again for each pass over the
    parameters.

    No global generator is touched.

    Trade-off: the numbers are MeZO's, bit for bit, but a sequential generator has no random access.
    For each seed the generator is kept in its present state, with copies wherever a sweep jumps
    because segments are visited in another order than they were registered in, and one at the start
    of the segment being visited, which may be drawn again (the RNG state manager of ZO2, arXiv
    2503.12668, section 5.1). A replay of many updates needs one for each seed, so their memory is
    limited: generators beyond the limit start again at every segment.

    Args:
        layouts: Segments in visiting order. Their parameters' indices are the drawing order.
        device: Device of the generator. CPU and CUDA generators give different numbers for one
            seed.
        memory: Bytes for generators, without those of the seeds that are being drawn from.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        device: torch.device | str = "cpu",
        *,
        memory: int = MEMORY,
    ) -> None:
        self._device = torch.device(device)
        owned = [[spec for spec in layout.parameters if not spec.frozen] for layout in layouts]
        borrowed = [[spec for spec in layout.borrowed if not spec.frozen] for layout in layouts]
        self._parameters = sorted(
            (spec for specs in owned for spec in specs), key=lambda spec: spec.index
        )
        self._dtypes = {spec.dtype for spec in self._parameters}
        self._places = {spec.index: place for place, spec in enumerate(self._parameters)}
        used = [[self._places[spec.index] for spec in specs] for specs in map(add, owned, borrowed)]
        visited = [place for places in used for place in sorted(places)]
        self._jumps = {
            after for before, after in pairwise([-1, *visited]) if after != before + 1
        } - {0}
        starts = {min(self._places[spec.index] for spec in specs) for specs in owned if specs}
        self._starts = starts - self._jumps - {0}
        copies = 1 + len(self._jumps)
        self._most = memory // (STREAM + GENERATOR * (1 + copies))
        # Kept by element count: a list for each parameter of OPT-175B would take half a GB.
        self._chunks: dict[int, list[tuple[int, int]]] = {}
        # streams of the first seeds, as many as memory allows, until ``retain``
        self._streams: dict[int, _Stream] = {}
        # recently used streams of other seeds, the latest at the end
        self._recent: dict[int, _Stream] = {}
        self._streams_lock = threading.Lock()

    @property
    def name(self) -> str:
        """Name of the device's torch generator in registration order."""
        return f"torch-{self._device.type}-sequential"

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Divide a parameter into cache-sized chunks; on other devices than the CPU it is one
        chunk.
        """
        numel = parameter.numel
        if numel not in self._chunks:
            starts = (
                list(range(0, max(numel - 15, 1), CHUNK)) if self._device.type == "cpu" else [0]
            )
            self._chunks[numel] = list(zip(starts, [*starts[1:], numel], strict=True))
        return self._chunks[numel]

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write one of the ``chunks`` of a parameter's z."""
        stream = self._stream(seed)
        place = self._places[parameter.index]
        with stream.lock:
            if stream.position != (place, start):
                self._seek(stream, place, start)
            if start == 0 and place in self._starts:
                stream.begin_run(place)
            stream.generator.fill(out)
            self._advance(stream, place, start + out.numel())

    def retain(self, seeds: Collection[int]) -> None:
        """Forget the generators of all other seeds."""
        with self._streams_lock:
            self._streams = {
                seed: stream for seed, stream in self._streams.items() if seed in seeds
            }
            self._recent.clear()

    def _stream(self, seed: int) -> _Stream:
        with self._streams_lock:
            if seed in self._streams:
                return self._streams[seed]
            stream = self._recent.pop(seed, None) or _Stream(
                partial(seeded, seed, self._device, self._dtypes)
            )
            if len(self._streams) < self._most:
                self._streams[seed] = stream
                return stream
            self._recent[seed] = stream
            if len(self._recent) > 2 * SEEDS_IN_TURN:
                # of one thread's chunk, and of other threads meanwhile
                del self._recent[next(iter(self._recent))]
            return stream

    def _advance(self, stream: _Stream, place: int, element: int) -> None:
        if element < self._parameters[place].numel:
            stream.position = (place, element)
            return
        stream.position = (place + 1, 0)
        if place + 1 in self._jumps:
            stream.keep(place + 1)

    def _seek(self, stream: _Stream, place: int, start: int) -> None:
        """Move the generator to an element: from its present position if that is nearest, else from
        a copy.
        """
        nearest = stream.nearest(place)
        if not (nearest, 0) <= stream.position <= (place, start):
            stream.return_to(nearest)
        while stream.position < (place, start):
            current, element = stream.position
            spec = self._parameters[current]
            stop = start if current == place else spec.numel
            last = min(
                (last for first, last in self.chunks(spec) if first <= element < last),
                default=spec.numel,
            )
            stream.generator.skip(min(last, stop) - element, spec.dtype)
            self._advance(stream, current, min(last, stop))


def drawn_bytes(layouts: Sequence[BlockLayout], noise: NoiseGenerator) -> int:
    """Bytes of the longest chunk of z."""
    specs = {
        (spec.numel, spec.dtype): spec
        for layout in layouts
        for spec in layout.parameters
        if not spec.frozen
    }
    longest = (
        max(stop - start for start, stop in noise.chunks(spec)) * spec.dtype.itemsize
        for spec in specs.values()
    )
    return max(longest, default=0)


def noise_bytes(layouts: Sequence[BlockLayout]) -> int:
    """Bytes of a noise buffer for these segments, in which the noise of tied weights stays from
    visit to visit.
    """
    tied, others = divide_tied(layouts)
    return packed_bytes(tied) + max(packed_bytes(specs) for specs in others)


def choose_noise(
    name: str | None, layouts: Sequence[BlockLayout], device: torch.device, *, memory: int = MEMORY
) -> NoiseGenerator:
    """Return the generator of a name; by default MeZO's numbers as this device draws them.

    Args:
        name: Name of a generator of this package (``NoiseGenerator.name``), or None.
        layouts: Segments in visiting order.
        device: The device that computes.
        memory: Bytes for the generators that sequential noise keeps.

    Raises:
        OptionError: for a name that no generator of this device has.
    """
    generators: list[NoiseGenerator] = [
        SequentialNoise(layouts, device, memory=memory),
        *map(PhiloxNoise, Distribution),
    ]
    for noise in generators:
        if name in (None, noise.name):
            return noise
    raise OptionError(
        "noise",
        found=repr(name),
        expected=f"one of {', '.join(noise.name for noise in generators)}",
        remedy="use the device that the run was made on, or pass a custom generator as noise=",
    )

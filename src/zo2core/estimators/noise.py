"""Noise generators, which draw z: by a counter, or sequentially as torch draws MeZO's numbers.

Sequential generators are torch's own, and a compiled one that gives the same bits on the CPU. torch
promises no particular numbers: they have changed between versions, and depend on the processor. So
the compiled generator is used only where it has just been compared with this torch on this machine.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from zo2core.errors import OptionError
from zo2core.kernels import dispatch, fill, native
from zo2core.protocols import SEEDS_IN_TURN, NoiseGenerator
from zo2core.types import (
    BlockLayout,
    Distribution,
    ParameterSpec,
    divide_tied,
    packed_bytes,
    trained,
)

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

    ``compiled_agrees`` says whether it may be used.

    Args:
        seed: Seed of 64 bits.
    """

    __slots__ = ("_library", "_state")

    def __init__(self, seed: int) -> None:
        self._library = native.functions()
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


def make_generator(seed: int, device: torch.device, dtypes: Collection[torch.dtype]) -> Generator:
    """Make the fastest generator that draws a device's numbers in these dtypes."""
    if device.type == "cpu" and all(compiled_agrees(dtype) for dtype in dtypes):
        return CompiledGenerator(seed)
    return TorchGenerator(seed, device)


@cache
def compiled_agrees(dtype: torch.dtype) -> bool:
    """Whether the compiled generator is installed and gives torch's bits in a dtype on this
    machine. Compared once.
    """
    if native.library() is None or dtype not in dispatch.DTYPES:
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
def drawing_fingerprint(device: torch.device) -> dict[str, str]:
    """Version of torch, and a checksum of what it draws on a device: other versions or processors
    may draw other numbers.
    """
    checksum = 0
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16)):
        drawn = torch.empty(1 << 16, dtype=dtype, device=device)
        TorchGenerator(0, device).fill(drawn)
        checksum = zlib.crc32(drawn.view(bits).cpu().numpy().tobytes(), checksum)
    return {"torch": torch.__version__, "crc32": f"{checksum:08x}"}


_DRAWN_AT_ONCE = (
    32768  # elements that counter-based noise draws at a time: a multiple of Philox's groups
)


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
                (start, min(start + _DRAWN_AT_ONCE, numel))
                for start in range(0, max(numel, 1), _DRAWN_AT_ONCE)
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


class _DirectionState:
    """One seed's generator, its position, and copies of it to return to."""

    __slots__ = ("_start", "copies", "generator", "lock", "position", "run")

    def __init__(self, start: Callable[[], Generator]) -> None:
        self._start = start
        self.generator = start()
        self.position = 0  # element, among those of all parameters, that is drawn next
        self.copies: dict[int, Generator] = {}  # position -> the generator at it
        # position of the copy at the start of the segment being drawn; others are for jumps
        self.run: int | None = None
        self.lock = threading.Lock()

    def keep(self) -> None:
        """Keep a copy of the generator at its position."""
        if self.position not in self.copies:
            self.copies[self.position] = self.generator.copy()

    def begin_run(self) -> None:
        """Keep a copy until the next segment begins."""
        if self.run != self.position:
            if self.run is not None:
                del self.copies[self.run]
            self.run = self.position
            self.keep()

    def return_before(self, position: int) -> None:
        """Return to the last position up to this one that has a copy, or to the first element,
        unless the generator is nearer.
        """
        nearest = max((start for start in self.copies if start <= position), default=0)
        if nearest <= self.position <= position:
            return
        self.generator = self.copies[nearest].copy() if nearest in self.copies else self._start()
        self.position = nearest


class _DrawingOrder:
    """Where the trained parameters' elements are in the order in which they are drawn."""

    def __init__(self, layouts: Sequence[BlockLayout]) -> None:
        self.parameters = sorted(trained(layouts), key=lambda spec: spec.index)
        self.positions = [0, *accumulate(spec.numel for spec in self.parameters)]
        self._places = {spec.index: place for place, spec in enumerate(self.parameters)}
        # of parameters, by index
        self.position_of = {index: self.positions[place] for index, place in self._places.items()}
        # to which a sweep jumps, because segments are visited in another order
        self.jumps = self._jumps(layouts)
        first_places = [
            min(places) for layout in layouts if (places := self._places_of(layout.parameters))
        ]
        # at which segments start, without those of jumps
        self.starts = {self.positions[place] for place in first_places} - self.jumps - {0}

    def _places_of(self, specs: Iterable[ParameterSpec]) -> list[int]:
        """Places of the trained ones of these parameters, ascending."""
        return sorted(self._places[spec.index] for spec in specs if not spec.frozen)

    def _jumps(self, layouts: Sequence[BlockLayout]) -> set[int]:
        visited = [place for layout in layouts for place in self._places_of(layout.used)]
        return {
            self.positions[current]
            for previous, current in pairwise([-1, *visited])
            if current not in (0, previous + 1)
        }

    def parameter_at(self, position: int) -> tuple[ParameterSpec, int]:
        """The parameter that has this element, and the position of its first one."""
        place = bisect_right(self.positions, position) - 1
        return self.parameters[place], self.positions[place]


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
        self._order = _DrawingOrder(layouts)
        self._dtypes = {spec.dtype for spec in self._order.parameters}
        copies = 1 + len(self._order.jumps)
        self._most = memory // (STREAM + GENERATOR * (1 + copies))
        # Kept by element count: a list for each parameter of OPT-175B would take half a GB.
        self._chunks: dict[int, list[tuple[int, int]]] = {}
        # streams of the first seeds, as many as memory allows, until ``retain``
        self._streams: dict[int, _DirectionState] = {}
        # recently used streams of other seeds, the latest at the end
        self._recent: dict[int, _DirectionState] = {}
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
        stream = self._streams.get(seed) or self._stream(seed)
        order = self._order
        position = order.position_of[parameter.index] + start
        with stream.lock:
            if stream.position != position:
                self._seek(stream, position)
            if position in order.starts:
                stream.begin_run()
            stream.generator.fill(out)
            stream.position = position + out.numel()
            if stream.position in order.jumps:
                stream.keep()

    def retain(self, seeds: Collection[int]) -> None:
        """Forget the generators of all other seeds."""
        with self._streams_lock:
            self._streams = {
                seed: stream for seed, stream in self._streams.items() if seed in seeds
            }
            self._recent.clear()

    def _stream(self, seed: int) -> _DirectionState:
        with self._streams_lock:
            if seed in self._streams:
                return self._streams[seed]
            stream = self._recent.pop(seed, None) or _DirectionState(
                partial(make_generator, seed, self._device, self._dtypes)
            )
            if len(self._streams) < self._most:
                self._streams[seed] = stream
                return stream
            self._recent[seed] = stream
            if len(self._recent) > 2 * SEEDS_IN_TURN:
                # of one thread's chunk, and of other threads meanwhile
                del self._recent[next(iter(self._recent))]
            return stream

    def _seek(self, stream: _DirectionState, position: int) -> None:
        """Move the generator to an element: from its present position if that is nearest, else from
        a copy.
        """
        stream.return_before(position)
        while stream.position < position:
            parameter, first = self._order.parameter_at(stream.position)
            chunk_end = next(
                first + stop for _, stop in self.chunks(parameter) if first + stop > stream.position
            )
            end = min(chunk_end, position)
            stream.generator.skip(end - stream.position, parameter.dtype)
            stream.position = end
            if end in self._order.jumps:
                stream.keep()


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

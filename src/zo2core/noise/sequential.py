"""MeZO's noise: torch's generator, drawn parameter after parameter in registration order.

Trade-off: the numbers are MeZO's own, bit for bit, but a sequential generator has no random access. One is kept for each
seed, where it stands, and copies of it wherever a sweep has to jump, because segments are visited in another order than they
were registered in, and at the start of the segment being visited, which may be drawn again (the RNG state manager of ZO2,
arXiv 2503.12668, section 5.1). A replay of many updates multiplies that by their number, so it is bounded: generators that
are beyond the bound start over at every segment.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import pairwise
from operator import add

import torch

from zo2core.kernels.generators import Generator, seeded
from zo2core.protocols import SEEDS_IN_TURN
from zo2core.types import BlockLayout, ParameterSpec

# Note: Drawing in chunks. torch's CPU `normal_` of 16 or more elements fills the tensor with uniforms and transforms them
# in groups of 16, the last group overlapping; so chunks that are multiples of 16 long, the last at least 16, give the
# numbers of one call. Under 16 elements it draws one by one and keeps a spare value in the generator's state.
CHUNK = 1 << 18  # elements: in fp32 a MiB, in reach of a core's caches; handing a chunk over costs tens of microseconds
MEMORY = 256 << 20  # bytes, by default: of 20,000 updates or more
GENERATOR = 2750  # bytes of one on the CPU, of which 2496 are the Mersenne twister's; measured, torch's and ours
STREAM = 700  # bytes of what is around the generators of a seed; measured


class _Stream:
    """One seed's generator, where it stands, and copies of it to return to."""

    __slots__ = ("_begin", "copies", "generator", "lock", "position", "run")

    def __init__(self, begin: Callable[[], Generator]) -> None:
        self._begin = begin
        self.generator = begin()
        self.position = (0, 0)  # place in drawing order, element: what the generator would draw next
        self.copies: dict[int, Generator] = {}  # place -> the generator as it was before that parameter
        self.run: int | None = None  # place of the only copy not kept for a jump: where the segment being drawn begins
        self.lock = threading.Lock()

    def keep(self, place: int) -> None:
        """Keep a copy of the generator, which stands at a place."""
        if place not in self.copies:
            self.copies[place] = self.generator.copy()

    def begin_run(self, place: int) -> None:
        """Keep a copy until the next run begins."""
        if self.run != place:
            if self.run is not None:
                del self.copies[self.run]
            self.run = place
            self.keep(place)

    def nearest(self, place: int) -> int:
        """The last place up to a given one that the generator can return to."""
        return max((kept for kept in self.copies if kept <= place), default=0)

    def return_to(self, place: int) -> None:
        """Stand at a place there is a copy for, or at the beginning."""
        if place in self.copies:
            self.generator = self.copies[place].copy()
        else:
            self.generator = self._begin()
        self.position = (place, 0)


class SequentialNoise:
    """z as MeZO draws it: ``torch.normal`` from a generator seeded anew for each pass over the parameters.

    No global generator is touched.

    Args:
        layouts: Segments in visiting order. Their parameters' indices are the drawing order.
        device: Whose generator. CPU and CUDA generators give different numbers for one seed.
        memory: Bytes that generators may take, but for those of the seeds that are drawn from in turn.
    """

    def __init__(self, layouts: Sequence[BlockLayout], device: torch.device | str = "cpu", *, memory: int = MEMORY) -> None:
        self._device = torch.device(device)
        owned = [[spec for spec in layout.parameters if not spec.frozen] for layout in layouts]
        borrowed = [[spec for spec in layout.borrowed if not spec.frozen] for layout in layouts]
        self._parameters = sorted((spec for specs in owned for spec in specs), key=lambda spec: spec.index)
        self._dtypes = {spec.dtype for spec in self._parameters}
        self._places = {spec.index: place for place, spec in enumerate(self._parameters)}
        used = [[self._places[spec.index] for spec in specs] for specs in map(add, owned, borrowed)]
        visited = [place for places in used for place in sorted(places)]
        self._jumps = {after for before, after in pairwise([-1, *visited]) if after != before + 1} - {0}
        starts = {min(self._places[spec.index] for spec in specs) for specs in owned if specs}
        self._starts = starts - self._jumps - {0}
        copies = 1 + len(self._jumps)
        self._most = memory // (STREAM + GENERATOR * (1 + copies))
        # Kept by element count: a list for each parameter of OPT-175B would take half a GB.
        self._chunks: dict[int, list[tuple[int, int]]] = {}
        self._streams: dict[int, _Stream] = {}  # streams of the first seeds, as many as memory allows, until ``retain``
        self._passing: dict[int, _Stream] = {}  # streams of other seeds, used last, the latest at the end
        self._streams_lock = threading.Lock()

    @property
    def name(self) -> str:
        """What z is: the device's torch generator, in registration order."""
        return f"torch-{self._device.type}-sequential"

    def chunks(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Cut a parameter into cache-sized chunks; on other devices than the CPU it is drawn in one."""
        numel = parameter.numel
        if numel not in self._chunks:
            starts = list(range(0, max(numel - 15, 1), CHUNK)) if self._device.type == "cpu" else [0]
            self._chunks[numel] = list(zip(starts, [*starts[1:], numel], strict=True))
        return self._chunks[numel]

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write a chunk of one parameter's z. See the contract for the chunks that are allowed."""
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
            self._streams = {seed: stream for seed, stream in self._streams.items() if seed in seeds}
            self._passing.clear()

    def _stream(self, seed: int) -> _Stream:
        with self._streams_lock:
            if seed in self._streams:
                return self._streams[seed]
            stream = self._passing.pop(seed, None) or _Stream(partial(seeded, seed, self._device, self._dtypes))
            if len(self._streams) < self._most:
                self._streams[seed] = stream
                return stream
            self._passing[seed] = stream
            if len(self._passing) > 2 * SEEDS_IN_TURN:  # of one turn, and of what other threads draw in the meantime
                del self._passing[next(iter(self._passing))]
            return stream

    def _advance(self, stream: _Stream, place: int, element: int) -> None:
        if element < self._parameters[place].numel:
            stream.position = (place, element)
            return
        stream.position = (place + 1, 0)
        if place + 1 in self._jumps:
            stream.keep(place + 1)

    def _seek(self, stream: _Stream, place: int, start: int) -> None:
        """Bring the generator to an element: from where it stands if that is nearest, else from a copy of it."""
        nearest = stream.nearest(place)
        if not (nearest, 0) <= stream.position <= (place, start):
            stream.return_to(nearest)
        while stream.position < (place, start):
            at, element = stream.position
            spec = self._parameters[at]
            stop = start if at == place else spec.numel
            last = min((last for first, last in self.chunks(spec) if first <= element < last), default=spec.numel)
            stream.generator.skip(min(last, stop) - element, spec.dtype)
            self._advance(stream, at, min(last, stop))

"""MeZO's noise: torch's generator, drawn parameter after parameter in registration order.

Trade-off: the numbers are MeZO's own, bit for bit, but a sequential generator has no random access. Its state is kept
wherever a sweep has to jump, because segments are visited in another order than they were registered in, and at the start
of the segment being visited, which may be drawn again (the RNG state manager of ZO2, arXiv 2503.12668, section 5.1).
States of all segments would take 5 KB each for every seed, which a replay of many updates multiplies.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from itertools import pairwise

import torch

from zo2core.types import BlockLayout, ParameterSpec

# Note: Drawing in pieces. torch's CPU `normal_` of 16 or more elements fills the tensor with uniforms and transforms them
# in groups of 16, the last group overlapping; so pieces that are multiples of 16 long, the last at least 16, give the
# numbers of one call. Under 16 elements it draws one by one and keeps a spare value in the generator's state.
PIECE = 32768  # elements: in fp32 an eighth of a MiB, at home in a core's cache; longer operations fork threads


class _Stream:
    """One seed's generator, where it stands, and states to return to."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device)
        self.generator.manual_seed(seed)
        self.position = (0, 0)  # place in drawing order, element: what the generator would draw next
        self.states = {0: self.generator.get_state()}  # place that a sweep jumps to -> state before it
        self.runs = dict(self.states)  # the same for the run being drawn and the one before it
        self.lock = threading.Lock()


class SequentialNoise:
    """z as MeZO draws it: ``torch.normal`` from a generator seeded anew for each pass over the parameters.

    No global generator is touched.

    Args:
        layouts: Segments in visiting order. Their parameters' indices are the drawing order.
        device: Whose generator. CPU and CUDA generators give different numbers for one seed.
    """

    def __init__(self, layouts: Sequence[BlockLayout], device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._parameters = sorted((spec for layout in layouts for spec in layout.parameters), key=lambda spec: spec.index)
        self._places = {spec.index: place for place, spec in enumerate(self._parameters)}
        visited = [
            self._places[spec.index] for layout in layouts for spec in sorted(layout.parameters, key=lambda s: s.index)
        ]
        # A run is what one segment draws without a jump.
        self._jumps = {after for before, after in pairwise([-1, *visited]) if after != before + 1}
        starts = {min(places) for layout in layouts if (places := [self._places[spec.index] for spec in layout.parameters])}
        self._starts = starts | self._jumps
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # elements -> pieces; for each parameter of OPT-175B: half a GB
        self._streams: dict[int, _Stream] = {}
        self._streams_lock = threading.Lock()

    @property
    def name(self) -> str:
        """What z is: the device's torch generator, in registration order."""
        return f"torch-{self._device.type}-sequential"

    def pieces(self, parameter: ParameterSpec) -> list[tuple[int, int]]:
        """Cut a parameter into cache-sized pieces; on other devices than the CPU it is drawn in one."""
        numel = parameter.numel
        if numel not in self._pieces:
            starts = list(range(0, max(numel - 15, 1), PIECE)) if self._device.type == "cpu" else [0]
            self._pieces[numel] = list(zip(starts, [*starts[1:], numel], strict=True))
        return self._pieces[numel]

    def fill(self, out: torch.Tensor, seed: int, parameter: ParameterSpec, start: int = 0) -> None:
        """Write a piece of one parameter's z. See the contract for the pieces that are allowed."""
        with self._streams_lock:
            stream = self._streams.get(seed)
            if stream is None:
                stream = self._streams[seed] = _Stream(seed, self._device)
        place = self._places[parameter.index]
        with stream.lock:
            if stream.position != (place, start):
                self._seek(stream, place, start)
            out.normal_(generator=stream.generator)
            self._advance(stream, place, start + out.numel())

    def retain(self, seeds: Collection[int]) -> None:
        """Forget the generators of all other seeds."""
        with self._streams_lock:
            self._streams = {seed: stream for seed, stream in self._streams.items() if seed in seeds}

    def _advance(self, stream: _Stream, place: int, element: int) -> None:
        if element < self._parameters[place].numel:
            stream.position = (place, element)
            return
        following = place + 1
        stream.position = (following, 0)
        if following in self._jumps:
            if following not in stream.states:
                stream.states[following] = stream.generator.get_state()
        elif following in self._starts:
            stream.runs[following] = stream.generator.get_state()
            while len(stream.runs) > 2:
                del stream.runs[next(iter(stream.runs))]

    def _seek(self, stream: _Stream, place: int, start: int) -> None:
        """Bring the generator to an element: from where it stands if that is nearest, else from a kept state."""
        states = {**stream.states, **stream.runs}
        nearest = max(kept for kept in states if kept <= place)
        if not (nearest, 0) <= stream.position <= (place, start):
            stream.generator.set_state(states[nearest])
            stream.position = (nearest, 0)
        while stream.position < (place, start):
            at, element = stream.position
            spec = self._parameters[at]
            stop = start if at == place else spec.numel
            last = min((last for first, last in self.pieces(spec) if first <= element < last), default=spec.numel)
            scratch = torch.empty(min(last, stop) - element, dtype=spec.dtype, device=self._device)
            scratch.normal_(generator=stream.generator)
            self._advance(stream, at, min(last, stop))

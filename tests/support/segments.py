"""Segments of numbers, weights that count how often they are read, and a source that checks the
bytes it is given back.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from zo2core import BlockLayout, ParameterSpec, SegmentKind, SequentialNoise
from zo2core.checkpoint.shards import SafetensorsReader, parse_header
from zo2core.protocols import NoiseGenerator, Store
from zo2core.types import Bucket


def segments(sizes: Sequence[int], dtype: torch.dtype = torch.float32) -> tuple[BlockLayout, ...]:
    """Embedding, blocks and head of one parameter of such a size each."""
    kinds = [SegmentKind.EMBEDDING, *[SegmentKind.BLOCK] * (len(sizes) - 2), SegmentKind.HEAD]
    specs = [ParameterSpec(f"p{i}", (size,), dtype, i, decays=True) for i, size in enumerate(sizes)]
    return tuple(
        BlockLayout(spec.name, kind, (spec,)) for spec, kind in zip(specs, kinds, strict=True)
    )


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"p{i}": torch.arange(n, dtype=torch.float32) + 100 * i
        for i, n in enumerate([5, 17, 1, 64, 3])
    }


def checkpoint(folder: Path) -> tuple[SafetensorsReader, tuple[BlockLayout, ...]]:
    values = tensors()
    save_file(values, folder / "model.safetensors")
    specs = [
        ParameterSpec(name, tuple(v.shape), v.dtype, i, True)
        for i, (name, v) in enumerate(values.items())
    ]
    layouts = (
        BlockLayout("embedding", SegmentKind.EMBEDDING, (specs[0],)),
        BlockLayout("block 0", SegmentKind.BLOCK, (specs[1], specs[2])),
        BlockLayout("block 1", SegmentKind.BLOCK, (specs[3],)),
        BlockLayout("head", SegmentKind.HEAD, (specs[4],)),
    )
    return SafetensorsReader(parse_header(folder / "model.safetensors")), layouts


BLOCKS = 6


def layouts(blocks: int = BLOCKS) -> tuple[BlockLayout, ...]:
    return segments(range(1000, 1002 + blocks))


class CountingWeights:
    """A base that counts its reads, and can hold them up; parameter i is full of i."""

    fingerprint = "counted"

    def __init__(self) -> None:
        self.reads: Counter[int] = Counter()
        self.go = threading.Event()
        self.go.set()

    def page_offset(self, spec: ParameterSpec) -> int | None:
        return None

    def itemsize(self, parameter: str) -> int:
        return 4

    def origin(self, parameter: str) -> str:
        return "counted"

    def read_into(self, parameter: str, out: torch.Tensor, start: int = 0) -> None:
        assert self.go.wait(10)
        out.fill_(int(parameter[1:]))
        self.reads[int(parameter[1:])] += 1

    def close(self) -> None:
        pass


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def z_of(noise: NoiseGenerator, spec: ParameterSpec, seed: int) -> torch.Tensor:
    out = torch.empty(spec.numel, dtype=spec.dtype)
    for start, stop in noise.chunks(spec):
        noise.fill(out[start:stop], seed, spec, start)
    return out


def assert_torch_draws(
    size: int, dtypes: Sequence[torch.dtype] = DTYPES, capability: str | None = None
) -> None:
    """Sequential noise is what torch draws; with a processor's capability, on such a one."""
    assert capability in (None, torch.backends.cpu.get_cpu_capability())
    for dtype in dtypes:
        spec = ParameterSpec("p", (size,), dtype, 0, True)
        found = z_of(SequentialNoise([BlockLayout("s", SegmentKind.BLOCK, (spec,))]), spec, 9)
        expected = torch.normal(
            0.0, 1.0, (size,), dtype=dtype, generator=torch.Generator().manual_seed(9)
        )
        assert torch.equal(found, expected), dtype


NUMBERS = 64  # a segment
SLOW = 0.02  # seconds


class CheckingSource:
    """Segments whose every number is 1000 * segment + version; whoever gives back other bytes is
    found out.
    """

    def __init__(self, capacity: int = BLOCKS) -> None:
        self.layouts = segments([NUMBERS] * (BLOCKS + 2))
        self.capacity = capacity
        self.acquired: set[int] = set()
        self.write_back_every = None
        self.versions = [0] * len(self.layouts)
        self.memory = [torch.empty(layout.nbytes, dtype=torch.uint8) for layout in self.layouts]
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def expected(self, index: int, version: int) -> float:
        return 1000.0 * index + version

    def prefetch(self, order: Sequence[int]) -> int:
        return len(order)

    def acquire(self, index: int) -> Bucket:
        layout, memory = self.layouts[index], self.memory[index]
        if index in self.acquired:
            self.errors.append(f"segment {index} was acquired again before it was released")
        self.acquired.add(index)
        views = layout.views(memory)
        views[0].fill_(self.expected(index, self.versions[index]))
        return Bucket(index, memory, views, self.versions[index])

    def release(self, bucket: Bucket, version: int | None) -> None:
        self.acquired.discard(bucket.segment)
        if version is None:  # lost: what comes next is the version from before
            return
        if not bool((bucket.views[0] == self.expected(bucket.segment, version)).all()):
            self.errors.append(
                f"segment {bucket.segment} came back with other bytes than version {version}'s"
            )
        self.versions[bucket.segment] = version
        bucket.data.fill_(255)  # from here on the memory is the source's

    def close(self) -> None:
        pass


def nothing() -> float:
    return 0.0


def slow() -> float:
    return SLOW


class TwoStepVisitor:
    """Commits what it replayed, and evaluates then, as a zeroth-order visit does."""

    def visit(self, index: int, store: Store, version: int, commit: Callable[[int], None]) -> None:
        commit(self.replay(index, store, version))
        self.evaluate(index, store)

    def replay(self, index: int, store: Store, version: int) -> int:
        raise NotImplementedError

    def evaluate(self, index: int, store: Store) -> None:
        raise NotImplementedError

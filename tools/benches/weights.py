"""What is done to weights: the speed of the kernels, and what becomes of small updates."""

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Annotated, Any

import torch
from measuring import spread, timed

from zo2adapters.models.checkpoint import DTYPES
from zo2core import CudaDevice, Distribution, LowRankPerturbation
from zo2core.encodings.decoding import decode
from zo2core.encodings.forms import GGUF_BLOCKS, GGUFRows, NF4Blocks
from zo2core.estimators.factors import FactorStore
from zo2core.estimators.perturbation import Factors
from zo2core.kernels import Draw, dispatch, fill, native, reference
from zo2core.types import Descend, Evaluation, ParameterSpec, Perturb, Program, Update

MATRIX = (4096, 11008)  # of Llama-7B's largest matrix
# elements of noise that are drawn, and of weights that are processed, at a time
CACHED, PORTION = 1 << 15, 1 << 18
PERTURB = Program((1,), (), then=Perturb(0, 1.0, 1e-3))
MEZO: tuple[Perturb | Descend, ...] = tuple(Perturb(0, shift, 1e-3) for shift in (1.0, -2.0, 1.0))
REPLAY = Program(
    (1, 2), (*MEZO, Descend(0, 0.5, lr=1e-6, weight_decay=0.0)), then=Perturb(1, 1.0, 1e-3)
)
ZO_EPS = 1e-3
GAUSSIAN = Distribution.GAUSSIAN
SCALE = 0.02  # standard deviation of synthetic weights, as in a newly initialised model

Work = Callable[[int, int], object]  # processes elements from a start to a stop


def kernels(
    *,
    device: Annotated[str, ["cpu", "cuda"]] = "cpu",
    dtypes: Annotated[Sequence[str], list(DTYPES)] = tuple(DTYPES),
    elements: Annotated[int, "weights"] = 1 << 26,
    rounds: int = 5,
    gguf: Annotated[bool, "measure decoding"] = False,
) -> dict[str, Any]:
    """Measure kernels on weights that no cache holds, in bytes a second, compared with a plain
    copy; and the bus of a GPU.

        python tools/bench.py kernels
        python tools/bench.py kernels --dtypes bfloat16 --device cuda --elements 536870912
        python tools/bench.py kernels --gguf

    Bytes are those that a kernel has to move: weights read and written and, if there is one, the
    perturbed copy written. *MeZO in torch* is the perturbation of MeZO's own loop: z is drawn into
    a new tensor, then multiplied and added. On the CPU each runs on one thread and on two that
    share the work; drawing noise fills a buffer in the cache. ``--gguf`` measures decoding of
    GGUF's blocks and of nf4 instead, in bytes of decoded weights a second.
    """
    torch.set_num_threads(1)  # this program starts its own threads
    measured: dict[str, Any] = {"compiled kernels": native.library() is not None}
    for name in dtypes:
        works = (
            decoding(DTYPES[name], rounds)
            if gguf
            else passes(DTYPES[name], device, elements, rounds)
        )
        measured[f"{name}: bytes a second"] = dict(works)
    if device == "cuda":
        measured["bus: bytes a second"] = bus(1 << 30, rounds)
    return measured


def rate(work: Callable[[], object], nbytes: int, rounds: int) -> dict[str, float]:
    """Bytes a second of all rounds but one, which warms up."""
    return spread([nbytes / timed(work)[0] for _ in range(1 + rounds)][1:])


def on_threads(work: Work, elements: int, portion: int, threads: int) -> None:
    """Run work on all elements, by portions that threads share."""
    starts = range(0, elements - portion + 1, portion)
    with ThreadPoolExecutor(threads) as pool:
        list(
            pool.map(
                lambda first: [work(at, at + portion) for at in starts[first::threads]],
                range(threads),
            )
        )


def passes(
    dtype: torch.dtype, device: str, elements: int, rounds: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Draw noise, and process weights once: copy, perturb into a buffer, or replay MeZO's last step
    before that.

    Mixed precision keeps float32, and rounds what it perturbs to the dtype.
    """
    on_cpu, size = device == "cpu", dtype.itemsize
    weights = torch.zeros(elements, dtype=dtype, device=device)
    in_float32 = torch.zeros(elements, device=device) if on_cpu else weights
    out = torch.empty(2 * PORTION if on_cpu else elements, dtype=dtype, device=device)
    noise = [torch.empty(CACHED, dtype=dtype) for _ in range(2)]

    def target(start: int, stop: int) -> torch.Tensor:
        # on the CPU, of the thread's own portion
        at = start // PORTION % 2 * PORTION if on_cpu else start
        return out[at : at + stop - start]

    def cached(start: int, stop: int) -> torch.Tensor:
        return noise[start // CACHED % 2] if on_cpu else target(start, stop)

    def draw(function: Callable[..., None], distribution: Distribution) -> Work:
        return lambda start, stop: function(cached(start, stop), distribution, 5, 0, start)

    def apply(source: torch.Tensor, program: Program, distribution: Distribution) -> Work:
        return lambda start, stop: dispatch.apply(
            source[start:stop], program, Draw(distribution, 0, start), out=target(start, stop)
        )

    def mezo(start: int, stop: int) -> None:
        part = weights[start:stop]
        part.add_(torch.normal(mean=0, std=1, size=part.shape, device=device, dtype=dtype) * 1e-3)

    works: dict[str, tuple[Work, int]] = {  # with bytes an element
        "copy": (lambda start, stop: target(start, stop).copy_(weights[start:stop]), 2 * size),
        "MeZO in torch, perturb": (mezo, 2 * size),
    }
    if on_cpu:
        works["draw, torch normal_"] = (lambda start, stop: cached(start, stop).normal_(), size)
    for distribution in Distribution:
        works[f"draw, {distribution.value}"] = (draw(dispatch.fill, distribution), size)
        if on_cpu:
            works[f"draw by torch operations, {distribution.value}"] = (
                draw(reference.fill, distribution),
                size,
            )
            rounded = apply(in_float32, PERTURB, distribution)
            works[f"perturb float32 and round, {distribution.value}"] = (rounded, 4 + size)
        works[f"perturb into a buffer, {distribution.value}"] = (
            apply(weights, PERTURB, distribution),
            2 * size,
        )
        works[f"replay and perturb, {distribution.value}"] = (
            apply(weights, REPLAY, distribution),
            3 * size,
        )
    for name, (work, nbytes) in works.items():
        if not on_cpu:
            yield name, rate(partial(work, 0, elements), elements * nbytes, rounds)
            continue
        portion = CACHED if name.startswith("draw") else PORTION
        count = (
            (max(elements // 64, CACHED) if "torch operations" in name else elements)
            // portion
            * portion
        )
        for threads in (1, 2):
            shared = partial(on_threads, work, count, portion, threads)
            yield f"{name}, {threads} threads", rate(shared, count * nbytes, rounds)


def bus(nbytes: int, rounds: int) -> dict[str, Any]:
    """Copies between page-locked memory and the GPU, in each direction and in both at once."""
    with closing(CudaDevice()) as device:
        pairs = [
            (device.empty(nbytes), device.host_memory(nbytes)),
            (device.host_memory(nbytes), device.empty(nbytes)),
        ]
        streams = [torch.cuda.Stream() for _ in pairs]  # type: ignore[no-untyped-call]

        def copy(*directions: int) -> None:
            for direction in directions:
                with torch.cuda.stream(streams[direction]):
                    target, source = pairs[direction]
                    target.copy_(source, non_blocking=True)

        ways = {"up": (0,), "back": (1,), "each way, both at once": (0, 1)}
        return {
            name: rate(partial(copy, *directions), nbytes, rounds)
            for name, directions in ways.items()
        }


def decoding(dtype: torch.dtype, rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """Decode a matrix of each of GGUF's types, and of nf4, on one thread and on two."""
    rows, columns = MATRIX[0], MATRIX[1] // 256 * 256
    out = torch.empty(rows * columns, dtype=dtype)
    source = torch.ones_like(out)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        yield f"copy, {threads} threads", rate(partial(out.copy_, source), out.nbytes, rounds)
        for name in [*GGUF_BLOCKS, "nf4"]:
            encoding = NF4Blocks() if name == "nf4" else GGUFRows(name)
            spec = ParameterSpec(
                "weight", (rows, columns), dtype, 0, decays=False, encoding=encoding
            )
            stored = torch.randint(0, 60, (spec.nbytes,), dtype=torch.uint8)
            yield (
                f"{name}, {threads} threads",
                rate(partial(decode, spec, stored, out), out.nbytes, rounds),
            )


class Accumulated:
    """One matrix, bfloat16, with updates of the size ``lr``, accumulated by all methods."""

    def __init__(self, base: torch.Tensor, rank: int, lr: float) -> None:
        self.spec = ParameterSpec("matrix", tuple(base.shape), base.dtype, 0, decays=True)
        self.store = FactorStore(LowRankPerturbation(rank=rank), GAUSSIAN, 0, base.device)
        self.base, self.rank, self.lr = base, rank, lr
        self.exact = torch.zeros(base.shape, dtype=torch.float64)  # sum of the updates
        self.updates: list[Update] = []
        self.in_place = {"float32": base.float(), "bfloat16 in place": base.clone()}

    def advance(self) -> torch.Tensor:
        """Bring the factors to the current version; return V of the current period, (inputs,
        rank).
        """
        self.store.begin_sweep()
        self.store.advance(self.spec, self.base.view(-1), self.updates, len(self.updates))
        factors = self.store.learned(self.spec, self.base.view(-1)).factors
        assert factors is not None, "a matrix has factors"
        return factors.right[:, -self.rank :]

    def take(self, seed: int, grad: float, z: torch.Tensor) -> None:
        """Take one update, with MeZO's arithmetic in the weights."""
        pair, number = (Evaluation(seed, 1.0), Evaluation(seed, -1.0)), len(self.updates)
        given: dict[str, Any] = {"perturb_in_place": False, "losses": (0.0, 0.0)}
        self.updates.append(Update(number, pair, (seed,), (grad,), self.lr, ZO_EPS, 0.0, **given))
        for weights in self.in_place.values():
            weights.sub_(z.to(weights.dtype, copy=True).mul_(grad).mul_(self.lr))

    def changes(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each method's name and weights after the updates, in float64."""
        yield from ((name, weights.double()) for name, weights in self.in_place.items())
        flat = self.base.view(-1)
        learned = self.store.learned(self.spec, flat)
        assert learned.factors is not None, "a matrix has factors"
        yield (
            "virtual float32",
            self.base.double() + learned.factors.left.double() @ learned.factors.right.double().t(),
        )
        formed, factors = (
            self.base.clone(),
            self.store.perturbed(self.spec, flat, self.store.perturbations([None], ZO_EPS)),
        )
        if self.store.forms(self.spec):
            self.store.form(self.spec, flat, formed)
        assert isinstance(factors, Factors), "a matrix has factors"
        yield (
            "the same, as a forward sees it",
            formed.double() + factors.left[0].double() @ factors.right.double().t(),
        )
        yield "the same, exported in bfloat16", learned.present().double()

    def report(self) -> dict[str, Any]:
        """The share of weights that changed in float32, and the error of the change relative to the
        exact change's size.
        """
        self.advance()
        base, size = self.base.double(), self.exact.norm()
        return {"in the weights": self.store.forms(self.spec)} | {
            name: {
                "moved": float((weights.float() != self.base.float()).double().mean()),
                "error": float((weights - base - self.exact).norm() / size),
            }
            for name, weights in self.changes()
        }


def accumulation(
    *,
    sizes: Annotated[Sequence[float], "sizes of updates"] = (1e-6, 1e-5, 1e-4),
    steps: Annotated[Sequence[int], "numbers of steps to measure after"] = (100, 1000, 10000),
    side: Annotated[int, "rows and columns of the matrix"] = 768,
    rank: Annotated[int, "rank of the directions"] = 8,
) -> dict[str, Any]:
    """Compare how small updates accumulate: in float32, in bfloat16 weights, or in float32 factors
    with a bfloat16 base.

        python tools/bench.py accumulation

    One matrix takes the same updates of rank-R directions as float32 weights, as bfloat16 weights
    in place, and as the factors of a low-rank run (``FactorStore``). An update's size is its root
    mean square; projected gradients are drawn from N(0, 1), as if directions were right as often as
    wrong. The change is compared with a sum in float64. Factors are read in three forms: as they
    are stored, as a forward uses them, and exported, rounded to bfloat16. What it means for a task,
    `real-task` measures.
    """
    generator, drawn_grads = torch.Generator().manual_seed(0), random.Random(0)
    base = torch.empty(side, side).normal_(0.0, SCALE, generator=generator).bfloat16()
    matrices = [Accumulated(base, rank, size) for size in sizes]
    drawn, measured = torch.empty(side * rank), dict[str, Any]()
    for step in range(max(steps)):
        if step % LowRankPerturbation(rank=rank).period == 0:
            shared = matrices[0].advance().float()  # V is the same for all
        seed, grad = drawn_grads.getrandbits(62), drawn_grads.gauss(0, 1)
        fill(drawn, GAUSSIAN, seed, 0)
        own = drawn.view(side, rank)
        z, exact = own @ shared.t(), own.double() @ shared.double().t()
        for matrix in matrices:
            matrix.take(seed, grad, z)
            matrix.exact.sub_(exact, alpha=matrix.lr * grad)
            if step + 1 in steps:
                measured[f"size {matrix.lr:g}, {step + 1} steps"] = matrix.report()
    return measured

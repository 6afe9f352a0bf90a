"""Chooses the kernel: compiled or Triton's if it is installed and supports the tensors, else the
reference. Runs kernels in several threads.

All give the same bits. The compiled kernels are the C files beside this one, through ctypes: for
CPU tensors of 32 and 16 bits. The library is built when the package is installed; where that was
not possible, everything runs on the reference.
"""

from __future__ import annotations

import ctypes
import importlib
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor

from zo2core.errors import ZO2Warning
from zo2core.kernels import reference
from zo2core.kernels.programs import Draw, table
from zo2core.types import Distribution, Perturb, Program

_REVISION = 16  # of the C files
_RUN = ctypes.CFUNCTYPE(None)
_TURNS = 8  # parts for each thread, so that all end at about the same time
_PAUSE_SOFT = 1  # omp_pause_soft of omp.h: threads end, and settings stay
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None, with one warning, if they were not built or cannot be used."""
    for suffix in reversed(EXTENSION_SUFFIXES):  # the name without a version first: setup.py
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            return _loaded(path)
    _warn_of_reference("no compiler built them when zo2core was installed")
    return None


@cache
def functions() -> ctypes.CDLL:
    """The compiled functions, where ``library`` has found them."""
    loaded = library()
    assert loaded is not None
    return loaded


def _loaded(path: Path) -> ctypes.CDLL | None:
    """Load a library; None, with a warning, if it is damaged or was built for other hardware or
    from other sources.
    """
    try:
        _require_whole(path)
        loaded = ctypes.CDLL(str(path))
        revision = loaded.zo2core_revision()
        if revision != _REVISION:
            raise OSError(
                f"{path}: revision {revision} of the kernels, where {_REVISION} is expected"
            )
        _declare(loaded)
        loaded.zo2core_use_threads(torch_threads())
    except (OSError, AttributeError) as error:  # the latter for a function that is not in it
        _warn_of_reference(" ".join(str(error).split())[:300])
        return None
    return loaded


@cache
def torch_threads() -> ctypes.c_void_p | None:
    """OpenMP's function that runs another one in the threads of torch's library; None: torch has
    been built without, and one thread does all.

    These threads wait for torch's work already. Others would take turns with them on the same
    cores.
    """
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p)
    except (AttributeError, OSError):
        return None


def _warn_of_reference(reason: str) -> None:
    warnings.warn(
        f"compiled kernels are not used ({reason}); all runs on the reference instead, slower and "
        "with the same bits. Install zo2core again to build them",
        ZO2Warning,
        stacklevel=3,
    )


def _require_whole(path: Path) -> None:
    """Refuse a truncated file: the loader would map missing pages, and the process would end when
    it touches them.

    A 64-bit ELF file ends with its section headers, whose offset, size and number are at bytes 40,
    58 and 60.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) == 64 and header[:6] == b"\x7fELF\x02\x01":
            (offset,) = struct.unpack_from("<Q", header, 40)
            (size, number) = struct.unpack_from("<HH", header, 58)
            length = file.seek(0, 2)
            if offset + size * number > length:
                raise OSError(f"{path}: {length} bytes of {offset + size * number}")


def _declare(loaded: ctypes.CDLL) -> None:
    integer = ctypes.c_int
    unsigned = ctypes.c_uint
    real = ctypes.c_float
    size = ctypes.c_size_t
    pointer = ctypes.c_void_p
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    matrix = (integer, pointer, pointer, pointer)
    for name, arguments in {
        "fill": (integer, pointer, u64, integer, u64, u32, u64),
        "walk": (
            integer,
            pointer,
            pointer,
            integer,
            pointer,
            u64,
            pointer,
            size,
            size,
            pointer,
            integer,
            u32,
            u64,
        ),
        "move_each": (
            integer,
            pointer,
            integer,
            pointer,
            u64,
            pointer,
            size,
            pointer,
            integer,
            u32,
        ),
        "twister_seed": (pointer, u64),
        "twister_fill": (pointer, integer, pointer, u64),
        "twister_skip": (pointer, integer, u64),
        "decode_int8": (*matrix, real, u64, u64),
        "decode_float8": (*matrix, u64, u64, u64, u64, u64),
        "decode_nf4": (*matrix, pointer, pointer, pointer, u64, real, u64, u64, u64),
        "decode_mxfp4": (*matrix, u64, u64, u64, u64),
        "decode_groups": (*matrix, pointer, pointer, *[integer] * 3, *[u64] * 5),
        "decode_gguf": (integer, pointer, pointer, integer, pointer, *[u64] * 6),
        "form": (*matrix, pointer, u64, u64, u64),
        "encode_float8": (pointer, pointer, pointer, real, real, u64, u64),
        "thin_product": (*matrix, pointer, real, u64, u64, u64, u64, unsigned),
        "row_sums": (*matrix, real, u64, u64, u64, u64, integer, u64, unsigned),
        "column_sums": (*matrix, real, u64, u64, u64, u64, integer, u64, unsigned, integer),
        "use_threads": (pointer,),
        "run_each": (pointer, u64, unsigned),
    }.items():
        function = getattr(loaded, f"zo2core_{name}")
        function.argtypes, function.restype = arguments, None
    loaded.zo2core_twister_size.restype = size
    loaded.zo2core_encode_float8.restype = integer


def thread_count() -> int:
    """The number of threads in which kernels run: those of torch's library, or one without it."""
    has_threads = library() is not None and torch_threads() is not None
    return torch.get_num_threads() if has_threads else 1


def run_together(
    functions: Sequence[Callable[[], object]], failed: Callable[[], object] | None = None
) -> None:
    """Run functions that need no gradients at the same time, in the threads of torch's library.

    They begin in their order, each when a thread has ended another one: all run one after the other
    where there is one thread. After an exception none begins. It is raised once all have ended; an
    interrupt before others.

    Args:
        functions: The functions. Those that wait for each other are at most as many as threads.
        failed: Called after an exception, so that no function waits for the one that raised it.
    """
    threads = thread_count()
    if threads == 1 or len(functions) < 2:
        for function in functions:
            function()
        return
    errors: list[BaseException] = []
    parts = _bounds(len(functions), min(len(functions), threads * _TURNS))
    runs = [_caught(functions[first:last], errors, failed) for first, last in parts]
    for run in runs:
        next(run)
    calls = [_RUN(run.__next__) for run in runs]
    addresses = (ctypes.c_void_p * len(calls))(
        *(ctypes.cast(call, ctypes.c_void_p).value for call in calls)
    )
    compiled = library()
    assert compiled is not None, "it has threads"
    compiled.zo2core_run_each(addresses, len(calls), threads)
    for error in errors:
        if not isinstance(error, Exception):
            raise error
    if errors:
        raise errors[0]


def _caught(
    functions: Sequence[Callable[[], object]],
    errors: list[BaseException],
    failed: Callable[[], object] | None,
) -> Iterator[None]:
    """Run functions between the first value and the second, and keep what one of them raises.

    OpenMP's threads cannot raise it. It is a generator so that it is resumed within the ``try``: an
    interrupt at the beginning of a function that C calls would be printed and ignored.
    """
    try:
        yield
        with torch.inference_mode():
            for function in functions:
                if not errors:
                    function()
    except GeneratorExit:  # it was never resumed
        return
    except BaseException as error:
        errors.append(error)
        if failed is not None:
            failed()
    yield


def end_openmp_team() -> None:
    """End the OpenMP threads of the calling thread, which start again when it next computes.

    Once a process has more OpenMP threads than processors, GNU's library puts them to sleep at the
    end of each operation instead of letting them wait actively: a step of a small model then takes
    a quarter longer. Threads that take turns call this before they wait. Other libraries than
    OpenMP 5.0 are left alone.
    """
    try:
        openmp = ctypes.CDLL(None)
        openmp.omp_pause_resource(_PAUSE_SOFT, openmp.omp_get_initial_device())
    except (OSError, AttributeError, TypeError):
        return


def run_in_parts(run: Callable[[int, int], None], rows: int) -> None:
    """Run a function of the first row and the end of the last one on parts of all rows, in the
    threads of torch's library.
    """
    threads = thread_count()
    parts = min(rows, threads * _TURNS)
    if threads == 1 or parts < 2:
        run(0, rows)
        return
    run_together([partial(run, first, last) for first, last in _bounds(rows, parts)])


def _bounds(count: int, parts: int) -> Iterable[tuple[int, int]]:
    """The first number and the end of each of some parts of so many numbers."""
    return pairwise(count * part // parts for part in range(parts + 1))


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels are installed and support these tensors."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES or library() is None:
        return False
    for tensor in tensors:
        if not (tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous()):
            return False
    return True


def rounds_to(*tensors: torch.Tensor | None) -> bool:
    """Whether results can be rounded to all of these tensors; None entries are skipped."""
    for tensor in tensors:
        if tensor is not None and not (
            tensor.is_cpu and tensor.dtype in DTYPES and tensor.is_contiguous()
        ):
            return False
    return True


def decodes(stored: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the compiled kernels are installed and can decode these bytes into this memory."""
    return (
        library() is not None
        and stored.device.type == "cpu"
        and stored.is_contiguous()
        and rounds_to(out)
    )


_DISTRIBUTIONS = {Distribution.GAUSSIAN: 0, Distribution.RADEMACHER: 1}
_PANEL = 16  # columns of a matrix that forming.c sums at once
_TWO_THREADS = 1 << 16  # weights of a matrix from which a second thread pays


class _Direction(ctypes.Structure):
    """A row of a table's directions with the address of a z that was already drawn."""

    _fields_ = (("seed", ctypes.c_uint64), ("z", ctypes.c_void_p))


# Runs a program as ``apply`` does, with its arguments in their order.
Kernel: TypeAlias = Callable[
    [Tensor, Program, Draw | Sequence[Tensor], Tensor | None, Tensor | None], None
]


def apply(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    rounded: Tensor | None = None,
) -> None:
    """Run a program on a range of a parameter, in one pass over memory. Thread-safe.

    Args:
        theta: The range's weights, 1-D, contiguous, changed in place.
        program: Instructions to run.
        z: The range's directions, one for each seed of the program, or how they are drawn.
        out: Memory for the perturbed copy that ``program.then`` makes: ``theta`` itself, or memory
            that does not overlap it; if its dtype is another one, the copy is rounded to it once.
        rounded: Memory for a second copy of the result (``out``, or ``theta`` without it), rounded
            once to its dtype; it overlaps no other tensor.
    """
    assert (out is None) == (program.then is None)
    zs = () if isinstance(z, Draw) else z
    choose_kernel(theta, *zs, copies=(out, rounded))(theta, program, z, out, rounded)


def choose_kernel(*weights: Tensor, copies: Sequence[Tensor | None]) -> Kernel:
    """Choose the fastest kernel for tensors of these dtypes on their device. All are contiguous.

    Args:
        weights: Weights, and their directions if these are drawn before.
        copies: Memory for copies, or None.
    """
    if takes(*weights) and rounds_to(*copies):
        return _apply_compiled
    if triton_kernels(weights[0]) is not None:
        return _apply_triton
    return reference.apply


def _apply_compiled(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    out: Tensor | None,
    rounded: Tensor | None,
) -> None:
    assert (out is None) == (program.then is None), "the copy has memory"
    coded = program.tables.get(theta.device) or table(program, theta.device)
    directions: object
    if isinstance(z, Draw):
        directions = coded.directions.data_ptr()
        drawn = (_DISTRIBUTIONS[z.distribution], z.parameter, z.start)
    else:
        rows = map(_Direction, program.seeds, map(Tensor.data_ptr, z))
        directions = (_Direction * len(z))(*rows)
        drawn = (0, 0, 0)
    if out is not None and out.dtype is not theta.dtype:
        assert rounded is None, "one other dtype at a time"
        rounded = out
        out = None
    in_place = len(program.instructions)
    functions().zo2core_walk(
        DTYPES[theta.dtype],
        theta.data_ptr(),
        None if out is None else out.data_ptr(),
        0 if rounded is None else DTYPES[rounded.dtype],
        None if rounded is None else rounded.data_ptr(),
        theta.numel(),
        coded.instructions.data_ptr(),
        in_place,
        in_place + (program.then is not None),
        directions,
        *drawn,
    )


def _apply_triton(
    theta: Tensor,
    program: Program,
    z: Draw | Sequence[Tensor],
    out: Tensor | None,
    rounded: Tensor | None,
) -> None:
    kernels = triton_kernels(theta)
    assert kernels is not None, "the kernel was chosen for another tensor"
    outs = None if out is None else [out]
    if isinstance(z, Draw):
        kernels.apply_drawing([theta], program, z.distribution, [z.parameter], z.start, outs=outs)
    else:
        kernels.apply([theta], program, [[direction] for direction in z], outs)
    if rounded is not None:
        rounded.copy_(theta if out is None else out)


def fill(
    out: Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0
) -> None:
    """Do what ``reference.fill`` does."""
    if takes(out):
        drawn = out.numel(), _DISTRIBUTIONS[distribution], seed, parameter, start
        functions().zo2core_fill(DTYPES[out.dtype], out.data_ptr(), *drawn)
        return
    if (kernels := triton_kernels(out)) is not None:
        kernels.fill(out, distribution, seed, parameter, start)
        return
    length = reference.chunk(out)
    for first in range(0, out.numel(), length):
        reference.fill(out[first : first + length], distribution, seed, parameter, start + first)


def perturb_each(
    theta: Tensor, perturbations: Program, distribution: Distribution, parameter: int, out: Tensor
) -> None:
    """Write one perturbed copy of the weights for each instruction, drawing its direction.

    Args:
        theta: A whole parameter, 1-D, contiguous; only read.
        perturbations: Program of ``Perturb`` instructions, one a row; a shift of 0 copies the
            weights.
        distribution: Distribution of z.
        parameter: Index of the parameter in registration order.
        out: (instructions, elements), contiguous, of any floating-point dtype, to which a row is
            rounded once.
    """
    if takes(theta) and rounds_to(out):
        coded = table(perturbations, theta.device)
        memory = (DTYPES[out.dtype], out.data_ptr(), theta.numel())
        moves = (
            coded.instructions.data_ptr(),
            len(perturbations.instructions),
            coded.directions.data_ptr(),
        )
        drawn = _DISTRIBUTIONS[distribution], parameter
        functions().zo2core_move_each(
            DTYPES[theta.dtype], theta.data_ptr(), *memory, *moves, *drawn
        )
        return
    for row, perturbation in zip(out, perturbations.instructions, strict=True):
        assert isinstance(perturbation, Perturb), "only perturbations make copies"
        if perturbation.shift == 0:
            row.copy_(theta)
        else:
            program = Program(
                (perturbations.seeds[perturbation.direction],),
                (),
                then=perturbation._replace(direction=0),
            )
            apply(theta, program, Draw(distribution, parameter), out=row)


def triton_kernels(tensor: Tensor) -> ModuleType | None:
    """The Triton kernels, if they support this tensor."""
    kernels = _triton_kernels() if tensor.is_cuda else None
    return kernels if kernels is not None and kernels.takes(tensor) else None


@cache
def _triton_kernels() -> ModuleType | None:
    """The Triton kernels, imported for the first CUDA tensor; None without Triton."""
    return (
        importlib.import_module("zo2core.kernels.triton_kernels") if find_spec("triton") else None
    )


def form(base: Tensor, left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write ``base + left right^T``, summed in float32 and rounded once.

    Products are added one after the other, so that every machine forms the same weights: a
    library's matrix product sums in an order of its own choice.

    Args:
        base: (rows, columns), contiguous, of a floating-point dtype.
        left: (rows, rank), float32.
        right: (columns, rank), of a floating-point dtype.
        out: Memory of the shape and dtype of ``base``; may be ``base``.
    """
    left = left.contiguous()
    if (kernels := triton_kernels(base)) is not None:
        kernels.form(base, left, right.float().t().contiguous(), out)
    elif takes(base, out):
        columns, rank = right.shape
        padded = torch.nn.functional.pad(right.float(), (0, 0, 0, -columns % _PANEL))
        # forming.c's layout
        panels = padded.view(len(padded) // _PANEL, _PANEL, rank).transpose(1, 2).contiguous()

        def run(first: int, last: int) -> None:
            rows = (matrix[first:last].data_ptr() for matrix in (base, out, left))
            functions().zo2core_form(
                DTYPES[base.dtype], *rows, panels.data_ptr(), last - first, columns, rank
            )

        if base.numel() < _TWO_THREADS:
            run(0, len(base))
        else:
            run_in_parts(run, len(base))
    else:
        reference.form(base, left, right, out)

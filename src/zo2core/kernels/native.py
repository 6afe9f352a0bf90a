"""The compiled kernels of native.c, twister.c, decode.c and forming.c, through ctypes: CPU tensors of 32 and 16 bits.

The library is built when the package is installed, and only then. Where that was not possible everything runs on the
reference, with the same bits.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from zo2core.errors import ZO2Warning
from zo2core.kernels.table import row, table
from zo2core.types import Distribution, NF4Blocks, Perturb, Program

_REVISION = 8  # of native.c, twister.c, decode.c and forming.c
_PANEL = 16  # columns of a matrix that forming.c sums at once
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_DISTRIBUTIONS = {Distribution.GAUSSIAN: 0, Distribution.RADEMACHER: 1}
_CPU = torch.device("cpu")


class _Direction(ctypes.Structure):
    """A row of a table's directions whose z was drawn before."""

    _fields_ = (("seed", ctypes.c_uint64), ("z", ctypes.c_void_p))


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None where they have not been built, or cannot be used, which is said once."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            return _loaded(path)
    return None


def _loaded(path: Path) -> ctypes.CDLL | None:
    """The functions of a library, declared; None with a warning if it is damaged, of other hardware or other sources."""
    try:
        _require_whole(path)
        loaded = ctypes.CDLL(str(path))
        revision = loaded.zo2core_revision()
        if revision != _REVISION:
            raise OSError(f"{path}: revision {revision} of the kernels, where {_REVISION} is expected")
        _declare(loaded)
    except (OSError, AttributeError) as error:  # the latter for a function that is not in it
        warnings.warn(
            f"compiled kernels are not used ({' '.join(str(error).split())[:300]}); all runs on the reference instead, "
            "slower and with the same bits. Install zo2core again to build them",
            ZO2Warning,
            stacklevel=2,
        )
        return None
    return loaded


def _require_whole(path: Path) -> None:
    """Refuse a file that was cut: the loader would map what is not there, and end the process when it touches it.

    An ELF file of 64 bits ends with its section headers, whose place, size and number stand at bytes 40, 58 and 60.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) == 64 and header[:6] == b"\x7fELF\x02\x01":
            (place,), (size, number) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
            length = file.seek(0, 2)
            if place + size * number > length:
                raise OSError(f"{path}: {length} bytes of {place + size * number}")


def _declare(loaded: ctypes.CDLL) -> None:
    size, pointer, u32, u64 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64
    loaded.zo2core_fill.argtypes = (ctypes.c_int, pointer, u64, ctypes.c_int, u64, u32, u64)
    loaded.zo2core_fill.restype = None
    number = ctypes.c_int
    walk = (number, pointer, pointer, number, pointer, u64, pointer, size, size, pointer, number, u32, u64)
    loaded.zo2core_walk.argtypes = walk
    loaded.zo2core_walk.restype = None
    real = ctypes.c_float
    move = (number, pointer, pointer, number, pointer, pointer, u64, ctypes.c_int32, real, real, real)
    loaded.zo2core_move.argtypes = move
    loaded.zo2core_move.restype = None
    each = (number, pointer, number, pointer, u64, pointer, size, pointer, number, u32)
    loaded.zo2core_move_each.argtypes = each
    loaded.zo2core_move_each.restype = None
    loaded.zo2core_twister_size.restype = size
    for function, arguments in (
        (loaded.zo2core_twister_seed, (pointer, u64)),
        (loaded.zo2core_twister_fill, (pointer, ctypes.c_int, pointer, u64)),
        (loaded.zo2core_twister_skip, (pointer, ctypes.c_int, u64)),
    ):
        function.argtypes, function.restype = arguments, None
    into = (number, pointer, pointer, pointer)
    loaded.zo2core_decode_int8.argtypes = (*into, real, u64, u64)
    loaded.zo2core_decode_float8.argtypes = (*into, u64, u64, u64, u64, u64)
    loaded.zo2core_decode_nf4.argtypes = (*into, pointer, pointer, pointer, u64, real, u64, u64, u64)
    for decoder in ("decode_int8", "decode_float8", "decode_nf4"):
        loaded[f"zo2core_{decoder}"].restype = None
    loaded.zo2core_form.argtypes = (*into, pointer, u64, u64, u64)
    loaded.zo2core_form.restype = None
    loaded.zo2core_encode_float8.argtypes = (pointer, pointer, pointer, real, real, u64, u64)
    loaded.zo2core_encode_float8.restype = number


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels are there and work on these tensors."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES or library() is None:
        return False
    for tensor in tensors:  # noqa: SIM110 - asked for every parameter: a generator takes as long as a small one
        if not (tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous()):
            return False
    return True


def fill(out: torch.Tensor, distribution: Distribution, seed: int, parameter: int, start: int = 0) -> None:
    """As ``philox.fill``."""
    loaded = library()
    assert loaded is not None
    loaded.zo2core_fill(DTYPES[out.dtype], out.data_ptr(), out.numel(), _DISTRIBUTIONS[distribution], seed, parameter, start)


def rounds_to(*tensors: torch.Tensor | None) -> bool:
    """Whether results can be rounded into all of these tensors; None is no tensor."""
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cpu and tensor.dtype in DTYPES and tensor.is_contiguous()):
            return False
    return True


def perturb(
    out: torch.Tensor,
    theta: torch.Tensor,
    z: torch.Tensor,
    *,
    shift: float,
    zo_eps: float,
    rounded: torch.Tensor | None = None,
) -> None:
    """As ``dispatch.perturb``. Without a program: to set one up would take as long as the pass over a small chunk."""
    loaded = library()
    assert loaded is not None
    coded = row(Perturb(0, shift, zo_eps))
    results = _results(theta, out, rounded)
    loaded.zo2core_move(DTYPES[theta.dtype], theta.data_ptr(), *results, z.data_ptr(), theta.numel(), *coded)


def apply(theta: torch.Tensor, program: Program, zs: Sequence[torch.Tensor]) -> None:
    """As ``arithmetic.apply``."""
    loaded = library()
    assert loaded is not None
    instructions = table(program, _CPU).instructions
    directions = (_Direction * len(zs))(*[_Direction(0, z.data_ptr()) for z in zs])
    length = len(program.instructions)
    loaded.zo2core_walk(
        DTYPES[theta.dtype],
        theta.data_ptr(),
        *_results(theta, None, None),
        theta.numel(),
        instructions.data_ptr(),
        length,
        length,
        directions,
        0,  # the distribution, the parameter and where it starts are those of drawn directions
        0,
        0,
    )


def apply_drawing(
    theta: torch.Tensor,
    program: Program,
    distribution: Distribution,
    parameter: int,
    start: int = 0,
    *,
    out: torch.Tensor | None = None,
    rounded: torch.Tensor | None = None,
) -> None:
    """As ``dispatch.apply_drawing``."""
    loaded = library()
    assert loaded is not None
    coded = table(program, _CPU)
    own = len(program.instructions)
    loaded.zo2core_walk(
        DTYPES[theta.dtype],
        theta.data_ptr(),
        *_results(theta, out, rounded),
        theta.numel(),
        coded.instructions.data_ptr(),
        own,
        own if program.then is None else own + 1,
        coded.directions.data_ptr(),
        _DISTRIBUTIONS[distribution],
        parameter,
        start,
    )


def move_each(theta: torch.Tensor, moves: Program, distribution: Distribution, parameter: int, out: torch.Tensor) -> None:
    """As ``dispatch.move_each``."""
    loaded = library()
    assert loaded is not None
    coded = table(moves, _CPU)
    loaded.zo2core_move_each(
        DTYPES[theta.dtype],
        theta.data_ptr(),
        DTYPES[out.dtype],
        out.data_ptr(),
        theta.numel(),
        coded.instructions.data_ptr(),
        len(moves.instructions),
        coded.directions.data_ptr(),
        _DISTRIBUTIONS[distribution],
        parameter,
    )


def _results(
    theta: torch.Tensor, out: torch.Tensor | None, rounded: torch.Tensor | None
) -> tuple[int | None, int, int | None]:
    """Where results go: in the dtype of the weights, and the dtype and the place where they are rounded to another."""
    if out is not None and out.dtype is not theta.dtype:
        assert rounded is None, "one other dtype at a time"
        out, rounded = None, out
    return (
        None if out is None else out.data_ptr(),
        0 if rounded is None else DTYPES[rounded.dtype],
        None if rounded is None else rounded.data_ptr(),
    )


def decodes(stored: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the compiled kernels are there and decode these bytes into this memory."""
    return library() is not None and stored.device.type == "cpu" and stored.is_contiguous() and rounds_to(out)


def decode_int8(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, unit: float) -> None:
    """Decode rows of signed bytes; float32 ``scales``, one a row; ``unit`` is what a code of 1 at a scale of 1 is."""
    loaded = library()
    assert loaded is not None
    loaded.zo2core_decode_int8(*_decoded(out, codes, scales), unit, *out.shape)


def decode_float8(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, first: int, block: tuple[int, int]) -> None:
    """Decode rows of e4m3 numbers, of a matrix from its ``first`` row on; float32 ``scales``, one a block of the matrix."""
    loaded = library()
    assert loaded is not None
    loaded.zo2core_decode_float8(*_decoded(out, codes, scales), first, *out.shape, *block)


def decode_nf4(out: torch.Tensor, parts: Mapping[str, torch.Tensor], encoding: NF4Blocks, first: int) -> None:
    """Decode pairs of codes.

    Args:
        out: Contiguous, from the matrix's weight ``first`` on, with which a byte begins.
        parts: Bytes of the whole matrix's parts, by role, at any address.
        encoding: How they are meant.
        first: Even.
    """
    loaded = library()
    assert loaded is not None
    roles = ("codes", "scales", "table", "nested scales", "nested table")
    places = (parts[role].data_ptr() if role in parts else None for role in roles)
    blocks = (encoding.nested_block or 0, encoding.offset, encoding.block)
    loaded.zo2core_decode_nf4(DTYPES[out.dtype], out.data_ptr(), *places, *blocks, first, out.numel())


def encode_float8(
    weights: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, largest_code: float, least_scale: float
) -> bool:
    """As ``carrying.encode`` to 8 bits, where this can: float32 rows on the CPU that are finite.

    Returns:
        Whether it was done. If not, ``codes`` and ``scales`` hold nothing yet.
    """
    loaded, given = library(), (weights, codes, scales)
    are_floats = weights.dtype is scales.dtype is torch.float32
    if loaded is None or not are_floats or any(t.device.type != "cpu" or not t.is_contiguous() for t in given):
        return False
    rows = len(scales)
    places = (tensor.data_ptr() for tensor in (codes, scales, weights))
    return bool(loaded.zo2core_encode_float8(*places, largest_code, least_scale, rows, weights.numel() // max(rows, 1)))


def panels(shared: torch.Tensor) -> torch.Tensor:
    """A factor, (columns, thin), as ``form`` takes it: float32 (panels, thin, 16), filled up with zeros."""
    columns, thin = shared.shape
    padded = torch.nn.functional.pad(shared.float(), (0, 0, 0, -columns % _PANEL))
    return padded.view(len(padded) // _PANEL, _PANEL, thin).transpose(1, 2).contiguous()


def form(base: torch.Tensor, own: torch.Tensor, shared: torch.Tensor, out: torch.Tensor, first: int, last: int) -> None:
    """As ``forming.form``, for some rows; ``shared`` as ``panels`` gives it."""
    loaded = library()
    assert loaded is not None
    rows = (matrix[first:last].data_ptr() for matrix in (base, out, own))
    loaded.zo2core_form(DTYPES[base.dtype], *rows, shared.data_ptr(), last - first, base.shape[1], own.shape[1])


def _decoded(out: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int, int]:
    assert scales.dtype is torch.float32
    assert scales.is_contiguous()
    return DTYPES[out.dtype], out.data_ptr(), codes.data_ptr(), scales.data_ptr()

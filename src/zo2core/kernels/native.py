"""The compiled kernels, the C files beside this one, through ctypes: CPU tensors of 32 and 16 bits.

The library is built when the package is installed. Where that was not possible, everything runs on the reference, with the
same bits.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from collections.abc import Callable
from concurrent.futures import Executor
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch

from zo2core.errors import ZO2Warning

_REVISION = 12  # of the C files
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None if they were not built, or, with one warning, if they cannot be used."""
    for suffix in EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"_native{suffix}")
        if path.exists():
            return _loaded(path)
    return None


@cache
def functions() -> ctypes.CDLL:
    """The compiled functions, where ``library`` has found them."""
    loaded = library()
    assert loaded is not None
    return loaded


def _loaded(path: Path) -> ctypes.CDLL | None:
    """Load a library; None, with a warning, if it is damaged or was built for other hardware or from other sources."""
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
    """Refuse a truncated file: the loader would map missing pages, and the process would end when it touches them.

    A 64-bit ELF file ends with its section headers, whose offset, size and number are at bytes 40, 58 and 60.
    """
    with path.open("rb") as file:
        header = file.read(64)
        if len(header) == 64 and header[:6] == b"\x7fELF\x02\x01":
            (offset,), (size, number) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
            length = file.seek(0, 2)
            if offset + size * number > length:
                raise OSError(f"{path}: {length} bytes of {offset + size * number}")


def _declare(loaded: ctypes.CDLL) -> None:
    integer, real, size, pointer = ctypes.c_int, ctypes.c_float, ctypes.c_size_t, ctypes.c_void_p
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    matrix = (integer, pointer, pointer, pointer)
    for name, arguments in {
        "fill": (integer, pointer, u64, integer, u64, u32, u64),
        "walk": (integer, pointer, pointer, integer, pointer, u64, pointer, size, size, pointer, integer, u32, u64),
        "move_each": (integer, pointer, integer, pointer, u64, pointer, size, pointer, integer, u32),
        "twister_seed": (pointer, u64),
        "twister_fill": (pointer, integer, pointer, u64),
        "twister_skip": (pointer, integer, u64),
        "decode_int8": (*matrix, real, u64, u64),
        "decode_float8": (*matrix, u64, u64, u64, u64, u64),
        "decode_nf4": (*matrix, pointer, pointer, pointer, u64, real, u64, u64, u64),
        "decode_mxfp4": (*matrix, u64, u64, u64, u64),
        "decode_four_bits": (*matrix, pointer, pointer, integer, integer, *[u64] * 5),
        "decode_gguf": (integer, pointer, pointer, integer, pointer, *[u64] * 6),
        "form": (*matrix, pointer, u64, u64, u64),
        "encode_float8": (pointer, pointer, pointer, real, real, u64, u64),
    }.items():
        function = getattr(loaded, f"zo2core_{name}")
        function.argtypes, function.restype = arguments, None
    loaded.zo2core_twister_size.restype = size
    loaded.zo2core_encode_float8.restype = integer


def run_in_halves(run: Callable[[int, int], None], rows: int, helper: Executor | None) -> None:
    """Run a function of the first row and the end of the last one over all rows; a helper runs the second half."""
    if helper is None:
        run(0, rows)
        return
    second_half = helper.submit(run, rows // 2, rows)
    try:
        run(0, rows // 2)
    finally:
        second_half.result()


def takes(*tensors: torch.Tensor) -> bool:
    """Whether the compiled kernels are installed and support these tensors."""
    dtype = tensors[0].dtype
    if dtype not in DTYPES or library() is None:
        return False
    for tensor in tensors:  # noqa: SIM110 - called for every parameter: a generator takes as long as a small one
        if not (tensor.is_cpu and tensor.dtype is dtype and tensor.is_contiguous()):
            return False
    return True


def rounds_to(*tensors: torch.Tensor | None) -> bool:
    """Whether results can be rounded to all of these tensors; None entries are skipped."""
    for tensor in tensors:
        if tensor is not None and not (tensor.is_cpu and tensor.dtype in DTYPES and tensor.is_contiguous()):
            return False
    return True


def decodes(stored: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the compiled kernels are installed and can decode these bytes into this memory."""
    return library() is not None and stored.device.type == "cpu" and stored.is_contiguous() and rounds_to(out)

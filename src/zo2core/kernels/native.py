"""The compiled functions: the C files beside this one, through ctypes.

The library is built when the package is installed; where that was not possible, everything runs on
the reference.
"""

from __future__ import annotations

import ctypes
import struct
import warnings
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from zo2core.errors import ZO2Warning

_REVISION = 16  # of the C files


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

"""Damage at random to bytes: what disks, crashes and people do to files."""

import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

Damage = Callable[[bytes, random.Random], bytes]

HOSTILE = [0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**61, 2**63 - 1, 2**63, 2**64 - 1]
INSERTED = [b"\n", b"{}\n", b'{"step":3}\n', b'{"a":1,', b'"a":', b"[" * 5000, b"9" * 5000]


def _stretch(raw: bytes, rng: random.Random) -> tuple[int, int]:
    """Its beginning and its end, as often as not near the beginning of all."""
    begin = (
        rng.randrange(min(300, len(raw)) + 1) if rng.random() < 0.5 else rng.randrange(len(raw) + 1)
    )
    return begin, min(begin + rng.choice([1, rng.randint(1, 40), 512, 4096]), len(raw))


def flip(raw: bytes, rng: random.Random) -> bytes:
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def zero(raw: bytes, rng: random.Random) -> bytes:
    begin, end = _stretch(raw, rng)
    return raw[:begin] + bytes(end - begin) + raw[end:]


def number(raw: bytes, rng: random.Random) -> bytes:
    begin, _ = _stretch(raw, rng)
    packed = struct.pack("<Q", rng.choice(HOSTILE))[: rng.choice([1, 4, 8])]
    return raw[:begin] + packed + raw[begin + len(packed) :]


def overwrite(raw: bytes, rng: random.Random) -> bytes:
    begin, _ = _stretch(raw, rng)
    return raw[:begin] + rng.randbytes(rng.randint(1, 9)) + raw[begin + rng.randint(0, 9) :]


def insert(raw: bytes, rng: random.Random) -> bytes:
    begin, _ = _stretch(raw, rng)
    return raw[:begin] + rng.choice(INSERTED) + raw[begin:]


def grow(raw: bytes, rng: random.Random) -> bytes:
    return raw + rng.choice([*INSERTED, rng.randbytes(40)])


def cut(raw: bytes, rng: random.Random) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def delete(raw: bytes, rng: random.Random) -> bytes:
    begin, end = _stretch(raw, rng)
    return raw[:begin] + raw[end:]


def double(raw: bytes, rng: random.Random) -> bytes:
    begin, end = _stretch(raw, rng)
    return raw[:end] + raw[begin:]


def exchange(raw: bytes, rng: random.Random) -> bytes:
    """Two stretches change places."""
    (a, b), (c, d) = sorted((_stretch(raw, rng), _stretch(raw, rng)))
    return raw if c < b else raw[:a] + raw[c:d] + raw[b:c] + raw[a:b] + raw[d:]


def drop_line(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    dropped = rng.randrange(len(lines) + 1)
    del lines[dropped : dropped + 1]
    return b"".join(lines)


def double_line(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.splitlines(keepends=True) or [b""]
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
    return b"".join(lines)


def move_lines(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


ANYWHERE: Sequence[Damage] = (
    flip,
    zero,
    number,
    overwrite,
    insert,
    grow,
    cut,
    delete,
    double,
    exchange,
)
IN_LINES: Sequence[Damage] = (*ANYWHERE, drop_line, double_line, move_lines)


def damaged(raw: bytes, rng: random.Random, among: Sequence[Damage] = ANYWHERE) -> bytes:
    """One to three damages."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        raw = rng.choice(among)(raw, rng)
    return raw


def damage_file(path: Path, damage: Damage, rng: random.Random) -> None:
    path.write_bytes(damage(path.read_bytes(), rng))

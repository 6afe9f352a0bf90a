"""Choice of low-bit transfer: whether the host or the device replays, and which bytes are copied between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from zo2core.errors import OptionError
from zo2core.protocols import CounterNoise, NoiseGenerator
from zo2core.types import BlockLayout

Replay: TypeAlias = Literal["auto", "host", "device"]
LowBitTransfer: TypeAlias = Literal["device", "host"]  # if the device replays, blocks are copied back


def choose_low_bit_transfer(
    replay: Replay, layouts: Sequence[BlockLayout], noise: NoiseGenerator, *, in_place: bool
) -> LowBitTransfer | None:
    """Choose who replays blocks that are copied in fewer bits than they are stored in; None: they are copied as stored."""
    if replay not in ("auto", "host", "device"):
        raise OptionError(
            "replay", found=repr(replay), expected="'auto', 'host' or 'device'", remedy="pass one of the three"
        )
    low_bit = [spec for layout in layouts for spec in layout.parameters if spec.is_low_bit]
    require_drawable(layouts, noise, by_host=replay == "host")
    comes_back = all(spec.transfer_back for spec in low_bit)
    if in_place:
        if replay != "auto":
            raise OptionError(
                "replay",
                found=f"{replay!r} on a device that computes in host memory",
                expected="a device with its own memory, such as a GPU, for this option",
                remedy="leave it out",
            )
        return None
    if replay == "device" and not comes_back:
        raise OptionError(
            "replay",
            found="'device', to which weights are copied in fewer bits than they are stored in",
            expected="'host', or weights rounded to the transfer dtype (Precision(transfer_back=True))",
            remedy="leave it out",
        )
    if replay == "host" or not comes_back:
        return "host"
    return "device" if low_bit else None


def require_drawable(layouts: Sequence[BlockLayout], noise: NoiseGenerator, *, by_host: bool = False) -> None:
    """Refuse noise that is not counter-based if weights are rounded for transfer, or the host replays."""
    low_bit = any(spec.is_low_bit for layout in layouts for spec in layout.parameters)
    if (low_bit or by_host) and not isinstance(noise, CounterNoise):
        raise OptionError(
            "noise",
            found=f"{noise.name}, which only the computing device can draw",
            expected="counter-based noise, since weights are rounded for transfer or the host replays",
            remedy="pass noise=PhiloxNoise(), or copy the weights as they are stored and replay on the device",
        )

"""Whether the host or the device replays, and so what travels between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

from zo2core.errors import OptionError
from zo2core.protocols import CounterNoise, NoiseGenerator
from zo2core.types import BlockLayout

Replay: TypeAlias = Literal["auto", "host", "device"]


class LowBitTransfer(NamedTuple):
    """How blocks travel other than as they are stored, there and back."""

    comes_back: bool  # the device replays, and gives back what is carried; else the host replays, and nothing comes back


def choose_low_bit_transfer(
    replay: Replay, layouts: Sequence[BlockLayout], noise: NoiseGenerator, *, in_place: bool
) -> LowBitTransfer | None:
    """Choose who replays.

    Args:
        replay: What was asked for; "auto" leaves it to the device wherever that gives the same weights: the ways there and
            back run side by side, so that nothing is gained by leaving the one back idle.
        layouts: Segments in visiting order.
        noise: Draws z; the host can draw it for a device if it is counter-based.
        in_place: Whether segments are computed on in host memory.

    Returns:
        None if blocks travel as they are stored, and the device replays.

    Raises:
        OptionError: if nothing would heed ``replay``, or the weights cannot be had so.
    """
    if replay not in ("auto", "host", "device"):
        raise OptionError("replay", found=repr(replay), expected="'auto', 'host' or 'device'", remedy="pass one of these")
    low_bit = [spec for layout in layouts for spec in layout.parameters if spec.is_low_bit]
    require_drawable(layouts, noise, by_host=replay == "host")
    comes_back = all(spec.transfer_back for spec in low_bit)
    if in_place:
        if replay != "auto":
            raise OptionError(
                "replay",
                found=f"{replay!r} on a device that computes in host memory",
                expected="a device with memory of its own, where it is given",
                remedy="leave it out",
            )
        return None
    if replay == "device" and not comes_back:
        raise OptionError(
            "replay",
            found="'device', to which float32 weights are carried in fewer bits",
            expected="'host', or weights that are rounded to what comes back (Precision(transfer_back=True))",
            remedy="leave it out",
        )
    if replay == "host" or not comes_back:
        return LowBitTransfer(comes_back=False)
    return LowBitTransfer(comes_back=True) if low_bit else None


def require_drawable(layouts: Sequence[BlockLayout], noise: NoiseGenerator, *, by_host: bool = False) -> None:
    """Refuse noise that is not counter-based where weights are rounded as they are carried, or the host replays.

    Raises:
        OptionError: naming the noise.
    """
    low_bit = any(spec.is_low_bit for layout in layouts for spec in layout.parameters)
    if (low_bit or by_host) and not isinstance(noise, CounterNoise):
        raise OptionError(
            "noise",
            found=f"{noise.name}, whose numbers only the device draws that computes",
            expected="counter-based noise, where weights are rounded as they are carried or the host replays",
            remedy="pass noise=PhiloxNoise(), or carry the weights as they are stored and replay on the device",
        )

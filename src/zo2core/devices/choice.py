"""The choice of a device by its name."""

from __future__ import annotations

from zo2core.devices.cuda import CudaDevice
from zo2core.devices.host import HostDevice
from zo2core.errors import OptionError
from zo2core.protocols import Device


def choose_device(device: Device | str) -> Device:
    """Make the device with a name: "cpu", "cuda" or "cuda:N". A device is returned unchanged."""
    if not isinstance(device, str):
        return device
    if device == "cpu":
        return HostDevice()
    kind, _, index = device.partition(":")
    if kind != "cuda" or not (index or "0").isdecimal():
        raise OptionError("device", found=repr(device), expected="'cpu', 'cuda' or 'cuda:N'", remedy="pass one of these")
    return CudaDevice(int(index or 0))

"""Compute devices."""

from zo2core.devices.host import HostDevice as HostDevice

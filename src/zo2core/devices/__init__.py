"""Compute devices."""

from zo2core.devices.choice import choose_device as choose_device
from zo2core.devices.cuda import CudaDevice as CudaDevice
from zo2core.devices.host import HostDevice as HostDevice

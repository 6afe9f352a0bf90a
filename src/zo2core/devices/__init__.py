"""Compute devices."""

from zo2core.devices.cuda import CudaDevice as CudaDevice
from zo2core.devices.host import HostDevice as HostDevice

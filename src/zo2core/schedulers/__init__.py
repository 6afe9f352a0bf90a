"""Schedulers: in which order upload, compute and offload happen."""

from zo2core.schedulers.overlapped import OverlappedScheduler as OverlappedScheduler
from zo2core.schedulers.overlapped import open_scheduler as open_scheduler
from zo2core.schedulers.serial import SerialScheduler as SerialScheduler

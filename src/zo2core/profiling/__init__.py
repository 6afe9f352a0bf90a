"""Timelines of the lanes' work, and traces of them."""

from zo2core.profiling.chrome_trace import Sweep as Sweep
from zo2core.profiling.chrome_trace import Trace as Trace
from zo2core.profiling.chrome_trace import TraceRecorder as TraceRecorder
from zo2core.profiling.timeline import Timeline as Timeline

"""Plans of a run: its host and device memory, and how often segments are written back."""

from zo2core.planning.memory import ACTIVATIONS as ACTIVATIONS
from zo2core.planning.memory import DevicePlan as DevicePlan
from zo2core.planning.memory import HostPlan as HostPlan
from zo2core.planning.memory import MemoryPolicy as MemoryPolicy
from zo2core.planning.memory import WriteBackPolicy as WriteBackPolicy
from zo2core.planning.run_spec import Replay as Replay

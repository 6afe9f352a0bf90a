"""Plans of a run: its host and device memory, and how often segments are written back."""

from zo2core.planning.low_bit import Replay as Replay
from zo2core.planning.memory import DevicePlan as DevicePlan
from zo2core.planning.memory import HostPlan as HostPlan
from zo2core.planning.policies import ACTIVATIONS as ACTIVATIONS
from zo2core.planning.policies import MemoryPolicy as MemoryPolicy
from zo2core.planning.policies import WriteBackPolicy as WriteBackPolicy

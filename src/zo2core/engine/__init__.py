"""The classes that users create: engines, which train, and replayers, which evaluate and export."""

from zo2core.engine.backprop_engine import BackpropEngine as BackpropEngine
from zo2core.engine.durable_backprop_engine import DurableBackpropEngine as DurableBackpropEngine
from zo2core.engine.full_backprop_engine import FullBackpropEngine as FullBackpropEngine
from zo2core.engine.full_backprop_engine import RunRecord as RunRecord
from zo2core.engine.present_runner import SnapshotReplayer as SnapshotReplayer
from zo2core.engine.replayer import Replayer as Replayer
from zo2core.engine.runner import Runner as Runner
from zo2core.engine.shared_base import SharedBase as SharedBase
from zo2core.engine.streamed_full_engine import StreamedFullBackpropEngine as StreamedFullBackpropEngine
from zo2core.engine.zo_engine import ZOEngine as ZOEngine

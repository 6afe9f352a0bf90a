"""The method of a run, chosen by its options."""

from __future__ import annotations

from zo2adapters.trainers.methods.first_order_run import FirstOrderRun
from zo2adapters.trainers.methods.full_run import FullRun
from zo2adapters.trainers.methods.run_method import RunMethod
from zo2adapters.trainers.methods.streamed_full_run import StreamedFullRun
from zo2adapters.trainers.methods.zeroth_order_run import ZerothOrderRun
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.shared_runs import require_shareable
from zo2core import SharedBase


def method_of(options: TrainOptions, shared: SharedBase | None = None) -> RunMethod:
    """The method that the options name; zeroth-order steps by default.

    Args:
        options: The run's options.
        shared: The base that the run shares with others; None: it reads its base alone.

    Raises:
        OptionError: if a number is out of range, or options cannot be combined.
    """
    if shared is not None:
        require_shareable(options)
    if options.first_order.method is None:
        return ZerothOrderRun(options, shared)
    if options.model_options.trains_adapter:
        return FirstOrderRun(options, shared)
    return StreamedFullRun(options) if options.first_order.stream_blocks else FullRun(options)

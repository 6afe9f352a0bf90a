"""The method of a run, chosen by its options."""

from __future__ import annotations

from typing import Any

from zo2adapters.trainers.methods.first_order_run import FirstOrderRun
from zo2adapters.trainers.methods.full_run import FullRun
from zo2adapters.trainers.methods.run_method import RunMethod
from zo2adapters.trainers.methods.streamed_full_run import StreamedFullRun
from zo2adapters.trainers.methods.zeroth_order_run import ZerothOrderRun
from zo2adapters.trainers.options import TrainOptions


def method_of(options: TrainOptions) -> RunMethod[Any]:
    """The method that the options name; zeroth-order steps by default.

    Raises:
        OptionError: if a number is out of range, or options cannot be combined.
    """
    if options.first_order.method is None:
        return ZerothOrderRun(options)
    if options.model_options.trains_adapter:
        return FirstOrderRun(options)
    return StreamedFullRun(options) if options.first_order.stream_blocks else FullRun(options)

"""Which steps a run takes, by its options."""

from __future__ import annotations

from typing import Any

from zo2adapters.trainers.first_order_run import FirstOrderRun
from zo2adapters.trainers.full_run import FullRun
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.run_method import RunMethod
from zo2adapters.trainers.streamed_turns_run import StreamedTurnsRun
from zo2adapters.trainers.zeroth_order_run import ZerothOrderRun


def method_of(options: TrainOptions) -> RunMethod[Any]:
    """How the run's steps are taken.

    Raises:
        OptionError: if a number is out of its range, or options do not go together.
    """
    if options.first_order.method is None:
        return ZerothOrderRun(options)
    if options.model_options.trains_adapter:
        return FirstOrderRun(options)
    return StreamedTurnsRun(options) if options.first_order.stream_blocks else FullRun(options)

"""The method of a run, chosen by its options."""

from __future__ import annotations

from zo2adapters.trainers.methods.gradient_run import GradientRun
from zo2adapters.trainers.methods.run_method import RunMethod
from zo2adapters.trainers.methods.zeroth_order_run import ZerothOrderRun
from zo2adapters.trainers.options import TrainOptions
from zo2adapters.trainers.shared_runs import require_shareable
from zo2core import SharedBase


def method_of(options: TrainOptions, shared: SharedBase | None = None) -> RunMethod:
    """The method that the options name; zeroth-order steps by default. A rate of auto stands for any rate."""
    if shared is not None:
        require_shareable(options)
    options = options.with_rate(1.0) if options.optimization.lr == "auto" else options
    return (ZerothOrderRun if options.first_order.method is None else GradientRun)(options, shared)

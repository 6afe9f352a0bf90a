"""Runs of first-order steps of all parameters, whose weights are in memory and change there."""

from __future__ import annotations

import math

from zo2adapters.models.hf import HFBlockModel
from zo2adapters.trainers.methods.first_order_run import GradientRun
from zo2adapters.trainers.methods.run_method import Opening
from zo2adapters.trainers.options import Order, TrainOptions
from zo2adapters.trainers.worker_options import local_device, worker_trace
from zo2core import BlockUpdate, Engine, FirstOrder, LossScaling
from zo2core.errors import OptionError
from zo2core.optimizers import OPTIMIZERS, state_bytes

FORWARDS = 4  # that a step costs: one, one more on the way back, and gradients of inputs and weights, which cost two
_MEASURED_FORWARDS = 2 * FORWARDS  # with a sweep before, which measures the norm of all gradients


class FullRun(GradientRun):
    """First-order steps of all parameters. See ``RunMethod``."""

    snapshot_of = "weights and optimizer"
    exported = "model"

    def __init__(self, options: TrainOptions) -> None:
        super().__init__(options)
        assert options.first_order.method is not None, "it is what chose this class"
        self.learning_rates = OPTIMIZERS[options.first_order.method].learning_rates
        self.few_learning_rates = self.learning_rates[1:-1]

    @property
    def forwards(self) -> int:
        """More with a sweep that measures gradients. See the contract."""
        return _MEASURED_FORWARDS if self.options.first_order.measures_gradients else FORWARDS

    def _method(self, update: BlockUpdate) -> FirstOrder:
        """The optimizer, and how gradients are clipped, and the loss scaled."""
        given = self.options.first_order
        scaling = LossScaling() if given.loss_scaling else None
        return FirstOrder(update, lr=self._lr, clip=given.max_grad_norm, clip_value=given.max_grad_value, scaling=scaling)

    @property
    def update(self) -> BlockUpdate:
        """A new optimizer, as the options say."""
        options = self.options
        weight_decay, seed = options.optimization.weight_decay, options.seed % (1 << 62)
        return options.first_order.block_update(weight_decay=weight_decay, seed=seed)

    def engine(self, opening: Opening) -> Engine:
        """An engine at the last snapshot. See the contract."""
        options, execution = self.options, opening.execution
        self._require_alone(opening)
        update = self.update
        self._policy.least = self._least_interval(opening.model, update)
        engine = Engine(
            opening.model,
            self._method(update),
            device=local_device(options.storage.device, None),
            memory=self._memory(opening.activations, opening.least_activations),
            micro_batch_size=options.batching.micro_batch_size,
            overlap=execution.scheduler is Order.OVERLAPPED,
            trace=worker_trace(execution.trace, None),
            run=options.output,
            provenance=opening.decides,
        )
        return self._with_best_step(engine)

    def snapshot_bytes(self, model: HFBlockModel) -> int:
        """Of the weights as they are stored, and the optimizer's state. See the contract."""
        return snapshot_bytes(model, self.update)

    def _require_alone(self, opening: Opening) -> None:
        """Refuse other workers, and a replay."""
        if opening.workers is not None:
            raise OptionError(
                "method",
                found=f"{self.options.first_order.method} of all parameters, and {opening.workers.size} workers",
                expected="one process: several with all parameters are what FSDP and DeepSpeed are for",
                remedy="start it without torchrun, or train an adapter with --lora-rank 8",
            )
        if opening.execution.replay != "auto":
            raise self._refusal("replay", opening.execution.replay, "none: nothing is replayed")

    def _least_interval(self, model: HFBlockModel, update: BlockUpdate) -> int:
        """Least steps between two snapshots, of which each writes all weights and states, within the limit of writes."""
        stored = self.options.storage
        if stored.write_limit_tb is None:
            return 1
        nbytes = snapshot_bytes(model, update)
        least = math.ceil(nbytes / (stored.write_limit_tb * 1e9))
        if stored.snapshot_every is not None and stored.snapshot_every < least:
            raise OptionError(
                "snapshot_every",
                found=f"{stored.snapshot_every}: {nbytes / stored.snapshot_every / 1e9:.3g} TB in 1,000 steps",
                expected=f"at least {least}, for the {stored.write_limit_tb:g} TB of --write-limit-tb",
                remedy="raise one of the two",
            )
        return least


def snapshot_bytes(model: HFBlockModel, update: BlockUpdate) -> int:
    """Size of a snapshot: the weights as they are stored, and the optimizer's state."""
    return sum(layout.nbytes for layout in model.layouts) + state_bytes(update, model.layouts)

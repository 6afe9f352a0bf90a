"""How a trainer's steps are taken by each kind of method: the engine, the optimizer, the reference
weights, and what a checkpoint has.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, Trainer, TrainerState

from zo2adapters.frameworks import arguments
from zo2adapters.frameworks.arguments import Kind, StreamedArguments
from zo2adapters.frameworks.saved_run import JOURNAL, name_base, read_journal, write_token_ids
from zo2adapters.models.adapter_files import WEIGHTS_FILE, read_values
from zo2adapters.models.hf import CalledForward, HFBlockModel
from zo2adapters.models.library_names import names_of
from zo2adapters.models.model_files import ADAPTER_FOLDER, BASE_FOLDER
from zo2adapters.models.peft_adapter import is_of_adapter
from zo2adapters.models.peft_model import PeftBlockModel
from zo2core import LOMO, AdaLOMO, Batch, BlockUpdate, Engine, Journal, TorchOptimizer
from zo2core.errors import OptionError
from zo2core.journal.journal import copy_journal
from zo2core.journal.snapshots import Snapshot, Snapshots
from zo2core.optimizers.adapter_and_base import AdapterAndBase
from zo2core.optimizers.registry import make_block_update

with names_of("transformers"):
    from transformers.trainer import TRAINER_STATE_NAME

# as in transformers.Trainer
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
# keys of the number of steps in the journal, in a trainer's state
_SAVED, _VERSION = "ZOTrainerMixin", "version"


class TrainerSteps:
    """How the steps of a trainer are taken."""

    # what to do about arguments that are not supported, other than those of all methods; None: they
    # are supported
    remedies: Mapping[str, str | None] = MappingProxyType({})
    takes_steps = True  # whether the engine takes the steps, and not the trainer's optimizer
    exports_checkpoints = True  # whether checkpoints have the weights

    def __init__(self, trainer: Any, streamed: StreamedArguments, model: HFBlockModel) -> None:
        self.trainer = trainer
        self.streamed = streamed
        self.model = model
        self.grad_norm: float | None = None  # of the last step
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """Engine that takes the steps, with the present weights."""
        if self._engine is None:
            self._engine = self._open()
        return self._engine

    @abstractmethod
    def _open(self) -> Engine:
        """Open the engine of the run."""

    @property
    @abstractmethod
    def operations(self) -> int:
        """Floating-point operations of a step for each parameter and token."""

    @abstractmethod
    def reference(self) -> AbstractContextManager[Engine]:
        """The weights that training started from."""

    @abstractmethod
    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint."""

    def begin(self) -> None:
        """Do what needs the whole trainer, once it is made."""

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose learning rate the schedule sets; None: the trainer's own."""
        lr = self.trainer.args.learning_rate
        return torch.optim.SGD([torch.zeros(0, requires_grad=True)], lr=lr)

    def present_lr(self, step: int) -> float:
        """The learning rate that the trainer's schedule has set."""
        return float(self.trainer.optimizer.param_groups[0]["lr"])

    def take(self, batches: list[Batch], loss: CalledForward | None) -> float:
        """Take a step with all its batches, and return its loss."""
        result = self.engine.step(batches, loss)
        self.grad_norm = result.grad_norm
        if self.grad_norm is None:
            self.grad_norm = math.sqrt(math.fsum(grad * grad for grad in result.projected_grads))
        return result.loss

    def decaying(self) -> list[str]:
        """Names of the parameters that decay."""
        return []

    def is_models_own_loss(self) -> bool:
        """Whether the engine computes the loss that the trainer asks for by itself."""
        return False

    def export(self, written: Path, directory: Path) -> None:
        """Write the model into a directory, whose files will be in another one."""
        self.engine.export(written)
        write_token_ids(self.trainer.model, written)

    def write_state(self, directory: Path) -> None:
        """Write what training needs to continue besides the model and the trainer's files."""

    def after_write(self, directory: Path) -> None:
        """Write what belongs beside weights that were written."""

    def before_checkpoint(self) -> None:
        """Put into the trainer's state what its checkpoint needs."""


class ZerothOrderTrainerSteps(TrainerSteps):
    """Zeroth-order steps, whose journal is the checkpoint."""

    def __init__(self, trainer: Any, streamed: StreamedArguments, model: HFBlockModel) -> None:
        super().__init__(trainer, streamed, model)
        self.journal = Journal()
        self._loss_was: Sequence[object] = ()
        self.exports_checkpoints = streamed.export_checkpoints

    def begin(self) -> None:
        """Note the parts of the loss, which a caller may replace."""
        self._loss_was = self._loss_parts()

    def _open(self) -> Engine:
        args = self.trainer.args
        return self.streamed.open_zeroth_order(
            self.model,
            self.journal,
            lr=self.present_lr,
            weight_decay=args.weight_decay,
            seed=args.seed,
            device=str(args.device),
        )

    def rewind(self, journal: Journal) -> None:
        """Continue from another version of the run."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.journal = journal

    @property
    def operations(self) -> int:
        """Two for each evaluation; there is no backward pass."""
        updates = self.engine.journal.updates
        return 2 * len(updates[-1].evaluations) if updates else 0

    def is_models_own_loss(self) -> bool:
        """Whether the trainer's loss is that of ``engine.step``, as trainer and model are now: what
        decides may change from step to step.
        """
        trainer = self.trainer
        method = type(trainer).compute_loss
        has_routers = self.model.routers.are_asked_for
        # Of several batches ``Trainer`` adds up the losses of routers, which are means.
        sums_routers = has_routers and trainer.args.gradient_accumulation_steps > 1
        is_own = method is Trainer.compute_loss and not sums_routers
        name = f"{method.__module__}.{method.__qualname__}"
        if name == "trl.trainer.sft_trainer.SFTTrainer.compute_loss":
            # It leaves out the loss of routers that a model adds, and adds its own.
            adds_routers = trainer.aux_loss_enabled or has_routers
            is_own = trainer.args.loss_type == "nll" and not adds_routers
        has_other = (
            self.streamed.trainer_loss
            or "compute_loss" in vars(trainer)
            or trainer.compute_loss_func is not None
            or trainer.label_smoother is not None
        )
        is_replaced = self.model.is_loss_replaced or self._loss_parts() != self._loss_was
        return is_own and not has_other and not is_replaced

    def _loss_parts(self) -> Sequence[object]:
        """The model's forward, and whether the trainer divides a loss by the tokens of all batches
        of a step.
        """
        return self.model.skeleton.forward, self.trainer.model_accepts_loss_kwargs

    @contextmanager
    def reference(self) -> Iterator[Engine]:
        """The base checkpoint, without the steps taken so far."""
        if self.engine.version == 0:
            yield self.engine
            return
        journal = self.engine.journal
        self.rewind(journal)  # closes the engine: only one engine at a time uses the model
        with Engine(
            self.model,
            journal=journal.until(0),
            device=str(self.trainer.args.device),
            memory=self.streamed.memory_policy(),
        ) as reference:
            yield reference

    def after_write(self, directory: Path) -> None:
        """Write the journal last: a kill between weights and journal leaves the earlier journal
        whole.
        """
        copy_journal(self.engine.journal, directory / JOURNAL)

    def before_checkpoint(self) -> None:
        """Save the number of steps: a second call of train counts global_step from 0 again."""
        saved = {"args": {}, "attributes": {_VERSION: self.engine.version}}
        self.trainer.state.stateful_callbacks[_SAVED] = saved

    def load(self, checkpoint: Path) -> None:
        """Continue from the journal, which must end at the step in the trainer's state."""
        path = checkpoint / TRAINER_STATE_NAME
        version = None
        if path.is_file():
            state = TrainerState.load_from_json(str(path))
            saved = state.stateful_callbacks.get(
                _SAVED, {"attributes": {_VERSION: state.global_step}}
            )
            version = int(saved["attributes"][_VERSION])
        self.rewind(read_journal(checkpoint / JOURNAL, version))


class FullTrainerSteps(TrainerSteps):
    """First-order steps of all parameters, each segment updated where it is stored."""

    remedies = arguments.FULL
    operations = 8  # two forward passes, and the gradients of activations and weights

    def _open(self) -> Engine:
        args = self.trainer.args
        return self.streamed.open_first_order(
            self.model,
            self._update(),
            lr=self.present_lr,
            clip=args.max_grad_norm or None,
            device=str(args.device),
        )

    def _update(self) -> BlockUpdate:
        """The optimizer that method and arguments name."""
        args = self.trainer.args
        if self.streamed.method == "badam":
            every = self.streamed.switch_every
            return make_block_update(
                "badam", weight_decay=args.weight_decay, switch_every=every, seed=args.seed
            )
        if args.optim in {"lomo", "adalomo"}:
            return (LOMO if args.optim == "lomo" else AdaLOMO)(weight_decay=args.weight_decay)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        decaying = frozenset(self.decaying())

        def make(named: list[tuple[str, nn.Parameter]]) -> Any:
            groups = (
                {
                    "params": [value for name, value in named if name in decaying],
                    "weight_decay": args.weight_decay,
                },
                {
                    "params": [value for name, value in named if name not in decaying],
                    "weight_decay": 0.0,
                },
            )
            return kind([group for group in groups if group["params"]], **options)

        return TorchOptimizer(make, by_name=True)

    def decaying(self) -> list[str]:
        """Names of the parameters that decay, as the trainer chooses them from the whole model."""
        with torch.device("meta"):
            whole = type(self.model.skeleton)(AutoConfig.for_model(**self.model.config.to_dict()))
        names: list[str] = Trainer.get_decay_parameter_names(self.trainer, whole)
        return names

    @contextmanager
    def reference(self) -> Iterator[Engine]:
        """The base checkpoint, before the first step."""
        if self.engine.version > 0:
            steps = self.engine.version
            found = (
                f"a reference that is needed after {steps} steps, when the base's weights have "
                "changed"
            )
            expected = "reference log-probabilities that are computed before the first step"
            raise OptionError(
                "ref_model",
                found,
                expected,
                "pass these rows as eval_dataset when the trainer is made, or train an adapter",
            )
        yield self.engine

    def write_state(self, directory: Path) -> None:
        """Write weights, optimizer states and the number of steps."""
        _snapshots(directory).write(Snapshot(self.engine.version, self.engine.state_dict()))

    def load(self, checkpoint: Path) -> None:
        """Continue from the snapshot of a checkpoint."""
        snapshots = _snapshots(checkpoint)
        self.engine.load_state_dict(snapshots.read(max(snapshots.steps, default=0)).state)


class AdapterAndBaseTrainerSteps(FullTrainerSteps):
    """First-order steps of an adapter, by the optimizer that ``optim`` names, and of the base under
    it, by LOMO.
    """

    remedies = MappingProxyType({**arguments.FULL, **arguments.OF_ADAPTER_CONFIG})

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer whose two learning rates the schedule sets, of adapter and base."""
        optimizer = super().optimizer()
        assert optimizer is not None, "the engine takes the steps"
        of_base = {"params": [torch.zeros(0, requires_grad=True)], "lr": self.streamed.base_lr}
        optimizer.add_param_group(of_base)
        return optimizer

    def _base_lr(self, step: int) -> float:
        """The base's learning rate that the trainer's schedule has set."""
        return float(self.trainer.optimizer.param_groups[1]["lr"])

    def _update(self) -> BlockUpdate:
        """The optimizer that ``optim`` names for the adapter, and LOMO for the base."""
        return AdapterAndBase(
            super()._update(),
            LOMO(weight_decay=self.trainer.args.weight_decay),
            base_lr=self._base_lr,
            is_of_adapter=is_of_adapter,
        )

    def decaying(self) -> list[str]:
        """Names of the adapter's parameters that decay; of the base all do."""
        assert isinstance(self.model, PeftBlockModel), "other models were refused"
        return _without_biases(self.model.adapter.parameters)

    def export(self, written: Path, directory: Path) -> None:
        """Write base and adapter into folders, of which the adapter names where the base will
        be.
        """
        self.engine.export(written)
        write_token_ids(self.trainer.model, written / BASE_FOLDER)
        name_base(written / ADAPTER_FOLDER, directory / BASE_FOLDER)


class AdapterTrainerSteps(TrainerSteps):
    """First-order steps of an adapter, which the trainer's optimizer takes."""

    remedies = arguments.ADAPTER
    operations = 6  # two forward passes, and the gradients of activations
    takes_steps = False

    def __init__(self, trainer: Any, streamed: StreamedArguments, model: HFBlockModel) -> None:
        super().__init__(trainer, streamed, model)
        # the adapter's parameters when training began, by name
        self._initial: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Show the trainer the adapter's parameters as the model's."""
        skeleton: Any = self.model.skeleton
        skeleton.parameters = lambda recurse=True: iter(self.engine.parameters.values())
        skeleton.named_parameters = lambda *_, **__: iter(self.engine.parameters.items())

    def _open(self) -> Engine:
        engine = self.streamed.open_first_order(
            self.model,
            None,
            lr=self.present_lr,
            clip=None,
            device=str(self.trainer.args.device),
        )
        self._initial = _copies(engine)
        return engine

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The trainer's own."""
        return None

    def take(self, batches: list[Batch], loss: CalledForward | None) -> float:
        """Add the step's gradients to those of the adapter: the trainer's optimizer takes the
        step.
        """
        to_training: Callable[[], object] | None
        if callable(to_training := getattr(self.trainer.optimizer, "train", None)):
            # schedule-free optimizers
            to_training()
        return self.engine.gradients(batches, loss)

    def decaying(self) -> list[str]:
        """Names of the adapter's parameters that decay: those of neither biases nor norms."""
        return _without_biases(self.engine.parameters)

    @contextmanager
    def reference(self) -> Iterator[Engine]:
        """The model with the adapter that training started from."""
        engine = self.engine
        present = _copies(engine)
        engine.load_parameters(self._initial)
        try:
            yield engine
        finally:
            engine.load_parameters(present)

    def load(self, checkpoint: Path) -> None:
        """Load the adapter of a checkpoint."""
        model, engine = self.model, self.engine
        assert isinstance(model, PeftBlockModel), "the engine has required an adapter"
        values = read_values(
            checkpoint / WEIGHTS_FILE, model.adapter.parameters, model.adapter.tensors
        )
        engine.load_parameters({name: values[name] for name in engine.parameters})


STEPS: Mapping[Kind, type[TrainerSteps]] = {
    Kind.ZEROTH_ORDER: ZerothOrderTrainerSteps,
    Kind.FULL: FullTrainerSteps,
    Kind.ADAPTER: AdapterTrainerSteps,
    Kind.BOTH: AdapterAndBaseTrainerSteps,
}


def _without_biases(names: Iterable[str]) -> list[str]:
    """Names of parameters without biases and norms, as ``transformers.Trainer`` tells them."""
    return [name for name in names if not _NO_DECAY.search(name.lower())]


def _copies(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in engine.parameters.items()}


def _snapshots(directory: Path) -> Snapshots:
    """The snapshot in a trainer's checkpoint, which has no journal beside it."""
    return Snapshots(directory, lambda step: 0, lambda step, name: None)

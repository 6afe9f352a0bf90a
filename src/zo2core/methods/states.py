"""Where what a run trains is, from step to step: one object for each place, all with the same verbs.

``load`` sets values, ``commit`` keeps a step, ``snapshot`` returns all on which later steps depend, ``restore`` continues
from that. A place that cannot do one of these refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from zo2core.checkpoint import Snapshot, Snapshots
from zo2core.errors import JournalError, OptionError
from zo2core.io.direct_file import whole_pages
from zo2core.journal import json_object
from zo2core.methods.first_order import FirstOrder, LossScaling
from zo2core.optimizer_states import (
    StateMemory,
    StatesInStores,
    copied_state,
    form_of,
    require_finite,
    require_optimizer_state,
    unusable_state,
)
from zo2core.optimizers import make_optimizer
from zo2core.planning.memory import MOST_USEFUL_BUCKETS
from zo2core.protocols import BlockUpdate
from zo2core.runner import Runner
from zo2core.sources import SegmentStore
from zo2core.sweep.trained import StoredParameters, TrainedParameters
from zo2core.types import LARGEST, BlockLayout, Commit, Update
from zo2core.workers import sync_snapshots


@dataclass(frozen=True)
class AtSnapshot:
    """The method of an engine that evaluates and exports the parameters of a snapshot, and takes no steps.

    Args:
        step: Number of steps taken when the snapshot was taken.
        parameters: Values of the trained parameters, by name; None: the initial values of the run.
    """

    step: int
    parameters: Mapping[str, torch.Tensor] | None


class State:
    """The state of a run, which its steps change. A kind of state refuses the operations that it does not support."""

    refusal: ClassVar[tuple[str, str, str]]  # found, expected and remedy of the error for such an operation

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters."""
        self.refuse("load_parameters")

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend."""
        self.refuse("state_dict")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        self.refuse("load_state_dict")

    def refuse(self, asked: str) -> NoReturn:
        """Raise an error for an operation that this kind of state does not support."""
        found, expected, remedy = self.refusal
        raise OptionError(asked, found=found, expected=expected, remedy=remedy)


class JournalState(State):
    """The state of zeroth-order steps: the journal's updates, which are replayed."""

    refusal = (
        "a run whose state is its journal",
        "a run of first-order steps",
        "copy the journal; for other weights, begin a run of a checkpoint with them",
    )

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    @property
    def version(self) -> int:
        """Number of steps taken."""
        return len(self._runner.journal.updates)

    def commit(self, record: Update) -> None:
        """Append a step's record to the journal."""
        self._runner.base_digests.note(self._runner.journal)
        self._runner.journal.append(record)


class TrainedState(State):
    """What first-order steps train, with the steps taken. A step that was lost with its process is repeated."""

    refusal = ("an engine that takes no steps", "FirstOrder(optimizer)", "pass a method to the engine")

    def __init__(self, runner: Runner, trained: TrainedParameters | StoredParameters, *, version: int = 0) -> None:
        self.version = version
        self._runner, self.trained = runner, trained

    def commit(self, record: Commit) -> None:
        """Record a step in the journal, or compare a repeated step with its record."""
        journal = self._runner.journal
        if not self._runner.is_kept:
            return
        if record.step == journal.version:
            self._runner.base_digests.note(journal)
            journal.append(record)
        elif (recorded := journal.commits[record.step]) != record:
            raise JournalError(
                f"{journal.name}, step {record.step}",
                found=f"loss {record.loss!r}, gradient norm {record.grad_norm!r} and lr {record.lr!r} in the repeated step",
                expected=f"loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r} and lr {recorded.lr!r}, as before",
                remedy="resume with the same machine, torch, transformers and number of threads",
            )

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters."""
        self.require(parameters)
        self.trained.load(parameters, lambda: self._runner.sweep(0, [], self._runner.model))

    def require(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than the trained ones, and values that are not finite."""
        if not isinstance(parameters, Mapping):
            raise unusable_state(f"a {type(parameters).__name__} as parameters")
        forms = {name: (tuple(shape), dtype) for name, (shape, dtype) in self.trained.forms.items()}
        if {name: form_of(value) for name, value in parameters.items()} != forms:
            raise unusable_state(f"{len(parameters)} parameters that are not all of the {len(forms)} trained ones")
        for name, value in parameters.items():
            require_finite(name, value)


class AdapterState(TrainedState):
    """Parameters in memory, such as an adapter's, whose optimizer takes its step after the sweep."""

    trained: TrainedParameters

    def __init__(self, runner: Runner, trained: TrainedParameters, method: FirstOrder) -> None:
        super().__init__(runner, trained)
        assert not isinstance(method.optimizer, BlockUpdate), "it trains what is in memory"
        self._factory, parameters = method.optimizer, list(trained.parameters.values())
        self.optimizer: Any = None if self._factory is None else make_optimizer(self._factory, parameters)

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, as copies."""
        return {
            "steps": self.version,
            "parameters": {name: value.detach().cpu().clone() for name, value in self.trained.parameters.items()},
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        _require_state(state)
        if self._factory is not None:
            require_optimizer_state(state["optimizer"], self._factory, list(self.trained.parameters.values()))
        self.load(state["parameters"])
        if self._factory is not None:
            self.optimizer.load_state_dict(copied_state(state["optimizer"]))
        self.version = state["steps"]


class LossScale:
    """The present scale of the loss, as in ``torch.amp.GradScaler``."""

    def __init__(self, scaling: LossScaling | None) -> None:
        self._scaling = scaling
        self.scale = 1.0 if scaling is None else scaling.initial
        self._good_steps = 0  # in a row, without overflow

    @property
    def may_skip(self) -> bool:
        """Whether a step whose gradients overflow is skipped, and the next one scaled by less.

        A loss that is not scaled up has gradients that are too large by themselves.
        """
        return self._scaling is not None and self.scale > 1.0

    def unscaled(self, gradient: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Divide a float32 gradient of the scaled loss by the scale; into ``out``, if it is given."""
        if self._scaling is None:
            return gradient
        return torch.mul(gradient, torch.tensor(1.0 / self.scale, dtype=torch.float32), out=out)

    def update(self, *, overflowed: bool) -> None:
        """Choose the scale of the next step."""
        if self._scaling is None:
            return
        if overflowed:
            self.scale, self._good_steps = max(self.scale * self._scaling.backoff, 1.0), 0
            return
        self._good_steps += 1
        if self._good_steps == self._scaling.interval:
            grown, self._good_steps = self.scale * self._scaling.growth, 0
            self.scale = grown if grown <= LARGEST else self.scale

    def values(self) -> dict[str, Any]:
        """What later steps depend on, as JSON."""
        return {} if self._scaling is None else {"loss_scale": self.scale, "good_steps": self._good_steps}

    def load_values(self, values: Mapping[str, Any]) -> None:
        """Continue with what ``values`` returned."""
        values = values if isinstance(values, Mapping) else {"loss_scale": values}
        scale, steps = values.get("loss_scale", 1.0), values.get("good_steps", 0)
        if not isinstance(scale, float) or not 1.0 <= scale <= LARGEST or type(steps) is not int or steps < 0:
            raise unusable_state(f"{values!r:.80} as the scale of the loss")
        if self._scaling is not None and "loss_scale" in values:
            self.scale, self._good_steps = scale, steps


class StoredState(TrainedState):
    """All parameters, in host memory, which change where they are stored."""

    trained: StoredParameters

    def __init__(self, runner: Runner, trained: StoredParameters, method: FirstOrder) -> None:
        assert method.update is not None, "it trains what is stored"
        super().__init__(runner, trained)
        self.update, self.scale = method.update, LossScale(method.scaling)
        self._options = json_object("update", method.journal_options)
        self.states: StateMemory | StatesInStores = StateMemory(self.update, runner.layouts)

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of all parameters, before the first step."""
        if self.version:
            raise OptionError(
                "load_parameters",
                found=f"a run of {self.version} steps, whose optimizer's state belongs to its weights",
                expected="a run without steps",
                remedy="use load_state_dict, or a new engine",
            )
        super().load(parameters)

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, which is not copied: the next step changes it."""
        assert isinstance(self.states, StateMemory), "other states are committed on disk"
        self.update.settle()
        segments = range(len(self._runner.layouts))
        weights = self._runner.parameters_at(0, segments)
        return {
            "steps": self.version,
            "parameters": {spec.name: view.view(spec.shape) for spec, view in weights},
            "optimizer": self.states.state_dict(),
            "values": self.scale.values(),
            "method": self._options,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        assert isinstance(self.states, StateMemory), "other states are committed on disk"
        _require_state(state)
        if state.get("method") != self._options:
            raise unusable_state(f"a state of the optimizer {state.get('method')!r:.200}")
        self.require(state["parameters"])
        self.update.settle()
        self.scale.load_values(state.get("values", {}))
        self.states.load_state_dict(state["optimizer"])
        super().load(state["parameters"])
        self.version = state["steps"]


class GenerationState(StoredState):
    """All parameters and optimizer states on disk, where those of a step are a generation that is committed together.

    An optimizer that forgets its states after a turn, as ``BAdam`` does, keeps them in memory. The segment of the turn stays
    there, too, and is written once, when the turn ends; that is the commit.
    """

    refusal = (
        "an engine whose weights and states are committed on disk",
        "an engine that keeps them in memory",
        "call commit(), from which the run resumes; for other weights, begin a run of a checkpoint with them",
    )
    load, snapshot, restore = State.load, State.snapshot, State.restore

    def __init__(self, runner: Runner, trained: StoredParameters, method: FirstOrder, commit_every: int) -> None:
        super().__init__(runner, trained, method)
        assert isinstance(runner.source, SegmentStore), "it was planned"
        assert runner.generations is not None, "it was planned"
        self._source, self._generations = runner.source, runner.generations
        if any(layout.states for layout in runner.layouts):
            self.states = StatesInStores(runner.layouts, runner.source.read_states)
        self._every = commit_every if self.update.turn is None else self.update.turn
        self.version = self._generations.step
        self.scale.load_values(self._generations.values)
        trained.versions = {segment: self._generations.version(segment) for segment in range(len(runner.layouts))}
        self._source.pin(self._kept())

    @property
    def committed(self) -> int:
        """The step of the last commit, from which a run resumes."""
        return self._generations.step

    def end_step(self) -> None:
        """Commit the present step if it is due."""
        self._source.skip_states()
        if self.version % self._every == 0:
            self.commit_generation()

    def commit_generation(self) -> None:
        """Commit the present step durably. An optimizer with turns is committed at their ends only."""
        turn = self.update.turn
        if self.version == self.committed or (turn is not None and self.version % turn):
            return
        try:
            self._source.write_kept()
            self._generations.commit(self.version, self.scale.values())
        except BaseException:
            self._runner.use.close()  # memory and disk may disagree about the segments
            raise
        self._source.pin(self._kept())

    def _kept(self) -> Sequence[int]:
        """Segments that stay in memory until the next commit."""
        if self.update.turn is not None:
            return tuple(self.update.segments(self.version, self.trained.segments))
        if self._every == 1:
            return ()
        layouts = self._runner.layouts
        residents = [index for index, layout in enumerate(layouts) if layout.resident]
        blocks = [index for index, layout in enumerate(layouts) if not layout.resident]
        return (*residents, *blocks[: kept_blocks(self._source.capacity, self._every)])


class KeptSnapshots:
    """The snapshots of a run's directory, of which the newest is loaded at the start."""

    def __init__(self, directory: Path, runner: Runner, state: TrainedState) -> None:
        self.files = Snapshots(directory, runner.journal.chain, runner.journal.require_version)
        self._state, self._workers = state, runner.workers
        self.files.clear_partial()
        newest = sync_snapshots(self.files, runner.workers)
        if newest is not None:
            state.restore(newest.state)

    def take(self, keep: Collection[int]) -> None:
        """Write a snapshot of the present step durably, and delete all older ones but the newest of them."""
        state = self._state.snapshot()
        self._workers.require_same("trained parameters", self._workers.digest([state["parameters"]]))
        self.files.write(Snapshot(self._state.version, state), keep=keep)


def kept_blocks(buckets: int, commit_every: int) -> int:
    """Blocks that stay in memory from one commit to the next, of so many buckets."""
    return 0 if commit_every == 1 else max(buckets - MOST_USEFUL_BUCKETS, 0)


def read_bytes(layouts: Sequence[BlockLayout], buckets: int, commit_every: int, *, measures: bool = False) -> int:
    """Bytes of blocks that a step reads from disk, for an optimizer without turns.

    Weights of blocks that are not in a bucket are read on the way there and on the way back. Optimizer states are read on
    the way back. At the end of a step the first blocks are in the buckets, and at its turn the last blocks.
    """
    kept = kept_blocks(buckets, commit_every)
    blocks = [layout for layout in layouts if not layout.resident][kept:]
    count, free = len(blocks), buckets - kept
    if free >= count:
        return 0
    weights = [whole_pages(layout.weight_bytes) for layout in blocks]
    states = [whole_pages(layout.nbytes) - of_weights for layout, of_weights in zip(blocks, weights, strict=True)]
    moved = sum(weights[free:]) + sum(weights[: count - free])
    return moved * (2 if measures else 1) + sum(states[max(free, count - free) :]) + sum(states[: count - free])


def _require_state(state: Mapping[str, Any]) -> None:
    missing = {"steps", "parameters", "optimizer"} - (state.keys() if isinstance(state, Mapping) else set())
    if missing:
        raise unusable_state(f"a state without {', '.join(sorted(missing))}")
    if type(state["steps"]) is not int or state["steps"] < 0:
        raise unusable_state(f"{state['steps']!r:.40} as the number of steps")

"""What first-order steps change: a state that is loaded, committed, copied and restored.

- ``AdapterState``: an adapter's parameters in memory, and the optimizer's state.
- ``StoredState``: all parameters in memory, with the optimizer's states.
- ``DividedState``: the same, where several workers divide the states.
- ``DiskState``: all parameters on disk, with the optimizer's states; a step's segments are a
  generation that is committed together.

A kind of state that cannot do one of these refuses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, NoReturn

import torch

from zo2core.errors import JournalError, OptionError
from zo2core.journal.records import json_object
from zo2core.journal.snapshots import LateTensor, Snapshot, Snapshots
from zo2core.methods.first_order import FirstOrder
from zo2core.optimizers.loss_scaling import LossScale
from zo2core.optimizers.states import (
    StateMemory,
    StatesInStores,
    copied_state,
    form_of,
    require_finite,
    require_optimizer_state,
    unusable_state,
)
from zo2core.optimizers.torch_optimizer import OptimizerFactory, make_optimizer
from zo2core.planning.speeds import kept_blocks
from zo2core.protocols import BlockUpdate
from zo2core.run import CommittedSegments, Run, lacking
from zo2core.sweep.trained_weights import AdapterWeights, StoredWeights, TrainedWeights
from zo2core.types import Commit
from zo2core.workers.agreement import sync_snapshots
from zo2core.workers.divided_states import DividedStates


class RunState(ABC):
    """The state that the steps of a run change."""

    # Found, expected and remedy of the error for what this kind of state does not support.
    refusal: ClassVar[tuple[str, str, str]]
    snapshots: Snapshots | None = None  # of first-order steps that are kept

    def __init__(self, run: Run) -> None:
        self._run = run

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of steps taken."""

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters."""
        self.refuse("load_parameters")

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend."""
        self.refuse("state_dict")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        self.refuse("load_state_dict")

    def refuse(self, operation: str) -> NoReturn:
        """Raise an error for an operation that this kind of state does not support."""
        found, expected, remedy = self.refusal
        raise OptionError(operation, found, expected, remedy)

    def require_snapshots(self, operation: str) -> Snapshots:
        """The snapshots of a run that is kept."""
        if self.snapshots is None:
            raise lacking(
                operation, "snapshots", "FirstOrder(...) with run=..., and without commit_every"
            )
        return self.snapshots

    def take_snapshot(self, keep: Collection[int]) -> None:
        """Write a snapshot of the present step durably, and delete all older ones but the newest of
        them.
        """
        self.require_snapshots("take_snapshot")
        self._write(self.snapshot(), keep)

    def _write(self, state: Mapping[str, Any], keep: Collection[int]) -> None:
        """Write a snapshot of this state, whose parameters all workers have alike."""
        snapshots = self.require_snapshots("take_snapshot")
        workers = self._run.division.peers
        workers.require_same("trained parameters", workers.digest([state["parameters"]]))
        snapshots.write(Snapshot(self.version, state), keep=keep)


class TrainedState(RunState):
    """Parameters that first-order steps train, of an engine that takes no steps itself."""

    refusal = (
        "an engine that takes no steps",
        "FirstOrder(optimizer)",
        "pass a method to the engine",
    )

    def __init__(self, run: Run, weights: TrainedWeights, *, step: int = 0) -> None:
        super().__init__(run)
        self._weights = weights
        self._version = step

    @property
    def version(self) -> int:
        """Number of steps taken. One that was lost with its process is repeated."""
        return self._version

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of the trained parameters."""
        self.require(parameters)
        self._weights.load(parameters, lambda: self._run.bring_to(0))

    def require(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Refuse values of other parameters than the trained ones, and values that are not
        finite.
        """
        if not isinstance(parameters, Mapping):
            raise unusable_state(f"a {type(parameters).__name__} as parameters")
        forms = dict(self._weights.forms)
        if {name: form_of(value) for name, value in parameters.items()} != forms:
            raise unusable_state(
                f"{len(parameters)} parameters that are not all of the {len(forms)} trained ones"
            )
        for name, value in parameters.items():
            require_finite(name, value)

    def resume(self) -> None:
        """Keep snapshots in the directory of the run, if it has one, and continue from the
        newest.
        """
        directory, journal = self._run.directory, self._run.journal
        if directory is None:
            return
        self.snapshots = Snapshots(directory, journal.chain, journal.require_version)
        self.snapshots.clear_partial()
        newest = sync_snapshots(self.snapshots, self._run.division.peers)
        if newest is not None:
            self.restore(newest.state)

    def record(self, commit: Commit) -> None:
        """Record a step in the journal, or compare a repeated step with its record."""
        run, journal = self._run, self._run.journal
        if not run.is_kept:
            return
        if commit.step == journal.version:
            run.append(commit)
            return
        recorded = journal.commits[commit.step]
        if recorded != commit:
            raise JournalError(
                f"{journal.name}, step {commit.step}",
                found=f"loss {commit.loss!r}, gradient norm {commit.grad_norm!r} and lr "
                f"{commit.lr!r} in the repeated step",
                expected=f"loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r} and lr "
                f"{recorded.lr!r}, as before",
                remedy="resume with the same machine, torch, transformers and number of threads",
            )


class AdapterState(TrainedState):
    """Parameters in memory, such as an adapter's, and the state of their optimizer."""

    def __init__(self, run: Run, weights: AdapterWeights, make: OptimizerFactory | None) -> None:
        super().__init__(run, weights)
        self.weights = weights
        self._make = make
        self.optimizer: Any = None  # of ``torch.optim``; None: the caller changes the parameters
        if make is not None:
            self.optimizer = make_optimizer(make, list(weights.parameters.values()))

    def commit(self, record: Commit) -> None:
        """Take a step: write its record, and change the parameters by their gradients."""
        self.record(record)
        self.optimizer.step()
        self._version += 1

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, as copies."""
        return {
            "steps": self.version,
            "parameters": {
                name: value.detach().cpu().clone()
                for name, value in self.weights.parameters.items()
            },
            "optimizer": None if self.optimizer is None else self.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        _require_state(state)
        if self._make is not None:
            parameters = list(self.weights.parameters.values())
            require_optimizer_state(state["optimizer"], self._make, parameters)
        self.load(state["parameters"])
        if self._make is not None:
            self.optimizer.load_state_dict(copied_state(state["optimizer"]))
        self._version = state["steps"]


class FusedState(TrainedState):
    """All parameters, where they are stored, with what an optimizer keeps of each segment."""

    states: StateMemory | StatesInStores  # of the optimizer

    def __init__(
        self, run: Run, weights: StoredWeights, method: FirstOrder, update: BlockUpdate
    ) -> None:
        super().__init__(run, weights)
        self.weights = weights
        self.update = update
        self.scale = LossScale(method.scaling)

    @property
    def next_version(self) -> int | None:
        """Version of a segment after its next update; None: the next number."""
        return None

    def commit(self, record: Commit, *, overflowed: bool) -> None:
        """Take a step, whose updates were made: write its record.

        Args:
            record: The record.
            overflowed: Whether the step was skipped, since a gradient of the scaled loss
                overflowed.
        """
        self.record(record)
        self.scale.update(overflowed=overflowed)
        self._version += 1

    def end_step(self) -> None:
        """Do what follows a step, and is not part of its time."""


class StoredState(FusedState):
    """All parameters and the optimizer's states in memory."""

    states: StateMemory

    def __init__(
        self, run: Run, weights: StoredWeights, method: FirstOrder, update: BlockUpdate
    ) -> None:
        super().__init__(run, weights, method, update)
        self._options = json_object("update", method.update_options)
        self.states = StateMemory(update, run.segments.layouts)

    def load(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set the values of all parameters, before the first step."""
        if self.version:
            raise OptionError(
                "load_parameters",
                found=f"a run of {self.version} steps, whose optimizer's state belongs to its "
                "weights",
                expected="a run without steps",
                remedy="use load_state_dict, or a new engine",
            )
        super().load(parameters)

    def snapshot(self) -> dict[str, Any]:
        """All on which later steps depend, which is not copied: the next step changes it."""
        self.update.settle()
        weights = self._run.parameters_at(0, range(len(self._run.segments.layouts)))
        return {
            "steps": self.version,
            "parameters": {spec.name: view.view(spec.shape) for spec, view in weights},
            "optimizer": self.states.state_dict(),
            "values": self.scale.values(),
            "method": self._options,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot."""
        _require_state(state)
        if state.get("method") != self._options:
            raise unusable_state(f"a state of the optimizer {state.get('method')!r:.200}")
        self.require(state["parameters"])
        self.update.settle()
        self.scale.load_values(state.get("values", {}))
        self.states.load_state_dict(state["optimizer"])
        super().load(state["parameters"])
        self._version = state["steps"]


class DividedState(StoredState):
    """All parameters in memory, with the optimizer's states of a share of the segments; other
    workers keep the rest. A snapshot has those of all.
    """

    refusal = (
        "an engine whose workers each keep a share of the optimizer's states",
        "an engine that keeps all of them",
        "call take_snapshot() on all workers, or leave divide_states out",
    )
    update: DividedStates

    def snapshot(self) -> dict[str, Any]:
        """Refuse: a single worker cannot ask the others."""
        self.refuse("state_dict")

    def take_snapshot(self, keep: Collection[int]) -> None:
        """Write a snapshot durably, on all workers at once. States of others are received while the
        file is written, one tensor at a time.
        """
        self._write(super().snapshot() | {"optimizer": self._all_states()}, keep)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a copy of a snapshot, of which this worker takes its share."""
        _require_state(state)
        states = state["optimizer"]
        if not isinstance(states, Mapping) or states.keys() - range(len(self.update.owners)):
            raise unusable_state("optimizer states of other segments")
        own_states = {segment: states[segment] for segment in self.update.own(states)}
        super().restore({**state, "optimizer": own_states})

    def _all_states(self) -> dict[int, dict[str, LateTensor]]:
        """The states of all segments, in their order."""
        own_states = self.states.state_dict()
        names = [[segment, list(states)] for segment, states in own_states.items()]
        gathered = self._run.workers.all_gather(names, "optimizer states")
        return {
            segment: {name: self._late_tensor(segment, name) for name in of_segment}
            for segment, of_segment in sorted(chain.from_iterable(gathered))
        }

    def _late_tensor(self, segment: int, name: str) -> LateTensor:
        """A state, which its owner sends to the other workers when it is read."""
        owner = self.update.owners[segment]
        spec = next(spec for spec in self.update.specs[segment] if spec.name == name)

        def read() -> torch.Tensor:
            if owner == self._run.workers.rank:
                state = self.states.of(segment, ())[name].contiguous()
            else:
                state = torch.empty(spec.shape, dtype=spec.stored_dtype)
            self._run.workers.broadcast_tensor(state, owner)
            return state

        return LateTensor(spec.shape, spec.stored_dtype, read)


class DiskState(FusedState):
    """All parameters on disk, where those of a step, with its states, are a generation that is
    committed together.

    An optimizer that forgets its states after a turn, as ``BAdam`` does, keeps them in memory. The
    segment of the turn stays there, too, and is written once, when the turn ends; that is the
    commit.
    """

    refusal = (
        "an engine whose weights and states are committed on disk",
        "an engine that keeps them in memory",
        "call commit(), from which the run resumes; for other weights, begin a run of a "
        "checkpoint with them",
    )
    load = RunState.load

    def __init__(
        self,
        run: Run,
        weights: StoredWeights,
        method: FirstOrder,
        update: BlockUpdate,
        segments: CommittedSegments,
    ) -> None:
        super().__init__(run, weights, method, update)
        self._every = segments.every if update.turn is None else update.turn
        self._store = segments.store
        self._generations = segments.generations
        self._layouts = layouts = run.segments.layouts
        if any(layout.states for layout in layouts):
            self.states = StatesInStores(layouts, segments.store.read_states)
        else:
            self.states = StateMemory(update, layouts)
        self._version = self._generations.step
        self.scale.load_values(self._generations.values)
        weights.versions = {
            segment: self._generations.version(segment) for segment in range(len(layouts))
        }
        self._store.pin(self._pinned())

    def resume(self) -> None:
        """Do nothing: the segments on disk are those of the last commit."""

    @property
    def committed(self) -> int:
        """The step of the last commit, from which a run resumes."""
        return self._generations.step

    @property
    def next_version(self) -> int:
        """Where segments are written, their version is the number of steps, and not that of their
        updates.
        """
        return self.version + 1

    def require_snapshots(self, operation: str) -> Snapshots:
        """Refuse: there are commits instead."""
        self.refuse(operation)

    def end_step(self) -> None:
        """Commit the step durably if that is due."""
        self._store.skip_states()
        if self.version % self._every == 0:
            self.commit_segments()

    def commit_segments(self) -> None:
        """Commit the present step durably.

        An optimizer with turns is committed at their ends only.
        """
        turn = self.update.turn
        if self.version == self.committed or (turn is not None and self.version % turn):
            return
        try:
            self._store.write_kept()
            self._generations.commit(self.version, self.scale.values())
        except BaseException:
            self._run.use.close()  # memory and disk may disagree about the segments
            raise
        self._store.pin(self._pinned())

    def _pinned(self) -> Sequence[int]:
        """Segments that stay in memory until the next commit."""
        if self.update.turn is not None:
            return tuple(self.update.segments(self.version, self.weights.segments))
        if self._every == 1:
            return ()
        residents = [index for index, layout in enumerate(self._layouts) if layout.resident]
        blocks = [index for index, layout in enumerate(self._layouts) if not layout.resident]
        return (*residents, *blocks[: kept_blocks(self._store.capacity, self._every)])


def _require_state(state: Mapping[str, Any]) -> None:
    names = state.keys() if isinstance(state, Mapping) else set[str]()
    missing = {"steps", "parameters", "optimizer"} - names
    if missing:
        raise unusable_state(f"a state without {', '.join(sorted(missing))}")
    steps = state["steps"]
    if type(steps) is not int or steps < 0:
        raise unusable_state(f"{steps!r:.40} as the number of steps")

"""The state and the steps of a run, chosen once by its method."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from zo2core.journal import json_object
from zo2core.methods.first_order import AdapterSteps, FirstOrder, gradient_visits
from zo2core.methods.fused import FusedSteps
from zo2core.methods.loss_scale import LossScale
from zo2core.methods.states import (
    AdapterState,
    AtSnapshot,
    GenerationState,
    JournalState,
    KeptSnapshots,
    StoredState,
    TrainedState,
)
from zo2core.methods.zeroth_order import ZerothOrder, ZerothOrderSteps
from zo2core.protocols import DifferentiableModel
from zo2core.runner import Runner
from zo2core.sweep.stored_parameters import StoredParameters

Method: TypeAlias = ZerothOrder | FirstOrder | AtSnapshot


class Steps(NamedTuple):
    """How a run goes on."""

    state: JournalState | TrainedState
    taken: ZerothOrderSteps | AdapterSteps | FusedSteps | None = None  # None: no steps are taken
    snapshots: KeptSnapshots | None = None  # of first-order steps that are kept; None: there are none


def open_steps(
    runner: Runner, method: Method, run: Path | str | None, commit_every: int | None, spill: Path | str | None
) -> Steps:
    """Choose state and steps, and go on from what a run has kept. The arguments are those of ``Engine``."""
    trained = runner.trained
    if isinstance(method, ZerothOrder):
        journal = JournalState(runner)
        return Steps(journal, None if method.estimator is None else ZerothOrderSteps(runner, method.seed, journal))
    assert trained is not None, "it was built"
    if isinstance(method, AtSnapshot):
        state = TrainedState(runner, trained, version=method.step)
        if method.parameters is not None:
            state.load(method.parameters)
        return Steps(state)
    model, update, is_kept = runner.model, method.update, run is not None
    assert isinstance(model, DifferentiableModel), "it was required"
    leaves: list[Mapping[str, torch.Tensor]] = [model.leaves(index) for index in range(len(model.layouts))]
    directory = Path(spill if spill is not None else tempfile.gettempdir() if run is None else run)
    first: AdapterState | StoredState
    taken: AdapterSteps | FusedSteps
    if isinstance(trained, StoredParameters):
        assert update is not None, "it trains what is stored"
        scale, recorded = LossScale(method.scaling), json_object("update", method.journal_options)
        if commit_every is not None:
            first = GenerationState(runner, trained, update, scale, recorded, commit_every=commit_every)
        else:
            first = StoredState(runner, trained, update, scale, recorded, is_kept=is_kept)
        taken = FusedSteps(runner, method, first, gradient_visits(runner, leaves, directory))
    else:
        leaves = [
            {name: leaf.requires_grad_() for name, leaf in of_segment.items() if name in trained.parameters}
            for of_segment in leaves
        ]
        first = AdapterState(runner, trained, method.factory, is_kept=is_kept)
        taken = AdapterSteps(runner, method, first, gradient_visits(runner, leaves, directory))
    keeps = run is not None and commit_every is None
    return Steps(first, taken, KeptSnapshots(Path(run), runner, first) if keeps and run is not None else None)

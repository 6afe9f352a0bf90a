"""The values that pass between the parts."""

from zo2core.types.lanes import COMPUTE, Event, Lane, LaneUse, bound_seconds
from zo2core.types.layouts import (
    ALIGNMENT,
    BlockLayout,
    Bucket,
    ParameterSpec,
    SavedForm,
    SavedPart,
    SegmentKind,
    aligned,
    divide_tied,
    flat_views,
    packed_bytes,
    saved_form,
    walk_bytes,
    walks_beside,
    work_bytes,
)
from zo2core.types.programs import Descend, Distribution, Perturb, Program, Table
from zo2core.types.results import EvaluationResult, StepResult
from zo2core.types.steps import LARGEST, MAX_SEED, Batch, Evaluation, Update

__all__ = [
    "ALIGNMENT",
    "COMPUTE",
    "LARGEST",
    "MAX_SEED",
    "Batch",
    "BlockLayout",
    "Bucket",
    "Descend",
    "Distribution",
    "Evaluation",
    "EvaluationResult",
    "Event",
    "Lane",
    "LaneUse",
    "ParameterSpec",
    "Perturb",
    "Program",
    "SavedForm",
    "SavedPart",
    "SegmentKind",
    "StepResult",
    "Table",
    "Update",
    "aligned",
    "bound_seconds",
    "divide_tied",
    "flat_views",
    "packed_bytes",
    "saved_form",
    "walk_bytes",
    "walks_beside",
    "work_bytes",
]

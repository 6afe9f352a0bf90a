"""The values that pass between the parts."""

from zo2core.types.encodings import EncodedPart, Encoding, Float8Blocks, Int8Rows, NF4Blocks, encoded_bytes
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
    trained,
    walk_bytes,
    walks_beside,
    work_bytes,
)
from zo2core.types.programs import Descend, Distribution, Perturb, Program, Table
from zo2core.types.results import EvaluationResult, StepResult
from zo2core.types.sizes import shown_bytes
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
    "EncodedPart",
    "Encoding",
    "Evaluation",
    "EvaluationResult",
    "Event",
    "Float8Blocks",
    "Int8Rows",
    "Lane",
    "LaneUse",
    "NF4Blocks",
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
    "encoded_bytes",
    "flat_views",
    "packed_bytes",
    "saved_form",
    "shown_bytes",
    "trained",
    "walk_bytes",
    "walks_beside",
    "work_bytes",
]

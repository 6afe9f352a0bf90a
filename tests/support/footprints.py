"""What activations really hold, beside what was expected of them."""

from typing import Any
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

from zo2adapters import HFBlockModel
from zo2core import Batch, Forward


def really_held(activations: Any) -> int:
    """Bytes of all storages that tensors in there use, each counted once."""
    tensors = [leaf for leaf in pytree.tree_leaves(activations) if isinstance(leaf, torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def expected(model: HFBlockModel, forward: Forward, batch: Batch) -> int:
    """What is expected of a batch, while the model refuses to run."""
    with patch.object(model.skeleton, "forward", side_effect=AssertionError("the model must not run")):
        return forward.held_bytes(batch)


def check(model: HFBlockModel, forward: Forward, batch: Batch) -> None:
    prepared = forward.prepared(batch)
    planned = expected(model, forward, prepared)
    assert planned == expected(model, forward, batch)
    with torch.inference_mode():
        held = really_held(forward.embed(prepared))
    assert held <= planned <= 2 * held

"""What is kept of a run: floats as hexadecimal numbers, weights and updates as digests."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from zo2core import Journal

Trajectory = dict[str, Any]  # JSON values


def exact(value: Any) -> Any:
    """A float, or nested sequences of floats, with all bits."""
    return float(value).hex() if isinstance(value, int | float) else [exact(one) for one in value]


def weights_digest(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Digest of named tensors in any order: names, dtypes, shapes and bytes.

    Each is read before the next one is made.
    """
    digests = {name: hashlib.sha256(_bytes(tensor)).hexdigest() for name, tensor in tensors}
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{tensor.dtype} {tuple(tensor.shape)}\n".encode() + values.numpy().tobytes()


def exported_digest(directory: Path) -> str:
    """Digest of all tensors of a saved model or adapter, whatever its files are called."""
    files = sorted(directory.rglob("*.safetensors"))
    assert files, f"no weights in {directory}"
    return weights_digest(named for file in files for named in load_file(file).items())


def journal_of(path: Path) -> Trajectory:
    """The steps that a journal records, and a digest of everything that a replay reads, but not of
    the file's format.
    """
    journal = Journal(path)
    if journal.commits:
        commits = journal.commits
        return {
            "losses": exact([commit.loss for commit in commits]),
            "grad_norms": exact([commit.grad_norm for commit in commits]),
            "lrs": exact([commit.lr for commit in commits]),
        }
    replayed = [
        [
            update.step,
            [[evaluation.seed, exact(evaluation.shift)] for evaluation in update.evaluations],
            list(update.seeds),
            exact(update.projected_grads),
            exact([update.lr, update.zo_eps, update.weight_decay]),
            update.perturb_in_place,
        ]
        for update in journal.updates
    ]
    return {
        "losses": exact([update.losses for update in journal.updates]),
        "projected_grads": exact([update.projected_grads for update in journal.updates]),
        "updates": hashlib.sha256(json.dumps(replayed).encode()).hexdigest(),
    }

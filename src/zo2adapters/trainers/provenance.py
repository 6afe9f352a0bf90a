"""Provenance: what a run's result depends on besides its base and its estimator, for the header of its journal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from zo2adapters.tasks.registry import function_file, names_model_loss
from zo2adapters.tasks.row_source import file_sha256
from zo2adapters.trainers.options import TrainOptions
from zo2core.errors import OptionError

if TYPE_CHECKING:
    from zo2core.checkpoint.gguf import GGUFFile


_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def provenance(
    options: TrainOptions,
    base: Path,
    tokens: dict[str, object],
    *,
    data_sha256: str,
    sequence_length: int,
    devices: str,
    task: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """The run's provenance, as JSON values.

    It leaves out what no bit of the result depends on: memory, write-backs, the order of transfers, and the number of
    steps.
    """
    batching = options.batching
    trained_on = {key: value for key, value in tokens.items() if not key.startswith("evaluation")}
    declared: dict[str, Any] = (
        {}
        if options.model_options.architecture is None
        else {"architecture sha256": file_sha256(options.model_options.architecture)}
    )
    if not names_model_loss(options.objective):
        declared["objective"] = options.objective
        if (function := function_file(options.objective)) is not None:
            declared |= {"objective": options.objective.rpartition(":")[2], "objective sha256": file_sha256(function)}
    if batching.pack:
        declared["packed"] = True
    if options.takes_labels:
        declared["head"] = options.model_options.head
    if options.evaluates:  # which steps --keep-best chooses among
        declared["evaluated every"] = options.evaluate_every
    return {
        **declared,
        **task,
        "data sha256": data_sha256,
        "tokens": trained_on,
        "tokenizer sha256": tokenizer_sha256(base),
        "dtype": options.model_options.dtype,
        "batch size": batching.batch_size,
        "micro-batch size": batching.micro_batch_size,
        "loss chunk": batching.loss_chunk,
        "sequence length": sequence_length,
        "seed": options.seed,
        "device": devices,
        "schedule": _schedule(options),
    }


def require_same_files(options: TrainOptions, header: Mapping[str, Any] | None) -> None:
    """Refuse files other than those that the run began with, before they are parsed or imported."""
    saved = {} if header is None else header.get("provenance", {})
    if not saved:
        return
    objective, rewards = function_file(options.objective), saved.get("rewards")
    for option, path in (("objective", objective), ("architecture", options.model_options.architecture)):
        digest, now = str(saved.get(f"{option} sha256")), None if path is None else file_sha256(path)
        if now is not None and now != digest:
            raise _changed(option, f"{path}, with sha256 {now[:12]}", f"sha256 {digest[:12]}, as", "file")
    if rewards is not None:
        given = [name.file and file_sha256(name.file) for name in options.rewards.names]
        if given != [digest for *_, digest in rewards]:
            raise _changed("reward", "functions in files with other digests", "the files as they were,", "files")
    function = options.objective.rpartition(":")[2]
    if objective is not None and function != saved.get("objective"):
        raise _changed("objective", f"the function {function}", f"{saved.get('objective')}, as", "function")


def _changed(option: str, found: str, expected: str, what: str) -> OptionError:
    remedy = f"pass the {what} that the run began with, or start a new run"
    return OptionError(option, found=found, expected=f"{expected} in the run's journal", remedy=remedy)


def rescheduled(provenance: Mapping[str, Any], options: TrainOptions) -> dict[str, Any]:
    """Provenance of a branch, whose learning-rate schedule and evaluations may differ from its parent's."""
    evaluated = {"evaluated every": options.evaluate_every} if options.evaluates else {}
    return {**provenance, **evaluated, "schedule": _schedule(options)}


def _schedule(options: TrainOptions) -> dict[str, Any]:
    trains_all = options.first_order.method is not None and not options.model_options.trains_adapter
    return {
        **({"lr": options.optimization.rate} if trains_all else {}),  # other methods name it beside their own options
        "decay": options.optimization.decay.value,
        "warmup steps": options.optimization.warmup_steps,
        "steps": options.steps if options.schedule_steps is None else options.schedule_steps,
    }


def tokenizer_sha256(base: Path) -> str:
    """SHA-256 over the names and bytes of a model directory's tokenizer files, or over what a GGUF file says of it."""
    from zo2core.checkpoint.gguf import is_gguf, read_gguf

    digest = hashlib.sha256()
    if is_gguf(base):
        for value in _tokenizer_values(read_gguf(base)):
            digest.update(repr(value).encode())
        return digest.hexdigest()
    for name in _TOKENIZER_FILES:
        if (base / name).exists():
            digest.update(f"{name} {file_sha256(base / name)}\n".encode())
    return digest.hexdigest()


def _tokenizer_values(file: GGUFFile) -> Iterator[tuple[str, Any]]:
    """Yield what a file says of its tokenizer, by key: numbers, texts, and the elements of arrays one after the other."""
    from zo2core.checkpoint.gguf import StoredArray

    for key in sorted(file.metadata):
        if key.startswith("tokenizer."):
            value = file.metadata[key]
            if isinstance(value, (int, float, bool, str)):
                yield key, value
            elif isinstance(value, StoredArray):
                for element in file.array(key):
                    yield key, element
            else:
                yield key, file.text(key)

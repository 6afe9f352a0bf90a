"""The heads of models: transformers' class for each, the labels it takes, and what its loss is the mean over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from zo2core import Batch
from zo2core.errors import BatchError, OptionError
from zo2core.sweep.microbatch import IGNORE_INDEX


def _count_labels(batch: Batch) -> int:
    labels = batch["labels"]
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Head:
    """One kind of head."""

    name: str
    auto_class: Any
    check: Callable[[Batch, PretrainedConfig], None]
    targets: tuple[str, ...] = ("labels",)
    count: Callable[[Batch], int] = _count_labels

    def class_of(self, config: PretrainedConfig) -> Any:
        """The class that builds the model of a config; a language model may also read images."""
        is_known = self is not CAUSAL_LM or type(config) in self.auto_class._model_mapping
        return transformers.AutoModelForImageTextToText if reads_images(config) and not is_known else self.auto_class


def reads_images(config: PretrainedConfig) -> bool:
    """Whether the config's model reads images and text."""
    return type(config) in transformers.AutoModelForImageTextToText._model_mapping


def head_of(name: str) -> Head:
    """The head with this name."""
    if name not in HEADS:
        raise OptionError("head", found=repr(name), expected=f"one of {', '.join(HEADS)}", remedy="pass one of these")
    return HEADS[name]


def _token_label_check(classes: str) -> Callable[[Batch, PretrainedConfig], None]:
    def check(batch: Batch, config: PretrainedConfig) -> None:
        labels, shape = batch["labels"], tuple(batch["input_ids"].shape)
        if tuple(labels.shape) != shape or labels.is_floating_point():
            raise _refusal("labels", f"{labels.dtype} of shape {tuple(labels.shape)}", f"integers of shape {shape}")
        _require_classes(labels, int(getattr(config, classes)))

    return check


def _check_row_labels(batch: Batch, config: PretrainedConfig) -> None:
    labels, rows, classes = batch["labels"], len(batch["input_ids"]), int(config.num_labels or 1)
    if len(labels) != rows or labels.dim() not in (1, 2):
        raise _refusal("labels", f"shape {tuple(labels.shape)}", f"a label for each of {rows} rows")
    kind = config.problem_type or _problem_type(labels, classes)
    if (kind == "single_label_classification") == labels.is_floating_point():
        raise _refusal("labels", f"{labels.dtype} for {kind}", "integers for one class a row, else floating-point numbers")
    if kind == "single_label_classification":
        _require_classes(labels, classes)
    elif labels.numel() != rows * classes or (kind == "multi_label_classification" and labels.dim() != 2):
        raise _refusal("labels", f"shape {tuple(labels.shape)}", f"{classes} for each of {rows} rows")


def _problem_type(labels: torch.Tensor, classes: int) -> str:
    """The problem type that transformers assumes if the config has none."""
    if classes == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _check_spans(batch: Batch, config: PretrainedConfig) -> None:
    rows, tokens = batch["input_ids"].shape
    for name in ("start_positions", "end_positions"):
        positions = batch[name]
        if tuple(positions.shape) != (rows,) or positions.is_floating_point():
            raise _refusal(name, f"{positions.dtype} of shape {tuple(positions.shape)}", f"integers of shape ({rows},)")
        if not 0 <= int(positions.min()) <= int(positions.max()) < tokens:  # transformers leaves such rows out of its mean
            found = f"positions {int(positions.min())} to {int(positions.max())}"
            raise _refusal(name, found, f"0 to {tokens - 1}, as the rows have {tokens} tokens")


def _require_classes(labels: torch.Tensor, classes: int) -> None:
    counted = labels[labels != IGNORE_INDEX]
    if not counted.numel():
        raise _refusal("labels", f"{IGNORE_INDEX} alone, which is not counted", "at least one other label")
    if not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        raise _refusal("labels", f"{int(counted.min())} to {int(counted.max())}", f"0 to {classes - 1}, or {IGNORE_INDEX}")


def _refusal(key: str, found: str, expected: str) -> BatchError:
    return BatchError(f"batch[{key!r}]", found=found, expected=expected, remedy="pass the labels of this head")


CAUSAL_LM = Head("causal-lm", transformers.AutoModelForCausalLM, _token_label_check("vocab_size"))
HEADS: Mapping[str, Head] = {
    head.name: head
    for head in (
        CAUSAL_LM,
        Head("masked-lm", transformers.AutoModelForMaskedLM, _token_label_check("vocab_size")),
        Head("sequence-classification", transformers.AutoModelForSequenceClassification, _check_row_labels),
        Head("token-classification", transformers.AutoModelForTokenClassification, _token_label_check("num_labels")),
        Head(
            "question-answering",
            transformers.AutoModelForQuestionAnswering,
            _check_spans,
            targets=("start_positions", "end_positions"),
            count=lambda batch: len(batch["input_ids"]),
        ),
    )
}

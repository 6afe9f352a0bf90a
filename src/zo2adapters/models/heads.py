"""What a model ends in: which of transformers' classes it is built from, what a batch's labels are, what a loss counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from zo2core import Batch, BatchError, OptionError
from zo2core.sweep.microbatch import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True)
class Head:
    """One kind of head.

    Args:
        name: What it is called.
        auto_class: Builds the model from a config.
        targets: Entries of a batch that the loss alone reads.
        check: Refuses a batch whose targets do not fit the config.
        count: How many labels a batch's loss is the mean over.
    """

    name: str
    auto_class: Any
    targets: tuple[str, ...]
    check: Callable[[Batch, PretrainedConfig], None]
    count: Callable[[Batch], int]

    def class_of(self, config: PretrainedConfig) -> Any:
        """The class that builds the model of a config: a language model may read images, too."""
        is_known = self is not CAUSAL_LM or type(config) in self.auto_class._model_mapping
        return AutoModelForImageTextToText if reads_images(config) and not is_known else self.auto_class


def reads_images(config: PretrainedConfig) -> bool:
    """Whether a config is of a model that reads images beside text."""
    return type(config) in AutoModelForImageTextToText._model_mapping


def head_of(name: str) -> Head:
    """The head of a name.

    Raises:
        OptionError: if there is none.
    """
    if name not in HEADS:
        raise OptionError("head", found=repr(name), expected=f"one of {', '.join(HEADS)}", remedy="choose one of these")
    return HEADS[name]


def _labels_of_tokens(classes: str) -> Callable[[Batch, PretrainedConfig], None]:
    def check(batch: Batch, config: PretrainedConfig) -> None:
        labels, shape = batch["labels"], tuple(batch["input_ids"].shape)
        if tuple(labels.shape) != shape or labels.is_floating_point():
            raise _refusal("labels", f"{labels.dtype} of shape {tuple(labels.shape)}", f"integers of shape {shape}")
        _require_classes(labels, int(getattr(config, classes)))

    return check


def _labels_of_rows(batch: Batch, config: PretrainedConfig) -> None:
    labels, rows, classes = batch["labels"], len(batch["input_ids"]), int(config.num_labels or 1)
    if len(labels) != rows or labels.dim() not in (1, 2):
        raise _refusal("labels", f"shape {tuple(labels.shape)}", f"one for each of {rows} rows")
    kind = config.problem_type or _problem_type(labels, classes)
    if (kind == "single_label_classification") == labels.is_floating_point():
        raise _refusal("labels", f"{labels.dtype} for {kind}", "integers for one class a row, else floating-point numbers")
    if kind == "single_label_classification":
        _require_classes(labels, classes)
    elif labels.numel() != rows * classes or (kind == "multi_label_classification" and labels.dim() != 2):
        raise _refusal("labels", f"shape {tuple(labels.shape)}", f"{classes} for each of {rows} rows")


def _problem_type(labels: torch.Tensor, classes: int) -> str:
    """What transformers takes labels for if the config does not say."""
    if classes == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def _spans(batch: Batch, config: PretrainedConfig) -> None:
    rows, tokens = batch["input_ids"].shape
    for name in ("start_positions", "end_positions"):
        places = batch[name]
        if tuple(places.shape) != (rows,) or places.is_floating_point():
            raise _refusal(name, f"{places.dtype} of shape {tuple(places.shape)}", f"integers of shape ({rows},)")
        if not 0 <= int(places.min()) <= int(places.max()) < tokens:  # transformers leaves such rows out of its mean
            found = f"places {int(places.min())} to {int(places.max())}"
            raise _refusal(name, found, f"0 to {tokens - 1}, as the rows have {tokens} tokens")


def _require_classes(labels: torch.Tensor, classes: int) -> None:
    known = labels[labels != IGNORE_INDEX]
    if not known.numel():
        raise _refusal("labels", "none that counts", f"one at least that is not {IGNORE_INDEX}")
    if not 0 <= int(known.min()) <= int(known.max()) < classes:
        raise _refusal("labels", f"{int(known.min())} to {int(known.max())}", f"0 to {classes - 1}, or {IGNORE_INDEX}")


def _refusal(key: str, found: str, expected: str) -> BatchError:
    return BatchError(f"batch[{key!r}]", found=found, expected=expected, remedy="make the labels for this head")


def _counted(batch: Batch) -> int:
    labels = batch["labels"]
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE_INDEX).sum())


CAUSAL_LM = Head(
    name="causal-lm",
    auto_class=AutoModelForCausalLM,
    targets=("labels",),
    check=_labels_of_tokens("vocab_size"),
    count=_counted,
)
HEADS: Mapping[str, Head] = {
    head.name: head
    for head in (
        CAUSAL_LM,
        Head(
            name="masked-lm",
            auto_class=AutoModelForMaskedLM,
            targets=("labels",),
            check=_labels_of_tokens("vocab_size"),
            count=_counted,
        ),
        Head(
            name="sequence-classification",
            auto_class=AutoModelForSequenceClassification,
            targets=("labels",),
            check=_labels_of_rows,
            count=_counted,
        ),
        Head(
            name="token-classification",
            auto_class=AutoModelForTokenClassification,
            targets=("labels",),
            check=_labels_of_tokens("num_labels"),
            count=_counted,
        ),
        Head(
            name="question-answering",
            auto_class=AutoModelForQuestionAnswering,
            targets=("start_positions", "end_positions"),
            check=_spans,
            count=lambda batch: len(batch["input_ids"]),
        ),
    )
}

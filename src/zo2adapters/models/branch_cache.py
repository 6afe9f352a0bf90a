"""What Hugging Face's forward asks tensors about a batch: asked once, so that on a GPU no sweep has to wait for an answer.

A branch on a tensor's value (is any token padding?) makes the host wait for the device. Masks and positions depend on the
batch alone: the questions, and their answers, are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from zo2adapters.models.batch_check import IGNORE_INDEX

_QUESTIONS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.tolist}


class Answers(TorchFunctionMode):
    """Within its context, questions are answered from memory, in the order in which they were first asked.

    Only those of integers and truth values: floating-point numbers may follow from weights, and are asked each time. That
    truth values do not is assumed of all that a decoder does before its first layer and after its last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[Any] = []
        self._asked = 0
        self._learning = True

    def __enter__(self) -> Answers:
        self._asked = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._learning = False  # the first pass is over: what another one asks beyond it has another reason
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _QUESTIONS or args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        place, self._asked = self._asked, self._asked + 1
        if place < len(self._known):
            return self._known[place]
        answer = func(*args, **(kwargs or {}))
        if self._learning:
            self._known.append(answer)
        return answer


class PreparedBatch(dict[str, torch.Tensor]):
    """A batch that was checked, with what is known about it."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        super().__init__(batch)
        self.answers = Answers()
        self.predictions = predictions(batch["labels"])


def predictions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns of the tokens from which a labelled one is predicted: int64, (labelled tokens,) each."""
    rows, columns = (labels[:, 1:] != IGNORE_INDEX).nonzero(as_tuple=True)
    return rows, columns

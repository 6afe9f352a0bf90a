"""What Hugging Face's forward asks tensors about a batch: asked once, so that on a GPU no sweep has to wait for an answer.

A branch on a tensor's value (is any token padding?) makes the host wait for the device. Masks and positions depend on the
batch alone: the questions, and their answers, are the same each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from zo2core import UnsupportedModelError

_QUESTIONS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.tolist}


class _Question(NamedTuple):
    """What was asked of which kind of tensor."""

    function: Callable[..., Any]
    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.function.__name__} of a tensor of shape {tuple(self.shape)} and {self.dtype}"


class BranchCache(TorchFunctionMode):
    """Within its context, questions are answered from memory, in the order in which they were first asked.

    Only questions about integers and truth values are: floating-point numbers may follow from weights, and are asked each
    time. That truth values do not is assumed of all that a decoder does before its first layer and after its last one.

    Raises:
        UnsupportedModelError: if a question is another one than the first time, whose answer would be a wrong one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: list[tuple[_Question, Any]] = []
        self._asked = 0
        self._learning = True

    def __enter__(self) -> BranchCache:
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
        question = _Question(func, args[0].shape, args[0].dtype)
        place, self._asked = self._asked, self._asked + 1
        if place < len(self._known):
            return self._answer(place, question)
        answer = func(*args, **(kwargs or {}))
        if self._learning:
            self._known.append((question, answer))
        return answer

    def _answer(self, place: int, question: _Question) -> Any:
        known, answer = self._known[place]
        if question != known:
            raise UnsupportedModelError(
                f"question {place} of Hugging Face's forward about a batch",
                found=str(question),
                expected=f"{known}, as the first time",
                remedy="this architecture's forward asks in no fixed order; it needs an adapter of its own",
            )
        return answer

"""What a run does with its rows: its task, the function that evaluates it, and the prompts that are
answered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from zo2adapters.models.checkpoint import end_token_ids
from zo2adapters.tasks.generation import generate
from zo2adapters.tasks.rows import Choice, Question, TokenizedRow
from zo2adapters.tasks.task import Task, TaskOptions, make_evaluation, make_task
from zo2adapters.trainers.run_directory import HeldRun
from zo2adapters.trainers.run_inputs import MOST_SAMPLED, RunInputs
from zo2core import Engine
from zo2core.errors import OptionError
from zo2core.ranges import counted


class RunTasks(NamedTuple):
    """What a run does with its rows.

    Making it refuses rows that cannot be used so, also for a plan: no function of the user's own is
    called.
    """

    task: Task
    evaluated: Callable[[Engine], dict[str, float]] | None  # None: the run is not evaluated
    samples: Samples | None  # None: no prompts are answered

    @classmethod
    def of(cls, inputs: RunInputs, *, evaluates: bool = True) -> RunTasks:
        """The tasks of a run."""
        options = inputs.options
        model = inputs.model
        data = inputs.data
        task_options = TaskOptions(
            objective=options.objective,
            pad=inputs.pad,
            batch_size=options.batching.batch_size,
            micro_batch_size=options.batching.micro_batch_size,
            beta=options.beta,
            pack=options.batching.pack,
            per_row=options.optimization.per_row,
            rewards=options.rewards if options.rewards.reward else None,
            tokenizer=inputs.tokenizer,
            seed=options.seed,
        )
        task = make_task(model, data, task_options)
        evaluated = None
        if inputs.evaluation is not None and evaluates:
            evaluated = make_evaluation(task, model, data, inputs.evaluation, task_options)
        return cls(task, evaluated, Samples(inputs) if options.samples else None)


class Samples:
    """The prompts of a run that are answered."""

    def __init__(self, inputs: RunInputs) -> None:
        self._model = inputs.model
        self._tokenizer = inputs.tokenizer
        self._pad = inputs.pad
        rows = inputs.data if inputs.evaluation is None else inputs.evaluation
        self._prompts = [self._prompt(row) for row in rows[: inputs.options.samples]]
        self.longest_prompt = max(len(ids) for ids, _ in self._prompts)
        room = (
            MOST_SAMPLED
            if self._model.longest_row is None
            else self._model.longest_row - self.longest_prompt
        )
        self._most = min(MOST_SAMPLED, room)
        if self._most < 1:
            found = (
                f"a prompt of {counted(self.longest_prompt, 'token')}, the model's longest sequence"
            )
            raise OptionError("samples", found, "room for an answer", "leave it out")

    @property
    def shape(self) -> tuple[int, int]:
        """Number of prompts, and most tokens of a prompt with its answer."""
        return len(self._prompts), self.longest_prompt + self._most

    def write(self, engine: Engine, run: HeldRun) -> None:
        """Answer the prompts with a runner's current weights, unless the run has the answers of
        this step.
        """
        earlier = run.samples()
        step = engine.version
        if any(sample["step"] == step for sample in earlier):
            return
        columns = generate(
            engine,
            self._model,
            [ids for ids, _ in self._prompts],
            max_new_tokens=self._most,
            eos_token_ids=end_token_ids(self._model, self._tokenizer),
            pad_token_id=self._pad,
            allowed=engine.activation_bytes,
        )
        samples = list(earlier)
        for number, ((ids, expected), answer) in enumerate(
            zip(self._prompts, zip(*columns, strict=True), strict=True)
        ):
            generated = self._text([token for token in answer if token is not None])
            texts = {"prompt": self._text(ids), "expected": expected, "generated": generated}
            samples.append({"step": step, "row": number, **texts})
        run.write_samples(samples)

    def _prompt(self, row: Any) -> tuple[Sequence[int], str]:
        """The tokens of a prompt, and the completion, the right candidate, or a right answer."""
        match row:
            case TokenizedRow() if row.prompt_length:
                end = row.later_prompts[0][0] if row.later_prompts else None
                answer = row.input_ids[row.prompt_length : end]
                return row.input_ids[: row.prompt_length], self._text(answer)
            case Choice():
                return row.prompt, self._text(row.candidates[row.answer])
            case Question():
                return row.prompt, row.answers[0]
        remedy = "leave it out, or pass rows with prompts as --evaluation"
        raise OptionError(
            "samples",
            "rows without a prompt",
            "rows with a prompt, such as prompt and completion",
            remedy,
        )

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

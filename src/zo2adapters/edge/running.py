"""Programs that train, run by ExecuTorch's runtime on this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere
from transformers import PretrainedConfig

from zo2adapters.edge.description import ProgramDescription
from zo2adapters.edge.digest import require_digest
from zo2adapters.models.peft_kinds.files import write_adapter
from zo2adapters.models.prepared_batch import check_batch
from zo2adapters.optional_package import executorch
from zo2core import Batch, BatchError, CheckpointError, NonFiniteLossError, OptionError
from zo2core.errors import reason
from zo2core.sweep.microbatch import IGNORE_INDEX

_METHODS = ("step", "state", "restore", "frozen")
_SEEDS = 1 << 63


class ProgramStep(NamedTuple):
    """What a step gave: all that an engine needs to be told, to take the same one."""

    seed: int  # of the direction
    losses: torch.Tensor  # float32 (2,): at +eps and at -eps
    projected_grad: float


class ProgramState(NamedTuple):
    """All that steps change."""

    adapter: torch.Tensor  # float32, flat: B of all layers, as the program lays them out
    seed: int  # of the next step


class TrainingProgram:
    """A program of ``write_program``, with its state in the runtime's memory.

    Args:
        path: The file. It is not written: a program that is opened again begins again.

    Raises:
        MissingPackageError: if ExecuTorch is not installed.
        CheckpointError: if the file cannot be read, is damaged, or is no such program.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        runtime = executorch("runtime")
        try:
            require_digest(self._path)
            program = runtime.Runtime.get().load_program(self._path)
            missing = {"description", *_METHODS} - program.method_names
            if missing:
                raise self._refusal(f"a program without {', '.join(sorted(missing))}")
            [text] = program.load_method("description").execute([])
            # All before the first step: to load a method is to set the state to its first values.
            self._methods = {name: program.load_method(name) for name in _METHODS}
        except OSError as error:
            raise self._refusal(reason(error)) from error
        except RuntimeError as error:  # the runtime's only one
            raise self._refusal(f"what the runtime does not load ({' '.join(str(error).split())[:200]})") from error
        self._program = program  # owns the methods' memory
        self.description = ProgramDescription.from_json(text, self._path)

    def step(self, batch: Batch, *, lr: float) -> ProgramStep:
        """Take one step: the state changes.

        Args:
            batch: input_ids and labels, and an attention_mask if it masks but what fills rows up at the right. One that is
                smaller than the program's is filled up, which does not change its loss.
            lr: Learning rate.

        Raises:
            BatchError: if the program cannot take the batch, or it has no label to learn from.
            OptionError: if the learning rate is negative or not finite.
            NonFiniteLossError: if a loss is not finite. B is what it was before, and the next step has another direction.
        """
        if not (math.isfinite(lr) and lr >= 0):
            raise OptionError(
                "lr", found=repr(lr), expected="a finite number of at least 0", remedy="mend the learning rate's schedule"
            )
        losses, projected_grad, seed = self._run("step", *self._fitted(batch), torch.tensor(lr, dtype=torch.float32))
        if not math.isfinite(projected_grad.item()):
            raise NonFiniteLossError(
                f"the step of seed {seed.item()}",
                found=f"losses {losses.tolist()}",
                expected="finite ones",
                remedy="lower lr, or write the program with a lower zo_eps; this step left the adapter as it was",
            )
        return ProgramStep(int(seed.item()), losses, projected_grad.item())

    def state(self) -> ProgramState:
        """A copy of the state."""
        adapter, seed = self._run("state")
        return ProgramState(adapter, int(seed.item()))

    def restore(self, state: ProgramState) -> None:
        """Go on from a state of this program, or of one that was written from the same model and adapter.

        Raises:
            OptionError: if it is of another adapter, or its seed is out of its range.
        """
        if not 0 <= state.seed < _SEEDS:
            raise OptionError(
                "state.seed", found=repr(state.seed)[:40], expected="0 to 2^63 - 1", remedy="use a state of this program"
            )
        expected = self.state().adapter
        if state.adapter.shape != expected.shape or state.adapter.dtype != expected.dtype:
            found = f"{state.adapter.dtype} of shape {tuple(state.adapter.shape)}"
            wanted = f"{expected.dtype} of shape {tuple(expected.shape)}"
            raise OptionError("state.adapter", found=found, expected=wanted, remedy="use a state of this program")
        self._run("restore", state.adapter, torch.tensor(state.seed, dtype=torch.int64))

    def save_adapter(self, directory: Path | str) -> None:
        """Write the adapter as it is now in peft's files.

        Args:
            directory: To write; must not exist or be empty.

        Raises:
            OutputError: if it is in use or cannot be written.
        """
        description = self.description
        values = description.split(self.state().adapter)
        values |= zip(description.frozen, self._run("frozen"), strict=True)
        write_adapter(Path(directory), description.config, values)

    def _run(self, method: str, *inputs: torch.Tensor) -> Sequence[Any]:
        outputs: Sequence[Any] = self._methods[method].execute(inputs)
        return outputs

    def _fitted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a batch, filled up to the program's shape."""
        description = self.description
        options: dict[str, Any] = {"vocab_size": description.vocabulary}
        check_batch(batch, PretrainedConfig(**options), description.tokens)
        ids, labels = batch["input_ids"].to("cpu", torch.int64), batch["labels"].to("cpu", torch.int64)
        if len(ids) > description.rows:
            expected = f"at most {description.rows}, as the program was written for"
            raise BatchError(
                "input_ids", found=f"{len(ids)} rows", expected=expected, remedy="cut the batch, or write another program"
            )
        others = sorted(batch.keys() - {"input_ids", "labels", "attention_mask"})
        if others:
            raise BatchError(
                others[0], found="an entry", expected="input_ids, labels and attention_mask alone", remedy="leave it out"
            )
        mask = batch.get("attention_mask", torch.ones_like(ids)).to("cpu") != 0
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or bool((labels[~mask] != IGNORE_INDEX).any()):
            raise BatchError(
                "attention_mask",
                found="masked tokens that others follow, or that have labels",
                expected="rows that are filled up at the right: a program has no mask",
                remedy="pad at the right, with labels of -100",
            )
        room = (0, description.tokens - ids.shape[1], 0, description.rows - len(ids))
        return F.pad(ids, room), F.pad(labels, room, value=IGNORE_INDEX)

    def _refusal(self, found: str) -> CheckpointError:
        return CheckpointError(
            self._path,
            found=found,
            expected="a program that write_program wrote, for this runtime's backends",
            remedy="write the program again",
        )

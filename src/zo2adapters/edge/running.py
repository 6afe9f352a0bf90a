"""Run training programs in ExecuTorch's runtime on this machine: their description, their digest, their methods."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import torch
from torch.nn import functional as F  # noqa: N812 - as everywhere
from transformers import PretrainedConfig

from zo2adapters.edge.step import GROUP, groups_of
from zo2adapters.models.batches import check_batch
from zo2adapters.models.peft_kinds import write_adapter
from zo2adapters.optional_package import executorch
from zo2core import Batch
from zo2core.errors import BatchError, CheckpointError, NonFiniteLossError, OptionError, reason
from zo2core.io.durable import open_no_follow, open_regular
from zo2core.ranges import require_number
from zo2core.sweep.microbatch import IGNORE_INDEX

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class ProgramDescription:
    """The properties of a program, which are fixed when it is written."""

    rows: int  # most rows of a batch
    tokens: int  # most tokens of a row
    vocabulary: int  # size of the vocabulary
    zo_eps: float  # perturbation scale
    config: Mapping[str, Any]  # peft's config, from ``plain_config``
    trained: Mapping[str, tuple[int, int]]  # (outputs, rank) of each layer's B by name in peft's files, in the state's order
    frozen: tuple[str, ...]  # name of each layer's A in peft's files, in the same order

    def to_json(self) -> str:
        """The description as text, which is stored in the program."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """Read the text of ``to_json``."""
        values = json.loads(text)
        if values.pop("format", None) != _FORMAT:
            raise _refused(path, f"another format than {_FORMAT}", "or run it with the version of zo2core that wrote it")
        trained = {name: (int(outputs), int(rank)) for name, (outputs, rank) in values["trained"].items()}
        return cls(**{**values, "trained": trained, "frozen": tuple(values["frozen"])})

    def split(self, adapter: torch.Tensor) -> dict[str, torch.Tensor]:
        """B of each layer, by its name in peft's files."""
        values: dict[str, torch.Tensor] = {}
        start = 0
        for name, shape in self.trained.items():
            size = shape[0] * shape[1]
            values[name] = adapter[start : start + size].view(shape)
            start += groups_of(size) * GROUP
        return values


_MARK = b"zo2core sha256: "
_LENGTH = len(_MARK) + hashlib.sha256().digest_size


def append_digest(path: Path) -> None:
    """Append the SHA-256 of a file's bytes to the file."""
    with open(path, "r+b", opener=open_no_follow) as file:
        file.write(_MARK + _digest(file, path.stat().st_size))


def require_digest(path: Path) -> None:
    """Refuse a file whose bytes do not match the digest that ``append_digest`` wrote."""
    with open_regular(path) as file:
        length = max(path.stat().st_size - _LENGTH, 0)
        digest, end = _digest(file, length), file.read()
    if end != _MARK + digest:
        found = "bytes that do not match the digest" if end.startswith(_MARK) else "no digest at its end"
        raise _refused(path, found, "or copy it again")


def _digest(file: BinaryIO, length: int) -> bytes:
    """The digest of a file's first ``length`` bytes. The file's position is then behind them."""
    digest = hashlib.sha256()
    while length and (piece := file.read(min(length, 1 << 20))):
        digest.update(piece)
        length -= len(piece)
    return digest.digest()


_METHODS = ("step", "state", "restore", "frozen")
_SEEDS = 1 << 63


class ProgramStep(NamedTuple):
    """The result of a step. An engine can take the same step from it."""

    seed: int  # seed of the direction
    losses: torch.Tensor  # losses at +eps and at -eps, float32 (2,)
    projected_grad: float


class ProgramState(NamedTuple):
    """The state that steps change."""

    adapter: torch.Tensor  # B of all layers, float32, flat; ``ProgramDescription.split`` divides it
    seed: int  # seed of the next step


class TrainingProgram:
    """A program of ``write_program``, with its state in the runtime's memory.

    Args:
        path: File of the program. It is not written: a program that is opened again starts from its initial values.

    Raises:
        MissingPackageError: if ExecuTorch is not installed.
        CheckpointError: if the file cannot be read, is damaged, or is another program.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        runtime = executorch("runtime")
        try:
            require_digest(self._path)
            program = runtime.Runtime.get().load_program(self._path)
            missing = {"description", *_METHODS} - program.method_names
            if missing:
                raise _refused(self._path, f"a program without {', '.join(sorted(missing))}")
            [text] = program.load_method("description").execute([])
            # All methods are loaded before the first step, since loading one resets the state.
            self._methods = {name: program.load_method(name) for name in _METHODS}
        except OSError as error:
            raise _refused(self._path, reason(error)) from error
        except RuntimeError as error:  # the only error of the runtime
            found = f"a file that the runtime does not load ({' '.join(str(error).split())[:200]})"
            raise _refused(self._path, found) from error
        self._program = program  # owns the methods' memory
        self.description = ProgramDescription.from_json(text, self._path)

    def step(self, batch: Batch, *, lr: float) -> ProgramStep:
        """Take one step, which changes the state.

        Args:
            batch: input_ids, labels and perhaps an attention_mask, which may mask padding at the right only. Smaller batches
                than the program's are padded, which does not change the loss.
            lr: Learning rate.

        Raises:
            BatchError: if the batch does not fit the program, or has no label.
            OptionError: if the learning rate is negative or not finite.
            NonFiniteLossError: if a loss is not finite. B does not change, and the next step has another direction.
        """
        require_number("lr", lr, least=0, remedy="correct the learning-rate schedule")
        losses, projected_grad, seed = self._run("step", *self._fitted(batch), torch.tensor(lr, dtype=torch.float32))
        if not math.isfinite(projected_grad.item()):
            raise NonFiniteLossError(
                f"the step of seed {seed.item()}",
                found=f"losses {losses.tolist()}",
                expected="finite losses",
                remedy="lower lr, or write the program with a lower zo_eps; this step did not change the adapter",
            )
        return ProgramStep(int(seed.item()), losses, projected_grad.item())

    def state(self) -> ProgramState:
        """A copy of the state."""
        adapter, seed = self._run("state")
        return ProgramState(adapter, int(seed.item()))

    def restore(self, state: ProgramState) -> None:
        """Set the state to that of this program, or of another one with the same model and adapter.

        Raises:
            OptionError: if the state has another adapter, or its seed is out of range.
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
        """Write the current adapter in peft's format.

        Args:
            directory: Directory to write, which must be empty or not exist.

        Raises:
            OutputError: if the directory is in use or cannot be written.
        """
        description = self.description
        values = description.split(self.state().adapter)
        values |= zip(description.frozen, self._run("frozen"), strict=True)
        write_adapter(Path(directory), description.config, values)

    def _run(self, method: str, *inputs: torch.Tensor) -> Sequence[Any]:
        outputs: Sequence[Any] = self._methods[method].execute(inputs)
        return outputs

    def _fitted(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels of a batch, padded to the program's shape."""
        description = self.description
        options: dict[str, Any] = {"vocab_size": description.vocabulary}
        check_batch(batch, PretrainedConfig(**options), description.tokens)
        ids, labels = batch["input_ids"].to("cpu", torch.int64), batch["labels"].to("cpu", torch.int64)
        if len(ids) > description.rows:
            expected, remedy = f"at most {description.rows}, the program's rows", "pass fewer rows, or write another program"
            raise BatchError("input_ids", found=f"{len(ids)} rows", expected=expected, remedy=remedy)
        others = sorted(batch.keys() - {"input_ids", "labels", "attention_mask"})
        if others:
            raise BatchError(
                others[0], found="an entry", expected="input_ids, labels and attention_mask alone", remedy="leave it out"
            )
        mask = batch.get("attention_mask", torch.ones_like(ids)).to("cpu") != 0
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()) or bool((labels[~mask] != IGNORE_INDEX).any()):
            raise BatchError(
                "attention_mask",
                found="masked tokens before other tokens, or with labels",
                expected="rows that are padded at the right: a program has no mask",
                remedy="pad at the right, with labels of -100",
            )
        room = (0, description.tokens - ids.shape[1], 0, description.rows - len(ids))
        return F.pad(ids, room), F.pad(labels, room, value=IGNORE_INDEX)


def _refused(path: Path, found: str, other_remedy: str = "for the backends of this runtime") -> CheckpointError:
    expected, remedy = "a whole program from write_program, for this runtime's backends", f"write it again, {other_remedy}"
    return CheckpointError(path, found=found, expected=expected, remedy=remedy)

"""``zo2 generate`` continues prompts, ``zo2 chat`` talks: with a model, its adapters or a run, or
labels texts.
"""

from __future__ import annotations

import importlib
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from zo2adapters.commands.at_step import AtStep
from zo2adapters.commands.options import POSITIONAL, Command, Written
from zo2adapters.tasks.option_tree import Change, Option, number, whole
from zo2adapters.tasks.row_options import RowOptions, with_line_breaks
from zo2adapters.trainers.metrics import progress_bar, sweep_bars
from zo2adapters.trainers.option_checks import require_valid
from zo2adapters.trainers.options import Batching, ModelOptions, Resources, RunModelOptions
from zo2adapters.trainers.process import WorkerOptions, is_first, require_same_command
from zo2adapters.trainers.run_directory import JOURNAL, RunDirectory, name_of
from zo2core.errors import DataError, NonFiniteLossError, OptionError, without_effect
from zo2core.ranges import LARGEST_WHOLE, counted, require_whole

if TYPE_CHECKING:
    from zo2adapters.models.hf import HFBlockModel
    from zo2adapters.tasks.generation import Sampling
    from zo2core import Engine, SharedBase, Workers
_BASE = "none"  # name under which the base without an adapter, or before a run, is chosen
_MOST_LABELS = 12  # that a message lists
# how a text ends whose last character needs another token
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen."""

    temperature: Annotated[float, Option("output", Change.CALL, check=number(least=0))] = 0.0
    """Temperature at which tokens are sampled; 0 takes the likeliest token."""
    top_p: Annotated[
        float,
        Option("output", Change.CALL, check=number(above=0, most=1), needs=("temperature",)),
    ] = 1.0
    """Probability mass of the likeliest tokens that are sampled from."""
    seed: Annotated[
        int, Option("output", Change.CALL, check=whole(-LARGEST_WHOLE), needs=("temperature",))
    ] = 0
    """Seed of the sampling: of all continuations, or of each answer of a chat."""

    def chosen(self) -> Sampling | None:
        """How tokens are sampled; None takes the likeliest."""
        from zo2adapters.tasks.generation import sampling_of

        return sampling_of(self.temperature, self.top_p, self.seed)


@dataclass(frozen=True, kw_only=True)
class Generate(AtStep):
    """Continue prompts with a model, or a run at any of its steps.

    Slow: each token takes a pass over all blocks.
    """

    needs: ClassVar = (
        "zo2adapters.models.checkpoint",
        "zo2adapters.tasks.generation",
        "zo2adapters.trainers.methods",
    )
    first_options: ClassVar = (
        "run_directory model adapter prompt at others max_new_tokens temperature top_p memory"
    )

    takes_texts: ClassVar = True

    prompt: tuple[str, ...]
    r"""Texts to continue, where \n is a line break and \t a tab; all of them share each pass over
    the blocks.
    """
    others: tuple[Path, ...] = ()
    """Further runs, or directories with saved adapters, of the same base, which continue the
    prompts, too. All share each pass over the blocks if they only read the base: adapters, and runs
    with --rank.
    """
    max_new_tokens: int = 32
    """Most tokens of a continuation."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    worker_options: WorkerOptions = field(default_factory=WorkerOptions)

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        super().check()
        require_valid(self.sampling, given=self.given)
        self.worker_options.require_no_shards("auto, for one process")

    def run(self) -> None:
        """Print each prompt with its continuation."""
        with self.worker_options.stages() as workers:
            require_same_command("generate", self, workers)
            self._generate(workers)

    def _generate(self, workers: Workers | None) -> None:
        from zo2adapters.tasks.generation import require_lengths
        from zo2adapters.tasks.tokenizer import load_tokenizer

        sampling = self.sampling.chosen()
        at = self.resolved()
        tokenizer = load_tokenizer(at.base())
        model = at.open_model()
        quiet = not is_first(workers)
        texts = [with_line_breaks(text) for text in self.prompt]
        prompts: list[list[int]] = [tokenizer(text)["input_ids"] for text in texts]
        require_lengths(model, prompts, self.max_new_tokens)
        tokens = max(map(len, prompts)) + self.max_new_tokens

        def continued(
            at: AtStep, model: HFBlockModel, shared: SharedBase | None
        ) -> list[list[int]]:
            """The tokens with which one model continues each prompt."""
            room = _generation_bytes(model.config, len(prompts), tokens)
            with (
                at.engine(
                    model,
                    activation_bytes=room,
                    workers=workers,
                    shared=shared,
                    tokens=len(prompts),
                ) as engine,
                progress_bar(total=self.max_new_tokens, unit="token", quiet=quiet) as bar,
                sweep_bars(engine, quiet=quiet),
            ):
                steps = []
                for step in _generated(
                    engine,
                    model,
                    at,
                    tokenizer,
                    prompts,
                    max_new_tokens=self.max_new_tokens,
                    sampling=sampling,
                ):
                    steps.append(step)
                    bar.update()
            return [
                [token for token in column if token is not None]
                for column in zip(*steps, strict=True)
            ]

        title = name_of(self.run_directory or at.model_options.adapter or Path(str(at.model)))
        results = at.with_others(
            model, at.named_others(self.others), continued, may_share=workers is None
        )
        for name, found in () if quiet else results.items():
            if self.others:
                print(f"\n{name}:" if name else f"{title}:")
            for text, ids, new in zip(texts, prompts, found, strict=True):
                whole, prefix = (
                    tokenizer.decode(tokens, skip_special_tokens=True)
                    for tokens in ([*ids, *new], ids)
                )
                print(text + str(whole)[len(str(prefix)) :])


def _generated(
    engine: Engine,
    model: HFBlockModel,
    at: AtStep,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None,
) -> Iterator[tuple[int | None, ...]]:
    """The next token of each prompt, again and again; a model that is not finite is refused by
    name.
    """
    from zo2adapters.models.checkpoint import end_token_ids
    from zo2adapters.tasks.generation import generate
    from zo2adapters.tasks.tokenizer import pad_token_id
    from zo2adapters.trainers.methods import require_finite_base

    ends = end_token_ids(model, tokenizer)
    pad = pad_token_id(tokenizer)
    try:
        yield from generate(
            engine,
            model,
            prompts,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            eos_token_ids=ends,
            pad_token_id=pad,
        )
    except NonFiniteLossError:
        # also experts that were read outside the engine's segments
        require_finite_base(at.open_model())
        raise


def _generation_bytes(config: Any, rows: int, tokens: int) -> int:
    """Bytes of keys, values and activations, for prompts of so many tokens with their
    continuations.
    """
    from zo2adapters.models.footprint import activation_bytes, cache_bytes

    return cache_bytes(config, rows, tokens) + activation_bytes(config, rows, tokens, streams=1)


class _Variant(AtStep):
    """A model at a step that answers."""

    takes_texts: ClassVar = True


@dataclass(frozen=True, kw_only=True)
class Chat(Command):
    """Chat with a model, its adapters, or a run, in the terminal.

    Slow: each token takes a pass over all blocks.
    """

    needs: ClassVar = (
        "zo2adapters.models.checkpoint",
        "zo2adapters.tasks.generation",
        "zo2adapters.trainers.methods",
    )
    first_options: ClassVar = (
        "run_directory model adapters at max_new_tokens temperature top_p sequence_length memory"
    )

    run_directory: Annotated[Path | None, POSITIONAL] = None
    """Directory of a run, instead of --model.

    A run on rows with labels chooses a label for each line, and says how sure it is.
    """
    model: str | None = None
    """The model: a directory, a GGUF file, or a hub id.

    By default the base that --adapter names.
    """
    adapters: Annotated[tuple[Path, ...], Written(name="adapter")] = ()
    """Saved peft adapters of the model.

    The first one answers; /adapter NAME switches to another one, named as its directory or its run,
    and /adapter none to the model alone.
    """
    at: int | None = None
    """Number of steps of the run that the weights include, by default as in zo2 export. /adapter
    none includes none.
    """
    max_new_tokens: int = 256
    """Most tokens of an answer."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    sequence_length: int | None = None
    """Most tokens of a conversation with its answer.

    By default 1024, or the model's limit if that is lower.
    """
    model_options: ModelOptions = field(default_factory=ModelOptions)
    resources: Resources = field(default_factory=Resources)

    def check(self) -> None:
        """Refuse what can be refused before anything is opened."""
        require_whole("max_new_tokens", self.max_new_tokens, 1)
        require_valid(self.sampling, given=self.given)
        for name, variant in self._variants().items():
            if name != _BASE or not self.adapters:  # else an adapter may name the base
                variant.check()

    def run(self) -> None:
        """Answer the lines of standard input until it ends, or until /quit."""
        self.check()  # also where the library is called
        session = _Session(self, self._resolved(), self._rows())
        session.open()
        with closing(session):
            print(session.introduction, file=sys.stderr)
            for line in _lines():
                if line == "/quit":
                    return
                session.take(line)

    def _rows(self) -> RowOptions | None:
        """The prompts and labels of the run, or of the one that made the first adapter or else the
        model, if a line is the only column of its prompts; None for conversations.
        """
        from zo2adapters.trainers.model_card import rows_of_export, rows_of_run

        if self.run_directory is not None:
            rows = rows_of_run(RunDirectory(self.run_directory).options())
        else:
            rows = rows_of_export(Path(*self.adapters[:1] or (str(self.model),)))
        is_prompt = (
            rows is not None
            and len(rows.prompt_columns) == 1
            and (rows.labels or rows.prompt_template)
        )
        return rows if is_prompt else None

    def _resolved(self) -> dict[str, AtStep]:
        """What answers, by name, with base, dtype and journal of each. See ``_variants``."""
        resolved = dict[str, AtStep]()
        for name, variant in self._variants().items():
            first = next(iter(resolved.values()), None)
            if variant.model is None and variant.run_directory is None and first is not None:
                variant = replace(variant, model=first.model)  # an adapter has named the base
            resolved[name] = variant.resolved()
        return resolved

    def _variants(self) -> dict[str, AtStep]:
        """What answers, by name; the first one answers first."""
        if self.model is not None and (Path(self.model) / JOURNAL).is_file():
            raise OptionError(
                "model",
                f"{self.model}, the directory of a run",
                "a model",
                f"zo2 chat {self.model}",
            )
        opening = RunModelOptions(**vars(self.model_options))
        if self.run_directory is None and (self.model is not None or self.adapters):
            return self._adapted(
                _Variant(model=self.model, model_options=opening, resources=self.resources)
            )
        if self.run_directory is None or self.model is not None:
            found = (
                "no model and no run's directory"
                if self.model is None
                else "both --model and a run's directory"
            )
            raise OptionError(
                "model", found, "either --model or a run's directory", "pass one of the two"
            )
        if self.adapters:
            raise without_effect(
                "adapter",
                f"{self.adapters[0]} with a run",
                "--model with --adapter, or a run alone",
            )
        run = _Variant(
            run_directory=self.run_directory,
            at=self.at,
            model_options=opening,
            resources=self.resources,
        )
        return {name_of(self.run_directory): run, _BASE: replace(run, at=0)}

    def _adapted(self, base: AtStep) -> dict[str, AtStep]:
        """A base with each of its adapters, and alone."""
        if self.at is not None:
            raise without_effect("at", f"{self.at} without a run", "a run's directory")
        names = [name_of(path) for path in self.adapters]
        if len({*names, _BASE}) <= len(names):
            remedy = "rename one of the directories, or pass links"
            raise OptionError(
                "adapter",
                f"the names {', '.join(names)}",
                f"different names, none of them {_BASE!r}",
                remedy,
            )
        adapted = [replace(base.model_options, adapter=path) for path in self.adapters]
        variants = [replace(base, model_options=model_options) for model_options in adapted]
        return {**dict(zip(names, variants, strict=True)), _BASE: base}


def _lines() -> Iterator[str]:
    """Lines of standard input that are not empty, after a mark in a terminal, where earlier lines
    can be taken up again.
    """
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with suppress(ImportError):  # not on every platform
            importlib.import_module("readline")  # which makes input() edit its line
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except (EOFError, KeyboardInterrupt) as ended:
            print(file=sys.stderr)  # the line with the mark has ended
            if isinstance(ended, KeyboardInterrupt):
                raise
            return
        if not line and not is_terminal:
            return
        if line.strip():
            yield line.strip()


class _Stop:
    """While an answer is written in a terminal, the first interrupt ends the answer, and the second
    one the command.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty() and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked and callable(self._before):
            self._before(number, frame)
        self.is_asked = True


class _Session:
    """Lines that one variant at a time answers, whose engine is open.

    A conversation goes on when another variant answers. With a run's template each line is a prompt
    by itself. With a run's labels a line gets one of these, compared as the run's evaluations
    compare them.
    """

    def __init__(
        self, options: Chat, variants: Mapping[str, AtStep], rows: RowOptions | None
    ) -> None:
        from zo2adapters.tasks.tokenizer import load_tokenizer

        self._options = options
        self._variants = variants
        self._sampling = options.sampling.chosen()
        self.name = next(iter(variants))
        self._messages = list[dict[str, str]]()
        self._tokenizer = load_tokenizer(self._at.base())
        self._labels = () if rows is None else rows.labels
        self._rows = (
            rows
            if rows is None or rows.labels
            else RowOptions(prompt_template=rows.prompt_template)
        )
        self.does, reset = "answers", ""  # what the present variant does with a line
        if rows is not None:
            [self._column] = rows.prompt_columns
            listed = ", ".join(self._labels[:_MOST_LABELS]) + (
                ", ..." if len(self._labels) > _MOST_LABELS else ""
            )
            does = (
                f"chooses one of the labels {listed} for"
                if self._labels
                else "continues the prompt of"
            )
            self.does = f"{does} the {self._column} that you type"
        elif self._tokenizer.chat_template:
            reset = "/reset forgets the conversation, "
        else:
            found, remedy = (
                "a tokenizer without a chat template",
                "continue plain text with zo2 generate --prompt TEXT",
            )
            raise DataError(self._at.base(), found, "the tokenizer of a chat model", remedy)
        switches = "/adapter NAME switches, /adapter lists, " if len(variants) > 1 else ""
        self.commands = f"{switches}{reset}/help says this again, /quit ends"

    def open(self) -> None:
        """Open the model and the engine of the present variant."""
        from zo2adapters.models.footprint import activation_bytes

        self._model = self._at.open_model()
        self._length = Batching(sequence_length=self._options.sequence_length).length_for(
            self._model
        )
        config = self._model.config
        labels = len(self._labels)
        length = self._length
        room = (
            activation_bytes(config, labels, length, streams=1)
            if labels
            else _generation_bytes(config, 1, length)
        )
        self._engine: Engine = self._at.engine(self._model, activation_bytes=room, tokens=1)

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

    @property
    def _at(self) -> AtStep:
        return self._variants[self.name]

    @property
    def title(self) -> str:
        """What the present variant is called: a base that has nothing beside it by its directory or
        hub id.
        """
        return self.name if len(self._variants) > 1 else name_of(Path(str(self._at.model)))

    @property
    def introduction(self) -> str:
        """What lines do."""
        return f"{self.title} {self.does}; {self.commands}"

    def take(self, line: str) -> None:
        """Answer a line, or do what it commands."""
        command, _, name = line.partition(" ")
        if command == "/help":
            print(self.introduction, file=sys.stderr)
        elif command == "/adapter":
            self._switch(name.strip())
        elif command == "/reset" and not self._labels:
            self._messages = []
            print("the conversation starts anew", file=sys.stderr)
        elif command.startswith("/"):
            print(f"{command} is not a command; {self.commands}", file=sys.stderr)
        elif self._labels:
            self._label(line)
        else:
            self._answer(line)

    def _switch(self, name: str) -> None:
        """Let another variant answer."""
        if name not in self._variants:
            print(
                f"{self.title} {self.does}; there are {', '.join(self._variants)}", file=sys.stderr
            )
            return
        if name != self.name:
            self._engine.close()
            self.name = name
            self.open()
        print(f"{name} {self.does}", file=sys.stderr)

    def _answer(self, line: str) -> None:
        """Print the answer as it is generated."""
        from zo2adapters.models.checkpoint import end_token_ids
        from zo2adapters.tasks.tokenizer import render_chat

        messages = [*self._messages, {"role": "user", "content": line}]
        if is_chat := self._rows is None:
            text = render_chat(messages, self._tokenizer, reply_follows=True)
        else:
            text = self._rows.converted({self._column: with_line_breaks(line)})["prompt"]
        ids: list[int] = self._tokenizer(text, add_special_tokens=not is_chat, verbose=False)[
            "input_ids"
        ]
        room = self._length - len(ids)
        if room < 1:
            said = (
                f"the conversation has {counted(len(ids), 'token')}, and at most "
                f"{self._length - 1} leave room"
            )
            print(f"{said} for an answer: shorten the message, or type /reset", file=sys.stderr)
            return
        ends = end_token_ids(self._model, self._tokenizer)
        stream = _TextStream(
            lambda tokens: str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        )
        with _Stop() as stop:
            for (token,) in _generated(
                self._engine,
                self._model,
                self._at,
                self._tokenizer,
                [ids],
                max_new_tokens=min(room, self._options.max_new_tokens),
                sampling=self._sampling,
            ):
                if token is not None and token not in ends:
                    stream.add(token)
                if stop.is_asked:
                    break
        answer = stream.end()
        self._messages = [*messages, {"role": "assistant", "content": answer}] if is_chat else []

    def _label(self, line: str) -> None:
        """Print the labels with their probabilities, the likeliest one first."""
        from zo2adapters.tasks.objectives import score
        from zo2adapters.tasks.rows import tokenized_choice
        from zo2adapters.tasks.tokenizer import pad_token_id

        assert self._rows is not None, "they have the labels"
        label_column = self._rows.label_column or "label"
        row = self._rows.converted(
            {self._column: with_line_breaks(line), label_column: self._labels[0]}
        )
        choice = tokenized_choice(row["prompt"], row["candidates"], [0], self._tokenizer)
        longest = max(tokens for tokens, _ in choice.sequences)
        if longest > self._length:
            said = (
                f"the prompt has {counted(longest, 'token')} with a label, and at most "
                f"{self._length} fit"
            )
            print(said, file=sys.stderr)
            return
        means = score(
            self._engine,
            self._model,
            [choice.prompt],
            [choice.candidates],
            batch_size=len(self._labels),
            pad_token_id=pad_token_id(self._tokenizer),
        ).means[0]
        weights = [math.exp(mean - max(means)) for mean in means]
        shares = sorted(zip(weights, self._labels, strict=True), key=lambda pair: -pair[0])
        print(
            ", ".join(
                f"{label} {weight / sum(weights):.1%}" for weight, label in shares[:_MOST_LABELS]
            ),
            flush=True,
        )


class _TextStream:
    """Prints a text while its tokens are generated."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens = list[int]()
        self._printed = ""

    def add(self, token: int) -> None:
        """Print the characters that this token completes."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(_UNFINISHED) and text.startswith(self._printed):
            print(text[len(self._printed) :], end="", flush=True)
            self._printed = text

    def end(self) -> str:
        """Print the rest and a line break, and return the whole text."""
        text = self._decode(self._tokens)
        print(text[len(self._printed) :] if text.startswith(self._printed) else "", flush=True)
        return text

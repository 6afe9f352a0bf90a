"""Batches of Hugging Face models: checked before they run, packed, with the values that forwards
read from them; losses.

Packing: rows of different lengths joined into one row without padding, each with positions from 0.
Hugging Face's forwards detect packed rows by their positions, and mask attention between them. Some
models' forwards do not, so each layer's attention mask is checked before anything is computed.

A branch on a tensor's value (is any token padding?) makes the host wait for the device. Masks and
positions depend on the batch alone, so the values are the same in each forward: a ``BranchCache``
keeps them, so that on a GPU no sweep waits.

A model's head says which labels a batch has, and what its loss is the mean over.

Logits of several streams are computed together, and over chunks of tokens they are never in memory
whole. Of the logits of a mixture's routers transformers computes a loss that keeps the experts'
loads even. It records the outputs of modules of a class that the model declares, and computes the
loss at the end of its forward. Here blocks run one at a time, so the logits travel with the hidden
state, and the stub of the last layer has a module of that class, which returns them to
transformers' own code.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias, cast

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from zo2adapters.models.library_names import OutputRecorder
from zo2core import Batch
from zo2core.errors import BatchError, OptionError, UnsupportedModelError
from zo2core.sweep.microbatch import IGNORE_INDEX, predicted

_READS = {torch.Tensor.__bool__, torch.Tensor.__int__, torch.Tensor.item, torch.Tensor.tolist}

_LABELS_REMEDY = "pass the labels of this head"
_MASK_ROWS = 256  # rows of a mask that are checked at a time, since a mask can be large


class BranchCache(TorchFunctionMode):
    """A context in which reads of tensor values return what they returned the first time, in the
    same order.

    Only integers and booleans are cached, since floating-point values may depend on weights.
    Booleans are assumed not to, in all that a decoder does before its first layer and after its
    last one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._cached: list[tuple[str, Any]] = []  # what was read, and its value
        self._count = 0  # reads since the context was entered
        self._recording = True

    def __enter__(self) -> BranchCache:
        self._count = 0
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        self._recording = False  # later reads beyond those of the first pass have another cause
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _READS or args[0].is_floating_point():
            return func(*args, **(kwargs or {}))
        read = f"{func.__name__} of a tensor of shape {tuple(args[0].shape)} and {args[0].dtype}"
        index = self._count
        self._count = self._count + 1
        if index >= len(self._cached):
            value = func(*args, **(kwargs or {}))
            if self._recording:
                self._cached.append((read, value))
            return value
        expected, value = self._cached[index]
        if read != expected:
            raise UnsupportedModelError(
                f"read {index} of a tensor's value in Hugging Face's forward",
                read,
                f"{expected}, as the first time",
                "write an adapter for this architecture: its forward reads values in no fixed "
                "order",
            )
        return value


class PreparedBatch(dict[str, torch.Tensor]):
    """A checked batch with cached properties, so that no sweep has to wait for the device."""

    def __init__(self, batch: Batch) -> None:
        super().__init__(batch)
        self.branches = BranchCache()
        labels = batch.get("labels")
        self.predictions = None if labels is None or labels.dim() != 2 else predictions(batch)
        self.is_padded = is_padded(batch)
        self.is_packed = is_packed(batch)


def longest_row(model: PreTrainedModel) -> int | None:
    """The largest number of tokens in a row; None if the config has no limit.

    Where positions start after the padding index, as in RoBERTa, those up to it are not usable.
    """
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if (
            longest is not None
            and is_table
            and module.num_embeddings == longest
            and module.padding_idx is not None
        ):
            return longest - int(module.padding_idx) - 1
    return longest


def check_inputs(batch: Batch, config: PretrainedConfig, longest: int | None) -> None:
    """Refuse a batch, without labels, that the model cannot run."""
    if "input_ids" not in batch:
        raise _refusal("input_ids", "no input_ids", "a (batch, tokens) tensor", "pass input_ids")
    ids = batch["input_ids"]
    mask = batch.get("attention_mask")
    if ids.dim() != 2 or ids.is_floating_point() or ids.numel() == 0:
        raise _refusal(
            "input_ids",
            f"{ids.dtype} of shape {tuple(ids.shape)}",
            "integers (batch, tokens)",
            "pad to one length",
        )
    if mask is not None and mask.shape != ids.shape:
        raise _refusal(
            "attention_mask",
            f"shape {tuple(mask.shape)}",
            f"{tuple(ids.shape)} as input_ids",
            "pad alike",
        )
    positions = batch.get("position_ids")  # each sequence of a packed row has its own
    tokens = (
        ids.shape[1] if positions is None or not positions.numel() else int(positions.max()) + 1
    )
    if longest is not None and tokens > longest:
        raise _refusal("input_ids", f"{tokens} tokens", f"at most {longest}", "cut the sequences")
    _require_range(
        "input_ids",
        "tokens",
        ids,
        config.get_text_config().vocab_size,
        "use this model's own tokenizer",
    )


def predictions(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and columns of the tokens whose next token is labelled: int64, (labelled tokens,)
    each.
    """
    if isinstance(batch, PreparedBatch) and batch.predictions is not None:
        return batch.predictions
    rows, columns = predicted(batch["labels"]).nonzero(as_tuple=True)
    return rows, columns


def stack_rows(batches: Sequence[Batch]) -> Batch | None:
    """Join batches along their rows; None if their entries differ in names or shapes.

    Entries that all rows of a batch share (positions, say) are kept once if they are equal in all
    batches.
    """
    first = batches[0]
    shapes = [{key: value.shape for key, value in batch.items()} for batch in batches]
    if any(shape != shapes[0] for shape in shapes):
        return None
    joined: dict[str, torch.Tensor] = {}
    for key, value in first.items():
        if value.dim() > 0 and len(value) == len(first["input_ids"]):
            joined[key] = torch.cat([batch[key] for batch in batches])
        elif all(batch[key] is value or torch.equal(batch[key], value) for batch in batches):
            joined[key] = value
        else:
            return None
    return joined


def branches_of(batch: Batch) -> contextlib.AbstractContextManager[object]:
    """The batch's cache of values that Hugging Face's forward branches on, as a context; empty if
    not prepared.
    """
    return batch.branches if isinstance(batch, PreparedBatch) else contextlib.nullcontext()


def is_padded(batch: Batch) -> bool:
    """Whether a batch masks any token, or packs rows, so that attention needs a mask."""
    if isinstance(batch, PreparedBatch):
        return batch.is_padded or batch.is_packed
    mask = batch.get("attention_mask")
    return mask is not None and not bool(mask.all())


def _refusal(key: str, found: str, expected: str, remedy: str = _LABELS_REMEDY) -> BatchError:
    return BatchError(f"batch[{key!r}]", found, expected, remedy)


def pack(batch: Batch) -> dict[str, torch.Tensor]:
    """Join the rows of a batch into one row.

    Args:
        batch: ``input_ids``, ``attention_mask`` (1 on tokens, 0 on padding) and ``labels``, each
            (batch, tokens), int64, and nothing else.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, each (1, tokens of all rows), int64. The
        label of each row's first token is ``IGNORE_INDEX``, since it is not predicted from the row
        before.

    Raises:
        BatchError: if the batch has other entries, which may not be packable.
    """
    needed = {"input_ids", "attention_mask", "labels"}
    if batch.keys() != needed:
        found = ", ".join(sorted(batch))
        expected = ", ".join(sorted(needed))
        raise BatchError("batch", found, f"{expected}, to pack them", "leave the batch padded")
    mask = batch["attention_mask"].bool()
    positions = mask.long().cumsum(dim=1) - 1
    labels = batch["labels"].masked_fill(positions == 0, IGNORE_INDEX)
    return {
        "input_ids": batch["input_ids"][mask][None],
        "labels": labels[mask][None],
        "position_ids": positions[mask][None],
    }


def is_packed(batch: Batch) -> bool:
    """Whether a row of a batch has several sequences: its positions restart, and there is no
    mask.
    """
    if isinstance(batch, PreparedBatch):
        return batch.is_packed
    positions = batch.get("position_ids")
    if positions is None or positions.dim() != 2 or "attention_mask" in batch:
        return False
    return bool((positions[:, 1:] - positions[:, :-1] != 1).any())


def sequence_numbers(batch: Batch) -> torch.Tensor:
    """The number of the sequence that each token of packed rows belongs to, from 0: (rows, tokens),
    int64.
    """
    positions = batch["position_ids"]
    starts = torch.diff(positions, dim=1, prepend=positions[:, :1]) != 1
    return starts.flatten().cumsum(0).view(positions.shape) - 1


@torch.inference_mode()
def require_separating_masks(
    batch: Batch, calls: Callable[[], Iterable[tuple[Sequence[Any], Mapping[str, Any]]]]
) -> None:
    """Refuse a model in which a layer would attend across the sequences of a packed row."""
    numbers = sequence_numbers(batch)
    separates = cache(partial(_separates, numbers))  # most layers share a mask
    for layer, (arguments, keywords) in enumerate(calls()):
        tensors = [
            value for value in (*arguments, *keywords.values()) if isinstance(value, torch.Tensor)
        ]
        masks = [
            value
            for value in tensors
            if value.dim() == 4 and value.shape[-2:] == (numbers.shape[1],) * 2
        ]
        if not any(separates(mask) for mask in masks):
            raise UnsupportedModelError(
                f"layer {layer}",
                "no attention mask that separates packed rows",
                "a mask from the positions of packed rows, as models make for sdpa and eager "
                "attention",
                "pad the rows: pass an attention_mask, and leave --pack out",
            )


def _separates(sequence_ids: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether a mask, (rows or 1, heads or 1, tokens, tokens), hides other sequences; floats are
    added to scores.
    """
    for first in range(0, sequence_ids.shape[1], _MASK_ROWS):
        part = mask[:, :, first : first + _MASK_ROWS]
        numbers = sequence_ids[:, first : first + _MASK_ROWS]
        visible = part if part.dtype is torch.bool else part > torch.finfo(part.dtype).min / 2
        apart = numbers[:, :, None] != sequence_ids[:, None, :]
        if bool((visible & apart[:, None]).any()):
            return False
    return True


def _count_labels(batch: Batch) -> int:
    labels = batch["labels"]
    return labels.numel() if labels.is_floating_point() else int((labels != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Head:
    """One kind of head."""

    name: str
    auto_class: Any
    check_targets: Callable[[Batch, PretrainedConfig], None]
    targets: tuple[str, ...] = ("labels",)
    count: Callable[[Batch], int] = _count_labels

    def check(self, batch: Batch, config: PretrainedConfig, longest: int | None) -> None:
        """Refuse a batch that the model cannot train on."""
        for name in self.targets:
            if name not in batch:
                raise _refusal(name, f"no {name}", f"the targets of {self.name}", "add it")
        check_inputs(
            {name: value for name, value in batch.items() if name not in self.targets},
            config,
            longest,
        )
        self.check_targets(batch, config)

    def class_of(self, config: PretrainedConfig) -> Any:
        """The class that builds the model of a config; a language model may also read images.

        Where transformers has a class for text alone, too, as of Qwen3.5, it is the one that
        ``config.json`` names.
        """
        if self is not CAUSAL_LM or not reads_images(config):
            return self.auto_class
        for_images = transformers.AutoModelForImageTextToText
        text: Any = self.auto_class._model_mapping.get(type(config), None)
        whole: Any = for_images._model_mapping[type(config)]
        named = getattr(config, "architectures", None) or ()
        is_whole = whole.__name__ in named and text is not whole
        return for_images if text is None or is_whole else self.auto_class


def reads_images(config: PretrainedConfig) -> bool:
    """Whether the config's model reads images and text."""
    return type(config) in transformers.AutoModelForImageTextToText._model_mapping


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model's forward has an argument for images as they are built here."""
    return "pixel_values" in inspect.signature(model.forward).parameters


def head_of(name: str) -> Head:
    """The head with this name."""
    if name not in HEADS:
        raise OptionError("head", repr(name), f"one of {', '.join(HEADS)}", "pass one of these")
    return HEADS[name]


def _check_token_classes(
    batch: Batch, config: PretrainedConfig, classes: int | None = None
) -> None:
    labels = batch["labels"]
    shape = tuple(batch["input_ids"].shape)
    if tuple(labels.shape) != shape or labels.is_floating_point():
        raise _refusal(
            "labels", f"{labels.dtype} of shape {tuple(labels.shape)}", f"integers of shape {shape}"
        )
    _require_classes(labels, int(config.num_labels or 1) if classes is None else classes)


def _check_tokens(batch: Batch, config: PretrainedConfig) -> None:
    _check_token_classes(batch, config, config.get_text_config().vocab_size)


def _check_next_tokens(batch: Batch, config: PretrainedConfig) -> None:
    if batch["labels"].dim() and not bool(predicted(batch["labels"]).any()):
        raise _refusal(
            "labels",
            "no token to predict",
            "a label beyond the first token",
            "leave this batch out",
        )
    _check_tokens(batch, config)


def _check_row_labels(batch: Batch, config: PretrainedConfig) -> None:
    labels = batch["labels"]
    rows = len(batch["input_ids"])
    classes = int(config.num_labels or 1)
    if len(labels) != rows or labels.dim() not in (1, 2):
        raise _refusal("labels", f"shape {tuple(labels.shape)}", f"a label for each of {rows} rows")
    by_class = (
        "multi_label_classification"
        if labels.is_floating_point()
        else "single_label_classification"
    )
    # as transformers assumes
    kind = config.problem_type or ("regression" if classes == 1 else by_class)
    if (kind == "single_label_classification") == labels.is_floating_point():
        raise _refusal(
            "labels",
            f"{labels.dtype} for {kind}",
            "integers for one class a row, else floating-point numbers",
        )
    if kind == "single_label_classification":
        _require_classes(labels, classes)
    elif labels.numel() != rows * classes or (
        kind == "multi_label_classification" and labels.dim() != 2
    ):
        raise _refusal(
            "labels", f"shape {tuple(labels.shape)}", f"{classes} for each of {rows} rows"
        )


def _check_spans(batch: Batch, config: PretrainedConfig) -> None:
    rows, tokens = batch["input_ids"].shape
    for name in ("start_positions", "end_positions"):
        positions = batch[name]
        if tuple(positions.shape) != (rows,) or positions.is_floating_point():
            raise _refusal(
                name,
                f"{positions.dtype} of shape {tuple(positions.shape)}",
                f"integers of shape ({rows},)",
            )
        # transformers leaves other rows out of its mean
        _require_range(name, "positions", positions, tokens)


def _require_classes(labels: torch.Tensor, classes: int) -> None:
    counted = labels[labels != IGNORE_INDEX]
    if not counted.numel():
        raise _refusal(
            "labels", f"{IGNORE_INDEX} alone, which is not counted", "at least one other label"
        )
    _require_range(
        "labels",
        "classes",
        counted,
        classes,
        f"{_LABELS_REMEDY}, and {IGNORE_INDEX} where none counts",
    )


def _require_range(
    key: str, what: str, values: torch.Tensor, stop: int, remedy: str = _LABELS_REMEDY
) -> None:
    """Refuse values that are not from 0 to below a number."""
    if not 0 <= int(values.min()) <= int(values.max()) < stop:
        raise _refusal(
            key, f"{what} {int(values.min())} to {int(values.max())}", f"0 to {stop - 1}", remedy
        )


CAUSAL_LM = Head("causal-lm", transformers.AutoModelForCausalLM, _check_next_tokens)
HEADS: Mapping[str, Head] = {
    head.name: head
    for head in (
        CAUSAL_LM,
        Head("masked-lm", transformers.AutoModelForMaskedLM, _check_tokens),
        Head(
            "sequence-classification",
            transformers.AutoModelForSequenceClassification,
            _check_row_labels,
        ),
        Head(
            "token-classification",
            transformers.AutoModelForTokenClassification,
            _check_token_classes,
        ),
        Head(
            "question-answering",
            transformers.AutoModelForQuestionAnswering,
            _check_spans,
            targets=("start_positions", "end_positions"),
            count=lambda batch: len(batch["input_ids"]),
        ),
    )
}


# takes logits and labels, as transformers' loss functions do
Loss: TypeAlias = Callable[..., torch.Tensor]


# Note: Losses one after another. A loss allocates its logits in float32, twice, and then a scalar.
# If that scalar were kept, it would lie behind the freed memory, and glibc, which aligns torch's
# allocations, could not reuse all of it for the next loss: 32 losses would take 32 times as much.
# So each scalar is copied into one tensor and freed.


class KeptLosses:
    """A fixed number of losses in one tensor. See the note: Losses one after another."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._kept = 0
        self._losses: torch.Tensor | None = None

    def keep(self, loss: torch.Tensor) -> None:
        """Store a copy of the next loss, 0-d."""
        if self._losses is None:
            self._losses = loss.new_empty(self._count)
        self._losses[self._kept] = loss
        self._kept += 1

    @property
    def losses(self) -> torch.Tensor:
        """All losses, 1-D."""
        assert self._losses is not None, "no loss was kept"
        assert self._kept == self._count, "a loss is missing"
        return self._losses


def whole_losses(logits: torch.Tensor, batches: Sequence[Batch], loss: Loss) -> list[torch.Tensor]:
    """Compute each stream's loss from all logits at once."""
    losses = KeptLosses(len(batches))
    for logits_of_stream, batch in zip(
        torch.split(logits, len(batches[0]["labels"])), batches, strict=True
    ):
        losses.keep(loss(logits_of_stream, batch["labels"]))
    return list(losses.losses.unbind())


def recomputed(
    function: Callable[..., torch.Tensor], *arguments: torch.Tensor, keeps: bool = False
) -> torch.Tensor:
    """Call a function. Where gradients are taken, it runs again in the backward pass, and nothing
    within it is kept until then, unless it ``keeps``. The bits are the same.
    """
    if keeps or not torch.is_grad_enabled():
        return function(*arguments)
    again: Any = checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return cast("torch.Tensor", again)


def chunked_losses(
    hidden: torch.Tensor,
    batches: Sequence[Batch],
    chunk: int,
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
) -> list[torch.Tensor]:
    """Compute each stream's mean loss over its labelled tokens; logits of unlabelled tokens are not
    computed.

    Where gradients are taken, the logits of several chunks are computed again in the backward pass.
    """
    states = torch.split(hidden, len(batches[0]["labels"]))
    predicted = [predictions(batch) for batch in batches]
    counts = [len(rows) for rows, _ in predicted]
    chunk = max(1, chunk // len(batches))
    terms = [KeptLosses(-(-count // chunk)) for count in counts]
    for start in range(0, max(counts), chunk):
        length = min(chunk, max(counts) - start)
        selected = []
        targets = []
        for state, batch, (rows, columns) in zip(states, batches, predicted, strict=True):
            indices = torch.arange(start, start + length, device=rows.device).clamp(
                max=len(rows) - 1
            )
            selected.append(state[rows[indices], columns[indices]])
            chunk_rows = slice(start, start + length)
            targets.append(batch["labels"][:, 1:][rows[chunk_rows], columns[chunk_rows]])
        sums = recomputed(
            partial(_sums_of_chunk, logits, loss, targets, counts),
            torch.cat(selected),
            keeps=max(counts) <= chunk,
        )
        labelled = [stream for stream, labels in zip(terms, targets, strict=True) if len(labels)]
        for stream, summed in zip(labelled, sums, strict=True):
            stream.keep(summed)
    return [losses.losses.sum() for losses in terms]


def _sums_of_chunk(
    logits: Callable[[torch.Tensor], torch.Tensor],
    loss: Loss,
    targets: Sequence[torch.Tensor],
    counts: Sequence[int],
    hidden: torch.Tensor,
) -> torch.Tensor:
    """Sum the losses of a chunk's tokens, for each stream that has any, and divide by its labelled
    tokens of all chunks.
    """
    sums = KeptLosses(sum(len(labels) > 0 for labels in targets))
    of_streams = torch.split(logits(hidden), len(hidden) // len(targets))
    for labels, of_stream, count in zip(targets, of_streams, counts, strict=True):
        if len(labels):
            sums.keep(
                loss(of_stream[: len(labels)], None, shift_labels=labels, num_items_in_batch=count)
            )
    return sums.losses


def require_chunkable(model: PreTrainedModel) -> None:
    """Refuse a model whose loss of a chunk's logits is not their share of the whole mean."""
    two_logits = torch.zeros(1, 2)
    label = torch.zeros(1, dtype=torch.int64)
    try:
        share = model.loss_function(
            two_logits, None, vocab_size=2, shift_labels=label, num_items_in_batch=4
        )
        found = f"a loss of {float(share):.3g} for one of four labels with two equal logits"
    except Exception as error:  # any: arguments of other names lead to all kinds of errors
        share = math.nan
        found = f"a loss function that does not run ({type(error).__name__})"
    if not math.isclose(share, math.log(2) / 4, rel_tol=1e-5):
        raise UnsupportedModelError(
            f"model type {model.config.model_type}",
            f"{found}, in transformers {transformers.__version__}",
            f"{math.log(2) / 4:.3g}, for losses of logits in chunks",
            "open it with `loss_chunk=None`",
        )


ROUTERS = "output_router_logits"  # of configs and forwards: whether their loss is computed
_OUTPUT = "router_logits"


def are_routers_asked_for(config: PretrainedConfig) -> bool:
    """Whether a config asks for the loss of routers."""
    return bool(getattr(config.get_text_config(), ROUTERS, False))


def without_router_losses(model: PreTrainedModel) -> Mapping[str, bool]:
    """The arguments with which a forward computes no router loss; none where it never does."""
    return {ROUTERS: False} if ROUTERS in inspect.signature(model.forward).parameters else {}


class RouterLogits:
    """The logits of all routers of a model, of which a loss is computed where that is asked for:
    by the model's config, which trainers change, or by the caller of the model.

    Args:
        model: The skeleton, before its layers are replaced by stubs.
        layers: Its layers.

    Raises:
        UnsupportedModelError: if the config asks for their loss, and transformers does not record
            the routers of this model.
    """

    def __init__(self, model: PreTrainedModel, layers: Sequence[nn.Module]) -> None:
        self._config = model.config
        self._is_argument = bool(without_router_losses(model))
        self._recorder = recorder = _recorder(model)
        self._routed: list[torch.Tensor | None] | None = None  # of the layer that runs
        self._count = 0  # routers
        self._stand_in = None if recorder is None else _stand_in(recorder)
        kind = () if recorder is None else recorder.target_class
        for module in (module for layer in layers for module in layer.modules()):
            if isinstance(module, kind):
                module.register_forward_hook(partial(self._record, self._count))
                self._count += 1
        if self.are_asked_for:
            self._require_recorded_for_config()

    @property
    def are_asked_for(self) -> bool:
        """Whether the config asks for the routers' loss at present."""
        return self._is_argument and are_routers_asked_for(self._config)

    def wanted_by(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call of the model with these arguments computes the routers' loss."""
        argument = arguments.get(ROUTERS)
        return self.are_asked_for if argument is None else bool(argument)

    def require_recorded(self, where: str, found: str, remedy: str) -> None:
        """Refuse to compute a loss of routers that transformers does not record."""
        if self._recorder is None or not self._is_argument:
            raise UnsupportedModelError(
                where,
                f"{found}, for the model type {self._config.model_type}",
                "a mixture whose routers transformers records, and has a loss of",
                f"{remedy}: the loss is then without that of the routers",
            )

    def none_yet(self, *, are_wanted: bool) -> tuple[None, ...] | None:
        """The logits before the first layer; None: none are recorded."""
        if are_wanted and self._recorder is None:
            self._require_recorded_for_config()
        return (None,) * self._count if are_wanted else None

    def _require_recorded_for_config(self) -> None:
        self.require_recorded(f"{ROUTERS} of the config", "true", "set it to false")

    def arguments(self, routed: Sequence[torch.Tensor | None] | None) -> Mapping[str, bool]:
        """The arguments with which a forward computes the loss of these logits, or none."""
        return {ROUTERS: routed is not None} if self._is_argument else {}

    @contextmanager
    def recorded(
        self, routed: Sequence[torch.Tensor | None] | None
    ) -> Iterator[list[torch.Tensor | None] | None]:
        """A context in which a layer runs, whose routers' logits are added to those of the layers
        before.
        """
        self._routed = added = None if routed is None else list(routed)
        try:
            yield added
        finally:
            self._routed = None

    def join(self, stub: nn.Module) -> None:
        """Give the last layer's stub a router, where transformers looks for one."""
        if self._recorder is not None:
            *path, name = (self._recorder.layer_name or "router").split(".")
            for part in path:
                # a stub has the attributes of its layer, which ``add_module`` would not hide
                stub._modules[part] = stub = nn.Module()
            stub._modules[name] = self._stand_in

    def replay(self, routed: Sequence[torch.Tensor | None] | None) -> None:
        """Return the logits of all layers to transformers, in order, within its forward."""
        for logits in routed or ():
            assert self._stand_in is not None, "only recorded routers have logits"
            self._stand_in(logits)

    def _record(self, number: int, module: nn.Module, inputs: object, output: Any) -> None:
        if self._routed is not None:
            assert self._recorder is not None, "it has the hook"
            self._routed[number] = (
                output[self._recorder.index] if isinstance(output, tuple) else output
            )


def _stand_in(recorder: OutputRecorder) -> nn.Module:
    """A router without weights, which returns what it is given."""
    router: nn.Module = recorder.target_class.__new__(recorder.target_class)
    nn.Module.__init__(router)
    router.forward = lambda logits: (*[None] * recorder.index, logits)
    return router


def _recorder(model: PreTrainedModel) -> OutputRecorder | None:
    """The declaration by which transformers records the routers; None: it does not."""
    for module in model.modules():
        declared = getattr(module, "_can_record_outputs", None) or {}
        recorder = declared.get(_OUTPUT)
        if isinstance(module, PreTrainedModel) and isinstance(recorder, OutputRecorder):
            return recorder
    return None

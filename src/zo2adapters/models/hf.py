"""Cut any Hugging Face decoder into embedding, blocks and head by running Hugging Face's own code.

The model is built from its config with parameters on the meta device. Its layers are replaced by
stubs. *Prologue*: HF's forward runs until the stubs have recorded the arguments with which HF calls
each layer. Each real layer is then called with its recorded arguments. *Epilogue*: HF's forward
runs again, each stub returning the final hidden state: norm, head and loss are HF's own. No forward
is copied, so none can become outdated.

A ``CalledForward`` ends in a function that calls the model, such as a trainer's ``compute_loss``.
The function runs twice. Before the first sweep it is interrupted where it calls the model, to get
the arguments. In the head's visit its call returns what Hugging Face's forward computes from the
last layer's output.

Trade-off: embedding, positions and masks are computed twice a forward, which costs little compared
to one layer.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import torch
from safetensors.torch import save
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import Cache, PretrainedConfig, PreTrainedModel, __version__

from zo2adapters.models.architecture import (
    Architecture,
    ParameterFormats,
    require_axes,
    segment_aliases,
    segment_layouts,
)
from zo2adapters.models.batches import (
    CAUSAL_LM,
    ROUTERS,
    BranchCache,
    Head,
    PreparedBatch,
    RouterLogits,
    branches_of,
    check_inputs,
    chunked_losses,
    is_padded,
    longest_row,
    require_chunkable,
    require_separating_masks,
    stack_rows,
    takes_images,
    whole_losses,
)
from zo2adapters.models.footprint import (
    PassBytes,
    PassPeaks,
    agreed_peaks,
    expected_held_bytes,
    forward_bytes,
    loss_bytes,
    router_bytes,
    vision_bytes,
)
from zo2adapters.models.library_names import ForCausalLMLoss, cache_argument
from zo2adapters.models.low_rank import LowRankModules, set_batch_shape
from zo2adapters.models.module_use import ModuleUse, module_use
from zo2adapters.models.routed_experts import MOST, RoutedExperts, expected_share, routed_stacks
from zo2adapters.models.skeleton import CallRecorder, CutError, LayerCall, LayerCalls, Stub
from zo2adapters.models.token_loss import causal_lm_loss
from zo2core import Batch, Forward, ZO2Error
from zo2core.checkpoint.shards import BaseFiles
from zo2core.errors import BatchError, OptionError, UnsupportedModelError
from zo2core.estimators.perturbation import PerturbedParameter
from zo2core.protocols import TensorReader
from zo2core.sweep.gradient_visitor import GRAPH_FORWARDS
from zo2core.sweep.microbatch import combined_loss, rows_of
from zo2core.types import ParameterSpec, SavedForm

# entries of a batch that are not by row
_IMAGES = ("pixel_values", "image_sizes", "image_grid_thw")
# the latter mark the tokens of images
_OF_IMAGES = (*_IMAGES, "token_type_ids", "mm_token_type_ids")
_NEUTRAL = {  # keys that do not affect a causal language model's forward
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    *(
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "use_cache",
        "initializer_range",
        "init_std",
    ),
    *(
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ),
}

Call = Callable[[Any, dict[str, Any]], Any]  # takes the model and a batch
Files: TypeAlias = Mapping[str, Path | bytes]  # paths to copy or contents, by name
NO_FILES: Files = MappingProxyType({})

# arguments of the model's forward that have no effect before the last layer's output
_HEAD_ARGUMENTS = {
    *(
        "labels",
        "shift_labels",
        "num_items_in_batch",
        "logits_to_keep",
        "fused_lm_head",
        "use_cache",
        "return_dict",
    ),
    ROUTERS,
}


class Activations(NamedTuple):
    """The data that one segment passes to the next."""

    # (rows, tokens, hidden size), or other axes, which ``HFBlockModel.by_token`` reorders
    hidden: torch.Tensor
    calls: LayerCalls
    # the logits of routers, each from its layer on; None: their loss is not computed
    routed: tuple[torch.Tensor | None, ...] | None = None


class HFBlockModel:
    """A Hugging Face causal language model as segments.

    Args:
        skeleton: From ``build_skeleton``. Its layers are replaced by stubs.
        architecture: The module paths of its parts.
        weights: The checkpoint, by the skeleton's parameter names.
        companions: Files to write beside exported weights: paths to copy or contents, by name.
        formats: How the parameters are stored, transferred and computed.
        saved_form: The tensors in which the checkpoint keeps the parameters, and its other tensors.
        loss_chunk: Labelled tokens whose logits are in memory at a time; None: all.
        export_dtype: The dtype to which exported weights are rounded; None is the stored dtype.
        head: The kind of the model's head.

    Raises:
        UnsupportedModelError: if the architecture's declaration does not fit the model.
    """

    virtual_tokens = 0  # before each row, which an adapter adds
    # whether ``logits`` takes hidden states of single tokens
    takes_single_tokens: ClassVar[bool] = True

    def __init__(
        self,
        skeleton: PreTrainedModel,
        architecture: Architecture,
        weights: TensorReader,
        companions: Files,
        *,
        formats: ParameterFormats = ParameterFormats(),
        saved_form: SavedForm | None = None,
        loss_chunk: int | None = None,
        export_dtype: torch.dtype | None = None,
        head: Head = CAUSAL_LM,
    ) -> None:
        self.config = skeleton.config
        _require_sizes(skeleton)
        self.layouts = segment_layouts(skeleton, architecture, formats)
        self._precision = formats.precision
        self.autocast = formats.precision.autocast
        self.export_dtype = export_dtype
        self.weights = weights
        self.companions = companions
        self.saved_form = saved_form or SavedForm()
        self.loss_chunk = loss_chunk
        self.make_room: Callable[[int], object] = lambda nbytes: None  # set by an engine
        self.base_files = BaseFiles()  # set by who opens them
        self.pass_peaks: PassPeaks | None = None  # None: memory is estimated by formula
        self.kind = head
        self.longest_row = longest_row(skeleton)
        self._architecture = architecture
        self._axes = architecture.axes
        self._aliases = segment_aliases(skeleton, architecture)
        self.modules = dict(skeleton.named_modules())
        self._stored = {
            spec.name: spec.dtype
            for layout in self.layouts
            for spec in layout.parameters
            if not spec.frozen
        }
        self._device = torch.device("cpu")  # where the modules' buffers are
        # with stubs for its layers; only the weights that an engine has bound have values
        self.skeleton = skeleton
        if skeleton.loss_function is ForCausalLMLoss:
            skeleton.loss_function = causal_lm_loss
        self.loss_function = skeleton.loss_function  # which may be replaced later
        self._called: Callable[..., Any] = skeleton  # runs HF's forward
        self._recorder = CallRecorder()
        self._low_rank: LowRankModules | None = None  # set by ``require_stackable``
        self._stand_in_branches = BranchCache()  # for ``logits``: the same for any number of tokens
        self.experts: RoutedExperts | None = None  # set by ``route``
        self._layers = list(self._present_layers)
        self.routers = RouterLogits(skeleton, self._layers)
        for i, layer in enumerate(self._layers):
            self._present_layers[i] = Stub(
                layer,
                self._recorder,
                last=i + 1 == len(self._layers),
                returned=architecture.returned,
            )
        self.routers.join(self._present_layers[-1])
        if loss_chunk is not None:
            self._require_no_router_loss("loss_chunk", f"chunks of {loss_chunk} tokens")
            require_chunkable(skeleton)

    @property
    def description(self) -> Mapping[str, Any]:
        """The config's values that determine the forward, with transformers' defaults, and the
        attention implementation.
        """
        values = json.loads(self.config.to_json_string(use_diff=False))
        decisive = {
            key: _finite(value)
            for key, value in values.items()
            if key not in _NEUTRAL and value is not None
        }
        constants = self.saved_form.constants
        buffers = (
            {"buffers": hashlib.sha256(save(dict(constants))).hexdigest()} if constants else {}
        )
        carried = self._precision.carried
        dtypes = {"autocast": self.autocast, "carried": carried}  # keys of journals
        dtypes["carried_back"] = carried if self._precision.transfer_back else None
        named = {
            key: str(dtype).removeprefix("torch.")
            for key, dtype in dtypes.items()
            if dtype is not None
        }
        return {**decisive, "attention": self.config._attn_implementation, **named, **buffers}

    def require_unchanged(self) -> None:
        """Refuse files of the base that have changed since they were opened."""
        self.base_files.require_unchanged()

    @property
    def tokenizer_files(self) -> dict[str, Path | bytes]:
        """The companions that are an adapter's, too: all but the model's config."""
        return {name: file for name, file in self.companions.items() if name != "config.json"}

    @property
    def measured(self) -> Forward:
        """The forward by which the model is evaluated."""
        return PredictionLoss(self)

    @property
    def is_loss_replaced(self) -> bool:
        """Whether the skeleton has another loss function than transformers', of which it is not
        known that losses of chunks add up.
        """
        return bool(self.skeleton.loss_function != self.loss_function)

    def _require_no_router_loss(self, where: str, found: str) -> None:
        """Refuse what computes the loss from logits alone."""
        if self.routers.are_asked_for:
            expected = f"the model's own loss as a whole, since {ROUTERS} is true in config.json"
            raise OptionError(where, found, expected, "leave it out, or set it to false there")

    def places_of(self, name: str) -> list[tuple[str, nn.Module, str]]:
        """The modules that have a parameter, several if it is tied: their paths, the modules, and
        its name in them.
        """
        places = (alias.rpartition(".") for some in self._aliases[name].values() for alias in some)
        return [(path, self.modules[path], leaf) for path, _, leaf in dict.fromkeys(places)]

    def bind(self, index: int, parameters: Mapping[str, torch.Tensor]) -> None:
        """Set these views as a segment's parameters, under all their names in it."""
        for name, view in parameters.items():
            # Kernels are chosen by requires_grad, which is set as in MeZO's loop although no
            # gradient is computed: not for frozen parameters, nor for those that autocast would
            # have cast.
            parameter = nn.Parameter(view, view.dtype == self._stored.get(name))
            for alias in self._aliases[name].get(index, ()):
                path, _, leaf = alias.rpartition(".")
                self.modules[path]._parameters[leaf] = parameter
        device = next(iter(parameters.values())).device
        if device != self._device:
            self._device = device
            for module in self.modules.values():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)

    def route(self, tokens: int) -> RoutedExperts | None:
        """Take the experts that are chosen by a router out of the segments, and read them when they
        are chosen.

        An engine of such a model takes no steps and exports nothing.

        Args:
            tokens: Tokens of most forwards, of all rows together.

        Returns:
            The experts; None if the model has none, if an adapter changes them, or if so many
            tokens are expected to be routed to more than half of them, which is faster if all are
            read ahead.
        """
        routed = self._routed_parameters()
        # as ``wraps_parameter``
        is_wrapped = any(hasattr(module, "parameter_name") for module in self.modules.values())
        per_token = getattr(self.config.get_text_config(), "num_experts_per_tok", None)
        if not routed or is_wrapped or per_token is None:
            return None
        if max(expected_share(spec.shape[0], per_token, tokens) for spec, _, _ in routed) > MOST:
            return None
        self._leave_out({spec.name for spec, _, _ in routed})
        self.experts = RoutedExperts(self.weights, routed)
        return self.experts

    def _routed_parameters(self) -> list[tuple[ParameterSpec, nn.Module, str]]:
        """The stacks of experts that are chosen by a router: the parameter, its module and its name
        there.
        """
        layers = [layout for layout in self.layouts if not layout.resident]
        stacks = {*routed_stacks([*self.modules.values()])}
        routed = []
        for spec in (spec for layout in layers for spec in layout.parameters):
            (_, module, leaf), *_ = self.places_of(spec.name)
            if (module, leaf) in stacks:
                routed.append((spec, module, leaf))
        return routed

    def _leave_out(self, names: Collection[str]) -> None:
        """Take parameters out of all segments."""
        self.layouts = tuple(
            replace(
                layout,
                parameters=tuple(spec for spec in layout.parameters if spec.name not in names),
            )
            for layout in self.layouts
        )

    @property
    def forwards_only(self) -> bool:
        """Whether some parameters are in no segment."""
        return self.experts is not None

    def leaves(self, index: int) -> Mapping[str, torch.Tensor]:
        """Return the parameters of a segment's modules, tied ones once."""
        leaves: dict[str, torch.Tensor] = {}
        for name, aliases in self._aliases.items():
            if index in aliases:
                path, _, leaf = aliases[index][0].rpartition(".")
                parameter = self.modules[path]._parameters[leaf]
                assert parameter is not None, "the segment is not bound"
                leaves[name] = parameter
        return leaves

    def prepared(self, batch: Batch) -> Batch:
        """Check a batch, and record the tensor values that HF's forward branches on."""
        self.kind.check(batch, self.config, self.longest_row)
        return self._prepared(batch)

    def prepared_inputs(self, batch: Batch) -> Batch:
        """As ``prepared``, for forwards that need no labels.

        Raises:
            BatchError: if the model cannot take the batch.
        """
        check_inputs(batch, self.config, self.longest_row)
        return self._prepared(batch)

    def _prepared(self, batch: Batch) -> Batch:
        takes_them = takes_images(self.skeleton) and not self._architecture.left_out
        if "pixel_values" in batch and not takes_them:
            raise BatchError(
                "batch['pixel_values']",
                f"images for {type(self.skeleton).__name__}, which is trained on text alone",
                "text",
                "leave the images out; docs/models.md lists the models that read them",
            )
        prepared = PreparedBatch(batch)
        if prepared.is_packed:
            require_separating_masks(prepared, lambda: self.embed(prepared).calls.by_layer())
        if batch["input_ids"].device.type != "cpu":  # on the CPU the first forward may record them
            self.record_branches(prepared)
        return prepared

    @torch.inference_mode()
    def record_branches(self, batch: Batch) -> None:
        """Record all tensor values that HF's forward branches on, for a batch and for the stand-in
        tokens of ``logits``.
        """
        self.embed(batch)
        with self._unwrapped(), self._stand_in_branches:
            self.prologue({"input_ids": torch.zeros_like(batch["input_ids"][:1, :1])})

    @property
    def _present_layers(self) -> nn.ModuleList:
        """The skeleton's list of layers or, in their place, stubs."""
        layers = self.skeleton.get_submodule(self._architecture.blocks)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def _module_use(self) -> ModuleUse:
        """How the forward uses the modules, found with the layers in their places."""
        stubs = list(self._present_layers)
        try:
            self._place(self._layers)
            return module_use(self.skeleton, self._architecture)
        finally:
            self._place(stubs)

    def _place(self, layers: Sequence[nn.Module]) -> None:
        for index, layer in enumerate(layers):
            self._present_layers[index] = layer

    def require_stackable(self) -> None:
        """Patch the modules for low-rank perturbations."""
        self._require_no_router_loss("perturbation", "directions of low rank")
        if self._low_rank is None:
            self._require_called_for_weights()
            self._low_rank = LowRankModules(self.modules)

    def _require_called_for_weights(self) -> None:
        """Refuse trained weights that the forward takes without calling their module, in whose
        output perturbations are added.
        """
        trained = {
            alias: name
            for name in self._stored
            for aliases in self._aliases[name].values()
            for alias in aliases
        }
        for name, function in self._module_use().read_outside.items():
            if name in trained:
                raise UnsupportedModelError(
                    name,
                    f"a weight that is used without its layer's forward (by {function})",
                    "layers that are called, for low-rank perturbations",
                    "leave --rank out, or use DensePerturbation(), which takes any layer",
                )

    def stacked(self, batches: Sequence[Batch]) -> Batch | None:
        """Join batches of equal shapes, where the loss follows from logits."""
        joined = stack_rows(batches) if self.takes_chunks else None
        return None if joined is None else self._prepared(joined)

    def perturb(
        self, index: int, perturbations: Mapping[str, PerturbedParameter], streams: int
    ) -> None:
        """Set the perturbations of a segment's modules."""
        assert self._low_rank is not None, "require_stackable was not called"
        aliases = {
            alias: value
            for name, value in perturbations.items()
            for alias in self._aliases[name].get(index, ())
        }
        self._low_rank.perturb(aliases, streams)

    def heads(self, batches: Sequence[Batch], activations: Activations) -> list[torch.Tensor]:
        """Run HF's norm and head on all streams, and its loss on each."""
        loss = partial(
            self.skeleton.loss_function, vocab_size=self.config.get_text_config().vocab_size
        )
        if self.loss_chunk is not None:
            hidden = self.by_token(activations.hidden)
            return chunked_losses(hidden, batches, self.loss_chunk, self.logits, loss)
        joined = stack_rows(batches)
        assert joined is not None, "stacked batches can be joined"
        inputs = {key: value for key, value in joined.items() if key not in self.kind.targets}
        return whole_losses(self._epilogue(activations, "logits", **inputs), batches, loss)

    def embed(self, batch: Batch) -> Activations:
        """Run HF's forward up to the first layer."""
        inputs = {key: value for key, value in batch.items() if key not in self.kind.targets}
        try:
            with branches_of(batch):
                activations = self.prologue(inputs)
        except (ZO2Error, torch.OutOfMemoryError):
            raise
        except (ValueError, IndexError, RuntimeError) as error:
            if (
                not any(name in batch for name in _IMAGES)
                or "alloc" in str(error)
                or "CUDA" in str(error)
            ):
                raise
            raise BatchError(
                "batch['pixel_values']",
                "images that cannot be embedded with these rows "
                f"({' '.join(str(error).split())[:200]})",
                "the output of the model's processor for these rows, images in the order of rows",
                "pass such batches; if a row has not exactly one image, use no micro-batches and "
                "do not split rows",
            ) from error
        are_wanted = self.routers.are_asked_for
        return activations._replace(routed=self.routers.none_yet(are_wanted=are_wanted))

    @cached_property
    def cache_argument(self) -> str | None:
        """The argument of HF's forward for a cache of keys and values; None: it takes none."""
        return cache_argument(self.skeleton)

    def prologue(self, inputs: Batch, cache: Cache | None = None) -> Activations:
        """Run HF's forward up to the first layer.

        Args:
            inputs: Arguments of HF's forward.
            cache: Keys and values of earlier tokens, to which the layers will add those of these.
        """
        recorder = self._recorder
        recorder.reset()
        set_batch_shape(self._low_rank, inputs["input_ids"])
        arguments: dict[str, Any] = {**inputs, **self.routers.arguments(None)}
        arguments["use_cache"] = cache is not None
        if cache is not None:
            assert self.cache_argument is not None, "a model without a cache was refused"
            arguments[self.cache_argument] = cache
        with contextlib.suppress(CutError), self._casting():
            self._called(**arguments)
        assert recorder.hidden is not None, "HF's forward did not reach the last layer"
        if cache is None and not self.virtual_tokens and recorder.has_cache():
            raise UnsupportedModelError(
                f"model type {self.config.model_type}",
                f"layers that are called with a cache, although use_cache is False, in "
                f"transformers {__version__}",
                "none, since a layer runs several times on the same tokens",
                "report it, and install another release of transformers",
            )
        if self.takes_single_tokens:
            require_axes(recorder.hidden, inputs["input_ids"], self._axes, self.config.model_type)
        return Activations(recorder.hidden, LayerCalls.of(recorder.calls))

    def block(self, index: int, activations: Activations) -> Activations:
        """Run one layer with its recorded arguments."""
        args, kwargs = self._arguments(index, activations)
        set_batch_shape(self._low_rank, self.by_token(activations.hidden))
        with self._casting(), self.routers.recorded(activations.routed) as routed:
            out = self._layers[index](activations.hidden, *args, **kwargs)
        hidden = out[0] if isinstance(out, (tuple, list)) else out
        return activations._replace(hidden=hidden, routed=None if routed is None else tuple(routed))

    def _arguments(self, index: int, activations: Activations) -> LayerCall:
        return activations.calls.layer(index)

    def head(self, batch: Batch, activations: Activations) -> torch.Tensor:
        """Run HF's norm, head and loss on the final hidden state."""
        if self.loss_chunk is not None and activations.routed is None and not self.is_loss_replaced:
            return self.heads([batch], activations)[0]
        text = {
            name: value
            for name, value in batch.items()
            if "pixel_values" not in batch or name not in _OF_IMAGES
        }
        with branches_of(batch) if len(text) == len(batch) else BranchCache():
            # without the vision tower, other reads
            return self._epilogue(activations, "loss", **text)

    def by_token(self, hidden: torch.Tensor) -> torch.Tensor:
        """View hidden states as (rows, tokens, ...), with all other axes behind."""
        return hidden.movedim(self._axes, (0, 1))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run HF's norm and head on final hidden states (n, ...) of single tokens, from
        ``by_token``: (n, vocabulary).
        """
        self.make_room(loss_bytes(self.config, len(hidden)))
        # Each token is a row, since there may be more tokens than the model has positions.
        ids = torch.zeros(len(hidden), 1, dtype=torch.int64, device=hidden.device)
        with self._unwrapped(), self._stand_in_branches:
            final = Activations(hidden[:, None].movedim((0, 1), self._axes), LayerCalls.of([]))
            return self._epilogue(final, "logits", input_ids=ids)[:, 0]

    @contextlib.contextmanager
    def _unwrapped(self) -> Iterator[None]:
        """A context in which HF's forward is called without what an adapter adds to its inputs."""
        called, self._called = self._called, self.skeleton
        try:
            yield
        finally:
            self._called = called

    def epilogue(self, final: Activations, **inputs: Any) -> Any:
        """Run HF's forward with these arguments from the last layer's output on, and return its
        result.
        """
        self._recorder.final = final.hidden
        self._recorder.at_end = partial(self.routers.replay, final.routed)
        set_batch_shape(self._low_rank, self.by_token(final.hidden))
        try:
            with self._casting():
                return self._called(**{**self.routers.arguments(final.routed), **inputs})
        finally:
            # which hold the logits' graphs
            self._recorder.final, self._recorder.at_end = None, None

    def with_wanted_routers(self, final: Activations, arguments: dict[str, Any]) -> Activations:
        """The last layer's output, with the logits of routers if a call of the model with these
        arguments asks for their loss; the argument that does is removed.
        """
        are_wanted = self.routers.wanted_by(arguments)
        argument = arguments.pop(ROUTERS, None)
        if are_wanted and final.routed is None:
            raise UnsupportedModelError(
                f"the model's argument {ROUTERS}",
                f"{argument} in a second call of the model within one loss",
                "the value of the first call",
                "pass it in each call",
            )
        return final if are_wanted else final._replace(routed=None)

    def _epilogue(
        self, final: Activations, output_name: str, **inputs: torch.Tensor
    ) -> torch.Tensor:
        return cast(
            "torch.Tensor", getattr(self.epilogue(final, **inputs, use_cache=False), output_name)
        )

    def _casting(self) -> contextlib.AbstractContextManager[object]:
        """The autocast context, if any. Its cache is off, since weights are cast beforehand."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self.autocast, cache_enabled=False)

    @property
    def forward_peaks(self) -> PassBytes | None:
        """The measured peaks of forwards; None: not measured."""
        return None if self.pass_peaks is None else self.pass_peaks.forward

    def agree(self, gather: Callable[[Any], list[Any]]) -> None:
        """Take the largest of several processes' peaks of forwards. See ``MeasuredModel``."""
        self.pass_peaks = agreed_peaks(self.pass_peaks, gather)

    @property
    def takes_chunks(self) -> bool:
        """Whether the model's loss is a sum over tokens, whose logits may be computed in chunks."""
        return not (self.routers.are_asked_for or self.is_loss_replaced)

    @property
    def chunk(self) -> int | None:
        """Labelled tokens whose logits are in memory at a time for the model's loss; None: all."""
        return self.loss_chunk if self.takes_chunks else None

    def forward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes, those of the vision tower included."""
        return self.pass_bytes(batch, self.forward_peaks)

    def backward_bytes(self, batch: Batch) -> int:
        """Estimate the bytes of a forward and backward."""
        if self.pass_peaks is None or self.pass_peaks.both is None:
            return math.ceil(GRAPH_FORWARDS * self.forward_bytes(batch))
        return self.pass_bytes(batch, self.pass_peaks.both)

    def pass_bytes(self, batch: Batch, measured: PassBytes | None) -> int:
        """Estimate the peak bytes of one segment's pass."""
        images = batch.get("pixel_values")
        tower = 0 if images is None else vision_bytes(self.config, images)
        rows, tokens = batch["input_ids"].shape
        nbytes = forward_bytes(self.config, rows, tokens, loss_chunk=self.chunk, measured=measured)
        return max(nbytes, tower)

    def held_bytes(self, batch: Batch) -> int:
        """Estimate the bytes by formula; images need masks and positions."""
        (rows, tokens) = batch["input_ids"].shape
        mask = batch.get("attention_mask")
        positions = batch.get("position_ids")
        rope = getattr(self.config.get_text_config(), "rope_parameters", None)
        position_rows = None if positions is None else len(positions)
        if "mrope_section" in (rope or {}):
            position_rows = rows  # positions of each row
        return expected_held_bytes(
            self.config,
            rows,
            tokens,
            # newest tokens attend to earlier ones
            keys=self.virtual_tokens + (tokens if mask is None else mask.shape[1]),
            is_padded="pixel_values" in batch or self.virtual_tokens > 0 or is_padded(batch),
            position_rows=position_rows,
        )


class PredictionLoss:
    """A model's forward to the loss of its predictions alone, by which it is evaluated.

    It is without the loss of routers, which a model adds for training: that does not depend on what
    is predicted, and of several batches together it is not the mean of theirs.
    """

    def __init__(self, model: HFBlockModel) -> None:
        self._model = model
        self.prepared = model.prepared
        self.block = model.block
        self.head = model.head
        self.forward_bytes = model.forward_bytes
        self.held_bytes = model.held_bytes

    def embed(self, batch: Batch) -> Activations:
        """Run the embedding. No logits of routers are kept."""
        return self._model.embed(batch)._replace(routed=None)


class HFHeadModel(HFBlockModel):
    """A Hugging Face model with another head than a causal language model's, and its own
    ``Objective``.
    """

    takes_single_tokens: ClassVar[bool] = False  # these heads take all hidden states

    def stacked(self, batches: Sequence[Batch]) -> Batch | None:
        """Return None: losses of these heads are computed one stream at a time."""
        return None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.loss_chunk is None, "chunks are for next-token losses"
        config = self.config
        labels = {"labels": config.num_labels, "problem": config.problem_type}
        # As the checkpoint has them: transformers' forward writes the kind of problem into the
        # config, trainers the padding.
        self._decisive = {
            "head": self.kind.name,
            **labels,
            "pad": getattr(config, "pad_token_id", None),
        }

    @property
    def description(self) -> Mapping[str, Any]:
        """The settings that determine the forward, including the head."""
        return {**super().description, **self._decisive}

    def split(self, batch: Batch, rows: int | None) -> list[Batch]:
        """Split a batch into micro-batches of at most ``rows`` rows, without those that have no
        counted label.
        """
        if not {"input_ids", *self.kind.targets} <= batch.keys():
            return [batch]  # ``prepared`` refuses it
        total = len(batch["input_ids"])
        rows = total if rows is None else rows
        micro_batches = (
            rows_of(batch, start, start + rows, "input_ids") for start in range(0, total, rows)
        )
        return [micro_batch for micro_batch in micro_batches if self.kind.count(micro_batch)]

    def loss(self, outputs: Sequence[torch.Tensor], micro_batches: Sequence[Batch]) -> torch.Tensor:
        """Return the mean over all labels, computed in float64 unless there is one micro-batch."""
        return combined_loss(
            outputs, [self.kind.count(micro_batch) for micro_batch in micro_batches]
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Refuse to predict next tokens."""
        where = f"model type {self.config.model_type}"
        expected = "a causal language model, to generate or to score"
        raise UnsupportedModelError(
            where, f"a head for {self.kind.name}", expected, "open the checkpoint without head"
        )

    @property
    def takes_chunks(self) -> bool:
        """The loss of these heads is computed as a whole."""
        return False

    @property
    def chunk(self) -> int | None:
        """No token has logits over a vocabulary, but for masked language models, where all have."""
        return None if self.kind.name == "masked-lm" else 0


def _finite(value: Any) -> Any:
    """Replace infinity and NaN, which JSON lacks, by strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


class _LeaveError(Exception):
    """Interrupts the function where it calls the model."""


class CalledModel:
    """Stands in for the model in the function: it has the model's attributes, and calls are passed
    on.
    """

    def __init__(self, model: HFBlockModel, on_call: Callable[..., Any]) -> None:
        self._skeleton = model.skeleton
        self._on_call = on_call

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the model."""
        by_name = (
            inspect.signature(type(self._skeleton).forward)
            .bind_partial(self._skeleton, *arguments)
            .arguments
        )
        return self._on_call(**dict(list(by_name.items())[1:]), **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._skeleton, name)


class CalledBatch(dict[str, Any]):
    """The function's batch, the inputs that the function passes to the model, and whether it asks
    for the loss of routers.
    """

    def __init__(self, batch: Batch, inputs: Batch, *, wants_routers: bool) -> None:
        super().__init__(batch)
        self.inputs = inputs
        self.wants_routers = wants_routers


class CalledForward:
    """A forward that ends in a function of the model. See ``Forward``.

    Args:
        model: The model.
        call: A function of the model and a batch (a dictionary). It may call the model several
            times, but always with the same tokens; its result is the head's result.
        keeps_logits: Whether the function's result holds all logits, which then stay in memory
            until the sweep ends.
        evaluates: Whether losses of the model are without that of routers, where the function does
            not ask for it: as in evaluations.
    """

    def __init__(
        self,
        model: HFBlockModel,
        call: Call,
        *,
        keeps_logits: bool = False,
        evaluates: bool = False,
    ) -> None:
        self._model = model
        self._keeps_logits = keeps_logits
        self._evaluates = evaluates
        self._call = call
        self.block = model.block

    def prepared(self, batch: Batch) -> Batch:
        """Record and check what the function passes to the model.

        Raises:
            BatchError: if the model cannot take it.
            UnsupportedModelError: if the function does not call the model, or requests outputs that
                are not kept.
        """
        passed: dict[str, Any] = {}

        def leave(**inputs: Any) -> None:
            passed.update(self._completed(inputs))
            raise _LeaveError

        try:
            self._call(CalledModel(self._model, leave), dict(batch))
        except _LeaveError:
            routers = self._model.routers
            if wants_routers := routers.wanted_by(passed):
                argument = f"the model's argument {ROUTERS}"
                routers.require_recorded(argument, "true", "leave it out")
            _require_none_by_config(self._model.config, passed)
            inputs = {key: value for key, value in passed.items() if _affects_layers(key, value)}
            prepared = self._model.prepared_inputs(inputs)
            return CalledBatch(batch, prepared, wants_routers=wants_routers)
        where, found = (
            "what is called with the model",
            "a function that returned without calling it",
        )
        raise UnsupportedModelError(
            where, found, "a function of what the model returns", "call the model within it"
        )

    def embed(self, batch: Batch) -> Activations:
        """Run the embedding on the inputs that the function passes to the model."""
        called = _called(batch)
        routed = self._model.routers.none_yet(are_wanted=called.wants_routers)
        return self._model.embed(called.inputs)._replace(routed=routed)

    def head(self, batch: Batch, activations: Activations) -> Any:
        """Run the function; its call of the model continues from the last layer's output."""
        inputs = _called(batch).inputs

        def resume(**arguments: Any) -> Any:
            _require_same(inputs, arguments)
            arguments = self._completed(arguments)
            final = self._model.with_wanted_routers(activations, arguments)
            with branches_of(inputs):
                output = self._model.epilogue(final, **arguments)
            return _in_float32(output) if self._model.autocast is not None else output

        return self._call(CalledModel(self._model, resume), dict(batch))

    def _completed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of the model, with what they say about routers."""
        is_left_out = self._evaluates and arguments.get(ROUTERS) is None
        return {**arguments, ROUTERS: False} if is_left_out else arguments

    def forward_bytes(self, batch: Batch) -> int:
        """Return the expected bytes, with all logits."""
        return self._with_all_logits(batch, self._model.forward_bytes(_called(batch).inputs), 1)

    def backward_bytes(self, batch: Batch) -> int:
        """Return the expected bytes of a forward and backward, with all logits. See the
        contract.
        """
        nbytes = self._model.backward_bytes(_called(batch).inputs)
        return self._with_all_logits(batch, nbytes, GRAPH_FORWARDS)

    def _with_all_logits(self, batch: Batch, nbytes: int, times: float) -> int:
        """The bytes of a pass of the model, with all logits in so many multiples of a forward's."""
        model = self._model
        called = _called(batch)
        rows, tokens = called.inputs["input_ids"].shape
        if model.loss_chunk is not None:
            nbytes = max(nbytes, math.ceil(times * forward_bytes(model.config, rows, tokens)))
        if called.wants_routers and not model.routers.are_asked_for:  # by the caller alone
            nbytes += router_bytes(model.config, rows * tokens)
        return nbytes

    def held_bytes(self, batch: Batch) -> int:
        """Return the expected bytes, with the logits that are kept."""
        inputs = _called(batch).inputs
        logit_bytes = (
            inputs["input_ids"].numel() * self._model.config.get_text_config().vocab_size * 4
            if self._keeps_logits
            else 0
        )
        return self._model.held_bytes(inputs) + logit_bytes


def _called(batch: Batch) -> CalledBatch:
    assert isinstance(batch, CalledBatch), "a batch is prepared before it runs"
    return batch


def _affects_layers(key: str, value: Any) -> bool:
    """Whether an argument of the model's forward affects what its layers compute."""
    if key in _HEAD_ARGUMENTS or value is None or value is False:
        return False
    if isinstance(value, torch.Tensor):
        return True
    where = f"the model's argument {key}"
    remedy = "leave it out: attentions, hidden states and router logits are not kept"
    raise UnsupportedModelError(
        where, repr(value)[:80], "tensors, which go through the layers one after the other", remedy
    )


def _require_sizes(skeleton: PreTrainedModel) -> None:
    """Refuse an own architecture whose config does not say what batches and plans ask for."""
    config = skeleton.config.get_text_config()
    missing = [name for name in ("vocab_size", "hidden_size") if not hasattr(config, name)]
    if missing:
        raise UnsupportedModelError(
            f"the config {type(config).__name__}",
            f"no {' and no '.join(missing)}",
            "the number of tokens, vocab_size, and the width of hidden states, hidden_size",
            "name them so, or map these names to yours by attribute_map of the config's class",
        )


def _require_none_by_config(config: PretrainedConfig, arguments: Mapping[str, Any]) -> None:
    """Refuse a config that asks for outputs of layers where the call of the model does not say."""
    for name in ("output_attentions", "output_hidden_states"):
        if arguments.get(name) is None and getattr(config, name, False):
            raise UnsupportedModelError(
                f"{name} of the config",
                "true",
                "false: attentions and hidden states are not kept",
                f"set model.config.{name} = False",
            )


def _require_same(inputs: Batch, arguments: Mapping[str, Any]) -> None:
    """Refuse a call of the model with other inputs than those that the layers have run on."""
    for key in inputs.keys() | {
        key for key, value in arguments.items() if _affects_layers(key, value)
    }:
        first = inputs.get(key)
        second = arguments.get(key)
        if first is not second and (
            first is None or second is None or not torch.equal(first, second)
        ):
            raise BatchError(
                f"batch[{key!r}]",
                "different values in a second call of the model",
                "the same values in each call within one loss",
                "join both into one batch, or compute one of the calls beforehand",
            )


def _in_float32(output: Any) -> Any:
    """Convert 16-bit outputs of a forward under autocast to float32, as accelerate does."""
    halves = (torch.bfloat16, torch.float16)
    return tree_map_only(
        torch.Tensor, lambda value: value.float() if value.dtype in halves else value, output
    )

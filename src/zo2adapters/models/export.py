"""Exports other than checkpoints: a low-rank run as an adapter, merged models, and GGUF files for
llama.cpp and ollama.

The updates of a matrix sum up to ``A V^T`` with a few columns a period, which is a LoRA adapter
with A as its ``lora_B`` and V^T as its ``lora_A``. Parameters without such a form (norms, biases,
tables of positions) are written whole.

An adapter is merged into the weights as peft's ``merge_and_unload`` does it, one matrix in memory
at a time. Each layer is merged by peft's own code: a copy of peft's module gets the values of one
layer, and nothing of the others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from zo2adapters.models import gguf_model, peft_adapter
from zo2adapters.models.adapter_files import ADAPTER_NAME, FILE_PREFIX, SAVED
from zo2adapters.models.checkpoint import end_token_ids
from zo2adapters.models.gguf_model import LlamaCppLayout, Place
from zo2adapters.models.hf import NO_FILES, Files, HFBlockModel, HFHeadModel
from zo2adapters.models.library_names import Conv1D
from zo2adapters.models.model_files import is_gguf
from zo2adapters.models.ollama import OllamaModel
from zo2adapters.models.peft_model import PeftBlockModel, plain_config, write_adapter
from zo2adapters.models.token_rows import is_one_change, is_token_layer
from zo2adapters.optional_package import optional_package
from zo2core import Engine, ParameterSpec
from zo2core.checkpoint.export import (
    is_finite,
    new_directory,
    not_finite,
    require_unused,
    write_checkpoint,
    write_companions,
)
from zo2core.checkpoint.gguf import GGUFFile, read_gguf
from zo2core.encodings.forms import GGUF_BLOCKS
from zo2core.errors import OptionError, UnsupportedModelError, without_effect

Progress: TypeAlias = Callable[[int], object]  # is told the bytes of each parameter
GGUFType = Literal["auto", "F32", "F16", "BF16", "Q8_0"]
MODEL = "model.gguf"
ADAPTER = "adapter.gguf"
MODELFILE = "Modelfile"
_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F32"}
# written from the Hugging Face layout: llama.cpp's names by model type
_ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3")},
    "qwen3_moe": "qwen3moe",
    "mixtral": "llama",
}
# of which adapters alone are written: experts of the model would have to be in MXFP4
_FOR_ADAPTERS = {"gpt_oss": "gpt-oss"}
# of models that llama.cpp computes otherwise: values of the config that it does not read
_UNREAD: Mapping[str, Mapping[str, object]] = {
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "mixtral": {"sliding_window": None},
}
_QUANTIZATION_VERSION = 2  # of llama.cpp's blocks
_FLOAT32_MATRICES = 4
_LAYER = ("lora_A.weight", "lora_B.weight")
_TABLE = ("lora_embedding_A", "lora_embedding_B")
_BASE = ".base_layer."  # within the name of a parameter that peft has wrapped


def export_adapter(
    replayer: Engine,
    model: HFBlockModel,
    directory: Path | str,
    *,
    base: str,
    files: Files = NO_FILES,
) -> None:
    """Write a run's updates as an adapter, which ``PeftModel.from_pretrained`` loads on the base.

    The loss is that of the exported model, except for the order of sums and the dtype in which peft
    adds them.
    """
    peft = optional_package("peft", install="zo2core[peft]")
    require_unused(Path(directory))
    if isinstance(model, PeftBlockModel):
        remedy = "leave it out: an adapter is exported anyway"
        raise OptionError(
            "as_adapter", "a run that trains an adapter", "a run that trains all weights", remedy
        )
    tensors: dict[str, torch.Tensor] = {}
    targets: list[str] = []
    saved: dict[str, None] = {}  # modules that are written whole
    rank = 0
    bias = "none"
    is_transposed = False
    with closing(replayer.learned()) as learned:
        for name, value in learned:
            for path, module, leaf in model.places_of(name):
                forward = type(module).forward
                prefix = f"{FILE_PREFIX}{path}"
                if forward not in (nn.Linear.forward, nn.Embedding.forward, Conv1D.forward):
                    saved[path] = None
                    tensors[f"{prefix}.{leaf}"] = value.present().clone()
                elif value.factors is None:
                    bias = "all"
                    tensors[f"{prefix}.base_layer.{leaf}"] = value.present().clone()
                else:
                    targets.append(path)
                    is_transposed |= forward is Conv1D.forward
                    rank = value.factors.left.shape[1]
                    factors = (
                        value.factors if forward is not nn.Linear.forward else value.factors[::-1]
                    )
                    names = _TABLE if forward is nn.Embedding.forward else _LAYER
                    tensors |= {
                        f"{prefix}.{name}": part
                        for name, part in zip(names, _lora(path, *factors), strict=True)
                    }
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=targets,
        modules_to_save=list(saved) or None,
        bias=bias,
        fan_in_fan_out=is_transposed,
        base_model_name_or_path=base,
        # peft's task types of other heads add a head
        task_type=None if isinstance(model, HFHeadModel) else "CAUSAL_LM",
        inference_mode=True,
    )
    write_adapter(
        Path(directory), plain_config(config), tensors, {**model.tokenizer_files, **files}
    )


def _lora(
    path: str, inputs: torch.Tensor, outputs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The matrices A and B of a LoRA adapter, from a matrix's factors of (inputs, columns) and
    (outputs, columns).
    """
    columns = inputs.shape[1]
    smaller = min(len(inputs), len(outputs))
    if columns > smaller:
        expected = f"at most {smaller}, for {path} of {len(inputs)} x {len(outputs)}"
        remedy = "leave it out: a merged model is smaller"
        raise OptionError("as_adapter", f"{columns} columns of all periods", expected, remedy)
    return inputs.float().cpu().t().contiguous(), outputs.float().cpu().contiguous()


def export_merged(
    runner: Engine,
    model: PeftBlockModel,
    directory: Path,
    *,
    files: Files = NO_FILES,
    progress: Progress | None = None,
) -> None:
    """Write the base with the adapter merged into its weights, as ``from_pretrained`` loads it."""
    require_unused(directory)
    specs, parameters = _whole_model(runner, model, progress)
    with closing(parameters) as tensors:
        companions = {**model.companions, **files}
        write_checkpoint(
            directory,
            specs,
            tensors,
            companions,
            dtype=model.export_dtype,
            form=model.saved_form,
            origin=partial(_origin_in_base, model),
        )


def _origin_in_base(model: PeftBlockModel, name: str) -> str:
    """The file of a parameter of the base, by its name there."""
    specs = (spec for layout in model.layouts for spec in layout.parameters)
    saved = {*model.adapter.parameters, *model.adapter.beside}
    of_base = (spec.name for spec in specs if spec.name not in saved)
    return next(
        model.weights.origin(name_in_base)
        for name_in_base in of_base
        if peft_adapter.base_form(name_in_base) == name
    )


def _whole_model(
    runner: Engine, model: HFBlockModel, progress: Progress | None = None
) -> tuple[list[ParameterSpec], Generator[tuple[str, torch.Tensor], None, None]]:
    """The parameters of a model without an adapter, which is merged into them, by their names in
    the base, decoded.
    """
    specs = [spec.decoded for layout in model.layouts for spec in layout.parameters]
    if not isinstance(model, PeftBlockModel):
        return specs, runner.parameters_now()
    require_mergeable(model)
    of_base = [
        replace(spec, name=peft_adapter.base_form(spec.name))
        for spec in specs
        if spec.name not in model.adapter.parameters
    ]
    return of_base, merged_parameters(runner, model, progress)


def adapter_values(runner: Engine, model: PeftBlockModel) -> dict[str, torch.Tensor]:
    """The adapter's parameters, which are all in memory."""
    names = model.adapter.parameters
    values = dict[str, torch.Tensor]()
    with closing(runner.parameters_now()) as parameters:
        for name, tensor in parameters:
            if name in names:
                values[name] = tensor.clone()
            if len(values) == len(names):
                break
    return values


def merging_bytes(model: HFBlockModel) -> int:
    """Bytes that merging takes beside the weights: peft's code has several float32 matrices of a
    layer at a time.
    """
    return (
        _FLOAT32_MATRICES
        * 4
        * max(spec.numel for layout in model.layouts for spec in layout.parameters)
    )


def require_mergeable(model: PeftBlockModel) -> None:
    """Refuse an adapter that is no change of weights, or one that changes a weight differently in
    each of the layers that share it.
    """
    remedy = "load it beside the base with peft"
    if model.adapter.wrapper is not None:
        found = f"{model.adapter.kind.title}, which no weight can contain"
        expected = "an adapter of linear layers, as LoRA"
        raise UnsupportedModelError("adapter", found, expected, remedy)
    specs = (spec for layout in model.layouts for spec in layout.parameters)
    for spec in specs:
        if spec.name in model.adapter.parameters:
            continue
        paths = [f"{path}.{leaf}" for path, _, leaf in model.places_of(spec.name)]
        if _is_changed_alike(model, paths):
            continue
        shared = [peft_adapter.base_form(path) for path in paths]
        found = f"a change of its own of {' and of '.join(shared)}, which are one weight"
        expected = "an adapter of weights that no two layers share"
        remedy = f"{remedy}, or name other layers"
        raise UnsupportedModelError("adapter", found, expected, remedy)


def _is_changed_alike(model: PeftBlockModel, paths: Sequence[str]) -> bool:
    """Whether an adapter has at most one change for a weight, which is at these places."""
    adapted = [path for path in paths if peft_adapter.base_form(path) != path]
    if not adapted or len(paths) == 1:
        return True
    around = [model.modules[path.rpartition(_BASE)[0]] for path in paths if _BASE in path]
    return len(around) == len(paths) and is_one_change(around)


def merged_parameters(
    runner: Engine, model: PeftBlockModel, progress: Progress | None = None
) -> Generator[tuple[str, torch.Tensor], None, None]:
    """Yield the parameters of the base by their names in it, with the adapter merged into them."""
    values = adapter_values(runner, model)
    copies = {
        peft_adapter.base_form(name): value for name, value in values.items() if SAVED in name
    }
    with closing(runner.parameters_now()) as parameters:
        for name, tensor in parameters:
            if name in values:
                continue
            base = peft_adapter.base_form(name)
            if base in copies:
                yield base, copies[base].to(tensor.dtype)
            elif _BASE in name:
                merged = merged_parameter(model, name, tensor, values)
                if is_finite(tensor) and not is_finite(merged):
                    raise not_finite(f"{model.adapter.where}, merged into {base}", merged, merged)
                yield base, merged
            else:
                yield base, tensor
            if progress is not None:
                progress(tensor.nbytes)


def merged_parameter(
    model: PeftBlockModel, name: str, tensor: torch.Tensor, values: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Merge the adapter into one parameter of a layer, by peft's own code."""
    path, _, leaf = name.rpartition(_BASE)
    while getattr(model.modules[path], "parameter_name", leaf) != leaf:
        # peft nests modules that adapt one parameter each
        if not path.endswith(_BASE[:-1]):
            return tensor
        path = path.removesuffix(_BASE[:-1])
    original = model.modules[path]
    # which are replaced below, not copied
    shared = {id(parameter): parameter for parameter in original.parameters()}
    layer: Any = deepcopy(original, shared)
    for parameter_name, _ in original.named_parameters():
        if f"{path}.{parameter_name}" in values:
            peft_adapter.put_value(layer, parameter_name, values[f"{path}.{parameter_name}"])
    base = layer.get_base_layer()
    for other, parameter in list(base.named_parameters()):
        peft_adapter.put_value(
            base,
            other,
            tensor.clone() if other == leaf else torch.zeros(parameter.shape, dtype=tensor.dtype),
        )
    with torch.no_grad():
        layer.merge(safe_merge=False, adapter_names=[ADAPTER_NAME])
    merged: torch.Tensor = getattr(base, leaf).detach()
    return merged.contiguous()


def export_gguf(
    engine: Engine,
    model: HFBlockModel,
    directory: Path,
    *,
    base: Path,
    tokenizer: Callable[[Path], PreTrainedTokenizerBase],
    kind: GGUFType = "auto",
    as_adapter: bool = False,
    template: str | None = None,
    of_ollama: OllamaModel | None = None,
    files: Files = NO_FILES,
) -> None:
    """Write a model at the present version as a GGUF file, and a Modelfile.

    An adapter is merged into the model or, ``as_adapter``, written as llama.cpp's GGUF LoRA beside
    the base's path. ``template`` is that of the Modelfile, which repeats what a model of ollama's
    store has beside its weights.
    """
    optional_package("gguf", install=gguf_model.GGUF_EXTRA)
    file = read_gguf(base) if is_gguf(base) else None
    names = tokenizer(base)
    is_adapter = as_adapter and isinstance(model, PeftBlockModel)
    named = {**_ARCHITECTURES, **(_FOR_ADAPTERS if is_adapter else {})}
    architecture = _architecture(model, base, file, named)
    layout = LlamaCppLayout(architecture, model.config)
    further = [token for token in end_token_ids(model, names) if token != names.eos_token_id]
    stops = [str(names.decode([token])) for token in further]
    settings = _settings(template, stops) if of_ollama is None else _repeated(of_ollama, template)
    if isinstance(model, PeftBlockModel) and as_adapter:
        if kind != "auto":
            raise without_effect("gguf_type", kind, "auto for an adapter, which is float32")
        loras = _loras(model, layout)
        lines = _modelfile([*_base_lines(base, file), f"ADAPTER ./{ADAPTER}"], settings)
        with new_directory(directory) as partial:
            _write_adapter(partial / ADAPTER, adapter_values(engine, model), layout, loras)
            write_companions(partial, {MODELFILE: lines, **files})
        return
    specs, parameters = _whole_model(engine, model)
    with new_directory(directory) as partial, closing(parameters):
        metadata: dict[str, Any] = {}
        if file is None:
            metadata = _metadata(model, architecture, base, names) | _further_ends(further)
        written = _WrittenModel(model, base, file, architecture, layout)
        _write_whole(partial / MODEL, written, specs, parameters, metadata, kind)
        write_companions(partial, {MODELFILE: _modelfile([f"FROM ./{MODEL}"], settings), **files})


class _WrittenModel(NamedTuple):
    """A model that is written as GGUF, and what it was opened from."""

    model: HFBlockModel
    base: Path
    file: GGUFFile | None  # None: the base is a directory
    architecture: str  # llama.cpp's name of it
    layout: LlamaCppLayout


def _write_whole(
    path: Path,
    written: _WrittenModel,
    specs: Sequence[ParameterSpec],
    parameters: Iterable[tuple[str, torch.Tensor]],
    metadata: dict[str, Any],
    kind: GGUFType,
) -> None:
    """Write all parameters of a model as a GGUF file, with this metadata and that of their
    types.
    """
    model, base, file, architecture, layout = written
    places = _places(specs, layout, base)
    chosen = _TYPES[specs[0].dtype] if kind == "auto" else kind
    metadata |= _type_metadata(chosen)
    if file is None:
        metadata["general.size_label"] = _size_label(base, places)
    rotary = _rotary_factors(model, file)
    infos = [(name, tuple(tensor.shape), "F32") for name, tensor in rotary.items()]
    infos += [
        (place.tensor, place.shape, _type_of(place, chosen))
        for spec in specs
        for place in places[spec.name]
    ]
    tensors = (
        (place.tensor, layout.write(place.tensor, place.taken_from(tensor.float())))
        for name, tensor in parameters
        for place in places[name]
    )
    values = chain(rotary.items(), tensors)
    gguf_model.write_gguf(path, architecture, metadata, infos, values, file, origin=base)


def _architecture(
    model: HFBlockModel, base: Path, file: GGUFFile | None, named: Mapping[str, str]
) -> str:
    """llama.cpp's name of a model's architecture, of those that are written by model type."""
    if file is not None:
        return str(file.metadata["general.architecture"])
    model_type: str = model.config.model_type
    if model_type not in named:
        raise gguf_model.unwritable(
            base,
            f"model type {model_type}",
            f"a GGUF base, or one of {', '.join(named)}",
        )
    for name, expected in _UNREAD.get(model_type, {}).items():
        value = getattr(model.config, name, expected)
        if value != expected:
            found = f"{name} {str(value)[:40]}"
            raise gguf_model.unwritable(base, found, f"{expected}, as llama.cpp computes it")
    return named[model_type]


def _base_lines(base: Path, file: GGUFFile | None) -> list[str]:
    """The lines of a Modelfile that name the base of an adapter.

    Ollama takes a split model as one ``FROM`` for each file. Links of the hub's cache are not
    followed, since ollama joins the files by their names.
    """
    if file is None:
        return [f"FROM {base.absolute()}"]
    parts = dict.fromkeys([file.path, *(tensor.path for tensor in file.tensors.values())])
    return [f"FROM {path.absolute()}" for path in parts]


def _further_ends(tokens: Sequence[int]) -> dict[str, Any]:
    """The metadata of tokens beside EOS at which generation stops, as many as llama.cpp knows."""
    ends = zip(gguf_model.FURTHER_ENDS, tokens, strict=False)
    return {f"tokenizer.ggml.{end}_token_id": token for end, token in ends}


def _places(
    specs: Sequence[ParameterSpec], layout: LlamaCppLayout, base: Path
) -> dict[str, list[Place]]:
    """The tensors of each parameter in llama.cpp's files."""
    places = layout.places({spec.name: spec.shape for spec in specs})
    unnamed = next((spec.name for spec in specs if spec.name not in places), None)
    if unnamed is not None:
        found = f"{unnamed}, for which llama.cpp's {layout.architecture} has no tensor"
        raise gguf_model.unwritable(base, found, "the tensors of its models")
    return places


def _type_metadata(chosen: str) -> dict[str, Any]:
    """The metadata of the type that most tensors have."""
    return {
        "general.file_type": {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}[chosen],
        gguf_model.QUANTIZATION_VERSION: _QUANTIZATION_VERSION,
    }


def _size_label(base: Path, places: Mapping[str, Sequence[Place]]) -> str:
    """The size of a model as llama.cpp's converter writes it: by the directory's name, else by the
    number of parameters, of a mixture those of one expert of each block.
    """
    import gguf

    shapes = {place.tensor: place.shape for tensors in places.values() for place in tensors}
    experts = {name: shape for name, shape in shapes.items() if len(shape) > 2}
    total = sum(map(math.prod, shapes.values()))
    of_experts = sum(math.prod(shape[1:]) for shape in experts.values())
    shared = total - sum(map(math.prod, experts.values()))
    named = gguf.Metadata.load(None, base, None, total).size_label
    count = max((shape[0] for shape in experts.values()), default=0)
    return str(named or gguf.size_label(total, shared, of_experts, count))


def _rotary_factors(model: HFBlockModel, file: GGUFFile | None) -> dict[str, torch.Tensor]:
    """The tensor of a model's rotary factors by its name, if it has scaled ones."""
    if file is not None:
        factors = gguf_model.rotary_factors(file)
    elif (model.config.rope_parameters or {}).get("rope_type") == "llama3":
        factors = gguf_model.scaled_rotary_factors(model.config)
    else:
        factors = None
    return {} if factors is None else {gguf_model.ROTARY_FACTORS: factors}


def _modelfile(lines: Sequence[str], settings: Sequence[str]) -> bytes:
    """The content of a Modelfile. Ollama stops at the tokenizer's EOS by itself."""
    for line in lines:
        if line.splitlines() != [line]:
            remedy = "rename the base's file or directory, or pass a link to it"
            raise OptionError(
                "model", f"{line!r} in its {MODELFILE}", "a path without line breaks", remedy
            )
    return "\n".join([*lines, *settings, ""]).encode()


def _settings(template: str | None, stops: Iterable[str]) -> list[str]:
    """The lines of a Modelfile about chats: texts at which generation stops, and a template."""
    lines = [f"PARAMETER stop {_quoted(stop)}" for stop in stops]
    return lines if template is None else [*lines, f"TEMPLATE {_quoted(template)}"]


def _repeated(model: OllamaModel, template: str | None) -> list[str]:
    """The lines of a Modelfile that repeat those of a model of ollama's store; ``template`` is that
    of the run's prompts, None if it has none.
    """
    lines = [
        f"PARAMETER {name} {_quoted(value) if isinstance(value, str) else json.dumps(value)}"
        for name, values in model.parameters.items()
        for value in (values if isinstance(values, list) else [values])
    ]
    chosen = model.template if template is None else template
    if chosen is not None:
        lines.append(f"TEMPLATE {_quoted(chosen)}")
    if model.system is not None:
        lines.append(f"SYSTEM {_quoted(model.system)}")
    return [*lines, *(f"LICENSE {_quoted(text)}" for text in model.licenses)]


def _quoted(text: str) -> str:
    """A text as a value in a Modelfile."""
    if '"' not in text and text.splitlines() == [text]:
        return f'"{text}"'
    quoted = f'"""{text}"""'
    if quoted.index('"""', 3) != len(text) + 3:
        # the text would end the value, and the rest of it be further lines
        remedy = "leave it out of the template, or of eos_token_id in generation_config.json"
        raise OptionError("format", f"{text!r:.80}", f"a text that a {MODELFILE} can quote", remedy)
    return quoted


def _type_of(place: Place, chosen: str) -> str:
    """The type of a tensor: F32 for vectors and routers, F16 for rows that are not whole blocks, as
    in llama.cpp's converter.
    """
    if len(place.shape) == 1 or gguf_model.ROUTER in place.tensor:
        return "F32"
    return "F16" if place.shape[-1] % GGUF_BLOCKS[chosen].weights else chosen


def _metadata(
    model: HFBlockModel, architecture: str, base: Path, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The metadata of a model in the Hugging Face layout, by key."""
    config: Any = model.config
    rotary = dict(config.rope_parameters or {})
    window = getattr(config, "use_sliding_window", False)
    if (
        rotary.get("rope_type", "default") not in ("default", "llama3")
        or window
        or config.hidden_act != "silu"
    ):
        found = (
            f"rotary tables of type {rotary.get('rope_type')}, sliding windows {window}, "
            f"{config.hidden_act}"
        )
        raise gguf_model.unwritable(
            base, found, "plain rotary tables or Llama 3.1's, no sliding windows, and silu"
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    fields = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        **dict.fromkeys(
            ("attention.key_length", "attention.value_length", "rope.dimension_count"), head
        ),
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rotary.get("rope_theta", 10000.0)),
    }
    fields |= _fields_of_experts(config)
    named = {
        "general.type": "model",
        "general.name": base.name,
        **{f"{architecture}.{key}": fields[key] for key in fields},
    }
    return {
        **named,
        **gguf_model.vocabulary(tokenizer, model.layouts[0].parameters[0].shape[0], base),
    }


def _fields_of_experts(config: Any) -> dict[str, Any]:
    """The metadata of a mixture's experts; none of a dense model."""
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts"))
    count = next((count for count in counts if count is not None), None)
    if count is None:
        return {}
    fields = {"expert_count": count, "expert_used_count": config.num_experts_per_tok}
    width = getattr(config, "moe_intermediate_size", None)
    return fields if width is None else {**fields, "expert_feed_forward_length": width}


def _loras(model: PeftBlockModel, layout: LlamaCppLayout) -> dict[str, tuple[str, float]]:
    """The parameter ``lora_B`` and the alpha of each layer that an adapter changes, by llama.cpp's
    names of the matrices.
    """
    unknown = _unknown_part(model)
    loras: dict[str, tuple[str, float]] = {}
    for up in (name for name in model.adapter.parameters if ".lora_B." in name):
        path = up.partition(".lora_B.")[0]
        tensor = next(iter(layout.names([f"{path}.weight"])), None)
        if tensor is None or (path == "lm_head" and model.config.tie_word_embeddings):
            unknown = unknown or f"LoRA on {path}, which is no matrix of its own in llama.cpp"
            continue
        wrapped: Any = model.modules[path]
        loras[tensor] = (up, wrapped.scaling[ADAPTER_NAME] * wrapped.r[ADAPTER_NAME])
    if unknown is not None:
        expected = "LoRA of linear layers, for llama.cpp"
        raise OptionError(
            "format", unknown, expected, "leave --format out, or train such an adapter"
        )
    return loras


def _unknown_part(model: PeftBlockModel) -> str | None:
    """The part of an adapter that llama.cpp does not have; None: there is none."""
    config: Any = model.adapter.config
    if config.peft_type != "LORA":
        return f"an adapter of type {model.adapter.kind.title}"
    if model.adapter.beside:
        return f"{next(iter(model.adapter.beside))}, a weight of the base beside the adapter's"
    if any(".lora_embedding_" in name for name in model.adapter.parameters):
        return "LoRA of an embedding"
    if any(is_token_layer(module) for module in model.modules.values()):
        return "rows of the embedding beside LoRA's matrices"
    if config.use_dora:
        return "DoRA"
    return "whole modules beside LoRA's matrices" if config.modules_to_save else None


def _write_adapter(
    path: Path,
    values: Mapping[str, torch.Tensor],
    layout: LlamaCppLayout,
    loras: Mapping[str, tuple[str, float]],
) -> None:
    """Write LoRA matrices. llama.cpp multiplies their product by alpha, one number for all, and
    divides it by the rank.
    """
    values = {name: tensor.float() for name, tensor in values.items()}
    first = next(alpha for _, alpha in loras.values())
    tensors: dict[str, torch.Tensor] = {}
    for name, (up, alpha) in loras.items():
        down = up.replace(".lora_B.", ".lora_A.")
        b = layout.write(name, values[up])
        tensors[f"{name}.lora_a"] = values[down]
        tensors[f"{name}.lora_b"] = b if alpha == first else b * (alpha / first)
    metadata = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(first),
    }
    infos = [(name, tuple(tensor.shape), "F32") for name, tensor in tensors.items()]
    gguf_model.write_gguf(
        path, layout.architecture, metadata, infos, tensors.items(), origin="the adapter"
    )

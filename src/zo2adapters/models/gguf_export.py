"""Export of models and adapters as GGUF files for llama.cpp and ollama."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from zo2adapters.models.export import merged_parameters, require_mergeable
from zo2adapters.models.gguf_model import GGUF_EXTRA, ROTARY_FACTORS, LlamaCppLayout
from zo2adapters.models.gguf_vocabulary import FURTHER_ENDS, vocabulary
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2adapters.models.peft_layers import base_form
from zo2adapters.optional_package import optional_package
from zo2core import Engine
from zo2core.checkpoint import GGUFFile, SafetensorsReader, StoredArray, StoredText, is_gguf, read_gguf
from zo2core.checkpoint.writer import new_directory, write_companions
from zo2core.encodings import GGUF_BLOCKS
from zo2core.errors import OptionError, UnsupportedModelError

GGUFType = Literal["auto", "F32", "F16", "BF16", "Q8_0"]

MODEL, ADAPTER, MODELFILE = "model.gguf", "adapter.gguf", "Modelfile"

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F32"}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # written from the Hugging Face layout; llama.cpp calls them the same
_REPLACED = ("general.file_type", "general.quantization_version", "general.architecture")  # the writer's own


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
    files: Mapping[str, Path | bytes] = MappingProxyType({}),
) -> None:
    """Write a model at the present version as a GGUF file, and a Modelfile.

    An adapter is merged into the model or, ``as_adapter``, written as llama.cpp's GGUF LoRA beside the base's path.
    ``template`` is that of the Modelfile.
    """
    optional_package("gguf", install=GGUF_EXTRA)
    layout, names = _layout(model, base), tokenizer(base)
    further = [token for token in end_token_ids(model, names) if token != names.eos_token_id]
    settings = [f"PARAMETER stop {_quoted(str(names.decode([token])))}" for token in further]
    settings += [] if template is None else [f"TEMPLATE {_quoted(template)}"]
    if isinstance(model, PeftBlockModel) and as_adapter:
        if kind != "auto":
            expected = "auto for an adapter, which is float32"
            raise OptionError("gguf_type", found=kind, expected=expected, remedy="leave it out")
        loras = _loras(model, layout)
        lines = _modelfile([*(f"FROM {path.absolute()}" for path in _files(base)), f"ADAPTER ./{ADAPTER}"], settings)
        with new_directory(directory) as partial:
            _write_adapter(partial / ADAPTER, engine, model, layout, loras)
            write_companions(partial, {MODELFILE: lines, **files})
        return
    if isinstance(model, PeftBlockModel):
        require_mergeable(model)
    with new_directory(directory) as partial:
        metadata = {} if is_gguf(base) else _metadata(model, layout.architecture, base, names)
        if metadata:
            metadata |= {
                f"tokenizer.ggml.{kind}_token_id": token for kind, token in zip(FURTHER_ENDS, further, strict=False)
            }
        _write_model(partial / MODEL, engine, model, layout, base, metadata, kind)
        write_companions(partial, {MODELFILE: _modelfile([f"FROM ./{MODEL}"], settings), **files})


def _modelfile(lines: Sequence[str], settings: Sequence[str]) -> bytes:
    """The content of a Modelfile. Ollama stops at the tokenizer's EOS by itself."""
    for line in lines:
        if line.splitlines() != [line]:
            found, remedy = f"{line!r} in its {MODELFILE}", "rename the base's file or directory, or pass a link to it"
            raise OptionError("model", found=found, expected="a path without line breaks", remedy=remedy)
    return "\n".join([*lines, *settings, ""]).encode()


def _quoted(text: str) -> str:
    """A text as a value in a Modelfile."""
    if '"' not in text and text.splitlines() == [text]:
        return f'"{text}"'
    quoted = f'"""{text}"""'
    if quoted.index('"""', 3) != len(text) + 3:  # the text would end the value, and the rest of it be further lines
        found, remedy = (
            f"{text!r:.80}",
            "leave it out of the template, or of eos_token_id in generation_config.json",
        )
        raise OptionError("format", found=found, expected=f"a text that a {MODELFILE} can quote", remedy=remedy)
    return quoted


def _files(base: Path) -> Iterable[Path]:
    """The paths of a base for the Modelfile: ollama takes a split model as one ``FROM`` for each file.

    Links of the hub's cache are not followed, since ollama joins the files by their names.
    """
    if not is_gguf(base):
        return [base]
    file = read_gguf(base)
    return dict.fromkeys([file.path, *(tensor.path for tensor in file.tensors.values())])


def _layout(model: HFBlockModel, base: Path) -> LlamaCppLayout:
    if is_gguf(base):
        return LlamaCppLayout(str(read_gguf(base).metadata["general.architecture"]), model.config)
    if model.config.model_type not in _ARCHITECTURES:
        raise UnsupportedModelError(
            base,
            found=f"model type {model.config.model_type}",
            expected=f"a GGUF base, or one of {', '.join(_ARCHITECTURES)}",
            remedy="export in the Hugging Face layout, and convert that by llama.cpp's convert_hf_to_gguf.py",
        )
    return LlamaCppLayout(model.config.model_type, model.config)


class _Writer:
    """A GGUF file that is written tensor by tensor."""

    def __init__(self, path: Path, architecture: str) -> None:
        self._gguf = optional_package("gguf", install=GGUF_EXTRA)
        self.header: Any = self._gguf.GGUFWriter(path, architecture)
        self._kinds: list[tuple[str, str]] = []

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.header.close()

    def copy_metadata(self, file: GGUFFile) -> None:
        """Copy another file's metadata."""
        types = self._gguf.GGUFValueType
        for key, value in file.metadata.items():
            if key in _REPLACED or key.startswith("split."):
                continue
            if isinstance(value, StoredArray):
                if value.length:  # the writer takes no empty arrays
                    inner = types(value.kind)
                    self.header.add_key_value(key, list(file.array(key)), types.ARRAY, sub_type=inner)
            else:
                plain = file.text(key) if isinstance(value, StoredText) else value
                self.header.add_key_value(key, plain, types(file.kinds[key]))

    def add_metadata(self, values: Mapping[str, Any]) -> None:
        """Add values by key: integers as uint32, floats as float32."""
        types = self._gguf.GGUFValueType
        for key, value in values.items():
            if isinstance(value, list):
                self.header.add_array(key, value)
            elif isinstance(value, int) and not isinstance(value, bool):
                self.header.add_key_value(key, value, types.UINT32)
            else:
                self.header.add_key_value(key, value, types.get_type(value))

    def write_header(self, tensors: Iterable[tuple[str, Sequence[int], str]]) -> None:
        """Write the header, with the names, shapes and types of all tensors."""
        for name, shape, kind in tensors:
            block, quantization = GGUF_BLOCKS[kind], self._gguf.GGMLQuantizationType[kind]
            stored = (*shape[:-1], shape[-1] // block.weights * block.nbytes)
            self.header.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=quantization)
            self._kinds.append((name, kind))
        self.header.write_header_to_file()
        self.header.write_kv_data_to_file()
        self.header.write_ti_data_to_file()
        self._left = iter(self._kinds)

    def write(self, name: str, weights: torch.Tensor) -> None:
        """Write the next tensor, float32, rounded to its type."""
        expected, kind = next(self._left)
        assert name == expected, f"{name} is written where {expected} comes next"
        coded = self._gguf.quantize(weights.contiguous().numpy(), self._gguf.GGMLQuantizationType[kind])
        self.header.write_tensor_data(np.ascontiguousarray(coded).view(np.uint8))


def _write_model(
    path: Path,
    engine: Engine,
    model: HFBlockModel,
    layout: LlamaCppLayout,
    base: Path,
    metadata: Mapping[str, Any],
    kind: GGUFType,
) -> None:
    specs = [spec.decoded for segment in model.layouts for spec in segment.parameters]
    tensors = engine.parameters_now()
    if isinstance(model, PeftBlockModel):
        merged = (spec for spec in specs if spec.name not in model.exported_parameters)
        specs = [replace(spec, name=base_form(spec.name)) for spec in merged]
        tensors = merged_parameters(engine, model)
    names = {mine: theirs for theirs, mine in layout.names([spec.name for spec in specs]).items()}
    chosen = _TYPES[specs[0].dtype] if kind == "auto" else kind
    unnamed = next((spec.name for spec in specs if spec.name not in names), None)
    if unnamed is not None:
        raise UnsupportedModelError(
            base,
            found=f"{unnamed}, for which llama.cpp's {layout.architecture} has no tensor",
            expected="the tensors of its models",
            remedy="export in the Hugging Face layout",
        )
    with _Writer(path, layout.architecture) as writer:
        further: list[tuple[str, torch.Tensor]] = []
        if is_gguf(base):
            file = read_gguf(base)
            writer.copy_metadata(file)
            further = list(_rotary_factors(file))
        else:
            further = list(_scaled_rotary(model))
            writer.add_metadata(metadata)
        writer.add_metadata({"general.file_type": {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}[chosen]})
        if chosen == "Q8_0":
            writer.add_metadata({"general.quantization_version": 2})
        infos = [(name, tuple(tensor.shape), "F32") for name, tensor in further]
        infos += [(names[spec.name], spec.shape, _type_of(spec.shape, chosen)) for spec in specs]
        writer.write_header(infos)
        for name, tensor in further:
            writer.write(name, tensor)
        with contextlib.closing(tensors) as parameters:
            for name, tensor in parameters:
                writer.write(names[name], layout.write(names[name], tensor.float()))


def _type_of(shape: Sequence[int], chosen: str) -> str:
    """The type of a tensor: F32 for vectors, F16 for rows that are not whole blocks, as in llama.cpp's converter."""
    if len(shape) == 1:
        return "F32"
    return "F16" if shape[-1] % GGUF_BLOCKS[chosen].weights else chosen


def _rotary_factors(file: GGUFFile) -> Iterator[tuple[str, torch.Tensor]]:
    entry = file.tensors.get(ROTARY_FACTORS)
    if entry is not None:
        values = torch.empty(entry.shape[0])
        with contextlib.closing(SafetensorsReader({entry.name: entry})) as reader:
            reader.read_into(entry.name, values)
        yield entry.name, values


def _scaled_rotary(model: HFBlockModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The factors of Llama 3.1's rotary frequencies, for a model whose config has them."""
    rotary: dict[str, Any] = model.config.rope_parameters or {}
    if rotary.get("rope_type", "default") == "llama3":
        scaled: Any = model.skeleton.get_submodule("model.rotary_emb").inv_freq
        steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
        yield ROTARY_FACTORS, (1.0 / rotary["rope_theta"] ** steps) / scaled.float().cpu()


def _settings(config: Any, architecture: str, base: Path) -> dict[str, Any]:
    """llama.cpp's settings of a model in the Hugging Face layout, by key."""
    rotary = dict(config.rope_parameters or {})
    window = getattr(config, "use_sliding_window", False)
    if rotary.get("rope_type", "default") not in ("default", "llama3") or window or config.hidden_act != "silu":
        raise UnsupportedModelError(
            base,
            found=f"rotary tables of type {rotary.get('rope_type')}, sliding windows {window}, {config.hidden_act}",
            expected="plain rotary tables or Llama 3.1's, no sliding windows, and silu",
            remedy="export in the Hugging Face layout, and convert that by llama.cpp's convert_hf_to_gguf.py",
        )
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    own = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": head,
        "rope.freq_base": float(rotary.get("rope_theta", 10000.0)),
    }
    return {"general.type": "model", "general.name": base.name, **{f"{architecture}.{key}": own[key] for key in own}}


def _metadata(model: HFBlockModel, architecture: str, base: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The metadata of a model in the Hugging Face layout, by key."""
    rows = model.layouts[0].parameters[0].shape[0]
    return {**_settings(model.config, architecture, base), **vocabulary(tokenizer, rows, base)}


class _Lora(NamedTuple):
    """A linear layer's LoRA matrices."""

    tensor: str  # llama.cpp's name of the layer's own matrix
    down: str  # the parameter that is (rank, inputs)
    up: str  # the parameter that is (outputs, rank)
    rank: int
    scale: float  # of their product


def _loras(model: PeftBlockModel, layout: LlamaCppLayout) -> list[_Lora]:
    """The layers that an adapter changes."""
    config: Any = model.adapter.config
    unknown = None
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        unknown = f"an adapter of type {getattr(config.peft_type, 'value', config.peft_type)}"
    elif config.use_dora or config.modules_to_save:
        unknown = "DoRA" if config.use_dora else "whole modules beside LoRA's matrices"
    specs = {spec.name: spec for segment in model.layouts for spec in segment.parameters}
    loras = []
    for up in (name for name in model.adapter.inserted.parameters if ".lora_B." in name):
        path = up.partition(".lora_B.")[0]
        tensor = next(iter(layout.names([f"{path}.weight"])), None)
        if tensor is None or (path == "lm_head" and model.config.tie_word_embeddings):
            unknown = unknown or f"LoRA on {path}, which is no matrix of its own in llama.cpp"
            continue
        rank = specs[up].shape[1]
        loras.append(_Lora(tensor, up.replace(".lora_B.", ".lora_A."), up, rank, _scale(config, path, rank)))
    if unknown is not None:
        expected, remedy = "LoRA of linear layers, for llama.cpp", "leave --format out, or train such an adapter"
        raise OptionError("format", found=unknown, expected=expected, remedy=remedy)
    return loras


def _scale(config: Any, path: str, rank: int) -> float:
    """The factor by which peft multiplies the product of a layer's two matrices."""
    patterns = optional_package("peft.utils.other", install="zo2core[peft]")
    key = patterns.get_pattern_key(config.alpha_pattern.keys(), path)
    alpha = config.alpha_pattern.get(key, config.lora_alpha)
    return float(alpha / math.sqrt(rank) if config.use_rslora else alpha / rank)


def _write_adapter(
    path: Path, engine: Engine, model: PeftBlockModel, layout: LlamaCppLayout, loras: Sequence[_Lora]
) -> None:
    """Write LoRA matrices. llama.cpp multiplies their product by alpha, one number for all, and divides it by the rank."""
    alpha = loras[0].scale * loras[0].rank
    with contextlib.closing(engine.parameters_now()) as parameters:
        wanted = {name for lora in loras for name in (lora.down, lora.up)}
        values = {name: tensor.float().clone() for name, tensor in parameters if name in wanted}
    with _Writer(path, layout.architecture) as writer:
        writer.add_metadata({"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(alpha)})
        tensors: list[tuple[str, torch.Tensor]] = []
        for lora in loras:
            factor, up = lora.scale * lora.rank / alpha, layout.write(lora.tensor, values[lora.up])
            tensors.append((f"{lora.tensor}.lora_a", values[lora.down]))
            tensors.append((f"{lora.tensor}.lora_b", up if factor == 1.0 else up * factor))
        writer.write_header((name, tuple(tensor.shape), "F32") for name, tensor in tensors)
        for name, tensor in tensors:
            writer.write(name, tensor)

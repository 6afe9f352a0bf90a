"""Export of models and adapters as GGUF files for llama.cpp and ollama."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from transformers import PreTrainedTokenizerBase

from zo2adapters.models.export import adapter_values, merged_parameters, merged_specs, require_mergeable
from zo2adapters.models.gguf_model import GGUF_EXTRA, ROTARY_FACTORS, LlamaCppLayout, rotary_factors, write_gguf
from zo2adapters.models.gguf_vocabulary import FURTHER_ENDS, vocabulary
from zo2adapters.models.hf import HFBlockModel
from zo2adapters.models.model_directory import end_token_ids
from zo2adapters.models.peft_kinds import PeftBlockModel
from zo2adapters.models.peft_layers import ADAPTER_NAME
from zo2adapters.optional_package import optional_package
from zo2core import Engine
from zo2core.checkpoint import is_gguf, read_gguf
from zo2core.checkpoint.writer import new_directory, write_companions
from zo2core.encodings import GGUF_BLOCKS
from zo2core.errors import OptionError, UnsupportedModelError

GGUFType = Literal["auto", "F32", "F16", "BF16", "Q8_0"]

MODEL, ADAPTER, MODELFILE = "model.gguf", "adapter.gguf", "Modelfile"

_TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F32"}
_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # written from the Hugging Face layout; llama.cpp calls them the same


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
        ends = zip(FURTHER_ENDS, further if metadata else [], strict=False)
        metadata |= {f"tokenizer.ggml.{end}_token_id": token for end, token in ends}
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
        remedy = "leave it out of the template, or of eos_token_id in generation_config.json"
        raise OptionError("format", found=f"{text!r:.80}", expected=f"a text that a {MODELFILE} can quote", remedy=remedy)
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


def _write_model(
    path: Path,
    engine: Engine,
    model: HFBlockModel,
    layout: LlamaCppLayout,
    base: Path,
    metadata: Mapping[str, Any],
    kind: GGUFType,
) -> None:
    if isinstance(model, PeftBlockModel):
        specs, parameters = merged_specs(model), merged_parameters(engine, model)
    else:
        specs = [spec.decoded for segment in model.layouts for spec in segment.parameters]
        parameters = engine.parameters_now()
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
    file = read_gguf(base) if is_gguf(base) else None
    factors = _scaled_rotary(model) if file is None else rotary_factors(file)
    further = {} if factors is None else {ROTARY_FACTORS: factors}
    types = {"general.file_type": {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}[chosen]}
    types |= {"general.quantization_version": 2} if chosen == "Q8_0" else {}
    infos = [(name, tuple(tensor.shape), "F32") for name, tensor in further.items()]
    infos += [(names[spec.name], spec.shape, _type_of(spec.shape, chosen)) for spec in specs]
    with contextlib.closing(parameters):
        tensors = ((names[name], layout.write(names[name], tensor.float())) for name, tensor in parameters)
        write_gguf(path, layout.architecture, {**metadata, **types}, infos, chain(further.items(), tensors), file)


def _type_of(shape: Sequence[int], chosen: str) -> str:
    """The type of a tensor: F32 for vectors, F16 for rows that are not whole blocks, as in llama.cpp's converter."""
    if len(shape) == 1:
        return "F32"
    return "F16" if shape[-1] % GGUF_BLOCKS[chosen].weights else chosen


def _scaled_rotary(model: HFBlockModel) -> torch.Tensor | None:
    """The factors of Llama 3.1's rotary frequencies, for a model whose config has them."""
    rotary: dict[str, Any] = model.config.rope_parameters or {}
    if rotary.get("rope_type", "default") != "llama3":
        return None
    scaled = model.skeleton.get_buffer("model.rotary_emb.inv_freq")
    steps = torch.arange(0, 2 * len(scaled), 2, dtype=torch.float32) / (2 * len(scaled))
    return torch.div(1.0 / rotary["rope_theta"] ** steps, scaled.float().cpu())


def _metadata(model: HFBlockModel, architecture: str, base: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The metadata of a model in the Hugging Face layout, by key."""
    config: Any = model.config
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
    named = {"general.type": "model", "general.name": base.name, **{f"{architecture}.{key}": own[key] for key in own}}
    return {**named, **vocabulary(tokenizer, model.layouts[0].parameters[0].shape[0], base)}


def _loras(model: PeftBlockModel, layout: LlamaCppLayout) -> dict[str, tuple[str, float]]:
    """The parameter ``lora_B`` and the alpha of each layer that an adapter changes, by llama.cpp's names of the matrices."""
    config: Any = model.adapter.config
    unknown = None
    if model.adapter.kind.peft_type != "LORA":
        unknown = f"an adapter of type {model.adapter.kind.peft_type}"
    elif config.use_dora or config.modules_to_save:
        unknown = "DoRA" if config.use_dora else "whole modules beside LoRA's matrices"
    loras = {}
    for up in (name for name in model.adapter.inserted.parameters if ".lora_B." in name):
        path = up.partition(".lora_B.")[0]
        tensor = next(iter(layout.names([f"{path}.weight"])), None)
        if tensor is None or (path == "lm_head" and model.config.tie_word_embeddings):
            unknown = unknown or f"LoRA on {path}, which is no matrix of its own in llama.cpp"
            continue
        wrapped: Any = model.modules[path]
        loras[tensor] = up, wrapped.scaling[ADAPTER_NAME] * wrapped.r[ADAPTER_NAME]
    if unknown is not None:
        expected, remedy = "LoRA of linear layers, for llama.cpp", "leave --format out, or train such an adapter"
        raise OptionError("format", found=unknown, expected=expected, remedy=remedy)
    return loras


def _write_adapter(
    path: Path, engine: Engine, model: PeftBlockModel, layout: LlamaCppLayout, loras: Mapping[str, tuple[str, float]]
) -> None:
    """Write LoRA matrices. llama.cpp multiplies their product by alpha, one number for all, and divides it by the rank."""
    values = {name: tensor.float() for name, tensor in adapter_values(engine, model).items()}
    first = next(alpha for _, alpha in loras.values())
    tensors: dict[str, torch.Tensor] = {}
    for name, (up, alpha) in loras.items():
        tensors[f"{name}.lora_a"], b = values[up.replace(".lora_B.", ".lora_A.")], layout.write(name, values[up])
        tensors[f"{name}.lora_b"] = b if alpha == first else b * (alpha / first)
    metadata = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": float(first)}
    infos = [(name, tuple(tensor.shape), "F32") for name, tensor in tensors.items()]
    write_gguf(path, layout.architecture, metadata, infos, tensors.items())

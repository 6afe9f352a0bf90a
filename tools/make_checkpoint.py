"""Write a checkpoint of a known geometry with random weights, shard by shard; the whole model is
never in memory.

    python tools/make_checkpoint.py opt-125m /tmp/opt-125m --dtype float16

Weights are drawn from N(0, 0.02), norms are ones, biases zeros, as in a newly initialised model.
With ``--sparse`` the files have their full names, headers and sizes, but their data is a hole,
which reads as zeros and takes no disk space. That is enough to measure layout, size and reads, and
OPT-175B is written in a second. With ``--nf4`` or ``--int8``, too, one layer is encoded, and all
layers have its header, its scales and a hole; gpt-oss has MXFP4 experts instead. Of a mixture the
embedding and the routers are written, so that tokens are routed to all experts. ``--gguf Q4_K``
writes a GGUF file of a Llama in the same way, with all matrices of this type.
"""

import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
import torch
from measuring import command
from safetensors.torch import load_file, save_file
from synthetic import scaled
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerFast,
)

from zo2adapters.models.architecture import ARCHITECTURES, architecture_of, segment_layouts
from zo2adapters.models.batches import CAUSAL_LM
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.conversion import quantize
from zo2adapters.models.skeleton import build_skeleton
from zo2core.checkpoint.export import new_checkpoint
from zo2core.checkpoint.shards import MAX_SHARD
from zo2core.encodings.forms import GGUF_BLOCKS
from zo2core.io.direct_file import byte_view
from zo2core.types import ParameterSpec

# bytes: smaller tensors of an encoded layer are written, larger ones are a hole
LARGEST_SCALES = 1 << 18


def geometries() -> dict[str, PretrainedConfig]:
    """All geometries by name, with the sizes of the published configs, from ``geometries.json``."""
    configs = json.loads(Path(__file__).with_name("geometries.json").read_text(encoding="utf-8"))
    return {
        name: CONFIG_MAPPING[values.pop("model_type")](**values) for name, values in configs.items()
    }


def write_shards(
    directory: Path,
    specs: Sequence[ParameterSpec],
    config: str,
    value_of: Callable[[ParameterSpec], torch.Tensor | None],
    max_shard: int = MAX_SHARD,
) -> int:
    """Write config and shards, with a hole for each parameter without a value; return the bytes of
    the weights.
    """
    with new_checkpoint(directory, specs, {"config.json": config.encode()}, max_shard) as locations:
        for spec in specs:
            file, start = locations[spec.name]
            file.seek(start)
            if (value := value_of(spec)) is None:
                file.truncate(start + spec.nbytes)
            else:
                file.write(byte_view(value))
    return sum(spec.nbytes for spec in specs)


def make_checkpoint(
    config: PretrainedConfig,
    directory: Path,
    *,
    dtype: torch.dtype,
    sparse: bool = False,
    max_shard: int = MAX_SHARD,
) -> int:
    """Write config and shards, whose data is a hole if ``sparse``; return the bytes of the
    weights.
    """
    config.dtype = dtype
    skeleton = build_skeleton(config, dtype)
    layouts = segment_layouts(skeleton, architecture_of(skeleton, CAUSAL_LM, None))
    specs = [spec for layout in layouts for spec in layout.parameters]
    if config.model_type == "qwen3_moe":
        specs = [part for spec in specs for part in by_expert(spec)]
    is_dense = config.model_type in ARCHITECTURES

    def value_of(spec: ParameterSpec) -> torch.Tensor | None:
        is_hole = sparse and (is_dense or not is_routing(spec.name))
        return None if is_hole else random_tensor(spec)

    text = config.to_json_string(use_diff=False)
    return write_shards(directory, specs, text, value_of, max_shard)


def by_expert(spec: ParameterSpec) -> Iterator[ParameterSpec]:
    """A parameter as published checkpoints of Qwen3's mixtures have it: of a stack of experts each
    matrix by itself.
    """
    path, _, leaf = spec.name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf, ())
    if len(spec.shape) < 3 or not parts:
        yield spec
        return
    experts, rows, columns = spec.shape
    for expert, part in product(range(experts), parts):
        name = f"{path}.{expert}.{part}.weight"
        yield replace(spec, name=name, shape=(rows // len(parts), columns))


def make_sparse_coded(
    config: PretrainedConfig, directory: Path, *, dtype: torch.dtype, encoding: str = "nf4"
) -> int:
    """Write config and shards of a model with coded layers, whose data is a hole; return the bytes
    of the weights.
    """
    layers, layer_types = config.num_hidden_layers, getattr(config, "layer_types", None)
    is_dense = config.model_type in ARCHITECTURES
    config.num_hidden_layers = 1
    if layer_types is not None:
        config.layer_types = layer_types[:1]
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        plain, coded = Path(folder, "plain"), Path(folder, "coded")
        if is_dense:
            make_checkpoint(config, plain, dtype=dtype, sparse=True)
        else:
            torch.manual_seed(0)
            whole: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            whole.save_pretrained(plain)
            del whole
        if config.model_type == "gpt_oss":
            with_mxfp4_experts(plain, coded)
        else:
            quantize(plain, coded, encoding)
        described = json.loads((coded / "config.json").read_text()) | {"num_hidden_layers": layers}
        described |= {} if layer_types is None else {"layer_types": layer_types}
        of_first = {
            name: tensor
            for shard in coded.glob("*.safetensors")
            for name, tensor in load_file(shard).items()  # mapped, not read
        }
        tensors = {  # layer by layer, as converted checkpoints are written
            name.replace(".layers.0.", f".layers.{layer}."): tensor
            for layer in range(layers)
            for name, tensor in of_first.items()
            if layer == 0 or ".layers.0." in name
        }
        specs = [
            ParameterSpec(name, tuple(tensor.shape), tensor.dtype, 0, decays=False)
            for name, tensor in tensors.items()
        ]

        def value_of(spec: ParameterSpec) -> torch.Tensor | None:
            if spec.nbytes > LARGEST_SCALES and (is_dense or not is_routing(spec.name)):
                return None
            value = tensors[spec.name].clone()
            if spec.name.endswith(".weight.quant_map"):
                # of holes, as in other formats: weights of -1.0 would choose the same few experts
                value[0] = 0.0
            return value

        return write_shards(directory, specs, json.dumps(described), value_of)


def is_routing(name: str) -> bool:
    """Whether a tensor decides which experts a token goes to."""
    return "embed_tokens" in name or name.endswith(("mlp.gate.weight", "mlp.router.weight"))


def with_mxfp4_experts(
    plain: Path, coded: Path, generator: torch.Generator | None = None
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Write a model of gpt-oss with experts in MXFP4, of zeros or drawn; return each stack's blocks
    and scales.

    Blocks have 32 weights, each block a scale.
    """
    tensors, stacks = (
        load_file(plain / "model.safetensors"),
        dict[str, tuple[torch.Tensor, torch.Tensor]](),
    )
    for name in [
        name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.zeros((experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.zeros((experts, outputs, inputs // 32), dtype=torch.uint8)
        if generator is not None:
            blocks.random_(256, generator=generator)
            scales.random_(118, 125, generator=generator)
        stacks[name] = tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
    coded.mkdir()
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    described = json.loads((plain / "config.json").read_bytes())
    described["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn"],
    }
    (coded / "config.json").write_text(json.dumps(described))
    return stacks


def make_sparse_gguf(config: PretrainedConfig, directory: Path, kind: str) -> int:
    """Write a GGUF file of a Llama, whose data is a hole; return the bytes of the weights.

    Its vocabulary has numbers for words.
    """
    writer: Any = gguf.GGUFWriter(None, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([str(number) for number in range(config.vocab_size)])
    writer.add_token_merges(["1 2"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    align, nbytes = gguf.GGUF_DEFAULT_ALIGNMENT, 0
    for layout in segment_layouts(build_skeleton(config, torch.float32), ARCHITECTURES["llama"]):
        for spec in layout.parameters:
            stem, _, leaf = spec.name.rpartition(".")
            is_matrix = len(spec.shape) > 1
            block = GGUF_BLOCKS[kind if is_matrix else "F32"]
            size = spec.numel // block.weights * block.nbytes
            writer.add_tensor_info(
                f"{names.get_name(stem)}.{leaf}",
                (*spec.shape[:-1], size // math.prod(spec.shape[:-1])) if is_matrix else spec.shape,
                np.dtype(np.uint8 if is_matrix else np.float32),
                size,
                raw_dtype=gguf.GGMLQuantizationType[kind if is_matrix else "F32"],
            )
            nbytes += -(-size // align) * align
    directory.mkdir()
    path = directory / "model.gguf"
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, -(-path.stat().st_size // align) * align + nbytes)
    return nbytes


def random_tensor(spec: ParameterSpec) -> torch.Tensor:
    """A parameter's initial value, which depends on its name only."""
    generator = torch.Generator().manual_seed(zlib.crc32(spec.name.encode()))
    if len(spec.shape) > 1:
        return torch.empty(spec.numel, dtype=spec.dtype).normal_(0.0, 0.02, generator=generator)
    return torch.full((spec.numel,), 0.0 if "bias" in spec.name else 1.0, dtype=spec.dtype)


def save_tokenizer(directory: Path, vocab_size: int) -> None:
    """Write a tokenizer whose words are numbers beside a model."""
    # special tokens are found within words, too: no number may contain them
    special = ["<pad>", "<eos>", "<unknown>"]
    words = {word: number for number, word in enumerate(special)}
    words |= {str(number): number for number in range(len(special), vocab_size)}
    made = Tokenizer(WordLevel(words, unk_token=special[2]))
    made.pre_tokenizer = WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast  # its constructor is untyped
    fast(tokenizer_object=made, pad_token=special[0], eos_token=special[1]).save_pretrained(
        directory
    )


@command
def main(
    geometry: Annotated[str, list(geometries())],
    directory: Path,
    *,
    dtype: Annotated[str, list(DTYPES)] = "float16",
    sparse: Annotated[bool, "write holes: weights are zero and take no disk space"] = False,
    nf4: Annotated[bool, "with --sparse: layers are encoded as nf4, gpt-oss as MXFP4"] = False,
    int8: Annotated[bool, "with --sparse: layers are encoded as int8, gpt-oss as MXFP4"] = False,
    scale: Annotated[int, "width, heads and vocabulary are divided by this"] = 1,
    layers: Annotated[int | None, "number of layers to keep; by default all"] = None,
    gguf: Annotated[
        str | None, list(GGUF_BLOCKS), "with --sparse: a GGUF file with matrices of this type"
    ] = None,
) -> None:
    encoding = "nf4" if nf4 else "int8" if int8 else None
    if gguf and not sparse:
        raise SystemExit("--gguf needs --sparse; export other models with zo2 export --format gguf")
    if encoding and not sparse:
        raise SystemExit(
            f"--{encoding} needs --sparse; encode other checkpoints with zo2 convert --quantize"
        )
    config = scaled(geometries()[geometry], scale, tokens=128)
    config.num_hidden_layers = layers or config.num_hidden_layers
    if gguf:
        written = make_sparse_gguf(config, directory, gguf)
    elif encoding:
        written = make_sparse_coded(config, directory, dtype=DTYPES[dtype], encoding=encoding)
    else:
        written = make_checkpoint(config, directory, dtype=DTYPES[dtype], sparse=sparse)
    if not gguf:
        save_tokenizer(directory, config.vocab_size)
    print(f"{directory}: {written / 1e9:.2f} GB of {gguf or encoding or dtype} weights")


if __name__ == "__main__":
    main()

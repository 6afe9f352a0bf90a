"""Write a checkpoint of a known geometry with random weights, shard by shard; the whole model is never in memory.

    python tools/make_checkpoint.py opt-125m /tmp/opt-125m --dtype float16

Weights are drawn from N(0, 0.02), norms are ones, biases zeros, as in a newly initialised model. With ``--sparse`` the files
have their full names, headers and sizes, but their data is a hole, which reads as zeros and takes no disk space. That is
enough to measure layout, size and reads, and OPT-175B is written in a second. With ``--nf4``, too, one layer is encoded as
nf4, and all layers have its header, its scales and a hole; gpt-oss has MXFP4 experts instead. Of a mixture the embedding and
the routers are written, so that tokens are routed to all experts. ``--gguf Q4_K`` writes a GGUF file of a Llama in the same
way, with all matrices of this type.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from zo2adapters.models.architecture import segment_layouts
from zo2adapters.models.architectures import ARCHITECTURES
from zo2adapters.models.checkpoint import DTYPES
from zo2adapters.models.quantizer import quantize
from zo2adapters.models.skeleton import build_skeleton
from zo2core.checkpoint import find_tensors, write_checkpoint
from zo2core.checkpoint.reader import TensorEntry
from zo2core.checkpoint.writer import MAX_SHARD, new_checkpoint
from zo2core.types import GGUF_BLOCKS, ParameterSpec

LARGEST_SCALES = 1 << 18  # bytes: smaller tensors of an encoded layer are written, larger ones are a hole


def opt(hidden: int, layers: int, heads: int, **other: Any) -> OPTConfig:
    """An OPT config; all sizes have the same vocabulary, positions and ratio of the feed-forward layer."""
    shape: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return OPTConfig(**{**shape, "ffn_dim": 4 * hidden, "word_embed_proj_dim": hidden, **other})


def llama(hidden: int, layers: int, heads: int, feed_forward: int) -> LlamaConfig:
    """A Llama 3.1 config."""
    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )


def qwen3(hidden: int, layers: int, heads: int, feed_forward: int, *, tied: bool) -> Qwen3Config:
    """A dense Qwen3 config."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=tied,
    )


def geometries() -> dict[str, PretrainedConfig]:
    """All geometries by name, with the sizes of the published configs."""
    return {
        "opt-125m": opt(768, 12, 12),
        "opt-350m": opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
        "opt-1.3b": opt(2048, 24, 32),
        "opt-2.7b": opt(2560, 32, 32),
        "opt-6.7b": opt(4096, 32, 32),
        "opt-13b": opt(5120, 40, 40),
        "opt-30b": opt(7168, 48, 56),
        "opt-66b": opt(9216, 64, 72),
        "opt-175b": opt(12288, 96, 96),
        "llama-160m": LlamaConfig(
            vocab_size=32000,
            hidden_size=768,
            intermediate_size=3072,
            num_hidden_layers=12,
            num_attention_heads=12,
            max_position_embeddings=2048,
        ),
        "smollm2-135m": LlamaConfig(
            vocab_size=49152,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=30,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
        ),
        "llama-3.1-8b": llama(4096, 32, 32, 14336),
        "llama-3.1-70b": llama(8192, 80, 64, 28672),
        "llama-3.1-405b": llama(16384, 126, 128, 53248),
        "qwen3-0.6b": qwen3(1024, 28, 16, 3072, tied=True),
        "qwen3-1.7b": qwen3(2048, 28, 16, 6144, tied=True),
        "qwen3-4b": qwen3(2560, 36, 32, 9728, tied=True),
        "qwen3-8b": qwen3(4096, 36, 32, 12288, tied=False),
        "qwen3-14b": qwen3(5120, 40, 40, 17408, tied=False),
        "qwen3-32b": qwen3(5120, 64, 64, 25600, tied=False),
        "qwen3-30b-a3b": Qwen3MoeConfig(  # type: ignore[call-arg]  # head_dim is read from other names
            vocab_size=151936,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            max_position_embeddings=40960,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "gpt-oss-20b": GptOssConfig(num_hidden_layers=24, num_local_experts=32),
    }


def make_checkpoint(
    config: PretrainedConfig,
    directory: Path,
    *,
    dtype: torch.dtype,
    seed: int = 0,
    sparse: bool = False,
    max_shard: int = MAX_SHARD,
) -> int:
    """Write config and shards, whose data is a hole if ``sparse``; return the bytes of the weights."""
    config.dtype = dtype
    layouts = segment_layouts(build_skeleton(config, dtype), ARCHITECTURES[config.model_type])
    specs = [spec for layout in layouts for spec in layout.parameters]
    companions = {"config.json": config.to_json_string(use_diff=False).encode()}
    if sparse:
        with new_checkpoint(directory, specs, companions, max_shard) as locations:
            for spec in specs:
                file, start = locations[spec.name]
                file.seek(start)
                leave_hole(file, spec)
    else:
        write_checkpoint(directory, specs, random_tensors(specs, seed), companions, max_shard=max_shard)
    return sum(spec.nbytes for spec in specs)


def make_sparse_coded(config: PretrainedConfig, directory: Path, *, dtype: torch.dtype) -> int:
    """Write config and one shard of a model with coded layers, whose data is a hole; return the bytes of the weights."""
    layers, layer_types = config.num_hidden_layers, getattr(config, "layer_types", None)
    is_dense = config.model_type in ARCHITECTURES
    config.num_hidden_layers = 1
    if layer_types is not None:
        config.layer_types = layer_types[:1]
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        one = Path(folder)
        if is_dense:
            make_checkpoint(config, one / "plain", dtype=dtype, sparse=True)
        else:
            torch.manual_seed(0)
            whole: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
            whole.save_pretrained(one / "plain")
            del whole
        if config.model_type == "gpt_oss":
            with_mxfp4_experts(one / "plain", one / "coded")
        else:
            quantize(one / "plain", one / "coded", "nf4")
        header: dict[str, Any] = {}
        sources: list[tuple[str, TensorEntry]] = []
        nbytes = 0
        for name, entry in sorted(find_tensors(one / "coded").items()):
            for layer in range(layers if ".layers.0." in name else 1):
                offsets = [nbytes, nbytes := nbytes + entry.nbytes]
                renamed = name.replace(".layers.0.", f".layers.{layer}.")
                header[renamed] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
                sources.append((name, entry))
        directory.mkdir()
        text = json.dumps(header).encode()
        text = text.ljust(-(-len(text) // 16) * 16 + 8)  # so that data begins at a multiple of 16
        with (directory / "model.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, entry in sources:
                if entry.nbytes > LARGEST_SCALES and (is_dense or not is_routing(name)):
                    file.seek(file.truncate(file.tell() + entry.nbytes))
                else:
                    with entry.path.open("rb") as source:
                        source.seek(entry.start)
                        file.write(source.read(entry.nbytes))
        written = json.loads((one / "coded" / "config.json").read_text())
    written |= {"num_hidden_layers": layers} | ({} if layer_types is None else {"layer_types": layer_types})
    (directory / "config.json").write_text(json.dumps(written))
    return nbytes


def is_routing(name: str) -> bool:
    """Whether a tensor decides which experts a token goes to."""
    return "embed_tokens" in name or name.endswith(("mlp.gate.weight", "mlp.router.weight"))


def with_mxfp4_experts(plain: Path, coded: Path) -> None:
    """Write a model of gpt-oss with experts of zeros in MXFP4: blocks of 32 weights, each with a scale."""
    tensors = load_file(plain / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        rows = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.zeros((*rows, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(rows, dtype=torch.uint8)
    coded.mkdir()
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    described = json.loads((plain / "config.json").read_bytes())
    described["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (coded / "config.json").write_text(json.dumps(described))


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
    nbytes = 0
    for layout in segment_layouts(build_skeleton(config, torch.float32), ARCHITECTURES["llama"]):
        for spec in layout.parameters:
            stem, _, leaf = spec.name.rpartition(".")
            stored = "F32" if len(spec.shape) == 1 else kind
            block = GGUF_BLOCKS[stored]
            rows = (*spec.shape[:-1], spec.shape[-1] // block.weights * block.nbytes)  # in bytes
            writer.add_tensor_info(
                f"{names.get_name(stem)}.{leaf}",
                rows if stored == kind else spec.shape,
                np.dtype(np.uint8 if stored == kind else np.float32),
                math.prod(rows),
                raw_dtype=gguf.GGMLQuantizationType[stored],
            )
            nbytes += -(-math.prod(rows) // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
    directory.mkdir()
    path = directory / "model.gguf"
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:
        start = -(-file.seek(0, os.SEEK_END) // gguf.GGUF_DEFAULT_ALIGNMENT) * gguf.GGUF_DEFAULT_ALIGNMENT
        file.truncate(start + nbytes)
    return nbytes


def leave_hole(file: IO[bytes], spec: ParameterSpec) -> None:
    """Extend a file by a parameter's bytes without writing them."""
    file.seek(file.truncate(file.tell() + spec.nbytes))


def random_tensors(specs: Sequence[ParameterSpec], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter's initial value; it depends on seed and name only."""
    for spec in specs:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(spec.name.encode()))
        if len(spec.shape) > 1:
            value = torch.empty(spec.numel, dtype=spec.dtype).normal_(0.0, 0.02, generator=generator)
        else:
            value = torch.full((spec.numel,), 0.0 if "bias" in spec.name else 1.0, dtype=spec.dtype)
        yield spec.name, value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=list(geometries()))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--dtype", choices=list(DTYPES), default="float16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sparse", action="store_true", help="write holes instead of data: weights are zero and take no disk space"
    )
    parser.add_argument("--nf4", action="store_true", help="with --sparse: layers are encoded as nf4, gpt-oss as MXFP4")
    parser.add_argument("--gguf", choices=list(GGUF_BLOCKS), help="with --sparse: a GGUF file with matrices of this type")
    options = parser.parse_args()
    if options.gguf:
        if not options.sparse:
            parser.error("--gguf needs --sparse; export other models with zo2 export --format gguf")
        written = make_sparse_gguf(geometries()[options.geometry], options.directory, options.gguf)
        print(f"{options.directory}: {written / 1e9:.2f} GB of {options.gguf} weights")
        return
    if options.nf4 and not options.sparse:
        parser.error("--nf4 needs --sparse; encode other checkpoints with zo2 convert --quantize nf4")
    if options.nf4:
        written = make_sparse_coded(geometries()[options.geometry], options.directory, dtype=DTYPES[options.dtype])
        print(f"{options.directory}: {written / 1e9:.2f} GB of 4-bit weights")
        return
    written = make_checkpoint(
        geometries()[options.geometry],
        options.directory,
        dtype=DTYPES[options.dtype],
        seed=options.seed,
        sparse=options.sparse,
    )
    print(f"{options.directory}: {written / 1e9:.2f} GB of {options.dtype} weights")


if __name__ == "__main__":
    main()

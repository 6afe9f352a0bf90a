"""Test which formats of weights are read in which families: LoRA on tiny models, beside peft on the
decoded model.

    python tools/formats.py --output formats.json

For each family and format a tiny checkpoint is written, opened with LoRA on its linear layers, and
trained for two steps of SGD. It is also decoded by `export`, loaded by transformers and trained
with peft: losses and adapters have to be equal, bit for bit. Prints a table in Markdown: an equals
sign, or the number of the reason below it.
"""

import json
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from families import class_of, small_config, small_model, train_lora
from make_checkpoint import with_mxfp4_experts
from measuring import command
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from zo2adapters import open_checkpoint
from zo2adapters.models.conversion import METHODS, quantize
from zo2core import Engine, ZO2Error

FORMATS = (
    *("bfloat16", *METHODS, "gptq", "awq", "int4", "nvfp4", "mxfp4"),
    *("fp8, channels", "fp8, tensor", "int8, channels"),
    *("gptq, 8", "packed int8", "modelopt nvfp4", "mxfp4-pack-quantized"),
)
DENSE = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "opt"]
MIXTURES = [
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "qwen3_next",
    "minimax",
    "phimoe",
]
MIXTURES += ["gpt_oss", "llama4_text", "granitemoe"]
# models of images and text, which are trained on text
IMAGES = ["gemma3", "internvl", "llava", "paligemma", "idefics3", "smolvlm", "mistral3"]
IMAGES += ["llava_next", "llava_onevision", "qwen3_vl", "llama4", "aya_vision", "qwen3_5"]
STEPS = 2
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # the output of each code of a word, from its lowest bits up
# ends of names of layers' linear weights
CODED = ("proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
GROUPS = [  # formats of a scale for each group of a row's weights; the number is that of bits
    "gptq",
    "gptq_v2",
    "gptq, ordered",
    "gptq, 2",
    "gptq, 3",
    "gptq_v2, 3",
    "gptq, 8",
    "gptq_v2, 8",
    "awq",
    "awq_gemv",
    "int4",
    "int4, asymmetric",
    "int4, channels",
    "packed int8",
    "packed int8, asymmetric",
    "packed int8, channels",
    "nvfp4",
    "modelopt nvfp4",
    "mxfp4-pack-quantized",
]
FLOAT_GROUPS = {"nvfp4": 16, "modelopt nvfp4": 16, "mxfp4-pack-quantized": 32}
EIGHT_BITS = {  # rows and columns that share a scale, 0 for all of them
    "fp8, channels": (1, 0),
    "fp8, tensor": (0, 0),
    "fp8, blocks": (16, 24),
    "int8, channels": (1, 0),
    "int8, tensor": (0, 0),
    "fbgemm_fp8": (1, 0),
    "modelopt": (0, 0),
}
Tensors = dict[str, torch.Tensor]


def words(
    codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8)), bits: int = 4
) -> torch.Tensor:
    """Pack columns into words of 32 bits, one code after the other; ``order`` has the column of
    each of 8 codes, from the lowest bits up.
    """
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 32)).long()
    in_order = padded.reshape(len(codes), -1, 8)[..., list(order)].reshape(len(codes), -1)
    of_codes = in_order[..., None] >> torch.arange(bits) & 1
    of_words = of_codes.view(len(codes), -1, 32) << torch.arange(32)
    packed = of_words.sum(dim=-1)[:, : -(-codes.shape[1] * bits // 32)]
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()


def bits_of(kind: str) -> int:
    """Bits of a code of integers in groups."""
    name, _, option = kind.partition(", ")
    return 8 if name == "packed int8" else int(option) if option.isdecimal() else 4


def random_floats(name: str, codes: torch.Tensor, scales: torch.Tensor) -> tuple[Tensors, Any]:
    """The tensors of a matrix of 4-bit floats, and its weights."""
    values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    of_column = torch.arange(codes.shape[1]) // FLOAT_GROUPS[name]
    if name == "mxfp4-pack-quantized":
        exponents = (120 + 1000 * scales.float()).to(torch.uint8) % 128
        weights = values * (2.0 ** (exponents.double() - 127)).float()[:, of_column]
        return {"weight_packed": packed, "weight_scale": exponents}, weights
    small = (100 * scales.float()).to(torch.float8_e4m3fn)
    if name == "modelopt nvfp4":
        factor = torch.tensor(0.027)
        weights = values * (small.float() * factor)[:, of_column]
        tensors = {"weight": packed, "weight_scale": small, "weight_scale_2": factor}
        return {**tensors, "input_scale": torch.tensor(1.0)}, weights
    divisor = torch.tensor([37.0])
    weights = values * (small.float() / divisor)[:, of_column]
    return {
        "weight_packed": packed,
        "weight_scale": small,
        "weight_global_scale": divisor,
    }, weights


def random_bytes(kind: str, rows: int, columns: int, seed: int) -> tuple[Tensors, torch.Tensor]:
    """A matrix's tensors in a format of 8 bits a weight, and its weights in float32."""
    generator = torch.Generator().manual_seed(seed)
    high, wide = EIGHT_BITS[kind]
    high, wide = high or rows, wide or columns
    codes = torch.randint(-127, 128, (rows, columns), generator=generator).to(torch.int8)
    if not kind.startswith("int8"):
        codes = (0.01 * codes.float()).to(torch.float8_e4m3fn)
    blocks = -(-rows // high), -(-columns // wide)
    scales = torch.rand(blocks, generator=generator) * 0.02 + 1e-3
    if "," in kind:  # of compressed-tensors
        scales = scales.bfloat16()
    row = torch.arange(rows)[:, None] // high
    column = torch.arange(columns)[None] // wide
    weights = codes.float() * scales.float()[row, column]
    shape = {"fp8, tensor": (1,), "int8, tensor": (1,), "modelopt": ()}.get(kind, blocks)
    return {"weight": codes, "weight_scale": scales.reshape(shape)}, weights


def random_matrix(
    kind: str, rows: int, columns: int, group: int, seed: int
) -> tuple[Tensors, torch.Tensor]:
    """A matrix's tensors in a format, and its weights in float32, (rows, columns)."""
    if kind in EIGHT_BITS:
        return random_bytes(kind, rows, columns, seed)
    generator = torch.Generator().manual_seed(seed)
    name, _, option = kind.partition(", ")
    bits = bits_of(kind)
    group = columns if option == "channels" else FLOAT_GROUPS.get(name, group)
    groups = -(-columns // group)
    codes = torch.randint(1 << bits, (rows, columns), generator=generator)
    zeros = torch.randint(1, 1 << bits, (rows, groups), generator=generator)
    scales = (torch.rand(rows, groups, generator=generator) * 0.02 + 1e-3).half()
    of_column = torch.arange(columns) // group
    if name in FLOAT_GROUPS:
        return random_floats(name, codes, scales)
    if name in ("int4", "packed int8"):
        tensors = {
            "weight_packed": words(codes, bits=bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, columns]),
        }
        if option == "asymmetric":
            tensors["weight_zero_point"] = words(zeros.t(), bits=bits).t().contiguous()
        else:
            zeros = torch.full_like(zeros, 1 << bits - 1)
    elif name == "awq_gemv":
        width = -(-groups // 8) * {64: 2, 32: 4}.get(group, 1)
        tensors = {
            "qweight": words(codes),
            "qzeros": words(torch.nn.functional.pad(zeros, (0, 8 * width - groups))),
            "scales": torch.nn.functional.pad(scales, (0, 8 * width - groups)),
        }
    else:
        stored = zeros.t() - 1 if name == "gptq" else zeros.t()
        order = AWQ if name == "awq" else tuple(range(8))
        packed = words(codes.t(), AWQ) if name == "awq" else words(codes, bits=bits).t()
        tensors = {"qweight": packed.contiguous(), "qzeros": words(stored, order, bits)}
        tensors["scales"] = scales.t().contiguous()
        if name != "awq":
            of_column = (
                of_column[torch.randperm(columns, generator=generator)]
                if option == "ordered"
                else of_column
            )
            tensors["g_idx"] = of_column.int()
    return tensors, (codes - zeros[:, of_column]).float() * scales.float()[:, of_column]


def described(kind: str, group: int) -> dict[str, Any]:
    """The quantization_config of a format."""
    name, _, option = kind.partition(", ")
    if kind in EIGHT_BITS and not option:
        return {"quant_method": name, "quant_algo": "FP8"}
    if name == "modelopt nvfp4":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    if name.startswith("gptq"):
        return {
            "quant_method": "gptq",
            "bits": bits_of(kind),
            "group_size": group,
            "sym": False,
            "checkpoint_format": name,
        }
    if name.startswith("awq"):
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemv" if name == "awq_gemv" else "gemm",
        }
    weights = {
        "num_bits": bits_of(kind),
        "type": "int",
        "strategy": "group",
        "group_size": group,
        "symmetric": option != "asymmetric",
    }
    if option == "channels":
        weights |= {"strategy": "channel", "group_size": None}
    if name in FLOAT_GROUPS:
        weights |= {"type": "float", "group_size": FLOAT_GROUPS[name], "symmetric": True}
        weights["strategy"] = "tensor_group" if name == "nvfp4" else "group"
    if kind in EIGHT_BITS:
        weights = {
            "num_bits": 8,
            "type": "int" if name == "int8" else "float",
            "strategy": option.removesuffix("s"),
            "symmetric": True,
        }
        if option == "blocks":
            weights["block_structure"] = list(EIGHT_BITS[kind])
    form = {
        "nvfp4": "nvfp4-pack-quantized",
        "mxfp4-pack-quantized": "mxfp4-pack-quantized",
        "fp8": "float-quantized",
        "int8": "int-quantized",
    }.get(name, "pack-quantized")
    scheme = {"group_0": {"targets": ["Linear"], "weights": weights}}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
    return {**common, "format": form, "config_groups": scheme, "ignore": ["lm_head"]}


def save_coded(
    kind: str, directory: Path, family: str = "llama", group: int = 16
) -> tuple[Path, Path]:
    """A model whose layers' linear weights are in a format, and the same model with the weights
    that these stand for.
    """
    plain, coded = directory / "plain", directory / "coded"
    config = small_config(family)
    if bits_of(kind) == 3:  # of which 32 codes end with a word
        config.hidden_size, config.head_dim = 32, 32 // config.num_attention_heads
    model: Any = small_model(config)
    model.half().save_pretrained(plain)
    tensors, packed = load_file(plain / "model.safetensors"), dict[str, torch.Tensor]()
    linear = {name for name in tensors if name.endswith(CODED) and tensors[name].ndim == 2}
    for number, name in enumerate(sorted(tensors)):
        if name not in linear:  # patches of images are convolutions
            continue
        layer, (rows, columns) = name.removesuffix("weight"), tensors[name].shape
        own, weights = random_matrix(kind, rows, columns, group, number)
        packed |= {f"{layer}{suffix}": value.contiguous() for suffix, value in own.items()}
        tensors[name] = weights.half()
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    coded.mkdir()
    others = {name: value for name, value in tensors.items() if name not in linear}
    save_file(others | packed, coded / "model.safetensors", {"format": "pt"})
    described_model = json.loads((plain / "config.json").read_bytes()) | {
        "quantization_config": described(kind, group)
    }
    (coded / "config.json").write_text(json.dumps(described_model))
    return plain, coded


def save_gpt_oss(directory: Path) -> tuple[Path, Path]:
    """A model of gpt-oss with its experts in MXFP4, and the same one decoded by transformers."""
    base, config = directory / "plain", small_config("gpt_oss")
    config.hidden_size, config.intermediate_size = 64, 32  # blocks have 32 weights
    model: Any = small_model(config)
    model.to(torch.bfloat16).save_pretrained(base)
    stacks = with_mxfp4_experts(base, directory / "mxfp4", torch.Generator().manual_seed(3))
    tensors = load_file(base / "model.safetensors")
    for name, (blocks, scales) in stacks.items():
        tensors[name] = convert_moe_packed_tensors(
            blocks, scales, dtype=torch.bfloat16
        ).contiguous()
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    return base, directory / "mxfp4"


def written(family: str, form: str, folder: Path) -> Path | None:
    """A tiny checkpoint; None if the format is not one of this family."""
    if form in (*GROUPS, *EIGHT_BITS):
        return save_coded(form, folder, family)[1]
    if form == "mxfp4":
        return save_gpt_oss(folder)[1] if family == "gpt_oss" else None
    model: Any = small_model(small_config(family))
    model.to(torch.bfloat16).save_pretrained(folder / "plain")
    if form == "bfloat16":
        return folder / "plain"
    quantize(folder / "plain", folder / "coded", form)
    return folder / "coded"


def outcome(family: str, form: str, folder: Path) -> str:
    """``=``, nothing, or why the steps are not equal."""
    checkpoint = written(family, form, folder)
    if checkpoint is None:
        return ""
    try:
        opened = open_checkpoint(checkpoint)
        with Engine(opened) as replayer:
            replayer.export(folder / "decoded")
        resident: Any = class_of(opened.config).from_pretrained
        model, found = train_lora(
            checkpoint, ["auto"], lambda: resident(folder / "decoded", dtype="auto"), STEPS
        )
    except ZO2Error as error:
        return f"refused: {type(error).__name__}, found {error.found}"
    if found["outcome"] != "equal":
        return "different"
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    coded = [spec for spec in specs if spec.encoding is not None]
    # without convolutions
    stacks = [spec for spec in specs if len(spec.shape) == 3 and min(spec.shape) > 1]
    if form != "bfloat16" and not coded:
        return "equal, and no weight of this checkpoint is in the format"
    return (
        "equal, with experts in bfloat16"
        if form != "bfloat16" and not {*stacks} <= {*coded}
        else "="
    )


def cell(family: str, form: str) -> str:
    """The outcome, also where transformers or peft fails, or there is a defect: the table
    lists it.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return outcome(family, form, Path(folder))
        except Exception as error:
            return f"failed: {type(error).__name__}: {str(error)[:200]}"


@command
def main(
    *,
    families: Sequence[str] = (*DENSE, *MIXTURES, *IMAGES),
    formats: Sequence[str] = FORMATS,
    output: Path | None = None,
) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, dict[str, str]] = {}
    reasons: list[str] = []
    print("| family |" + " | ".join(formats) + " |\n" + "|---" * (1 + len(formats)) + "|")
    for family in families:
        found[family] = {form: cell(family, form) for form in formats}
        reasons += (
            text
            for text in dict.fromkeys(found[family].values())
            if text not in ("", "=", *reasons)
        )
        cells = (
            text if text in ("", "=") else str(reasons.index(text) + 1)
            for text in found[family].values()
        )
        print(f"| {family} | " + " | ".join(cells) + " |", flush=True)
    print("", *(f"{number}. {text}" for number, text in enumerate(reasons, 1)), sep="\n")
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Matrices of 8 and 4 bits: decoded to the dequantised model's bits wherever they are, and refused
where they cannot be.
"""

import json
import math
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import families
import pytest
import torch
from command_lines import done, refusal
from engines import assert_equal, memory, zeroth_order
from formats import (
    EIGHT_BITS,
    FLOAT_GROUPS,
    GROUPS,
    bits_of,
    random_bytes,
    random_matrix,
    save_coded,
    save_gpt_oss,
)
from hypothesis import given
from hypothesis import strategies as st
from models import make_batch, save_model, small_config
from parity import assert_same_bits
from profiles import each_choice, needs_threads, short_first
from runs import small_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from threaded_device import ThreadedDevice, ThreadedStreams
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from zo2adapters import Adapter, Precision, open_checkpoint
from zo2adapters.models.conversion import quantize
from zo2core import (
    Distribution,
    Engine,
    FirstOrder,
    LowRankPerturbation,
    MeZOSGD,
    ParameterSpec,
    PhiloxNoise,
    ZerothOrder,
    ZO2Error,
)
from zo2core.encodings import decoding
from zo2core.encodings.decoding import encode
from zo2core.encodings.forms import (
    Float4Groups,
    Float8Blocks,
    Int8Rows,
    MatrixEncoding,
    MatrixStack,
    MXFP4Stack,
    NF4Blocks,
    PackedGroups,
)
from zo2core.errors import CheckpointError, OptionError, OutputError, UnsupportedModelError
from zo2core.kernels import dispatch, native, parallel
from zo2core.types import Lane, shown_bytes

SCALES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu)


def bytes_of(
    encoding: MatrixEncoding, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> torch.Tensor:
    return torch.cat(
        [parts[part.role].contiguous().view(-1).view(torch.uint8) for part in encoding.parts(shape)]
    )


def by_hand(
    encoding: MatrixEncoding, parts: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> torch.Tensor:
    """Weight by weight, in float32, as the formats' papers and libraries have it."""
    out = torch.empty(shape)
    for row in range(shape[0]):
        for column in range(shape[1]):
            place = row * shape[1] + column
            if isinstance(encoding, Int8Rows):
                value = (
                    parts["codes"][row, column].float()
                    * parts["scales"][row]
                    * 7.874015718698502e-3
                )
            elif isinstance(encoding, Float8Blocks):
                scale = parts["scales"][
                    row // encoding.block[0], column // encoding.block[1]
                ].float()
                value = parts["codes"][row, column].float() * scale
            else:
                assert isinstance(encoding, NF4Blocks)
                byte = int(parts["codes"][place // 2])
                scale = parts["scales"][place // encoding.block]
                if encoding.nested_block is not None:
                    nested = parts["nested scales"][
                        place // encoding.block // encoding.nested_block
                    ]
                    scale = parts["nested table"][int(scale)] * nested + encoding.offset
                value = parts["table"][byte & 15 if place % 2 else byte >> 4] * scale
            out[row, column] = value
    return out


@st.composite
def encodings(draw: st.DrawFn) -> MatrixEncoding:
    block = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    choices: list[MatrixEncoding] = [
        Int8Rows(),
        Float8Blocks(block, draw(st.sampled_from(SCALES))),
        NF4Blocks(2 * draw(st.integers(1, 40)), draw(st.sampled_from([None, 1, 3, 256]))),
    ]
    return draw(st.sampled_from(choices))


peft: Any = pytest.importorskip("peft")
METHODS = ["int8", "nf4", "fp8"]


class Coded(NamedTuple):
    """A matrix in a format, its bytes, and what they stand for."""

    spec: ParameterSpec
    stored: torch.Tensor
    expected: torch.Tensor


def of(encoding: Any, stored: Sequence[torch.Tensor], expected: torch.Tensor) -> Coded:
    spec = ParameterSpec(
        "w", tuple(expected.shape), expected.dtype, 0, decays=False, encoding=encoding
    )
    return Coded(spec, torch.cat([part.reshape(-1).view(torch.uint8) for part in stored]), expected)


dtypes, seeds = st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 9)


@st.composite
def matrices(draw: st.DrawFn) -> Coded:
    shape, generator = (
        draw(st.tuples(st.integers(1, 9), st.integers(1, 40))),
        torch.Generator().manual_seed(draw(seeds)),
    )
    weights = torch.randn(shape, generator=generator) * draw(
        st.sampled_from([0.0, 1e-6, 0.02, 100.0])
    )
    encoding, parts = encode(weights, draw(encodings()))
    return of(
        encoding,
        [bytes_of(encoding, parts, shape)],
        by_hand(encoding, parts, shape).to(draw(dtypes)),
    )


@st.composite
def stacks(draw: st.DrawFn) -> Coded:
    """A stack is its matrices one after the other."""
    generator, columns = torch.Generator().manual_seed(draw(seeds)), draw(st.integers(1, 24))
    fitted, stored, expected = [], [], []
    for own, rows in draw(
        st.lists(st.tuples(encodings(), st.integers(1, 6)), min_size=1, max_size=4)
    ):
        encoding, parts = encode(torch.randn(rows, columns, generator=generator), own)
        fitted.append((encoding, rows))
        stored.append(bytes_of(encoding, parts, (rows, columns)))
        expected.append(by_hand(encoding, parts, (rows, columns)))
    return of(MatrixStack(tuple(fitted)), stored, torch.cat(expected)[None])


@st.composite
def groups(draw: st.DrawFn, kind: str) -> Coded:
    """A matrix with a scale for each group of a row's weights, by the formats' published
    layouts.
    """
    name, _, option = kind.partition(", ")
    bits = bits_of(kind)
    group = draw(st.sampled_from([8, 16, 24, 32, 64]))
    eights = 4 if bits == 3 else 1  # of 3 bits, only 32 codes end with a word
    rows, columns = 8 * eights * draw(st.integers(1, 9)), 32 * draw(st.integers(1, 4))
    tensors, weights = random_matrix(kind, rows, columns, group, draw(seeds))
    group = columns if option == "channels" else group
    has_zeros = "weight_shape" not in tensors or "weight_zero_point" in tensors
    layout = {"int4": "pack-quantized", "packed int8": "pack-quantized"}.get(name, name)
    encoding: MatrixEncoding = PackedGroups(
        layout, group, torch.float16, has_zeros, option == "ordered", bits
    )
    if name in FLOAT_GROUPS:
        encoding = Float4Groups(name)
    roles = {
        "codes": ("qweight", "weight_packed", "weight"),
        "scales": ("scales", "weight_scale"),
        "global": ("weight_global_scale", "weight_scale_2"),
    }
    roles |= {"zeros": ("qzeros", "weight_zero_point"), "order": ("g_idx",)}
    parts = [
        next(tensors[name] for name in roles[part.role] if name in tensors)
        for part in encoding.parts((rows, columns))
    ]
    return of(encoding, parts, weights.to(draw(dtypes)))


@st.composite
def eight_bits(draw: st.DrawFn, kind: str) -> Coded:
    """A matrix of compressed-tensors, fbgemm or ModelOpt."""
    rows, columns = draw(st.integers(1, 70)), draw(st.integers(1, 70))
    tensors, weights = random_bytes(kind, rows, columns, draw(seeds))
    scales = tensors["weight_scale"].dtype
    encoding: MatrixEncoding = Int8Rows(scales, unit=1.0, shares_scale=kind == "int8, tensor")
    if not kind.startswith("int8"):
        high, wide = EIGHT_BITS[kind]
        encoding = Float8Blocks((high or rows, wide or columns), scales)
    return of(encoding, [tensors["weight"], tensors["weight_scale"]], weights.to(draw(dtypes)))


@st.composite
def mxfp4(draw: st.DrawFn) -> Coded:
    rows, generator = (
        draw(st.tuples(st.integers(1, 3), st.integers(1, 70), st.integers(1, 3))),
        torch.Generator(),
    )
    generator.manual_seed(draw(seeds))
    blocks = torch.randint(256, (*rows, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(255, rows, dtype=torch.uint8, generator=generator)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return of(
        MXFP4Stack(), [blocks, scales], convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    )


ENCODED = {
    "matrices": matrices(),
    "stacks": stacks(),
    "mxfp4": mxfp4(),
    **{kind: groups(kind) for kind in GROUPS},
    **{kind: eight_bits(kind) for kind in EIGHT_BITS},
}


@pytest.mark.parametrize("kind", ENCODED)
@given(
    data=st.data(),
    askew=st.integers(0, 5),
    compiled=st.booleans(),
    threaded=st.booleans(),
    many=st.sampled_from([2, 8]),
)
def test_every_encoding_is_decoded_by_its_formats_arithmetic_rounded_once(
    kind: str, data: st.DataObject, askew: int, *, compiled: bool, threaded: bool, many: int
) -> None:
    spec, stored, expected = data.draw(ENCODED[kind])
    assert spec.nbytes == len(stored)
    shifted = torch.cat([torch.zeros(askew, dtype=torch.uint8), stored])[askew:]
    out = torch.full(spec.shape, 7.0, dtype=spec.dtype)
    with (
        patch.object(dispatch, "decodes", dispatch.decodes if compiled else lambda *tensors: False),
        patch.object(decoding, "_IN_A_PART", 1),
        patch.object(decoding, "_MANY", many),
        patch.object(parallel, "thread_count", lambda: 2),
    ):
        decoding.decode(spec, shifted, out, in_threads=threaded)
    assert_same_bits(kind, out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nested", [None, 256])
@pytest.mark.parametrize("block", [64, 72])
def test_whole_blocks_of_nf4_and_the_rest_of_the_last_have_the_references_bits(
    block: int, nested: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 1102, generator=generator)
    encoding, parts = encode(weights, NF4Blocks(block, nested))
    if nested is None:
        parts["scales"][:3] = torch.tensor([math.nan, math.inf, 1e-41])
    spec, stored, _ = of(encoding, [bytes_of(encoding, parts, (3, 1102))], weights.to(dtype))
    decoded_by = {}
    for compiled in (False, True):
        out = torch.empty(spec.shape, dtype=dtype)
        decodes = partial(lambda result, *tensors: result, compiled)
        with patch.object(dispatch, "decodes", decodes):
            decoding.decode(spec, stored, out)
        same_nans = torch.where(out.isnan(), torch.full_like(out, math.nan), out)
        decoded_by[compiled] = same_nans.view(torch.int32 if dtype.itemsize == 4 else torch.int16)
    assert torch.equal(decoded_by[True], decoded_by[False])


@pytest.mark.parametrize(
    "encoding", [Int8Rows(), Float8Blocks((1, 64)), NF4Blocks(64, None)], ids=["int8", "fp8", "nf4"]
)
def test_encoding_loses_what_its_bits_lose_in_rows_of_any_size(encoding: MatrixEncoding) -> None:
    for largest in (0.0, 1e-30, 2e-37, 3e-38, 1e30):
        weights = torch.linspace(-1.0, 1.0, 64).repeat(2, 1) * largest
        fitted, parts = encode(weights, encoding)
        assert float((by_hand(fitted, parts, (2, 64)) - weights).abs().max()) <= 0.16 * largest
    weights = torch.empty(32, 64).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(1))
    fitted, parts = encode(weights, encoding)
    error = {Int8Rows: 0.012, Float8Blocks: 0.03, NF4Blocks: 0.1}[type(encoding)]
    assert (by_hand(fitted, parts, (32, 64)) - weights).abs().mean() < error * weights.abs().mean()


@pytest.mark.skipif(native.library() is None, reason="there are no compiled kernels")
def test_the_compiled_kernels_decode_every_code_of_fp8() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(5)  # more than a chunk
    spec = ParameterSpec(
        "w", (1, len(codes)), torch.float32, 0, decays=False, encoding=Float8Blocks((1, 2048))
    )
    out = torch.empty(spec.shape)
    decoding.decode(spec, torch.cat([codes, torch.tensor([0.3]).view(torch.uint8)]), out)
    expected = codes.view(torch.float8_e4m3fn).float() * 0.3
    torch.testing.assert_close(out.view(-1), expected, rtol=0, atol=0, equal_nan=True)


def test_factors_take_what_plans_count(tmp_path: Path) -> None:
    path, settings, batch = (
        make(tmp_path, "nf4"),
        LowRankPerturbation(rank=4, period=2),
        make_batch(40, [7, 5]),
    )
    with engine(path, perturbation=settings) as opened:
        store = opened._run.directions.factors
        assert store is not None
        for taken in range(5):
            opened.evaluate([batch])
            held = [drawn for _, drawn in store._right.values()]
            for sums in store._sums.values():
                held += [sums.now, *(sums.past or ())]
            planned = settings.factor_bytes(open_checkpoint(path).layouts, taken)
            assert planned == sum(tensor.nbytes for tensor in held)
            opened.step(batch)


def make(folder: Path, method: str, model_type: str = "llama", *, width: int = 128) -> Path:
    """A checkpoint, and the same one quantised."""
    sizes = (
        {"ffn_dim": width}
        if model_type == "opt"
        else {"intermediate_size": width, "num_key_value_heads": 2}
    )
    sizes |= {"word_embed_proj_dim": 64} if model_type == "opt" else {}
    config = small_config(model_type, hidden_size=64, num_attention_heads=4, **sizes)
    save_model(folder / "base", config, torch.bfloat16)
    quantize(folder / "base", folder / method, method)
    return folder / method


def engine(path: Path, folder: Path | None = None, **options: Any) -> Engine:
    dtype = options.pop("dtype", "auto")
    estimator = MeZOSGD(lr=1e-3, zo_eps=1e-2, perturb_in_place=False)
    if folder is not None:
        options["journal"] = folder / "journal.jsonl"
    options.setdefault("perturbation", LowRankPerturbation(rank=4, period=2))
    return zeroth_order(open_checkpoint(path, dtype=dtype), estimator, seed=3, **options)


def trajectory(
    path: Path, folder: Path | None = None, *, steps: int = 5, **options: Any
) -> list[float]:
    """Losses of steps, of which those after the first period form past factors into the weights,
    and of the evaluation.
    """
    batch = make_batch(40, [7, 5])
    with engine(path, folder, **options) as opened:
        losses = [loss for _ in range(steps) for loss in opened.step(batch).losses]
        return [*losses, opened.evaluate([batch]).loss]


def dequantised(path: Path, folder: Path, dtype: str = "auto") -> Path:
    """The same weights as a checkpoint of floats: what the engine exports before any step."""
    with Engine(open_checkpoint(path, dtype=dtype)) as opened:
        opened.export(folder / "dequantised")
    return folder / "dequantised"


PAIRS = [(method, family) for method in METHODS for family in ("llama", "opt", "qwen3")]
PAIRS += [(kind, "llama") for kind in ("gptq, 8", "packed int8", *EIGHT_BITS)]
SHORT = [("int8", "opt"), ("nf4", "qwen3"), ("awq", "llama"), ("fp8, channels", "llama")]


@pytest.mark.parametrize(
    "case",
    short_first(SHORT, [pair for pair in PAIRS if pair not in SHORT]),
    ids=str,
)
def test_a_quantised_model_trains_as_the_dequantised_one_bit_for_bit(
    case: tuple[str, str], tmp_path: Path
) -> None:
    method, model_type = case
    if method in METHODS:
        path = make(tmp_path, method, model_type)
        plain = dequantised(path, tmp_path)
    else:
        plain, path = save_coded(method, tmp_path)
    expected = trajectory(plain)
    assert trajectory(path) == trajectory(path, memory=memory(1)) == expected
    with closing(ThreadedDevice(ThreadedStreams(lambda lane, nbytes: 1e-4, poison=True))) as device:
        assert trajectory(path, device=device, memory=memory(kept=0)) == expected


@pytest.mark.parametrize("kind", GROUPS)
def test_a_coded_checkpoint_is_read_as_the_weights_that_it_stands_for(
    kind: str, tmp_path: Path
) -> None:
    plain, coded = save_coded(kind, tmp_path)
    assert_equal(read_by(coded), read_by(plain))


def lora(targets: Sequence[str]) -> Adapter:
    return Adapter(
        config=peft.LoraConfig(r=2, target_modules=list(targets), init_lora_weights=False), seed=1
    )


def learned(
    path: Path, adapter: Adapter, buckets: int | None = None
) -> tuple[list[float], dict[str, Any]]:
    """The losses of two first-order steps, and the trained parameters."""
    model = open_checkpoint(path, adapter=adapter)
    with Engine(
        model, FirstOrder(partial(torch.optim.SGD, lr=1e-2)), memory=memory(buckets)
    ) as opened:
        losses = [opened.step(families.batch()).loss for _ in range(2)]
        return losses, {
            name: value.tolist() for name, value in opened.parameters_now() if "lora" in name
        }


def save(family: str, directory: Path) -> Path:
    model: Any = families.small_model(families.small_config(family))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def coded_mixture(method: str, folder: Path, family: str) -> tuple[Path, Path]:
    """A mixture whose experts are encoded, too, behind the same one decoded."""
    left = quantize(save(family, folder / "base"), folder / method, method).left
    assert not any(".experts." in spec.name and len(spec.shape) == 3 for spec in left)
    return dequantised(folder / method, folder), folder / method


MIXTURES = ["qwen3_moe", "mixtral", "deepseek_v3", "olmoe", "glm4_moe", "gpt_oss", "granitemoe"]
TARGETS = [["auto"], ["auto", "experts"]]


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("make", "form", "family", "targets", "buckets"),
    [
        *each_choice(
            [save_coded],
            [kind for kind in GROUPS if bits_of(kind) != 3],
            ["llama", "qwen3_moe", "mixtral"],
            TARGETS[:1],
            [None, 2],
        ),
        *each_choice([coded_mixture], METHODS, MIXTURES, TARGETS, [None, 2]),
        *each_choice(
            [lambda _, folder, __: save_gpt_oss(folder)], ["mxfp4"], ["gpt_oss"], TARGETS, [None, 2]
        ),
    ],
)
def test_adapters_train_on_coded_weights_as_on_the_decoded_ones(
    make: Callable[..., tuple[Path, Path]],
    form: str,
    family: str,
    targets: list[str],
    buckets: int | None,
    tmp_path: Path,
) -> None:
    plain, coded = make(form, tmp_path, family)
    with Engine(open_checkpoint(coded)) as opened:
        encodings = [
            spec.encoding
            for layout in opened._run.model.layouts
            for spec in layout.parameters
            if spec.encoding
        ]
        opened.export(tmp_path / "decoded")
    assert len(encodings) >= (2 if family in MIXTURES else 8)
    with Engine(open_checkpoint(plain, adapter=lora(targets))) as beginner:
        beginner.export(tmp_path / "adapter")
    # saved, since peft rounds what it draws to the dtype of weights that are not encoded
    adapter = Adapter(config=tmp_path / "adapter")
    assert learned(coded, adapter, buckets) == learned(plain, adapter)
    decoded, before = (
        load_file(tmp_path / "decoded" / "model.safetensors"),
        load_file(plain / "model.safetensors"),
    )
    assert [name for name, value in before.items() if not torch.equal(value, decoded[name])] == []


@needs_threads
def test_threads_decode_what_a_gradient_is_computed_with(tmp_path: Path) -> None:
    divided = []

    def run_in_parts(run: Callable[[int, int], None], rows: int, most_parts: int) -> None:
        divided.append(min(rows, most_parts) > 1)
        run_all(run, rows, most_parts)

    run_all = parallel.run_in_parts
    model = open_checkpoint(make(tmp_path, "nf4"), adapter=lora(["q_proj"]))
    method = FirstOrder(partial(torch.optim.SGD, lr=1e-2))
    with (
        Engine(model, method) as opened,
        patch.object(decoding, "_IN_A_PART", 1),
        patch.object(parallel, "run_in_parts", run_in_parts),
        patch.object(parallel, "thread_count", lambda: 2),
    ):
        opened.step(families.batch())
    assert any(divided)


@pytest.mark.parametrize("method", METHODS)
# with a tensor for each expert's matrix, and with stacks
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_each_expert_is_decoded_from_its_own_tensors(
    family: str, method: str, tmp_path: Path
) -> None:
    """And a stack as transformers decodes it."""
    if (family, method) == ("gpt_oss", "nf4"):
        plain, packed = save_gpt_oss(tmp_path / "packed")
        whole = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
        for parameter in whole.parameters():
            # what is mapped from a file lies otherwise, and rounds differently
            parameter.data = parameter.data.clone()
        with Engine(open_checkpoint(packed)) as replayer:
            assert (
                replayer.evaluate([families.batch()]).loss
                == whole(**families.batch(), use_cache=False).loss.item()
            )
    base = save(family, tmp_path / "base")
    quantize(base, tmp_path / "small", method)
    with Engine(open_checkpoint(tmp_path / "small")) as replayer:
        replayer.export(tmp_path / "plain")
    before, after = (
        load_file(base / "model.safetensors"),
        load_file(tmp_path / "plain" / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    experts = [name for name in before if ".experts." in name and not name.endswith("bias")]
    assert len(experts) >= 4
    for name in experts:
        nearness = 0.2 if method == "nf4" else 0.1
        assert not torch.equal(before[name], after[name]), name
        assert (before[name].float() - after[name].float()).abs().max() <= nearness * before[
            name
        ].abs().max(), name


@pytest.mark.parametrize("method", METHODS)
def test_it_computes_what_transformers_does_in_any_dtype(method: str, tmp_path: Path) -> None:
    path = make(tmp_path, method)
    batch = make_batch(40, [7, 5])
    for dtype in ("auto", "float32"):
        plain = dequantised(path, tmp_path / dtype, dtype)
        whole = AutoModelForCausalLM.from_pretrained(plain)
        with Engine(open_checkpoint(path, dtype=dtype)) as opened:
            assert opened.evaluate([batch]).loss == whole(**batch, use_cache=False).loss.item()
    assert json.loads((plain / "config.json").read_text())["dtype"] == "float32"
    assert trajectory(path, steps=2, dtype="float32") == trajectory(plain, steps=2)


@pytest.mark.parametrize(("method", "least"), [("int8", 1.9), ("fp8", 1.9), ("nf4", 3.0)])
def test_fewer_bytes_are_held_and_read(method: str, least: float, tmp_path: Path) -> None:
    path = make(tmp_path, method, width=512)
    block, base = open_checkpoint(path).layouts[1], open_checkpoint(tmp_path / "base").layouts[1]
    assert base.nbytes / block.nbytes > least
    with engine(path, memory=memory(1)) as opened:
        batch = make_batch(40, [7, 5])
        opened.step(batch)
        lane = opened.step(batch).lanes[Lane.READ]
    blocks, rest = divmod(lane.nbytes, sum(spec.nbytes for spec in block.parameters))
    assert 0 < blocks <= 3  # one may be the next step's
    assert rest == 0


def test_codes_have_the_shape_in_which_bitsandbytes_saves_them(tmp_path: Path) -> None:
    for method, shape in (("nf4", [128 * 64 // 2, 1]), ("int8", [128, 64])):
        with safe_open(make(tmp_path / method, method) / "model.safetensors", "pt") as saved:
            assert saved.get_slice(f"{LAYER}.weight").get_shape() == shape


def test_a_changed_code_is_noticed(tmp_path: Path) -> None:
    # most bytes of a matrix are no samples of the fingerprint
    path = make(tmp_path, "int8", width=512)
    trajectory(path, tmp_path)
    shard = path / "model.safetensors"
    tensors = load_file(shard)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][130, 17] += 1
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match="digest"), engine(path, tmp_path) as opened:
        opened.step(make_batch(40, [7, 5]))


LAYER = "model.layers.0.mlp.up_proj"
STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"


def state(**changes: Any) -> torch.Tensor:
    values = {
        "quant_type": "nf4",
        "blocksize": 64,
        "shape": [128, 64],
        "nested_blocksize": 256,
        "nested_offset": 0.1,
    }
    return torch.tensor(list(json.dumps(values | changes).encode()), dtype=torch.uint8)


def put(value: torch.Tensor) -> Any:
    return lambda _: value


def short(value: torch.Tensor) -> torch.Tensor:
    return value[..., :-1].contiguous()


def coded(kind: str, folder: Path) -> Path:
    """A saved checkpoint of codes of this kind."""
    return save_coded(kind, folder)[1]


EXPERTS, DOWN = "model.layers.0.mlp.experts", "model.layers.0.mlp.down_proj"
MAKERS: dict[str, Callable[[Path], Path]] = {
    **{method: partial(make, method=method) for method in METHODS},
    **{kind: partial(coded, kind) for kind in (*GROUPS, *EIGHT_BITS)},
    "mxfp4": lambda folder: save_gpt_oss(folder)[1],
    "tensors of experts": lambda folder: coded_mixture("nf4", folder, "qwen3_moe")[1],
    "stacks of experts": lambda folder: coded_mixture("nf4", folder, "gpt_oss")[1],
}
# a tensor, what becomes of it (None: it is removed), and what is told
DAMAGED: list[tuple[str, str, Any, str]] = [
    ("int8", f"{LAYER}.SCB", put(torch.zeros(3)), "F32 of shape"),
    ("int8", f"{LAYER}.SCB", put(torch.zeros(128, dtype=torch.float16)), "F16 of shape"),
    ("int8", f"{LAYER}.SCB", None, "tensor|int8"),
    ("fp8, channels", f"{DOWN}.weight_scale", put(torch.zeros(3)), "F32 of shape"),
    ("fp8, channels", f"{DOWN}.weight", None, "no tensor"),
    (
        "int8",
        f"{LAYER}.weight_format",
        put(torch.tensor(1, dtype=torch.uint8)),
        "codes in another layout",
    ),
    ("int8", f"{LAYER}.weight", put(torch.zeros(3, dtype=torch.int8)), "shape"),
    ("int8", f"{LAYER}.weight", put(torch.zeros(128, 64, dtype=torch.uint8)), "U8"),
    ("int8", f"{LAYER}.weight", put(torch.zeros(64, 64, dtype=torch.int8)), "F32 of shape"),
    ("fp8", f"{LAYER}.weight_scale_inv", put(torch.zeros(7, 3)), "F32 of shape"),
    ("fp8", f"{LAYER}.weight_scale_inv", put(torch.zeros(1, 2)), "F32 of shape"),
    ("fp8", f"{LAYER}.weight", put(torch.zeros(128, 64, dtype=torch.float8_e5m2)), "F8_E5M2"),
    ("nf4", f"{LAYER}.weight.nested_absmax", None, "no tensor"),
    ("nf4", f"{LAYER}.weight.absmax", put(torch.zeros(128)), "F32 of shape"),
    ("nf4", STATE, put(state(quant_type="fp4")), "type fp4"),
    ("nf4", STATE, put(state(blocksize=63)), "blocks of 63"),
    ("nf4", STATE, put(state(blocksize=10**12)), "blocks of 10"),
    ("nf4", STATE, put(state(blocksize=1 << 21)), "blocks of 2097152"),
    ("nf4", STATE, put(state(shape=[128])), "shape"),
    ("nf4", STATE, put(state(shape=[64, 128])), "shape"),
    ("nf4", STATE, put(state(nested_offset=float("nan"))), "offset of nan"),
    ("nf4", STATE, put(state(nested_offset=1e300)), "offset of 1e"),
    ("nf4", STATE, put(state(nested_offset=10**400)), "an invalid state"),
    ("nf4", STATE, put(state(nested_blocksize=2**31 - 1)), "blocks of 64 and 2147483647"),
    ("nf4", STATE, put(torch.zeros(9, dtype=torch.uint8)), "an invalid state"),
    ("nf4", STATE, put(torch.zeros(9999, dtype=torch.uint8)), "9999 bytes"),
    ("gptq", f"{DOWN}.qzeros", short, "down_proj"),
    ("gptq", f"{DOWN}.scales", torch.Tensor.int, "down_proj"),
    ("gptq, ordered", f"{DOWN}.g_idx", lambda order: order + 1000, "down_proj"),
    ("awq", f"{DOWN}.qweight", short, "down_proj"),
    ("awq_gemv", f"{DOWN}.scales", short, "F16 of shape"),
    ("gptq, 8", f"{DOWN}.qzeros", short, "I32 of shape"),
    ("packed int8", f"{DOWN}.weight_packed", short, r"found shape \[16, 28\]"),
    ("modelopt nvfp4", f"{DOWN}.weight_scale", short, "F8_E4M3 of shape"),
    ("mxfp4-pack-quantized", f"{DOWN}.weight_scale", short, "U8 of shape"),
    ("int4", f"{DOWN}.weight_scale", short, "down_proj"),
    ("nvfp4", f"{DOWN}.weight_global_scale", None, "down_proj"),
    ("mxfp4", f"{EXPERTS}.down_proj_scales", None, r"mlp\.experts"),
    ("mxfp4", f"{EXPERTS}.down_proj_scales", short, r"mlp\.experts"),
    ("tensors of experts", f"{EXPERTS}.1.up_proj.weight", None, r"mlp\.experts"),
    ("stacks of experts", f"{EXPERTS}.down_proj.matrices.1.weight", None, r"mlp\.experts"),
]


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Path], Path]:
    """Copies a checkpoint of a kind, each of which is made once."""
    made: dict[str, Path] = {}

    def copy(kind: str, folder: Path) -> Path:
        if kind not in made:
            made[kind] = MAKERS[kind](tmp_path_factory.mktemp("coded"))
        return Path(shutil.copytree(made[kind], folder / "copy"))

    return copy


@pytest.mark.parametrize(("kind", "name", "change", "found"), DAMAGED)
def test_tensors_that_do_not_fit_each_other_are_refused(
    kind: str,
    name: str,
    change: Any,
    found: str,
    copied: Callable[[str, Path], Path],
    tmp_path: Path,
) -> None:
    shard = copied(kind, tmp_path) / "model.safetensors"
    tensors = load_file(shard)
    value = tensors.pop(name, None)
    if change is not None:
        tensors[name] = change(value)
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match=found):
        open_checkpoint(shard.parent)


def described(folder: Path, changes: Mapping[str, Any]) -> Path:
    """Change a copy's ``quantization_config``; what becomes None is removed."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    fields = {**config["quantization_config"], **changes}
    config["quantization_config"] = {key: v for key, v in fields.items() if v is not None}
    path.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "field", "found"),
    [
        ("int8", {"load_in_8bit": None, "quant_method": "hqq"}, "quant_method", "'hqq'"),
        ("gptq", {"quant_method": "GPTQ"}, "quant_method", "'GPTQ'"),
        ("gptq", {"quant_method": None}, "quant_method", "no such field"),
        ("int8", {"load_in_8bit": None}, "load_in_4bit", "no such field"),
        ("int8", {"load_in_4bit": True}, "load_in_4bit", "True"),
        ("nf4", {"load_in_4bit": "x"}, "load_in_4bit", "'x'"),
        ("fp8", {"weight_block_size": 0}, "weight_block_size", "0"),
        ("fp8", {"weight_block_size": [0, 128]}, "weight_block_size", r"\[0, 128\]"),
        ("gptq", {"bits": 5}, "bits", "5"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype", "'int16'"),
        ("gptq", {"group_size": "16"}, "group_size", "'16'"),
        ("gptq", {"dynamic": {"+:.*0.*": {"bits": 5}}}, r"dynamic\.\+:\.\*0\.\*\.bits", "5"),
        ("gptq", {"dynamic": {"q": {"adapter": "x"}}}, r"dynamic\.q\.adapter", "'x'"),
        ("gptq", {"dynamic": {"q": "x"}}, r"dynamic\.q", "'x'"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format", "'marlin'"),
        ("gptq", {"checkpoint_format": None, "format": "marlin"}, "format", "'marlin'"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format", "True"),
        ("gptq", {"sym": "yes"}, "sym", "'yes'"),
        ("awq", {"version": "marlin"}, "version", "'marlin'"),
        ("awq", {"version": None, "format": "gemv_fast"}, "format", "'gemv_fast'"),
        ("awq", {"zero_point": False}, "zero_point", "False"),
        ("awq", {"bits": 8}, "bits", "8"),
        ("int4", {"format": "marlin-24"}, "format", "'marlin-24'"),
        ("int4", {"config_groups": {}}, "config_groups", "{}"),
        (
            "int4",
            {"config_groups": {"W3A16": ["Linear"]}},
            r"config_groups\.W3A16",
            r"\['Linear'\]",
        ),
        (
            "int4",
            {"sparsity_config": {"format": "bitmask"}},
            r"sparsity_config\.format",
            "'bitmask'",
        ),
        ("nvfp4", {"transform_config": {"R": 1}}, "transform_config", "{'R': 1}"),
        ("modelopt", {"quant_algo": "NVFP4_AWQ"}, "quant_algo", "'NVFP4_AWQ'"),
        ("modelopt", {"quant_algo": None}, "quant_algo", "no such field"),
        ("modelopt nvfp4", {"group_size": 32}, "group_size", "32"),
        *(
            (
                kind,
                {"config_groups": {"g": {"weights": {"num_bits": 8, **weights}}}},
                rf"config_groups\.g\.weights\.{field}",
                found,
            )
            for kind, weights, field, found in (
                ("packed int8", {"num_bits": 3}, "num_bits", "3"),
                ("packed int8", {"type": "float"}, "type", "'float'"),
                ("nvfp4", {"num_bits": 8}, "num_bits", "8"),
                (
                    "mxfp4-pack-quantized",
                    {"num_bits": 4, "symmetric": False},
                    "symmetric",
                    "False",
                ),
                (
                    "mxfp4-pack-quantized",
                    {"num_bits": 4, "group_size": 16},
                    "group_size",
                    "16",
                ),
                ("fp8, tensor", {"type": "float", "strategy": "group"}, "strategy", "'group'"),
                ("fp8, tensor", {"type": "float", "num_bits": 6}, "num_bits", "6"),
                ("int8, tensor", {"symmetric": False}, "symmetric", "False"),
                ("int8, tensor", {"strategy": "block"}, "strategy", "'block'"),
                ("int8, tensor", {"type": "complex"}, "type", "'complex'"),
            )
        ),
    ],
)
def test_a_field_that_does_not_fit_is_refused_by_its_name_and_value(
    kind: str,
    changes: dict[str, Any],
    field: str,
    found: str,
    copied: Callable[[str, Path], Path],
    tmp_path: Path,
) -> None:
    coded = described(copied(kind, tmp_path), changes)
    told = rf"config\.json: quantization_config\.{field}: found {found}; expected "
    with pytest.raises(UnsupportedModelError, match=told):
        open_checkpoint(coded)


ZEROS = f"{DOWN}.qzeros"


@pytest.mark.parametrize(
    ("kind", "changes", "change", "told"),
    [
        ("int8", {"load_in_8bit": None, "load_in_4bit": True}, {}, "nf4, and no tensor of it"),
        ("gptq", {"sym": None}, {ZEROS: 0x77777777}, None),
        (
            "gptq",
            {"sym": None},
            {ZEROS: 0x88888888},
            rf"{ZEROS}: found .* 8 .*checkpoint_format: gptq,",
        ),
        ("gptq_v2", {"sym": None}, {ZEROS: 0x77777777}, r"7 .*checkpoint_format: gptq_v2,"),
        ("gptq, 8", {"sym": True}, {f"{DOWN}.qzeros": 0x7F7F7F7F}, "127"),
        ("gptq, 8", {"sym": None}, {ZEROS: 0x80808080}, r"128 .*checkpoint_format: gptq,"),
        ("gptq_v2, 8", {"sym": None}, {ZEROS: 0x80808080}, None),
        ("gptq_v2, 8", {"sym": None}, {ZEROS: 0x7F7F7F7F}, r"127 .*checkpoint_format: gptq_v2"),
        ("gptq, 8", {"bits": 4}, {}, "g_idx: found 32 columns .*4 bits with group_size 16"),
        (
            "gptq",
            {"bits": 8, "dynamic": {"q": {"bits": 4, "group_size": 8}}},
            {},
            "found I32 .*8 bits with group_size 16 or 4 bits with group_size 8",
        ),
        ("gptq", {"bits": 8, "dynamic": {"q": {"bits": 4}}}, {}, None),
        ("gptq", {"sym": True, "dynamic": {"q": {"sym": False}}}, {}, None),
        ("modelopt nvfp4", {"quant_algo": "FP8"}, {}, "U8 of shape .*with a scale for each matrix"),
        (
            "gptq_v2",
            {"sym": None, "checkpoint_format": None},
            {ZEROS: 0x88888888},
            "zeros stored as 8",
        ),
        ("gptq", {"sym": False}, {ZEROS: 0x88888888}, None),
        ("gptq", {"sym": True}, {}, r"zeros that are not stored as 7; expected .*sym: true"),
        ("gptq", {"group_size": 8}, {}, r"scales: found F16 of shape .*with group_size 8"),
        ("gptq", {"group_size": None}, {}, "g_idx: found 32 columns .*with group_size 128"),
        ("awq", {"group_size": None}, {}, "with group_size 128"),
        ("int4", {"config_groups": {"W4A16": ["Linear"]}}, {}, "with group_size 128"),
        ("fp8", {"weight_block_size": None}, {}, r"with weight_block_size \[128, 128\]"),
        ("int4", {}, {f"{DOWN}.weight_zero_point": 0}, None),
        ("int4", {}, {f"{DOWN}.weight_zero_point": 1}, r"not 0; expected .*symmetric: true"),
        ("int8, channels", {}, {f"{DOWN}.weight_zero_point": 0}, None),
        ("int8, channels", {}, {f"{DOWN}.weight_zero_point": 1}, r"not 0; expected .*symmetric"),
        ("int8, channels", {"config_groups": {"FP8": []}}, {}, "I8 of shape .*F8_E4M3"),
        ("fp8, channels", {"config_groups": {"FP8": []}}, {}, "with a scale for each matrix"),
        ("fp8, tensor", {"config_groups": {"FP8_DYNAMIC": []}}, {}, "with a scale for each row"),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(
    kind: str,
    changes: dict[str, Any],
    change: dict[str, int],
    told: str | None,
    copied: Callable[[str, Path], Path],
    tmp_path: Path,
) -> None:
    coded = described(copied(kind, tmp_path), changes)
    tensors = load_file(coded / "model.safetensors")
    for name, word in change.items():
        value = tensors.get(name, torch.zeros(2, 2, dtype=torch.int32))
        tensors[name] = torch.full_like(value, word - (1 << 32) * (word >= 1 << 31))
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    if told is None:
        open_checkpoint(coded)
        return
    with pytest.raises(ZO2Error, match=told):
        open_checkpoint(coded)


NO_ORDER = {f"{DOWN}.weight_g_idx": torch.full((32,), -1, dtype=torch.int32)}
WEIGHTS = {"num_bits": 4, "type": "INT", "group_size": 16}


def with_tensors(ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return lambda tensors: {
        name: change(value) if name.endswith(ending) else value for name, value in tensors.items()
    }


CACHE_SCALES = {
    f"model.layers.0.self_attn.{name}": torch.tensor(0.5)
    for name in ("k_proj.k_scale", "v_proj.v_scale")
}


def in_fp4(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same matrices, one of which says that it is in fp4, whose table is as good as another."""
    changed = dict(tensors)
    stated = json.loads(bytes(changed.pop(STATE).tolist()))
    text = json.dumps({**stated, "quant_type": "fp4"}).encode()
    name = STATE.replace("bitsandbytes__nf4", "bitsandbytes__fp4")
    return {**changed, name: torch.tensor(list(text), dtype=torch.uint8)}


LAYOUTS: list[tuple[str, dict[str, Any], Any]] = [
    ("gptq_v2", {"checkpoint_format": None, "format": "GPTQ_v2"}, None),
    ("gptq_v2", {"format": "gptq"}, None),
    ("gptq", {"checkpoint_format": None, "dynamic": {"-:.*lm_head.*": {}}}, None),
    ("awq", {"version": None, "bits": None, "zero_point": None}, None),
    ("awq_gemv", {"version": "GEMV"}, None),
    ("modelopt nvfp4", {"quant_algo": "W4A16_NVFP4", "group_size": 16}, None),
    ("modelopt", {}, lambda tensors: {**tensors, **CACHE_SCALES}),
    (
        "fp8, channels",
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        None,
    ),
    ("packed int8, channels", {"config_groups": {"W8A16": ["Linear"]}}, None),
    ("mxfp4-pack-quantized", {"config_groups": {"MXFP4A16": ["Linear"]}}, None),
    ("nf4", {"bnb_4bit_quant_type": "fp4"}, lambda tensors: in_fp4(tensors)),
    ("awq", {"checkpoint_format": "gemm", "version": "gemv"}, None),
    ("nf4", {"quant_method": None, "bnb_4bit_quant_type": None}, None),
    ("nf4", {"bnb_4bit_quant_type": "fp4"}, None),
    (
        "nf4",
        {"bnb_4bit_quant_storage": "bfloat16"},
        with_tensors("_proj.weight", lambda value: value.view(1, -1).view(torch.bfloat16).T),
    ),
    ("int8", {"quant_method": None}, None),
    ("int4", {"quantization_status": "frozen"}, None),
    ("int4", {}, with_tensors(".weight_shape", torch.Tensor.int)),
    ("int4", {}, lambda tensors: {**tensors, **NO_ORDER}),
    ("int4", {"config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}, None),
    ("nvfp4", {"config_groups": {"nvfp4a16": ["Linear"]}}, None),
    (
        "nvfp4",
        {
            "format": "mixed-precision",
            "config_groups": {
                "group_0": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4}}
            },
        },
        None,
    ),
]


@pytest.mark.parametrize(("kind", "changes", "change"), LAYOUTS)
def test_synonyms_and_older_layouts_that_transformers_opens_are_read(
    kind: str,
    changes: dict[str, Any],
    change: Any,
    copied: Callable[[str, Path], Path],
    tmp_path: Path,
) -> None:
    expected = read_by(copied(kind, tmp_path / "as it is"))
    coded = described(copied(kind, tmp_path), changes)
    if change is not None:
        changed = change(load_file(coded / "model.safetensors"))
        tensors = {name: value.contiguous() for name, value in changed.items()}
        save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    assert_equal(read_by(coded), expected)


def test_layers_of_other_bits_and_groups_are_read_by_their_tensors(
    copied: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    entries = {"-:.*lm_head.*": {}, "+:.*down.*": {"bits": 8, "group_size": 8, "mse": 0.1}}
    path = described(copied("gptq", tmp_path), {"dynamic": entries})
    tensors = load_file(path / "model.safetensors")
    (columns,), (_, rows) = tensors[f"{DOWN}.g_idx"].shape, tensors[f"{DOWN}.qweight"].shape
    matrix, expected = random_matrix("gptq, 8", rows, columns, 8, seed=5)
    tensors |= {f"{DOWN}.{name}": value for name, value in matrix.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    found = read_by(path)
    assert_same_bits(DOWN, found[f"{DOWN}.weight"], expected.half())
    others = read_by(copied("gptq", tmp_path / "as it was"))
    del found[f"{DOWN}.weight"], others[f"{DOWN}.weight"]
    assert_equal(found, others)


def test_modelopts_own_file_says_what_config_json_leaves_out(
    copied: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    path = copied("modelopt nvfp4", tmp_path)
    expected = read_by(path)
    config = json.loads((path / "config.json").read_bytes())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    own = path / "hf_quant_config.json"
    fields = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    own.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": fields}))
    assert_equal(read_by(path), expected)
    (path / "quantize_config.json").write_text("{}")
    exported = dequantised(path, tmp_path)
    assert not list(exported.glob("*quant*.json")), "of weights that are not encoded any more"
    assert_equal(read_by(exported), expected)
    for quantization, told in (
        ({"quant_algo": "MIXED_PRECISION"}, r"quantization\.quant_algo: found 'MIXED_PRECISION'"),
        ("x", "quantization: found 'x'; expected an object"),
    ):
        own.write_text(json.dumps({"quantization": quantization}))
        with pytest.raises(UnsupportedModelError, match=rf"hf_quant_config\.json: {told}"):
            open_checkpoint(path)
    own.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    shutil.copy(exported / "model.safetensors", path / "model.safetensors")
    assert_equal(read_by(path), expected)


@pytest.mark.parametrize("kind", ["nf4", "buffers"])
def test_checkpoints_of_shards_beyond_memory_open(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses to map such a shard privately, as safetensors' reader for torch does."""

    def refuse(path: str, *_: object, **__: object) -> None:
        raise RuntimeError(f"unable to mmap bytes from file <{path}>: Cannot allocate memory (12)")

    path = make(tmp_path, kind) if kind in METHODS else save("deepseek_v3", tmp_path / "base")
    monkeypatch.setattr(torch.UntypedStorage, "from_file", refuse)
    open_checkpoint(path).weights.close()


def test_a_quantised_head_trains_as_the_dequantised_one(tmp_path: Path) -> None:
    path = make(tmp_path, "int8")
    tensors = load_file(path / "model.safetensors")
    scale = {"lm_head.SCB": torch.rand(40)}
    weight = {"lm_head.weight": torch.randint(-127, 128, (40, 64), dtype=torch.int8)}
    save_file({**tensors, **weight, **scale}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert trajectory(path) == trajectory(dequantised(path, tmp_path))


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_or_quantised_already_is_not_quantised(
    method: str, tmp_path: Path
) -> None:
    path, again = make(tmp_path, method), tmp_path / "again"
    with pytest.raises(UnsupportedModelError, match=f"in {method}"):
        quantize(path, again, "nf4")
    with pytest.raises(OutputError, match="something at this path"):
        quantize(tmp_path / "base", path, method)
    with pytest.raises(OptionError, match="int4"):
        quantize(tmp_path / "base", again, "int4")
    shard = tmp_path / "base" / "model.safetensors"
    tensors = load_file(shard)
    tensors[f"{LAYER}.weight"][3, 5] = float("inf")
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight: found inf"):
        quantize(tmp_path / "base", again, method)
    assert not again.exists()


def test_other_precisions_than_one_dtype_and_directions_in_quantised_weights_are_refused(
    tmp_path: Path,
) -> None:
    path = make(tmp_path, "int8")
    mixed = Precision(stored=torch.float32, computed=torch.bfloat16)
    asked: list[dict[str, Any]] = [
        {"precision": "mixed"},
        {"precision": mixed},
        {"transfer_dtype": "bfloat16"},
    ]
    for options in asked:
        with pytest.raises(OptionError, match=f"^{next(iter(options))}: .*quantised"):
            open_checkpoint(path, **options)
    noise = PhiloxNoise(Distribution.RADEMACHER)
    with pytest.raises(OptionError, match=r"perturbation: .*stored in int8.*LowRankPerturbation"):
        Engine(open_checkpoint(path), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-2), noise=noise))


def test_a_quantised_base_on_the_command_line(tmp_path: Path) -> None:
    options = small_run(tmp_path, dtype=torch.bfloat16)
    quantised, run = tmp_path / "nf4", tmp_path / "run"
    said = done("convert", "--model", options.model, "--output", quantised, "--quantize", "nf4").out
    sizes = (
        sum(value.nbytes for value in load_file(path / "model.safetensors").values())
        for path in (quantised, Path(options.model))
    )
    assert said == "{}: the model in nf4, {}; it was {}\n".format(
        quantised, *map(shown_bytes, sizes)
    )
    shutil.rmtree(tmp_path / "base")
    train = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        quantised,
        "--data",
        options.data,
        "--output",
        run,
        "--steps",
        "4",
        "--lr",
        "1e-3",
    ]
    assert "--rank" in refusal(*train)
    done(*train, "--rank", "2", "--period", "2")
    assert "--rank" in refusal("plan", "--method", "zeroth-order", "--model", quantised)
    said = done("plan", "--method", "zeroth-order", "--model", quantised, "--rank", "2").out
    assert "factors of directions" in said
    assert re.search(r"written back +never", said)
    assert re.search(r"written per 1,000 steps +[0-9.]+ [kM]B", said), "what periods came to"
    said = done(
        "plan",
        "--method",
        "zeroth-order",
        "--model",
        quantised,
        "--rank",
        "2",
        "--device-memory",
        "2GB",
    ).out
    assert re.search(r"transferred back per step +0", said)
    done("export", "--run", run, "--output", tmp_path / "merged")
    assert open_checkpoint(tmp_path / "merged").layouts[1].parameters[0].dtype is torch.bfloat16


def read_by(path: Path) -> dict[str, torch.Tensor]:
    """The weights that an engine has of a checkpoint."""
    with closing(Engine(open_checkpoint(path))) as opened:
        return {name: value.clone() for name, value in opened.parameters_now()}


@pytest.mark.parametrize("method", METHODS)
def test_transformers_reads_what_was_written(method: str, tmp_path: Path) -> None:
    if method != "fp8":
        pytest.importorskip("bitsandbytes")
    path = make(tmp_path, method)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    if method == "fp8":  # on a CPU transformers dequantises it
        assert {name: tensor.dtype for name, tensor in loaded.named_parameters()}[
            f"{LAYER}.weight"
        ] is torch.bfloat16
    theirs = dict(loaded.named_parameters())
    for name, value in read_by(path).items():
        assert_same_bits(name, value, as_floats(loaded, name, theirs[name]))


def as_floats(model: Any, name: str, weight: Any) -> torch.Tensor:
    """A parameter of transformers' model, by bitsandbytes' own functions where it is encoded."""
    state = getattr(weight, "quant_state", None)
    if state is None and weight.dtype is not torch.int8:
        plain: torch.Tensor = weight.detach()
        return plain
    functional: Any = pytest.importorskip("bitsandbytes.functional")
    if state is not None:
        decoded: torch.Tensor = functional.dequantize_4bit(weight.data, state)
    else:
        decoded = functional.int8_vectorwise_dequant(weight.data, weight.SCB).to(model.dtype)
    return decoded


NF4: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": "bfloat16",
}


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({**NF4, "bnb_4bit_use_double_quant": True}, "auto"),
        ({**NF4, "bnb_4bit_use_double_quant": False}, "auto"),
        ({**NF4, "bnb_4bit_quant_storage": "bfloat16"}, "auto"),
        ({**NF4, "bnb_4bit_quant_type": "fp4"}, "auto"),
        ({**NF4, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True}, torch.float16),
        *(
            ({**NF4, "bnb_4bit_quant_type": kind, "bnb_4bit_quant_storage": storage}, "auto")
            for kind, storage in (("fp4", "float32"), ("nf4", "float16"), ("nf4", "int8"))
        ),
        ({"load_in_8bit": True}, torch.float16),
    ],
    ids=str,
)
def test_what_bitsandbytes_writes_is_read(
    options: dict[str, Any], dtype: Any, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    make(tmp_path, "int8")
    made: Any = BitsAndBytesConfig
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=made(**options), dtype=dtype
    )
    loaded.save_pretrained(tmp_path / "theirs")
    theirs, ours = dict(loaded.named_parameters()), read_by(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert_same_bits(name, value, as_floats(loaded, name, theirs[name]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("kept", [0, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_gpu_decodes_to_the_dequantised_models_bits(
    method: str, kept: int, tmp_path: Path
) -> None:
    path = make(tmp_path, method)
    plain = dequantised(path, tmp_path)
    expected = trajectory(plain, device="cuda", memory=memory(kept=kept))
    assert trajectory(path, device="cuda", memory=memory(kept=kept)) == expected


def test_matrices_of_a_mixture_that_are_left_are_counted_and_named(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "base")
    said = done(
        "convert", "--model", tmp_path / "base", "--output", tmp_path / "nf4", "--quantize", "nf4"
    ).out
    encoded = {
        spec.name
        for layout in open_checkpoint(tmp_path / "nf4").layouts
        for spec in layout.parameters
        if spec.encoding
    }
    assert any(".experts." in name for name in encoded)
    layers = [
        layout for layout in open_checkpoint(tmp_path / "base").layouts if not layout.resident
    ]
    left = [
        spec
        for layout in layers
        for spec in layout.parameters
        if len(spec.shape) > 1 and spec.name not in encoded
    ]
    assert left  # the routers
    assert all(".gate." in spec.name for spec in left)
    assert f"not in nf4: {len(left)} of the layers' matrices" in said
    assert ".gate." in said
    (tmp_path / "dense").mkdir()
    make(tmp_path / "dense", "int8")
    whole = ("--model", tmp_path / "dense" / "base", "--output", tmp_path / "8")
    assert "not in" not in done("convert", *whole, "--quantize", "int8").out

"""Directories of a stranger: what beside a model's weights is read, refused and exported, and what
code is imported.
"""

import json
import os
import py_compile
import re
import shutil
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command_lines import done, refusal
from families import small_config as family_config
from families import small_model
from models import make_batch, save_model, save_tokenizer, small_config
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zo2adapters
from zo2adapters import Adapter, open_checkpoint
from zo2adapters.cli import format_warning, show_warning
from zo2adapters.models import checkpoint
from zo2adapters.models.checkpoint import refuse_oversized, resolve_directory
from zo2adapters.models.export import export_adapter
from zo2adapters.models.skeleton import Bounds, OversizedError, build_skeleton
from zo2adapters.tasks.task import user_function
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2adapters.trainers import checked_json
from zo2adapters.trainers.run_directory import RunDirectory
from zo2core import (
    DensePerturbation,
    Engine,
    FirstOrder,
    Journal,
    LowRankPerturbation,
    MeZOSGD,
    ZerothOrder,
    ZO2Error,
)
from zo2core.errors import CheckpointError, OptionError, UnsupportedModelError, ZO2Warning
from zo2core.io.durable import FileState

peft: Any = pytest.importorskip("peft")
BATCH = make_batch(40, [5, 4])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = save_model(tmp_path / "base", small_config("llama"))
    save_tokenizer(directory)
    return directory


def export(directory: Path, out: Path) -> Path:
    with Engine(open_checkpoint(directory)) as engine:
        engine.export(out)
    return out


def change_json(path: Path, changes: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", "tokenizer.json", "generation_config.json"]
)
def test_a_link_out_of_the_directory_is_refused(name: str, base: Path, tmp_path: Path) -> None:
    (base / name).unlink(missing_ok=True)
    (tmp_path / "secret").write_text("{}")
    (base / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link to") as info:
        open_checkpoint(base)
    assert info.value.where == str(base / name)
    with pytest.raises(CheckpointError, match="a link to"):
        load_tokenizer(base)


@pytest.mark.parametrize("shard_size", ["5GB", "2KB"], ids=["one file", "shards"])
def test_weights_that_a_link_takes_from_elsewhere_are_refused(
    shard_size: str, tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), max_shard_size=shard_size)
    files = sorted(base.glob("model*"))
    assert len(files) == 1 if shard_size == "5GB" else len(files) > 2
    for path in files:
        path.rename(tmp_path / "secret")
        for target in (tmp_path / "secret", "../secret"):
            path.symlink_to(target)
            with pytest.raises(
                CheckpointError, match=f"found a link to {tmp_path / 'secret'}; expected"
            ) as info:
                open_checkpoint(base)
            assert info.value.where == str(path)
            path.unlink()
        (tmp_path / "secret").rename(path)
    (tmp_path / "link").symlink_to(base)
    assert open_checkpoint(tmp_path / "link").layouts == open_checkpoint(base).layouts


@pytest.mark.parametrize("other", ["models--a--c/blobs", "blobs", "models--a--b/blobs"])
def test_blobs_of_another_model_and_those_that_link_elsewhere_are_refused(
    other: str, tmp_path: Path
) -> None:
    revision, blob = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / other / "0"
    save_model(revision, small_config("llama"))
    blob.parent.mkdir(parents=True)
    (revision / "model.safetensors").rename(
        tmp_path / "secret" if other == "models--a--b/blobs" else blob
    )
    if not blob.exists():
        blob.symlink_to(tmp_path / "secret")
    (revision / "model.safetensors").symlink_to(blob)
    with pytest.raises(CheckpointError, match="a link to"):
        open_checkpoint(revision)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapters_files_that_links_take_from_elsewhere_are_refused(
    name: str, base: Path, tmp_path: Path
) -> None:
    peft: Any = pytest.importorskip("peft")
    whole = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(whole, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(
        tmp_path / "adapter"
    )
    (tmp_path / "adapter" / name).rename(tmp_path / "secret")
    (tmp_path / "adapter" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link to"):
        open_checkpoint(base, adapter=Adapter(config=tmp_path / "adapter"))


def test_links_inside_the_directory_and_of_the_hubs_cache_are_followed(
    base: Path, tmp_path: Path
) -> None:
    (base / "again.txt").symlink_to("config.json")
    revision, blobs = (
        tmp_path / "models--a--b" / "snapshots" / "abc",
        tmp_path / "models--a--b" / "blobs",
    )
    revision.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(base.iterdir())):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (revision / path.name).symlink_to(f"../../blobs/{number}")
    for source in (base, revision):
        out = export(source, tmp_path / f"out-{source.name}")
        assert (out / "again.txt").read_bytes() == (base / "config.json").read_bytes()
        assert not any(path.is_symlink() for path in out.iterdir())
        assert load_tokenizer(source) is not None


def listen(path: Path) -> None:
    where = os.open(path.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{where}/{path.name}")  # a socket's own path may not be long
    os.close(where)


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": listen,
    "a directory": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "1 TiB": sparse,
    "lists in lists": lambda path: path.write_bytes(b"[" * 1_000_000),
    "objects in objects": lambda path: path.write_bytes(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "no JSON": lambda path: path.write_bytes(b"\xff\x00"),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "tokenizer_config.json", "additional_chat_templates/x.jinja"],
)
def test_a_file_that_is_none_or_absurd_is_refused_at_once(
    name: str, make: Callable[[Path], object], base: Path
) -> None:
    (base / "additional_chat_templates").mkdir()
    (base / name).unlink(missing_ok=True)
    make(base / name)
    if (
        name.endswith("jinja")
        and (base / name).is_file()
        and (base / name).stat().st_size < 1 << 30
    ):
        return  # any text may be a template

    with pytest.raises(ZO2Error) as info:
        open_checkpoint(base) and load_tokenizer(base)
    assert "\n" not in str(info.value)


def test_an_export_holds_no_remote_code_and_loads_without(base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        inner = [{"auto_map": {"AutoModel": "code.Model"}, "kept": 1}]
        change_json(base / name, {"auto_map": {"AutoConfig": "code.Config"}, "inner": inner})
    (base / "code.py").write_text("raise SystemExit")
    with pytest.warns(ZO2Warning, match="auto_map is left out") as warned:
        out = export(base, tmp_path / "out")
    assert len(warned) == 1
    assert "\n" not in str(warned[0].message)
    assert not any(b"auto_map" in path.read_bytes() for path in out.iterdir())
    assert not (out / "code.py").exists()
    assert json.loads((out / "config.json").read_bytes())["inner"] == [{"kept": 1}]
    assert AutoConfig.from_pretrained(out, trust_remote_code=False).model_type == "llama"
    assert AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False) is not None
    assert AutoTokenizer.from_pretrained(out, trust_remote_code=False) is not None


def test_a_command_shows_a_warning_of_ours_as_one_line_also_in_a_progress_bar(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert format_warning(ZO2Warning("said"), ZO2Warning, "file.py", 1) == "zo2: said\n"
    assert "file.py:1" in format_warning(UserWarning("said"), UserWarning, "file.py", 1)
    with tqdm(total=9, file=sys.stderr, mininterval=0) as bar:
        bar.update(4)
        show_warning(ZO2Warning("said"), ZO2Warning, "file.py", 1)
    assert "\nzo2: said\n" in capsys.readouterr().err.replace("\r", "\n")


def replace_whole(path: Path) -> None:
    """Put another file of the same size and the same time of the last write at a path."""
    shutil.copy2(path, path.with_name("other"))
    path.with_name("other").replace(path)


def write_in_place(path: Path) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))


BASE_FILES = ["model.safetensors", "config.json", "tokenizer.json", "generation_config.json"]


@pytest.mark.parametrize("name", BASE_FILES)
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (replace_whole, "another file in its place"),
        (write_in_place, "another process has written"),
        (Path.unlink, "No such file"),
    ],
)
@pytest.mark.parametrize("trains", ["all", "adapter", "low rank"])
@pytest.mark.few(6)
def test_a_base_that_changes_is_refused_by_each_step_and_export_although_it_is_in_memory(
    name: str, change: Callable[[Path], None], found: str, trains: str, base: Path, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = open_checkpoint(base, adapter=Adapter(config=config) if trains == "adapter" else None)
    perturbation = LowRankPerturbation(rank=1) if trains == "low rank" else DensePerturbation()
    method: Any = ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3), perturbation=perturbation)
    if trains == "adapter":
        method = FirstOrder(partial(torch.optim.SGD, lr=1e-3))
    with Engine(model, method) as engine:
        engine.step(BATCH)
        change(base / name)
        operations: dict[str, Callable[[], object]] = {
            "step": lambda: engine.step(BATCH),
            "export": lambda: engine.export(tmp_path / "out"),
            "weights": lambda: next(engine.parameters_now()),
            **(
                {"gradients": lambda: engine.gradients(BATCH)}
                if trains == "adapter"
                else {"ask": engine.ask}
            ),
        }
        if trains == "low rank":
            operations["adapter"] = lambda: export_adapter(
                engine, model, tmp_path / "out", base=str(base)
            )
        for operation in operations.values():
            with pytest.raises(CheckpointError, match=found) as refused:
                operation()
            assert refused.value.where == str(base / name)
        assert engine.version == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_attributes_and_another_number_of_the_same_file_are_no_change(base: Path) -> None:
    path = base / "model.safetensors"
    state = FileState.of(path)
    path.chmod(0o600)
    state.require(path, path)
    state = FileState.of(path)._replace(identity=(0, 0))  # of some file systems in user space
    state.require(path, path)


def test_a_link_that_leads_to_another_file_is_a_change_and_each_file_costs_one_call(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (base / "tokenizer.json").rename(base / "first.json")
    (base / "tokenizer.json").symlink_to(base / "first.json")
    shutil.copy(base / "first.json", base / "second.json")
    model = open_checkpoint(base)
    looked_at: list[Any] = []
    stat = os.stat

    def counting_stat(path: Any) -> os.stat_result:
        looked_at.append(path)
        return stat(path)

    with monkeypatch.context() as counted:
        counted.setattr(os, "stat", counting_stat)
        model.require_unchanged()
    suffixes = (".json", ".safetensors")
    assert sorted(looked_at) == sorted(path for path in base.iterdir() if path.suffix in suffixes)
    (base / "tokenizer.json").unlink()
    (base / "tokenizer.json").symlink_to(base / "second.json")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: found another file in its place"):
        model.require_unchanged()


@pytest.mark.parametrize(
    ("config", "name", "value", "largest"),
    [
        ({"model_type": "gpt2"}, "n_layer", 2_000, 1 << 10),
        ({"model_type": "gpt2"}, "num_hidden_layers", 2_000, 1 << 10),
        ({"model_type": "gpt2"}, "n_embd", 1e300, 1 << 20),
        ({"model_type": "gemma3"}, "text_config.num_hidden_layers", 2_000, 1 << 10),
        (
            {"model_type": "llava", "text_config": {"model_type": "gpt2"}},
            "text_config.n_layer",
            2_000,
            1 << 10,
        ),
        ({"model_type": "qwen2_5_vl"}, "vision_config.depth", 2_000, 1 << 10),
        ({"model_type": "nothing known"}, "some.inner.head_dim", 1 << 21, 1 << 20),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_absurd_sizes_are_refused_under_every_name_and_in_inner_configs(
    config: dict[str, Any], name: str, value: float, largest: int, tmp_path: Path
) -> None:
    *outer, last = name.split(".")
    place = config = json.loads(json.dumps(config))
    for key in outer:
        place = place.setdefault(key, {})
    place[last] = largest
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuse_oversized(tmp_path / "config.json")
    place[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = f"config.json: {name}: found {re.escape(str(value))}; expected at most {largest}"
    with pytest.raises(CheckpointError, match=told):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("model_type", "name"), [("gpt2", "n_inner"), ("gptj", "n_positions")])
def test_what_a_size_under_another_name_asks_for_is_not_made(
    model_type: str, name: str, tmp_path: Path
) -> None:
    small_model(family_config(model_type)).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", {name: 1 << 28})
    with pytest.raises(CheckpointError, match="a model with a table of 268435456 numbers"):
        open_checkpoint(tmp_path)


def test_a_model_is_built_within_bounds_that_follow_from_the_checkpoint() -> None:
    config = small_config("opt", num_hidden_layers=6)
    numel = [parameter.shape for parameter in build_skeleton(config, torch.float32).parameters()]
    assert build_skeleton(config, torch.float32, bounds=Bounds.of(numel)) is not None
    with pytest.raises(OversizedError, match="more than 20 parameters"):
        build_skeleton(config, torch.float32, bounds=Bounds(parameters=20))
    sinusoids = family_config("gptj")  # an outer product of two vectors, each of which is small
    assert build_skeleton(sinusoids, torch.float32, bounds=Bounds(numbers=4096)) is not None
    with pytest.raises(OversizedError, match="a table of"):
        build_skeleton(sinusoids, torch.float32, bounds=Bounds(numbers=100))


def save_others(path: Path, base: Path) -> None:
    """Write other weights of the same model."""
    state = AutoModelForCausalLM.from_pretrained(base).state_dict()
    other = {name: tensor + 1 for name, tensor in state.items()}
    if path.suffix == ".bin":
        torch.save(other, path)
    else:
        save_file(other, path, metadata={"format": "pt"})


def copy_into_last_shard(base: Path) -> None:
    """Lay another value of a tensor in the last shard, which the index looks for in the first."""
    index = json.loads((base / "model.safetensors.index.json").read_bytes())["weight_map"]
    first, *_, last = sorted(set(index.values()))
    name = next(name for name, shard in index.items() if shard == first)
    tensors = load_file(base / last)
    tensors[name] = load_file(base / first)[name] + 1
    save_file(tensors, base / last, metadata={"format": "pt"})


CHOICES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "one file beside shards": ("2KB", lambda base: save_others(base / "model.safetensors", base)),
    "consolidated beside shards": (
        "2KB",
        lambda base: save_others(base / "consolidated.safetensors", base),
    ),
    "a copy in a later shard": ("2KB", copy_into_last_shard),
    "a variant": ("5GB", lambda base: save_others(base / "model.fp16.safetensors", base)),
    "pickled beside it": ("5GB", lambda base: save_others(base / "pytorch_model.bin", base)),
    "a name in the config": (
        "5GB",
        lambda base: change_json(
            base / "config.json", {"transformers_weights": "model.safetensors"}
        ),
    ),
}


@pytest.mark.parametrize(("shard_size", "arrange"), CHOICES.values(), ids=CHOICES)
def test_of_several_files_those_count_that_transformers_loads(
    shard_size: str, arrange: Callable[[Path], object], tmp_path: Path
) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), max_shard_size=shard_size)
    arrange(base)
    expected = AutoModelForCausalLM.from_pretrained(base).state_dict()
    exported = load_file(export(base, tmp_path / "out") / "model.safetensors")
    assert exported
    assert all(torch.equal(value, expected[name]) for name, value in exported.items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(again[name], value) for name, value in expected.items())


def embed_adapter(base: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    whole = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(whole, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(base)


def pickle_beside_a_variant(base: Path) -> None:
    save_others(base / "pytorch_model.bin", base)
    (base / "model.safetensors").rename(base / "model.fp16.safetensors")


UNCLEAR: dict[str, tuple[Callable[[Path], object], str]] = {
    "a variant alone": (
        lambda base: (base / "model.safetensors").rename(base / "model.fp16.safetensors"),
        r"model\.fp16\.safetensors: found weights under another name; expected model\.safeten",
    ),
    "consolidated alone": (
        lambda base: (base / "model.safetensors").rename(base / "consolidated.safetensors"),
        r"consolidated\.safetensors: found weights under another name.* rename it",
    ),
    "a GGUF file": (
        lambda base: (base / "model.safetensors").rename(base / "model-f16.gguf"),
        r"model-f16\.gguf: found weights under another name.* pass the path of this file",
    ),
    "a pickle and a variant": (
        pickle_beside_a_variant,
        r"pytorch_model\.bin: found pickled weights.* zo2 convert",
    ),
    "another name in the config": (
        lambda base: change_json(base / "config.json", {"transformers_weights": "x.safetensors"}),
        r"config\.json: transformers_weights: found 'x\.safetensors'; expected model\.safetensors",
    ),
    "an adapter": (
        embed_adapter,
        r"adapter_config\.json: found an adapter beside a model; expected a model alone",
    ),
}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize(("arrange", "told"), UNCLEAR.values(), ids=UNCLEAR)
def test_weights_that_transformers_would_take_otherwise_are_refused_by_name(
    arrange: Callable[[Path], object], told: str, base: Path
) -> None:
    arrange(base)
    with pytest.raises(UnsupportedModelError, match=told):
        open_checkpoint(base)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
def test_a_model_with_an_adapter_is_merged_if_both_are_named_and_has_none_then(
    base: Path, tmp_path: Path
) -> None:
    embed_adapter(base)
    done("merge", "--model", base, "--adapter", base, "--output", tmp_path / "out")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out") is not None


@pytest.mark.parametrize("kind", ["one file", "shards", "one file and shards"])
def test_only_needed_weights_are_downloaded(
    kind: str, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    shutil.copytree(base, hub)
    names = ["model.safetensors"]
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    if kind != "one file":
        weight_map = dict(zip("ab", shards, strict=True))
        (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if kind == "shards":
        names = shards
        (hub / "model.safetensors").unlink()
    for name in shards:
        (hub / name).touch()
    for name in ("consolidated.safetensors", "model.fp16.safetensors", *names):
        (hub / name).touch()
    cache.mkdir()

    def download(name: str, *, allow_patterns: list[str]) -> str:
        for path in hub.iterdir():
            if any(path.match(pattern) for pattern in allow_patterns):
                shutil.copyfile(path, cache / path.name)
        return str(cache)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    resolve_directory("user/model")
    assert sorted(path.name for path in cache.glob("*.safetensors")) == names
    assert (cache / "config.json").exists()


FUNCTION = "def calm(model, batch):\n    return model(**batch).logits.square().mean()\n"
MARKING = "import pathlib\npathlib.Path({!r}).touch()\n"


RESUME = ("train", "--resume", "run", "--steps", 3)
ON_ROWS = ("train", "--method", "zeroth-order", "--model", "base", "--data", "rows.jsonl")
NAMED = ("--objective", "own.py:calm")


@pytest.fixture
def place(here: Path) -> Path:
    """A run of two steps on a function in ``own.py``."""
    (here / "own.py").write_text(FUNCTION)
    done(*ON_ROWS, "--output", "run", "--steps", 2, "--batch-size", 2, "--lr", 1e-3, *NAMED)
    return here


def steps() -> int:
    return len(Journal("run/journal.jsonl").updates)


def test_a_run_runs_no_function_that_the_command_does_not_name(place: Path) -> None:
    (place / "own.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION)
    assert "own.py:calm if you trust it" in refusal(*RESUME)
    assert "own.py:calm if you trust it" in refusal(
        "train", "--resume", "run", "--from-step", 1, "--output", "branch"
    )
    assert not (place / "mark").exists()
    (place / "own.py").write_text(FUNCTION)
    done(*RESUME, *NAMED)
    assert steps() == 3
    command = RunDirectory(Path("run")).options().resume_command  # names its functions
    done(*command.split()[1:], "--steps", 4)
    values = {
        "model": "base",
        "data": "rows.jsonl",
        "output": "other",
        "steps": 2,
        "objective": "own.py:calm",
    }
    (place / "recipe.yaml").write_text(json.dumps(values))
    done("train", "recipe.yaml", *NAMED)
    assert zo2adapters.train({**values, "output": "mapped"}) == Path("mapped"), (
        "who writes a mapping names the function"
    )


@pytest.mark.parametrize(
    "line", ["objective: own.py:calm", "reward: own.py:calm", "reward: [length, own.py:calm=2]"]
)
def test_a_recipe_runs_no_function_that_the_command_does_not_name(place: Path, line: str) -> None:
    (place / "own.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION)
    option, more = (
        line.partition(":")[0],
        "estimator: es\nqueries: 2\n" if line.startswith("reward") else "",
    )
    (place / "recipe.yaml").write_text(
        f"model: base\ndata: rows.jsonl\noutput: other\nsteps: 2\n{more}{line}\n"
    )
    told = refusal("train", "recipe.yaml")
    assert told.startswith(f"zo2: recipe.yaml: {option}: found ")
    assert "expected the same functions on the command line" in told
    with pytest.raises(OptionError, match="the same functions on the command line"):
        zo2adapters.train(place / "recipe.yaml", {"steps": 1})
    (place / "runs.yaml").write_text(f"one: {{{line}}}\n")
    told = refusal(*ON_ROWS, "--output", "all", "--rank", 2, "--runs", "runs.yaml")
    assert f"runs.yaml, one: {option}: found" in told
    assert not (place / "mark").exists()


def test_a_file_that_was_changed_is_not_imported_and_one_that_moved_is_named_at_its_new_place(
    place: Path,
) -> None:
    (place / "own.py").write_text(MARKING.format(str(place / "mark")) + FUNCTION)
    line = refusal(*RESUME, *NAMED)
    assert line.startswith("zo2: --objective: found ")
    assert not (place / "mark").exists()
    assert steps() == 2
    (place / "own.py").unlink()
    (place / "moved.py").write_text(FUNCTION)
    assert "--objective: found" in refusal(*RESUME, "--objective", "moved.py:gone")
    done(*RESUME, "--objective", "moved.py:calm")
    assert "moved.py:calm if you trust it" in refusal("train", "--resume", "run", "--steps", 4), (
        "the new path is saved"
    )


@pytest.mark.parametrize("function", ["calm", "other"])
def test_another_file_that_the_options_name_is_not_imported(place: Path, function: str) -> None:
    (place / "other.py").write_text(
        MARKING.format(str(place / "mark")) + FUNCTION.replace("calm", function)
    )
    record = json.loads(Path("run/options.json").read_bytes())
    del record["sha256"]
    record["options"]["objective"] = f"{place / 'other.py'}:{function}"
    Path("run/options.json").write_text(checked_json.to_text(record))
    assert f"other.py:{function} if you trust it" in refusal(*RESUME)
    assert "--objective: found" in refusal(*RESUME, "--objective", f"other.py:{function}")
    assert not (place / "mark").exists()


def test_compiled_code_beside_a_function_is_not_run(tmp_path: Path) -> None:
    """Python's import takes it if size and time of the source are those that it names, whatever the
    source says.
    """
    source, other = tmp_path / "own.py", tmp_path / "other.py"
    other.write_text("def one(model, batch):\n    raise OSError\n")
    source.write_text("def one(model, batch):\n    return 1.0  #\n")
    assert source.stat().st_size == other.stat().st_size
    os.utime(other, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    cached = Path(py_compile.compile(str(other), doraise=True) or "")
    cached.rename(cached.with_name(cached.name.replace("other", "own")))
    with pytest.raises(OptionError, match="found float from one"):
        # what the source says: it returned a number
        user_function(f"{source}:one")(None, {})


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_model_that_names_code_of_the_hub_is_refused_by_name(base: Path, key: str) -> None:
    change_json(base / "config.json", {key: "kernels-community/flash-attn2"})
    with pytest.raises(
        UnsupportedModelError, match=r"kernels-community/flash-attn2.*remote code is never run"
    ):
        open_checkpoint(base)

"""The files beside a model's weights, from a stranger: what is read, what is refused, what goes along."""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_config as family_config
from families import small_model
from models import save_model, save_tokenizer, small_config
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from zo2adapters import Adapter, open_checkpoint
from zo2adapters.cli import format_warning, show_warning
from zo2adapters.models import checkpoint
from zo2adapters.models.checkpoint import refuse_oversized, resolve_directory
from zo2adapters.models.skeleton import Bounds, OversizedError, build_skeleton
from zo2adapters.tasks.tokenizer import load_tokenizer
from zo2core import Engine, MeZOSGD, ZerothOrder, ZO2Error
from zo2core.errors import CheckpointError, ZO2Warning


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = save_model(tmp_path / "base", small_config("llama"))
    save_tokenizer(directory)
    return directory


def export(directory: Path, out: Path) -> Path:
    with Engine(open_checkpoint(directory), ZerothOrder(MeZOSGD(lr=1e-3, zo_eps=1e-3))) as engine:
        engine.export(out)
    return out


@pytest.mark.parametrize("name", ["notes.txt", "config.json", "tokenizer.json", "generation_config.json"])
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
def test_weights_that_a_link_takes_from_elsewhere_are_refused(shard_size: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", small_config("llama"), max_shard_size=shard_size)
    files = sorted(base.glob("model*"))
    assert len(files) == 1 if shard_size == "5GB" else len(files) > 2
    for path in files:
        path.rename(tmp_path / "secret")
        for target in (tmp_path / "secret", "../secret"):
            path.symlink_to(target)
            with pytest.raises(CheckpointError, match=f"found a link to {tmp_path / 'secret'}; expected") as info:
                open_checkpoint(base)
            assert info.value.where == str(path)
            path.unlink()
        (tmp_path / "secret").rename(path)
    (tmp_path / "link").symlink_to(base)
    assert open_checkpoint(tmp_path / "link").layouts == open_checkpoint(base).layouts


@pytest.mark.parametrize("other", ["models--a--c/blobs", "blobs", "models--a--b/blobs"])
def test_blobs_of_another_model_and_those_that_link_elsewhere_are_refused(other: str, tmp_path: Path) -> None:
    revision, blob = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / other / "0"
    save_model(revision, small_config("llama"))
    blob.parent.mkdir(parents=True)
    (revision / "model.safetensors").rename(tmp_path / "secret" if other == "models--a--b/blobs" else blob)
    if not blob.exists():
        blob.symlink_to(tmp_path / "secret")
    (revision / "model.safetensors").symlink_to(blob)
    with pytest.raises(CheckpointError, match="a link to"):
        open_checkpoint(revision)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks for it
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapters_files_that_links_take_from_elsewhere_are_refused(name: str, base: Path, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    whole = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(whole, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / name).rename(tmp_path / "secret")
    (tmp_path / "adapter" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link to"):
        open_checkpoint(base, adapter=Adapter(config=tmp_path / "adapter"))


def test_links_inside_the_directory_and_of_the_hubs_cache_are_followed(base: Path, tmp_path: Path) -> None:
    (base / "again.txt").symlink_to("config.json")
    revision, blobs = tmp_path / "models--a--b" / "snapshots" / "abc", tmp_path / "models--a--b" / "blobs"
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
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "additional_chat_templates/x.jinja"]
)
def test_a_file_that_is_none_or_absurd_is_refused_at_once(name: str, make: Callable[[Path], object], base: Path) -> None:
    (base / "additional_chat_templates").mkdir()
    (base / name).unlink(missing_ok=True)
    make(base / name)
    if name.endswith("jinja") and (base / name).is_file() and (base / name).stat().st_size < 1 << 30:
        return  # any text may be a template

    def use() -> None:
        open_checkpoint(base)
        load_tokenizer(base)

    with pytest.raises(ZO2Error) as info:
        use()
    assert "\n" not in str(info.value)


def test_an_export_holds_no_remote_code_and_loads_without(base: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        path = base / name
        values = {**json.loads(path.read_bytes()), "auto_map": {"AutoConfig": "code.Config"}}
        path.write_text(json.dumps({**values, "inner": [{"auto_map": {"AutoModel": "code.Model"}, "kept": 1}]}))
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


def test_a_command_shows_a_warning_of_ours_as_one_line_also_in_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert format_warning(ZO2Warning("said"), ZO2Warning, "file.py", 1) == "zo2: said\n"
    assert "file.py:1" in format_warning(UserWarning("said"), UserWarning, "file.py", 1)
    with tqdm(total=9, file=sys.stderr, mininterval=0) as bar:
        bar.update(4)
        show_warning(ZO2Warning("said"), ZO2Warning, "file.py", 1)
    assert "\nzo2: said\n" in capsys.readouterr().err.replace("\r", "\n")


@pytest.mark.parametrize(
    ("config", "name", "value", "largest"),
    [
        ({"model_type": "gpt2"}, "n_layer", 2_000, 1 << 10),
        ({"model_type": "gpt2"}, "num_hidden_layers", 2_000, 1 << 10),
        ({"model_type": "gpt2"}, "n_embd", 1e300, 1 << 20),
        ({"model_type": "gemma3"}, "text_config.num_hidden_layers", 2_000, 1 << 10),
        ({"model_type": "llava", "text_config": {"model_type": "gpt2"}}, "text_config.n_layer", 2_000, 1 << 10),
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
    with pytest.raises(
        CheckpointError, match=f"config.json: {name}: found {re.escape(str(value))}; expected at most {largest}"
    ):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "name", "said"),
    [("gpt2", "n_inner", "a table of 268435456 numbers"), ("gptj", "n_positions", "a table of 268435456 numbers")],
)
def test_what_a_size_under_another_name_asks_for_is_not_made(model_type: str, name: str, said: str, tmp_path: Path) -> None:
    small_model(family_config(model_type)).save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({**values, name: 1 << 28}))
    with pytest.raises(CheckpointError, match=f"config.json: found the config of a model with {said}"):
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


@pytest.mark.parametrize("index", [True, False])
def test_only_needed_weights_are_downloaded(
    index: bool, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, cache = tmp_path / "hub", tmp_path / "cache"
    shutil.copytree(base, hub)
    names = ["model.safetensors"]
    if index:
        names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
        (hub / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict(zip("ab", names, strict=True))}))
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

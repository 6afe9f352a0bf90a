"""``zo2 report``: one page, which needs nothing else, of runs as they are on disk."""

import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from command_lines import done, refusal, write_rows
from models import WORDS, save_model, save_tokenizer, small_config
from runs import rows_of

from zo2adapters.commands import report_page
from zo2adapters.commands.journal import HEAD
from zo2adapters.commands.report_page import page, read_run
from zo2adapters.trainers import checked_json
from zo2core import Journal

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    save_model(folder / "model", small_config("llama", max_position_embeddings=32))
    save_tokenizer(folder / "model")
    write_rows(
        folder / "rows.jsonl",
        [{"prompt": f"the {word}", "completion": f" {word}"} for word in WORDS[3:8]],
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        common = [
            "train",
            "--method",
            "zeroth-order",
            "--model",
            "model",
            "--data",
            "rows.jsonl",
            "--batch-size",
            "2",
            "--steps",
            "6",
            "--lr",
            "1e-3",
        ]
        done(
            *common, "--output", "a <b> & c", "--evaluation", "rows.jsonl", "--evaluate-every", "2"
        )
        done(*common, "--output", "two", "--seed", "1", "--queries", "2")
    return folder


class Elements(HTMLParser):
    """Elements of a page, and whatever would be loaded from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            if (
                name in ("src", "href", "xlink:href")
                and value is not None
                and not value.startswith("#")
            ):
                self.loaded.append(value)


def test_the_page_says_what_is_in_the_runs(here: Path) -> None:
    assert done("report", "a <b> & c", "two", "-o", "page.html").out == "page.html\n"
    text = Path("page.html").read_text()
    assert "null" not in text
    assert ">rank<" not in text, "an option that no run has set"
    assert re.search(r'<td class="key">evaluate_every</td><td>2</td><td>not set</td>', text)
    elements = Elements()
    elements.feed(text)
    assert elements.loaded == []
    assert "script" not in elements.seen
    assert elements.seen.count("svg") == 3
    assert "<b>" not in text
    assert "a &lt;b&gt; &amp; c" in text
    assert ">6, 12<" in text.replace(" ", " ")
    assert ">6, 24<" in text
    run = read_run(Path("a <b> & c"))
    best = min(run.evaluations, key=lambda row: (row["evaluation_loss"], row["step"]))
    assert f"{best['evaluation_loss']:.4f} at step {best['step']}" in text
    assert re.search(r'<tr class="differs"><td class="key">seed</td><td>0</td><td>1</td>', text)
    assert re.search(r'<tr><td class="key">steps</td><td>6</td><td>6</td>', text)
    assert re.search(r">training loss, from [\d.]+<", text)
    # blocks are in memory
    assert (
        '<td class="key">written to disk, with snapshots</td><td>0, 0 in 1,000 steps</td>' in text
    )
    assert run.minutes == sorted(run.minutes)
    table = dict(
        re.findall(r'<td class="key">([^<]*)</td><td>(.*)</td></tr>', text.partition("<h2>Loss")[0])
    )
    first, last = (Journal("a <b> & c/journal.jsonl").evaluations[step]["loss"] for step in (0, 6))
    assert (
        table["evaluation loss, first and last"]
        == f"{first:.4f}, {last:.4f} at step 0 and 6</td><td>none"
    )
    assert table["method"] == "zeroth-order (mezo)</td><td>zeroth-order (mezo)"
    assert table["data"] == "rows.jsonl</td><td>rows.jsonl"
    assert "steps rejected by the guard" not in table
    done("report", "two", "-o", "page.html")
    assert Path("page.html").read_text() != text
    for path in ("own.html", "nowhere/page.html"):
        if path == "own.html":
            Path(path).write_text("<!doctype html>\n<html></html>\n")
        assert f"{path}: found" in refusal("report", "two", "-o", path)
    assert Path("own.html").read_text() == "<!doctype html>\n<html></html>\n"
    options = json.loads(Path("two/options.json").read_bytes())
    del options["sha256"]
    odd = {**options, "options": {**options["options"], "storage": "odd"}}
    Path("two/options.json").write_text(checked_json.to_text(odd))
    done("report", "two", "-o", "page.html")
    assert "<td>&quot;odd&quot;</td>" in Path("page.html").read_text()
    Path("two/options.json").write_text("[]")
    assert "two/options.json: found" in refusal("report", "two", "-o", "page.html")


def test_a_rate_has_its_tick_trials_are_apart_and_lanes_are_shown_where_there_are_several(
    here: Path,
) -> None:
    rates = (3e-5, 1e-4, 3e-4)
    trials = [
        {
            "lr": lr,
            "steps": 2,
            "loss": 1 + lr,
            "losses": [2.0, 1 + lr],
            "forwards": 4,
            "seconds": 60.0,
        }
        for lr in rates
    ]
    run = read_run(Path("two"))._replace(trials=trials)
    text = page([run])
    assert all(f">{lr:g}<" in text for lr in rates)
    assert "forwards of trials before</td><td>12<" in text
    assert run.minutes[-1] < 1
    assert ">mean loss of the last steps, from 1<" in text
    assert "<h2>Lanes</h2>" not in page(
        [run._replace(steps=[{**row, "lanes": {}} for row in run.steps])]
    )
    lanes = {lane: {"busy": 0.5, "bytes": 8} for lane in ("read", "evaluate")}
    assert "<h2>Lanes</h2>" in page(
        [run._replace(steps=[{**row, "lanes": lanes} for row in run.steps])]
    )


def test_a_run_without_metrics_is_known_by_its_journal(here: Path) -> None:
    before = {path: path.read_bytes() for path in Path("two").rglob("*") if path.is_file()}
    Path("two/metrics.jsonl").unlink()
    done("report", "two", "-o", "page.html")
    assert "not noted" in Path("page.html").read_text()
    assert not Path("two/metrics.jsonl").exists()
    after = {path: path.read_bytes() for path in Path("two").rglob("*") if path.is_file()}
    assert after.items() <= before.items()
    losses = [update.losses[0] for update in Journal("two/journal.jsonl").updates]
    assert [row["loss"] for row in read_run(Path("two")).steps] == losses


def test_a_page_that_does_not_fit_on_the_disk_leaves_no_file_and_the_earlier_one(
    here: Path,
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    Path("page.html").write_text(HEAD)
    for name, left in (("page.html", HEAD), ("new.html", None)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            assert f"{name}: found File too large" in refusal("report", "two", "-o", name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (Path(name).read_text() if Path(name).exists() else None) == left


def changed_rows(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change each row of a run's metrics."""
    rows = rows_of(Path(name, "metrics.jsonl"))
    for row in rows:
        change(row)
    write_rows(Path(name, "metrics.jsonl"), rows)


WITHOUT = object()
NO_NUMBERS: tuple[Any, ...] = ("0.1", None, [1.0], True)
NO_LANES: tuple[Any, ...] = (
    "none",
    [],
    {"compute": 1},
    {"compute": {"busy": 0.1}},
    {"write": {"busy": 0, "bytes": "1"}},
)
DAMAGED: list[tuple[str, Any]] = [
    *((name, value) for name in ("seconds", "rss_bytes", "peak_rss_bytes") for value in NO_NUMBERS),
    *((name, WITHOUT) for name in ("seconds", "bound_seconds", "rss_bytes", "peak_rss_bytes")),
    *(("lanes", value) for value in NO_LANES),
    ("seconds", 10**400),
    ("seconds", float("nan")),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "value"), DAMAGED, ids=lambda value: "missing" if value is WITHOUT else None
)
def test_damaged_measurements_of_a_step_are_unknown_and_that_is_said(
    here: Path, name: str, value: Any
) -> None:
    def damage(row: dict[str, Any]) -> None:
        if row["step"] % 2 == 0 and value is WITHOUT:
            del row[name]
        elif row["step"] % 2 == 0:
            row[name] = value

    losses = [row["loss"] for row in read_run(Path("two")).steps]
    changed_rows("two", damage)
    done("report", "two", "-o", "page.html")
    assert (
        '<td class="key">steps of unknown time and memory</td><td>3</td>'
        in Path("page.html").read_text()
    )
    run = read_run(Path("two"))
    assert [row["loss"] for row in run.steps] == losses
    assert ["seconds" in row for row in run.steps] == [False, True] * 3


@pytest.mark.few(1)
@pytest.mark.parametrize("value", ["0.5", None, {}, 10**400])
@pytest.mark.parametrize("name", ["evaluation_seconds", "evaluation_accuracy", "a $\\frac{$ b"])
def test_numbers_of_an_evaluation_that_are_none_are_left_out(
    here: Path, name: str, value: Any
) -> None:
    changed_rows(
        "a <b> & c", lambda row: row.update({name: value} if row["step"] == 2 else {name: 0.5})
    )
    done("report", "a <b> & c", "-o", "page.html")
    assert [name in row for row in read_run(Path("a <b> & c")).evaluations] == [
        True,
        False,
        True,
        True,
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("a$\\frac{$", "a$\\frac{$"),
        ("$x$", "$x$"),
        ("_hidden", "_hidden"),
        ("\u4e2d\u6587", "\u4e2d\u6587"),
        ("a\nb\tc", "a\ufffdb\ufffdc"),
        ("a\udcffb", "a\ufffdb"),
    ],
)
def test_a_run_may_have_any_name(here: Path, name: str, shown: str) -> None:
    Path("two").rename(name)
    done("report", name, "-o", "page.html")
    text = Path("page.html").read_text()
    assert f"<h1>{shown}</h1>" in text
    assert f"{shown}</text>" in text, "the legend"


@pytest.mark.skipif(CHROMIUM is None, reason="no browser is installed")
def test_a_browser_draws_the_page(here: Path) -> None:
    done("report", "a <b> & c", "two", "-o", "page.html")
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={here / 'profile'}",
    ]
    address = (here / "page.html").as_uri()
    drawing: Any = {"check": True, "capture_output": True, "timeout": 120}
    subprocess.run(
        [*command, "--window-size=1000,1400", f"--screenshot={here / 'page.png'}", address],
        **drawing,
    )
    import matplotlib.image

    pixels = matplotlib.image.imread(here / "page.png")
    assert pixels.shape[:2] == (1400, 1000)
    colours = {
        tuple(colour)
        for colour in (pixels[::3, ::3, :3].reshape(-1, 3) * 255).round().astype(int).tolist()
    }
    assert {(31, 119, 180), (255, 127, 14)} <= colours, "the curves of both runs"
    dom = subprocess.run([*command, "--dump-dom", address], text=True, **drawing).stdout
    assert dom.count("<svg") == 3


def test_numbers_go_to_a_tracker_as_they_come(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard, wandb = MagicMock(), MagicMock()
    for name in ("tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, tensorboard)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    common = [
        "train",
        "--method",
        "zeroth-order",
        "--model",
        "model",
        "--data",
        "rows.jsonl",
        "--steps",
        "2",
        "--lr",
        "1e-3",
        "--batch-size",
        "2",
    ]
    done(*common, "--output", "tb", "--report-to", "tensorboard", "--evaluation", "rows.jsonl")
    rows = rows_of("tb/metrics.jsonl")
    tensorboard.SummaryWriter.assert_called_once_with(log_dir="tb/tensorboard")
    writer = tensorboard.SummaryWriter.return_value
    writer.close.assert_called_once_with()
    scalars = [call.args for call in writer.add_scalar.call_args_list]
    for key in ("loss", "evaluation_loss", "seconds"):
        expected = [(key, row[key], row["step"]) for row in rows if key in row]
        assert [scalar for scalar in scalars if scalar[0] == key] == expected != []
    done(*common, "--output", "wb", "--report-to", "wandb")
    run = wandb.init.return_value
    run.finish.assert_called_once_with()
    assert wandb.init.call_args.kwargs["name"] == "wb"
    assert [call.args[0]["step"] for call in run.log.call_args_list] == [0, 1]
    done("train", "--resume", "wb", "--steps", "3", "--report-to", "none")
    assert run.log.call_count == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    told = refusal(*common, "--output", "none", "--report-to", "wandb")
    assert (
        "wandb: found no such package; expected it installed. What to do: pip install 'wandb'."
        in told
    )
    assert not Path("none").exists()


def test_seconds_and_memory_are_drawn_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[report_page.Chart] = []

    def figure(charts: Sequence[report_page.Chart], **options: Any) -> str:
        drawn.extend(charts)
        return ""

    monkeypatch.setattr(report_page, "_figure", figure)
    report_page._costs([])
    assert [chart.from_zero for chart in drawn] == [True, True]

"""What no command does: one typed line each, that names option, file or row, and nothing in the
directory has changed.
"""

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from command_lines import ROWS, refusal, write_rows
from models import WORDS, save_model, save_tokenizer, small_config
from transformers import AutoModelForSequenceClassification

from zo2adapters.models.conversion import quantize

CHOICE = {"prompt": "the cat", "candidates": [" sat", " ran"], "answer": 0}
PREFERENCE = {"prompt": "the cat", "chosen": " sat", "rejected": " ran"}
LORA = {
    "peft_type": "LORA",
    "r": 2,
    "target_modules": ["q_proj", "up_proj"],
    "task_type": "CAUSAL_LM",
}
FUNCTIONS = """
def flat(model, batch):
    return model(**batch).loss.detach()
def logits(model, batch):
    return model(**batch).logits
"""
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "classes": {"num_labels": 3},
    "number": {"num_labels": 1},
    "numbers": {"num_labels": 3, "problem_type": "regression"},
    "one-or-none": {"num_labels": 1, "problem_type": "multi_label_classification"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: models, rows of each format, and code of the user's."""
    folder = tmp_path_factory.mktemp("refusals")
    config = small_config("llama", vocab_size=len(WORDS), max_position_embeddings=32)
    save_tokenizer(save_model(folder / "base", config))
    quantize(folder / "base", folder / "int8", "int8")
    for name, changes in CLASSIFIERS.items():
        made: Any = AutoModelForSequenceClassification
        made.from_config(
            type(config)(**{**config.to_dict(), "pad_token_id": 0, **changes})
        ).save_pretrained(folder / name)
        save_tokenizer(folder / name)
    rows: dict[str, list[Any]] = {
        "rows": ROWS,
        "choices": [CHOICE] * 4,
        "preferences": [PREFERENCE] * 4,
        "texts": [{"text": "the cat sat"}] * 4,
        "labels": [{"text": "the cat", "label": 1}] * 4,
        "answers": [{"prompt": "the cat", "answers": ["sat"]}] * 4,
    }
    for name, written in rows.items():
        write_rows(folder / f"{name}.jsonl", written)
    (folder / "sst2").mkdir()
    for name in ("train", "validation"):
        labelled = [
            {"sentence": f"the {word}", "label": number % 2} for number, word in enumerate(WORDS)
        ]
        write_rows(folder / "sst2" / f"{name}.jsonl", labelled)
    (folder / "lora.json").write_text(json.dumps(LORA))
    (folder / "own.py").write_text(FUNCTIONS)
    (folder / "mine").mkdir()
    (folder / "mine" / "journal.jsonl").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


TRAIN = "train --method zeroth-order --model base --data rows.jsonl --output run --steps 6"
ADAMW = f"{TRAIN} --batch-size 3 --lr 1e-2 --method adamw"
ADAPTER = f"{ADAMW} --adapter lora.json"
LORA_RANK = f"{TRAIN} --lr 1e-2 --lora-rank 2"
BADAM = f"{ADAMW} --method badam --switch-every 2 --stream-blocks"
REWARD = f"{TRAIN} --reward length --estimator es --queries 3 --rank 2 --max-new-tokens 5"
PREFERENCES, CHOICES = f"{TRAIN} --data preferences.jsonl", f"{TRAIN} --data choices.jsonl"
CLASSES = (
    "train --method zeroth-order --model classes --head sequence-classification "
    "--data labels.jsonl --output run"
)
ROOM = "--max-new-tokens"
TASK = "train --method zeroth-order --model base --data sst2 --output run --task sst2"
TUNE = "tune --method zeroth-order --model base --data rows.jsonl --output tuned"
EVALUATE, PLAN, VERIFY = (
    "evaluate --model base --data rows.jsonl",
    "plan --method zeroth-order --model base",
    "verify --model base",
)

REFUSED: list[tuple[str, str]] = [
    # What is missing, in use, or not there
    ("train --method zeroth-order --model m", "--data: found nothing"),
    ("train --resume nowhere", "expected the directory of a run"),
    ("train --resume nowhere --steps 3", "nowhere: found no readable options.json"),
    (
        "train --method zeroth-order --from-step 3 --output new",
        "--from-step: found 3; expected --resume. What to do: pass it",
    ),
    ("export --run nowhere --output o", "nowhere: found no readable options.json"),
    ("export --output o", "either --model or --run"),
    ("export --model base --output base", "something at this path"),
    ("export --model base --output out --journal none", "no journal"),
    ("export --model base --output out --journal rows.jsonl", "line 1"),
    ("journal nowhere", "no journal"),
    ("report run", "found no --output; expected --output PATH"),
    ("report -o page.html", "found"),
    ("report nowhere -o page.html", "nowhere/journal.jsonl"),
    *(
        (f"report run -o {name}", f"--output: found {name}; expected the name of an HTML file")
        for name in ("x.pdf", "rows.jsonl")
    ),
    ("report base -o page.html", "base/journal.jsonl"),
    ("generate --run run", "found no --prompt; expected --prompt TEXT ..."),
    ("init --model nowhere --data rows.jsonl -o new.yaml", "nowhere"),
    *(
        (f"{command} --model base {option}", f"{option.split()[0]}: found ")
        for command in ("generate --prompt the", "chat")
        for option in ("--seed 0", "--seed 3", "--top-p 0.5", "--top-p 1")
    ),
    ("generate --prompt the --model base --seed 3", "expected --temperature. What to do: pass it"),
    ("chat", "--model"),
    ("chat mine --model base", "--model"),
    ("chat mine --adapter lora", "--adapter"),
    ("chat --model base --adapter lora lora", "--adapter"),
    ("chat --model base --adapter lora", "--adapter"),
    ("chat --model base --at 1", "--at"),
    ("chat --model mine", "the directory of a run; expected a model. What to do: zo2 chat mine"),
    ("convert --model base --output out.gguf --quantize nf4", "pass --output out, a directory"),
    ("chat --model base", "zo2 generate"),  # it has no chat template
    (f"{TRAIN} --model /nowhere", "no directory"),
    (f"{TRAIN} --data /nowhere.jsonl", "nowhere.jsonl"),
    (f"{TRAIN} --evaluation /nowhere.jsonl", "nowhere.jsonl"),
    (f"{TRAIN} --adapter missing.json", "missing.json"),
    (f"{TRAIN} --output base", "something at this path"),
    (
        f"{TRAIN} --runs none.yaml --rank 2",
        "expected a YAML file with a line such as small: {lr: 1e-4} for each run",
    ),
    # Values out of range
    (f"{TRAIN} --lr nan", "--lr: found nan"),
    (f"{TRAIN} --sequence-length 33", "at most 32"),
    (f"{TRAIN} --split rows", "torchrun"),
    (f"{TRAIN} --warmup-steps 6", "--warmup-steps: found 6"),
    (f"{TRAIN} --dtype int8", "dtype"),
    (f"{TRAIN} --device gpu", "--device: found 'gpu'"),
    (f"{TRAIN} --device cuda:99", "CUDA device(s)"),
    (f"{TRAIN} --memory much", "--memory: found 'much'"),
    (f"{TRAIN} --device-memory 8GiB", "--device-memory: found 8GiB; expected --device cuda"),
    *(
        (
            f"{command} --memory {size}",
            f"--memory: found {size}, which is {told}; did you mean {meant}.",
        )
        for command in (TRAIN, PLAN, EVALUATE)
        for size, told, meant in (
            ("6", "6 bytes; expected a size with its unit", "6GB"),
            ("1.5", "1 byte; expected a size with its unit", "1.5GB"),
            ("16000", "16000 bytes; expected a size with its unit", "16000MB"),
        )
    ),
    (f"{TRAIN} --activation-memory 9", "--activation-memory: found 9, which is 9 bytes"),
    (f"{TRAIN} --device cuda --device-memory 24", "--device-memory: found 24, which is 24 bytes"),
    (f"{EVALUATE} --activation-memory 512", "--activation-memory: found 512, which is 512 bytes"),
    (f"{REWARD} --reward-memory 2", "--reward-memory: found 2, which is 2 byt"),
    *(
        (f"{TRAIN} --eval-split {share}", "--eval-split: found")
        for share in ("0", "1", "nan", "1.5")
    ),
    # Estimators
    *(
        (f"{command} --batch-size 2 {estimator}", told)
        for command in (TRAIN, PLAN)
        for estimator, told in (
            ("--estimator fzoo", "--queries: found 1; expected at least 2"),
            (
                "--method mezo --estimator fzoo --queries 4",
                "--estimator: found fzoo with --method mezo; expected --method zeroth-order",
            ),
            (
                "--estimator fzoo --queries 4 --noise mezo",
                "--noise: found 'mezo'; expected 'rademacher'",
            ),
            ("--estimator fzoo --queries 4 --noise gaussian", "--noise: found 'gaussian'"),
            ("--estimator adam", "adam"),
        )
    ),
    # Gradients
    (f"{ADAMW} --memory 100MB", "expected at least"),
    (
        f"{ADAMW} --write-limit-tb 1e-9 --snapshot-every 1",
        "--snapshot-every: found 1; expected at least ",
    ),
    (
        f"{ADAMW} --model int8",
        "which is quantised; expected a model all of whose parameters are trained",
    ),
    (f"{ADAMW} --max-grad-norm 1 --split 2x1", "--split: found 2x1"),
    (
        f"{ADAMW} --stream-blocks --lora-rank 2",
        "--stream-blocks: found on with --method adamw and",
    ),
    (
        f"{ADAMW} --loss-scaling --lora-rank 2",
        "--loss-scaling: found on with --method adamw and",
    ),
    (f"{BADAM} --snapshot-every 2", "--snapshot-every: found 2 with --stream-blocks"),
    (f"{BADAM} --write-limit-tb 1e-9", "--write-limit-tb: found 1e-09, and a run that writes "),
    (f"{TRAIN} --max-grad-norm 1", "--max-grad-norm: found 1.0 with --method zeroth-order"),
    (f"{TRAIN} --max-grad-norm 1", "--clip-grad"),
    *(
        (
            f"{command} --stream-blocks",
            "--stream-blocks: found on with --method zeroth-order; expected a first-order",
        )
        for command in (TRAIN, PLAN)
    ),
    *(
        (f"{command} {more}", told)
        for command in (ADAMW, ADAPTER)
        for more, told in (
            ("--lr None", "--lr: found nothing; expected a learning rate for adamw"),
            ("--warmup-steps 6", "--warmup-steps: found 6"),
            (
                "--objective exact-match",
                "--objective: found exact-match, which has no gradient; expected loss",
            ),
            (
                "--data choices.jsonl --objective accuracy",
                "found accuracy, which has no gradient; expected choice-",
            ),
            ("--objective own.py:flat", "a loss that has no gradient"),
        )
    ),
    # Adapters
    (
        f"{ADAPTER} --adapter-frozen lora_A lora_B",
        "--adapter-frozen: found ['lora_A', 'lora_B'], which every parameter's",
    ),
    (
        f"{ADAPTER} --method lomo",
        "--adapter: found lora.json with --method lomo; expected a --method that trains an adapter",
    ),
    *(
        (
            f"{command} --method badam --adapter lora.json",
            "--adapter: found lora.json with --method badam",
        )
        for command in (PLAN, VERIFY)
    ),
    (
        f"{PLAN} --method adamw --adapter lora.json --device-memory 24GB",
        "it has no effect otherwise",
    ),
    (f"{TRAIN} --adapter lora.json --precision auto --transfer-dtype bfloat16", "--transfer-dtype"),
    (f"{TRAIN} --adapter lora.json --snapshot-every 2", "--snapshot-every"),
    (f"{TRAIN} --adapter lora.json --write-back-every 2", "--write-back-every"),
    (f"{TRAIN} --adapter lora.json --adapter-frozen lora_C", "--adapter-frozen"),
    (f"{LORA_RANK} --adapter lora", "--lora-rank: found 2 with --adapter lora"),
    (f"{LORA_RANK} --lora-targets all-linear q_proj", "--lora-targets: found all-linear q_proj"),
    (
        f"{LORA_RANK} --lora-targets q_proj,up_proj",
        "spaces between them. What to do: write q_proj up_proj",
    ),
    (f"{LORA_RANK} --lora-targets c_attn", "Target modules {'c_attn'} not found"),
    (f"{LORA_RANK} --snapshot-every 2", "--snapshot-every: found 2 with --method zeroth-order"),
    (f"{LORA_RANK} --adapter-frozen lora_C", "--adapter-frozen"),
    (f"{LORA_RANK} --method lomo", "--lora-rank: found 2 with --method lomo"),
    *((f"{command} --lora-targets q_proj", "--lora-targets") for command in (PLAN, VERIFY, TUNE)),
    (f"{EVALUATE} --lora-rank 2", "--lora-rank: found 2"),
    (f"{EVALUATE} --lora-rank 2", "pass --run or --adapter DIR"),
    # Objectives and their rows
    (f"{TRAIN} --objective dpo", "rows with prompt, chosen and rejected"),
    (
        f"{TRAIN} --beta 0.5",
        "--beta: found the objective loss; expected the objective dpo",
    ),
    (
        f"{TRAIN} --objective accuracy",
        "found accuracy for rows with text, or prompt and completion",
    ),
    (f"{TRAIN} --objective f2", "found 'f2'; expected one of auto, loss, choice-loss"),
    (
        f"{TRAIN} --objective own.py:gone",
        "found own.py without gone, but with flat, logits",
    ),
    (f"{TRAIN} --objective gone.py:calm", "found gone.py: No such file or directory"),
    (f"{TRAIN} --batch-size 4 --objective own.py:logits", "--objective: found shape [4,"),
    (f"{PREFERENCES} --beta 0", "--beta: found 0.0"),
    (f"{PREFERENCES} --objective exact-match", "rows with prompt, chosen and rejected"),
    (
        f"{PREFERENCES} --rank 2 --per-row",
        "--per-row: found the objective dpo; expected the objective loss",
    ),
    ("evaluate --model base --data preferences.jsonl", "zo2 train as --evaluation"),
    (f"{CHOICES} --objective exact-match", "found exact-match for rows with prompt, candidates"),
    (f"{CHOICES} --rank 2 --per-row", "--per-row: found the objective choice-loss"),
    (f"{CHOICES} --keep-best", "--keep-best: found on; expected --evaluation"),
    (f"{CHOICES} --evaluation preferences.jsonl", "rows with the fields of the training rows"),
    (f"{CHOICES} --evaluation rows.jsonl", "--evaluation: found rows with text"),
    (f"{CHOICES} --evaluation answers.jsonl", "prompt and answers"),
    (f"{TRAIN} --evaluation preferences.jsonl", "prompt, chosen and rejected"),
    (f"{TRAIN} --data texts.jsonl --samples 1", "--samples: found rows without a prompt"),
    (f"{TRAIN} --data texts.jsonl --samples -1", "--samples"),
    (
        f"{TRAIN} --data texts.jsonl --reward length --rank 2",
        "--reward: found rows without a prompt; expected rows with a",
    ),
    *(
        (
            f"{command} --data {rows} --labels ran sat",
            "--labels: found ran sat for rows without labels",
        )
        for command in (TRAIN, EVALUATE, PLAN)
        for rows in ("texts.jsonl", "choices.jsonl")
    ),
    # Packed rows, heads, rewards
    (f"{TRAIN} --pack --micro-batch-size 2", "--pack: found on with --micro-batch-size"),
    (f"{TRAIN} --pack --per-row", "--per-row: found on with --pack"),
    (f"{CHOICES} --pack", "--pack: found the objective choice-loss"),
    ("evaluate --model base --data choices.jsonl --pack", "--pack: found"),
    (f"{CLASSES} --pack", "sequence-classification"),
    (f"{CLASSES} --objective accuracy", "--objective: found accuracy with --head"),
    (f"{CLASSES} --loss-chunk 3", "loss-chunk"),
    (f"{CLASSES} --head question-answering", "sequence-classification"),
    *(
        (f"{REWARD} {more}", told)
        for more, told in (
            ("--objective exact-match", "zo2: --reward: "),
            ("--micro-batch-size 1", "zo2: --micro-batch-size: "),
            ("--estimator mezo --fitness ranks", "zo2: --fitness: "),
            ("--reward exact", "zo2: --reward: "),
            ("--max-new-tokens 31", "zo2: --max-new-tokens: "),
            ("--max-new-tokens 0", "zo2: --max-new-tokens: "),
            ("--reward-seconds 0", "zo2: --reward-seconds: "),
            ("--reward-seconds 1e308", "zo2: --reward-seconds: "),
            ("--reward-memory much", "zo2: --reward-memory: "),
            ("--max-drift -1", "zo2: --max-drift: "),
            ("--temperature -1", "zo2: --temperature: "),
            ("--temperature 1e-300", "zo2: --temperature: "),
            ("--top-p 0.5 --temperature 0", "zo2: --top-p: "),
        )
    ),
    (
        f"{TRAIN} --max-new-tokens 5",
        "--max-new-tokens: found 5; expected --reward",
    ),
    # Benchmarks in one command
    (f"{TASK} --task sst3", "zo2: --task: found"),
    (f"{TASK} --lr 0", "zo2: --lr: found"),
    (f"{TASK} --evaluation rows.jsonl", "zo2: --evaluation: found"),
    (f"{TASK} --adapter adapter.json", "zo2: --adapter: found"),
    (f"{TASK} --head sequence-classification", "zo2: --head: found"),
    (f"{TASK} --objective dpo --beta 0.3", "zo2: --beta: found"),
    (f"{TRAIN} --shots 2", "zo2: --shots: found"),
    (
        "rows --task rte --data sst2 --output new",
        "train.jsonl, line 1: found a row that cannot be read (KeyError",
    ),
    # Plans and trials
    (f"{PLAN} --evaluate-every 5", "--evaluate-every: found 5 without the rows"),
    (f"{PLAN} --evaluation rows.jsonl", "--evaluation: found rows.jsonl without the rows"),
    (f"{PLAN} --runs 2 --data rows.jsonl", "that only read its weights"),
    (f"{PLAN} --model int8", "--rank"),
    (f"{VERIFY} --lr auto", "--lr: found auto"),
    *((f"{VERIFY} --lr {lr}", "--lr: found ") for lr in ("0", "-1", "nan", "inf")),
    (f"{PLAN} --adapter rows.jsonl", "rows.jsonl: found a config that peft does not read (Extra"),
    *(
        (f"{TUNE} {more}", more.split()[0])
        for more in ("--lr 1e-5", "--steps 5", "--forwards 0", "--evaluation rows.jsonl")
    ),
    (f"{TUNE} --lr auto", "--lr: found auto"),
    (f"{TUNE} --method adamw --adapter lora.json --zo-eps-to-try 1e-3", "--zo-eps-to-try"),
    # Names of other tools, and near misses
    *(
        (f"train --{theirs} 3", f"did you mean --{ours}. ")
        for theirs, ours in (
            ("num-train-epochs", "steps"),
            ("epochs", "steps"),
            ("gradient_accumulation_steps", "micro-batch-size"),
            ("max-seq-length", "sequence-length"),
            ("lora-r", "lora-rank"),
            ("bf16", "dtype"),
        )
    ),
    *(
        (
            f"{command} {option} 1",
            f"command line: found the unknown option {option.partition('=')[0]}; expected an "
            f"option of zo2 {command}; "
            f"did you mean {nearest}.",
        )
        for command, option, nearest in (
            ("train", "--learning-rate", "--lr"),
            ("train", "--lrr=3", "--lr"),
            ("tune", "--learning-rate", "--learning-rates"),
            ("evaluate", "--eval-batch-size", "--batch-size"),
            ("generate", "--promt", "--prompt"),
            ("export", "--ouput", "--output"),
            ("evaluate", "--rn", "--run"),
            ("plan", "--momory", "--memory"),
            ("rows", "--tasks", "--task"),
        )
    ),
    ("plan --method zeroth-order --lrr 3 --lr 3", "the unknown option --lrr"),
]


@pytest.mark.parametrize(("command", "told"), REFUSED, ids=[command for command, _ in REFUSED])
def test_a_command_that_cannot_be_done_is_refused_in_one_line(
    command: str, told: str, place: Path
) -> None:
    before = contents(place)
    assert told in refusal(*command.split())
    assert contents(place) == before


# What a run refuses by its options, its rows or its model: a plan of it is none, either.
UNPLANNED: list[tuple[str, str]] = [
    ("--objective accuracy --data choices.jsonl --method adamw --lr 1e-2", "has no gradient"),
    ("--objective exact-match --method adamw --lr 1e-2", "has no gradient; expected loss"),
    ("--objective f2", "found 'f2'; expected one of auto"),
    ("--objective f1", "found f1 for rows with text"),
    ("--beta 0.5", "--beta: found the objective loss"),
    ("--data choices.jsonl --pack", "--pack: found the objective choice-loss"),
    ("--data choices.jsonl --per-row --rank 2", "choice-loss; expected the objective loss. "),
    ("--data choices.jsonl --evaluation preferences.jsonl", "--evaluation: found rows with"),
    ("--rank 2 --write-back-every 3", "--write-back-every: found 3 with --rank; expected auto"),
    ("--lora-rank 2 --write-back-every 3", "--write-back-every: found 3 with --method zeroth"),
    ("--samples 2 --data texts.jsonl", "--samples: found rows without a prompt"),
    (f"--reward length --rank 2 {ROOM} 31", "--max-new-tokens: found 31"),
    ("--reward length --rank 2 --data texts.jsonl", "--reward: found rows without a prompt"),
    (
        f"--reward gone.py:f --rank 2 {ROOM} 5",
        "gone.py: No such file or directory; expected a readable file",
    ),
    (f"--reward length --rank 2 {ROOM} 5 --temperature -1", "--temperature"),
    *(
        (f"--report-to {package}", f"{package}: found no such package; expected it installed")
        for package in ("tensorboard", "wandb")
    ),
    ("--from-step 3", "--from-step: found 3; expected --resume"),
    ("--shots 2", "--shots: found 2; expected --task"),
    ("--split rows", "--split: found rows"),
    ("--runs runs.yaml", "small, --write-back-every: found 3 with --rank"),
]


@pytest.mark.parametrize(("options", "told"), UNPLANNED, ids=[options for options, _ in UNPLANNED])
def test_what_a_run_refuses_has_no_plan(
    options: str, told: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    runs = {"large": {"rank": 8}, "small": {"rank": 2, "write_back_every": 3}}
    (place / "runs.yaml").write_text(json.dumps(runs))
    before = contents(place)
    command = ["--model", "base", "--data", "rows.jsonl", "--output", "run"]
    command += ["--method", "zeroth-order", *options.split()]
    lines = [refusal(name, *command) for name in ("train", "plan")]
    assert lines[0] == lines[1]
    assert told in lines[0]
    assert contents(place) == before


def contents(folder: Path) -> set[tuple[Path, int]]:
    return {(path, path.stat().st_mtime_ns) for path in folder.rglob("*")}


ANSWER = "evaluate --model base --data bad.jsonl --max-new-tokens"
LABELLED = (
    "train --method zeroth-order --model {} --head sequence-classification --data bad.jsonl "
    "--output run --steps 1"
)
BAD_ROWS: list[tuple[str, Mapping[str, Any], str]] = [
    (TRAIN, {"prompt": "the cat", "chosen": " sat"}, "'prompt', 'chosen' and 'rejected'"),
    (
        TRAIN,
        {**PREFERENCE, "rejected": [{"role": "user", "content": "x"}]},
        "all texts or all lists",
    ),
    (
        TRAIN,
        {**PREFERENCE, "rejected": " sat" * 40},
        "a row of 43 tokens, with candidates, preferences or answers, which cannot be cut; "
        "expected at most 32",
    ),
    (TRAIN, {**PREFERENCE, "prompt": ""}, "at least 1 token of each"),
    (TRAIN, {**PREFERENCE, "chosen": ""}, "\"\" in the column 'chosen'"),
    (f"{ANSWER} 4", {"prompt": "the", "answers": []}, "found [] in the column 'answers'"),
    (
        f"{ANSWER} 4",
        {"prompt": "", "answers": ["cat"]},
        "in the column 'prompt', which has no tokens",
    ),
    (
        f"{ANSWER} 4",
        {"prompt": "the " * 30, "answers": ["cat"]},
        "which cannot be cut; expected at most 28, so that --max-new-tokens fit, too. What to do: "
        "shorten this row or remove it, or raise --sequence-length, up to what the model takes, "
        "or lower",
    ),
    *(
        (LABELLED.format(model), row, told)
        for model, row, told in (
            ("classes", {"text": "the cat", "label": 3}, "a class from 0 to 2"),
            ("classes", {"text": "the cat", "label": "worst"}, "a class from 0 to 2"),
            ("classes", {"text": "the cat", "label": True}, "a class from 0 to 2"),
            (
                "classes",
                {"text": "the cat"},
                "found the keys 'text'; expected a text 'text', perhaps",
            ),
            ("classes", {"prompt": "the cat", "completion": "sat"}, "a text 'text'"),
            ("classes", {"text": "the cat", "text_pair": 3, "label": 1}, "found 3 in"),
            ("classes", {"text": " ", "label": 1}, "a text of no tokens"),
            ("number", {"text": "the cat", "label": "x"}, "a number"),
            ("one-or-none", {"text": "the cat", "label": 1}, "a list of 1 numbers"),
            ("numbers", {"text": "the cat", "label": [1, 0]}, "a list of 3 numbers"),
        )
    ),
]
GOOD: dict[str, Mapping[str, Any]] = {
    "train": PREFERENCE,
    "evaluate": {"prompt": "the", "answers": ["cat"]},
    "classes": {"text": "the cat", "label": 1},
    "number": {"text": "the cat", "label": 0.5},
    "one-or-none": {"text": "the cat", "label": [1]},
    "numbers": {"text": "the cat", "label": [1, 0, 2]},
}


@pytest.mark.parametrize(("command", "row", "told"), BAD_ROWS, ids=[told for *_, told in BAD_ROWS])
def test_a_row_of_another_form_is_refused_by_its_line(
    command: str, row: dict[str, Any], told: str, place: Path
) -> None:
    words = command.split()
    model = words[words.index("--model") + 1]
    write_rows(place / "bad.jsonl", [GOOD[model if model in GOOD else words[0]], row])
    line = refusal(*words, *(("--data", "bad.jsonl") if command == TRAIN else ()))
    assert "bad.jsonl, line 2" in line
    assert told in line
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("tokens", "said"),
    [(32, "found 32; expected at most 31: prompt and answer together"), (0, "found 0")],
    ids=str,
)
def test_answers_without_room_are_refused(tokens: int, said: str, place: Path) -> None:
    assert f"--max-new-tokens: {said}" in refusal(
        *EVALUATE.split(), "--data", "answers.jsonl", "--max-new-tokens", tokens
    )


RUNS: list[tuple[Mapping[str, Any], str]] = [
    ({"a": {"model": "x"}}, "pass --model for all runs"),
    ({"a": {"lr": 1e-3}}, "a run that trains all weights"),
    ({"a": {"rank": 2, "lr": "auto"}}, "zo2 tune"),
    ({"a/b": {"rank": 2}}, "a name of letters and digits"),
    ({"a": 3}, "a name of letters and digits"),
    *(
        ({"a": {"rank": 2}, name: {"rank": 4}}, f"runs.yaml: found a run named {name}; expected")
        for name in ("lock", "runs.json", "Lock")
    ),
    ({"a": {"rnk": 2}}, "rank"),
    ({}, "at least one"),
    (
        {f"run-{number}": {"rank": 2} for number in range(1000)},
        "runs.yaml: found 1000 runs; expected at most 64",
    ),
]


@pytest.mark.parametrize(("runs", "told"), RUNS, ids=[told for _, told in RUNS])
def test_a_file_of_runs_that_cannot_be_is_refused(
    runs: Mapping[str, Any], told: str, place: Path
) -> None:
    (place / "runs.yaml").write_text(json.dumps(runs))
    assert told in refusal(*TRAIN.split(), "--runs", "runs.yaml")
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "def good(prompt, completion, row):\n    return 1\n",
            "rewards.py without short, but with good",
        ),
        ("'A docstring.'\n", "rewards.py without short;"),
        ("def short(:\n", "rewards.py, line 1: "),
    ],
)
def test_a_reward_that_its_file_does_not_define_is_refused(
    text: str, found: str, place: Path
) -> None:
    (place / "rewards.py").write_text(text)
    told = refusal(*REWARD.split(), "--reward", "rewards.py:short")
    assert "--reward: found " in told
    assert found in told
    assert not (place / "run").exists()


def test_tasks_under_torchrun_and_chats_of_two_adapters_are_refused(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "did you mean --steps" not in refusal("evaluate", "--epochs", 3), (
        "a command that has no such option"
    )
    for folder in ("one", "two"):
        shutil.copytree(place / "mine", place / folder / "same")
    assert "--adapter" in refusal("chat", "--model", "base", "--adapter", "one/same", "two/same")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("RANK", "0")
    assert "zo2 rows" in refusal(*TASK.split())

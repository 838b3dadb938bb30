"""Bad input: a clear message with the value and the remedy, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import small
from tests.routing.made import write_scores
from tests.thinned import thinned

CONFIGS = Path(__file__).parents[2] / "configs"
RUN_FILES = {
    "tiny": CONFIGS / "tiny-router.yaml",
    "router": CONFIGS / "mixtral-8x7b-router.yaml",
    "experts": CONFIGS / "mixtral-8x7b-experts.yaml",
}


@pytest.fixture
def run_file(small_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run file that would train, in the working directory."""
    monkeypatch.chdir(tmp_path)
    small.write_data(tmp_path / "data.jsonl")
    run = small.run_file(small_model, Path("data.jsonl"), Path("runs/new"))
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run), encoding="utf-8")
    return file


def listing(folder: Path) -> dict[str, bytes | None]:
    return {str(item.relative_to(folder)): item.read_bytes() if item.is_file() else None for item in folder.rglob("*")}


def assert_refused(ended: Any, *fragments: str) -> None:
    assert ended.code == 2
    assert ended.out == ""
    assert re.search(r"^error: ", ended.err, re.MULTILINE)
    assert "Traceback" not in ended.err
    for fragment in fragments:
        assert fragment in ended.err


CASES: dict[str, tuple[list[str], list[str]]] = {
    "fp16 without float32 updates": (
        ["model.dtype=fp16", "optimizer.name=sgd"],
        ["model.dtype: fp16 and sgd on", "set master_weights: fp32"],
    ),
    "one optimizer and one for a part": (
        ["optimizer.experts.lr=0.1"],
        ["optimizer: is either one optimizer (name, lr, …) or one for each part", "move lr, name there"],
    ),
    "a fused backward that shall accumulate": (
        ["optimizer.name=lomo", "train.accumulate=2"],
        ["lomo with optimizer.fused_backward frees each gradient as soon as it is used", "set train.accumulate: 1"],
    ),
    "a base wider than compute": (
        ["model.base=fp32", "model.dtype=bf16"],
        ["model.base: fp32 needs model.dtype: fp32"],
    ),
    "a part without an optimizer": (
        ["optimizer={experts: {name: adamw}}", "train.accumulate=1"],
        ["optimizer.router is missing, and that part trains", "optimizer.experts: adapt: chooses nothing of that part"],
    ),
    "typo in a key": (["train.stpes=5"], ["train.stpes: unknown key. Did you mean 'steps'?"]),
    "several errors": (
        ["train.stpes=5", "model.base=nf3", "optimizer.lr=-1"],
        ["train.stpes: unknown key", "model.base: 'nf3' is not valid", "optimizer.lr: -1 is not valid"],
    ),
    "several wrong parts": (
        ["adapt.router=9", "adapt.also=[nrm]", "adapt.lora={rank: 2, alpha: 4, targets: [q_prj]}"],
        [
            "adapt.router: layer 9 has no router",
            "adapt.also[0]: 'nrm' matches no parameter. Did you mean 'norm'?",
            "'q_prj'",
        ],
    ),
    "nothing trains": (["adapt={}"], ["adapt: nothing trains; set router, experts, lora or also"]),
    "no data section": (["data=null"], ["moetune train needs data: in the run file"]),
    "no output": (["output=null"], ["moetune train needs output: in the run file"]),
    "missing data file": (["data.train=dta.jsonl"], ["no such file: 'dta.jsonl'. Did you mean 'data.jsonl'?"]),
    "empty data file": (["data.train=empty.jsonl"], ["'empty.jsonl' is empty: it holds no record"]),
    "broken line": (
        ["data.train=broken.jsonl"],
        ["'broken.jsonl'", "line 2: not valid JSON", "line 4: no 'completion'"],
    ),
    "a sequence too short": (["train.sequence_length=4"], ["tokens do not fit train.sequence_length 4", "raise"]),
    "output below a file": (["output=data.jsonl/run"], ["output 'data.jsonl/run' cannot be written: Not a directory"]),
    "output in /proc": (["output=/proc/run"], ["output '/proc/run' cannot be written: "]),
    "output exists": (["output=foreign"], ["output 'foreign' exists and is not a run folder; choose another output"]),
    "unknown model": (["model.path=mixtral-8x7"], ["model 'mixtral-8x7'", "Did you mean 'mixtral-8x7b'?"]),
    "a model without weights": (["model.path=no-weights"], ["only safetensors checkpoints are read"]),
    "a model with broken weights": (
        ["model.path=broken-weights"],
        ["'broken-weights/model.safetensors' cannot be read"],
    ),
    "a model without tokenizer": (
        ["model.path=no-tokenizer"],
        ["there is no tokenizer in 'no-tokenizer'"],
    ),
    "a bad override": (["train.steps"], ["--set 'train.steps': write it as section.key=value"]),
}

MODELS = {
    "no-weights": "model.safetensors",
    "broken-weights": "model.safetensors",
    "no-tokenizer": "tokenizer.json",
}
"""Folders of models, each with one file removed."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("overrides", "fragments"), CASES.values(), ids=CASES)
def test_refused_before_anything_is_written(
    overrides: list[str], fragments: list[str], run_file: Path, moetune: Callable[..., Any]
) -> None:
    here = run_file.parent
    (here / "empty.jsonl").touch()
    (here / "blank.jsonl").write_text("\n  \n")
    rows = ['{"prompt": "a b", "completion": "c"}'] * 2
    (here / "broken.jsonl").write_text("\n".join([rows[0], '{"prompt": ', rows[1], '{"prompt": "only"}']))
    (here / "foreign").mkdir()
    (here / "foreign" / "thesis.tex").write_text("years of work")
    model = Path(yaml.safe_load(run_file.read_text())["model"]["path"])
    for name, missing in MODELS.items():
        shutil.copytree(model, here / name, ignore=shutil.ignore_patterns(missing))
    (here / "broken-weights" / "model.safetensors").write_bytes(b"no header")
    before = listing(here)
    options = [option for override in overrides for option in ("--set", override)]
    assert_refused(moetune("train", run_file, *options), *fragments)
    assert listing(here) == before
    assert_refused(moetune("train", run_file, *options, "--overwrite"), *fragments)
    assert listing(here) == before


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (None, "run file 'run.yaml' cannot be read: No such file or directory"),
        (b"model: [", "is not valid YAML"),
        (b"- model", "must hold a mapping with model: and adapt:"),
        (b"", "must hold a mapping with model: and adapt:"),
        (b"model: {path: a}\nmodel: {path: b}", "key 'model' is written twice"),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_run_file_that_is_none(
    content: bytes | None, fragment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moetune: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("run.yaml").write_bytes(content)
    before = listing(tmp_path)
    assert_refused(moetune("train", "run.yaml"), fragment)
    assert listing(tmp_path) == before


@pytest.mark.parametrize("resume", ["nonsense", "runs/new/checkpoints/step-9", "data.jsonl", "."])
def test_resume_of_what_is_not_there(resume: str, run_file: Path, moetune: Callable[..., Any]) -> None:
    before = listing(run_file.parent)
    assert_refused(
        moetune("train", run_file, "--resume", resume),
        f"--resume {resume!r} is no checkpoint of the run in 'runs/new'; use auto, never or one of",
        "which has: none",
    )
    assert listing(run_file.parent) == before


@pytest.mark.usefixtures("unpredicted")
def test_an_existing_run(run_file: Path, moetune: Callable[..., Any]) -> None:
    here = run_file.parent
    assert moetune("train", run_file).code == 0
    before = listing(here)
    for options, fragments in [
        ([], ["output 'runs/new' already holds a run", "--resume auto", "--overwrite", "choose another output"]),
        (["--resume", "auto", "--overwrite"], ["--resume and --overwrite exclude each other"]),
        (["--resume", "auto", "--set", "train.seed=3"], ["train.seed: 0 before, 3 now", "Set these back"]),
        (["--resume", "step-3"], ["which has: step-3"]),
        (["--overwrite", "--set", "data.train=gone.jsonl"], ["no such file: 'gone.jsonl'"]),
    ]:
        assert_refused(moetune("train", run_file, *options), *fragments)
        assert listing(here) == before
    (here / "runs" / "new" / "notes.txt").write_text("mine")
    assert moetune("train", run_file, "--overwrite", "--set", "train.steps=1").code == 0
    assert sorted(path.name for path in (here / "runs" / "new" / "checkpoints").iterdir()) == ["step-1"]
    assert (here / "runs" / "new" / "notes.txt").read_text() == "mine"


REFUSED = {
    "count mixtral-8x7": "Did you mean 'mixtral-8x7b'?",
    "count": "count needs a MODEL or --run",
    "count tiny-mixtral --set a=b": "--set changes a run file; give one with --run",
    "count --run gone.yaml": "gone.yaml",
    "init": "init needs a recipe. There are: ",
    "init tiny-routr": "recipe 'tiny-routr' does not exist. Did you mean 'tiny-router'?",
    "init tiny-router --out taken.yaml": "'taken.yaml' exists and is not moetune's to replace",
    "init tiny-router --out no/x.yaml": "'no/x.yaml' cannot be written: there is no folder 'no'",
    "init tiny-lora --out mine.yaml --set train.stepps=7": "Did you mean 'steps'",
    "init tiny-mixtral --gpu 24GiB --goal all": "--goal 'all': give router, experts or lora",
    "init tiny-router --gpu 24GiB": "--gpu is for a plan for a MODEL, and 'tiny-router' is a recipe",
    "plan {tiny}": "give --solve KEY",
    "plan tiny-mixtral": "plan needs a card",
    "plan tiny-mixtral --gpu 24GiB --solve train.micro_batch": "is none",
    "plan tiny-mixtral --gpu 24GiB --host much": "--host 'much' is not a memory size",
    "plan tiny-mixtral --gpu 24GiB --set train.steps=1": "chooses settings itself",
    "plan llama-7b --gpu 24GiB --goal experts": "is a dense model",
    "plan {tiny} --solve train.micro_batch --html p.html": "--html is for a plan for a model",
    "plan tiny-mixtral --gpu 24GiB --figure plan.pdf": "a figure is .png or .svg",
    "plan tiny-mixtral --gpu 44GiB --data nosuch.jsonl --write new": "no such file: 'nosuch.jsonl'",
    "predict tiny-mixtral": "'tiny-mixtral' is a model | --lora RANK | --experts LAYERS:EXPERTS",
    "predict {tiny} --lora 4": "leave --lora out",
    "predict {router} --gpu l50s": "'l50s' | Did you mean 'l40s'? | 44GiB",
    "predict {router} --routing skew:0": "--routing 'skew:0' | a number from 1 to",
    "predict {router} --routing nope": "--routing 'nope': give balanced, skew:S, worst, or an existing file",
    "predict {tiny} --figure x.gif": "'x.gif' | .png or .svg, not '.gif'",
    "predict {tiny} --gpu 24GiB --html gone/deep/p.html": "there is no folder 'gone/deep'",
    "predict none.yaml": "none.yaml' cannot be read: No such file or directory",
    "predict {tiny} --measured gone": "cannot be read",
    "eval tiny-mixtral": "has no held-out data of its own; name some with --data",
    "eval tiny-mixtral --format alpca": "Did you mean 'alpaca'?",
    "eval tiny-mixtral --base nf3": "--base 'nf3': give nf4, int8, fp8, fp8-row, fp8-tensor, mxfp8, nvfp4, mxfp4",
    "generate gone --prompt a": "neither a catalog name, nor a folder that exists",
    "generate tiny-mixtral --prompt a --samples 1": "--samples is for --prompts FILE",
    "generate tiny-mixtral --prompts p.jsonl --out o.jsonl --chat": "--chat is for --prompt;",
    "generate tiny-mixtral --prompt a --temperature 1e-300": "--temperature 1e-300",
    "generate tiny-mixtral --prompt a --seed 11111111111111111111111": "--seed",
    "generate tiny-mixtral --prompt a\udcff": "is not UTF-8",
    "score tiny-mixtral": "needs --data FILE",
    "score tiny-mixtral --data x.jsonl --set a.b=1": "--set changes a run file",
    "score tiny-mixtral --data gone.jsonl": "no such file: 'gone.jsonl'",
    "score tiny-mixtral --data unicode-names --data unicode-names": "named twice",
    "score tiny-mixtral --data unicode-names --out no/where.json": "there is no folder",
    "score llama-7b --data unicode-names": "is a dense model",
    "score tiny-mixtral --data unicode-names --gpu l40s": "--gpu is the card that --predict",
    "select missing.json --k 1": "'missing.json' cannot be read: No such file",
    "select made.json": "says how many experts in no way",
    "select made.json --k 1 --rule best": "--rule 'best'",
    "select made.json --budget 44GiB": "--budget 44GiB | give --run RUN.yaml",
    "select made.json --k 1 --as both": "'both': give experts or lora",
    "select made.json --layers none": "--layers none",
}
"""Command lines, and what their message holds."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("line", "said"), REFUSED.items(), ids=REFUSED)
def test_a_command_that_is_refused(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moetune: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken.yaml").write_text("mine")
    write_scores(tmp_path / "made.json", {layer: [1, 2, 3, 4, 5, 6, 7, 8] for layer in range(4)})
    before = listing(tmp_path)
    arguments = line.format(**RUN_FILES).split()
    ended = moetune(*arguments)
    if "--seed" in arguments:  # typer says this one
        assert (ended.code, ended.out, said in ended.err) == (2, "", True)
    else:
        assert_refused(ended, *said.split(" | "))
    assert listing(tmp_path) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", ".", "--format", "peft", "--out", "o", "--check", "9" * 30],
        ["trian"],
        ["train"],
        ["train", "a.yaml", "b.yaml"],
        ["train", "--no-such-option"],
        ["models", "--out"],
        [],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line(arguments: list[str], moetune: Callable[..., Any]) -> None:
    ended = moetune(*arguments)
    assert ended.code == 2
    assert "Usage" in ended.out + ended.err
    assert "Traceback" not in ended.err


SEEN = {
    "tag": "output: !!int ''", "time": "output: !!timestamp x", "map": "output: !!map [1, 2]",
    "digits": f"train: {{steps: {'9' * 5000}}}", "hexadecimal": f"output: 0x{'f' * 5000}",
    "user": "output: ~nosuchuser/x", "name": f"output: {'x' * 256}",
    "nul": 'output: "a\\0b"', "surrogate": 'output: "a\\ud800"', "byte": 'output: "a\\udcff"',
    "markup": "output: 3\nmodel: {path: 'x[/]y'}",
    "depth": "a: " + "[" * 30_000, "ids": 'adapt: {router: "0-99999999999"}',
    "alpha": "adapt: {lora: {rank: 4, alpha: 1.0e+300}}", "rank": "adapt: {lora: {rank: 99999999999, alpha: 1}}",
    "bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    ),
    "keys": "".join(f"k{n}: 1\n" for n in range(30_000)),
}  # fmt: skip


@pytest.mark.parametrize("text", SEEN.values(), ids=SEEN)
def test_what_once_gave_a_traceback_or_a_flood(text: str, tmp_path: Path, moetune: Callable[..., Any]) -> None:
    """Refused at once, in a short message, and nothing is written."""
    sections = {"model: {path: tiny-mixtral}\n": "model:", "adapt: {router: all}\n": "adapt:"}
    rest = "".join(section for section, key in sections.items() if key not in text)
    (tmp_path / "run.yaml").write_text(rest + text + "\n")
    begun = time.perf_counter()
    ended = moetune("count", "--run", tmp_path / "run.yaml")
    assert_refused(ended)
    assert len(ended.err.encode()) <= 4096
    assert time.perf_counter() - begun < 60
    assert listing(tmp_path).keys() == {"run.yaml"}


NAMES = [
    "compare {0}.yaml", "count {0}", "count tiny-mixtral --run {0}", "data {0}", "data {0} --html x.html", "doctor {0}",
    "drift {0}", "drift . --figure {0}.png", "eval {0}", "export {0} --format peft --out o", "init --out {0}",
    "init tiny-router --out gone/run.yaml", "plan {0} --gpu 44GiB", "plan run.yaml --solve {0}",
    "plan x.yaml --solve {0}",
    "predict {0} --lora 4", "predict {0}", "quantize {0} --out o", "quantize gone --out {0}", "report {0}",
    "report . --out {0}", "score {0} --data data.jsonl", "score run.yaml --out {0}", "score run.yaml --out gone/s.json",
    "select {0}", "select run.yaml --out {0}", "select run.yaml --out gone/run.yaml", "train {0}", "verify {0}",
    "apply {0} --to tiny-mixtral --out o", "generate {0} --prompt a", "report . --out gone/report.html",
]  # fmt: skip
"""Of every command that is given a name; all are refused before a model is read."""


ODD = {
    "long": "n" * 300, "markup": "x[/]y:key:", "user": "~nosuchuser/x", "deep": "gone/" * 900, "byte": "\udcff"
}  # fmt: skip


@pytest.mark.parametrize("name", thinned(ODD, every=5))
def test_names_on_the_command_line(name: str, run_file: Path, moetune: Callable[..., Any]) -> None:
    here = listing(run_file.parent)
    for command in NAMES:
        ended = moetune(*(argument.format(ODD[name]) for argument in command.split()))
        assert (ended.code, ended.out, "Traceback" in ended.err) == (2, "", False), command
        assert len(ended.err.encode("utf-8", "backslashreplace")) <= 4096, command
        assert listing(run_file.parent) == here, command


def test_debug_shows_where(tmp_path: Path, moetune: Callable[..., Any]) -> None:
    (tmp_path / "run.yaml").write_text("model: !!int ''")
    arguments = ("count", "--run", tmp_path / "run.yaml")
    assert "Traceback" not in moetune(*arguments).err
    assert "Traceback" in moetune("--debug", *arguments).err
    assert "Traceback" not in moetune(*arguments).err


def test_the_program_itself_ends_with_2(tmp_path: Path) -> None:
    """Once as a user does it: a process, its exit code and its two streams."""
    process = subprocess.run(
        [sys.executable, "-m", "moetune", "train", "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 2
    assert process.stdout == ""
    assert process.stderr == "error: run file 'run.yaml' cannot be read: No such file or directory\n"

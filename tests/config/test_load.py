"""Reading run files: what is accepted, and that every problem is named with its remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from moetune.config.load import _fields_at, load_run_config, refuse_missing_files
from moetune.config.other_names import OTHER_NAMES
from moetune.config.schema import RunConfig
from moetune.errors import UserError

BASE = "model: {path: tiny-mixtral}\nadapt: {router: all}\n"


def load(tmp_path: Path, text: str, *overrides: str) -> RunConfig:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return load_run_config(file, overrides)


def problems(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        load(tmp_path, text, *overrides)
    return str(raised.value)


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    config = load(tmp_path, BASE)  # model and adapt are enough
    assert (config.model.path, config.model.base, config.adapt.router) == ("tiny-mixtral", "auto", "all")
    text = BASE.replace(
        "{router: all}", "{experts: {layers: 0-5, ids: [0, 1]}, lora: {rank: 4, alpha: 8}, also: [norm]}"
    )
    config = load(tmp_path, text + "data: {train: a.jsonl}\noptimizer: {lr: 1e-5}\noutput: runs/é")
    assert load(tmp_path, config.to_yaml()) == config
    assert config.optimizer.lr == 1e-5  # YAML itself reads 1e-5 as text


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    text = """
model: {pth: tiny-mixtral, base: nf5}
adapt: {experts: {layer: 0, ids: 5-2}, lora: {rank: 0}}
optimizer: {name: adam, betas: [0.9, 2]}
train: {steps: many, seed: 99999999999, report_to: 5}
data: 5
hardware:
sheduler: cosine
"""
    lines = problems(tmp_path, text).splitlines()[1:]
    expected = [
        "model.path: missing, and required",
        "model.pth: unknown key. Did you mean 'path'?",
        "model.base: 'nf5' is not valid; it may be 'auto', 'nf4', 'int8', 'fp8', 'fp8-row', 'fp8-tensor', 'mxfp8', "
        "'nvfp4', 'mxfp4', "
        "'int4-g32', 'int4-g64', 'int4-g128', 'int4-row', 'int4-g32-order', 'int4-g64-order', 'int4-g128-order', "
        "'bf16' or 'fp32'. "
        "Did you mean 'nf4'?",
        "adapt.experts.layer: unknown key. Did you mean 'layers'?",
        "adapt.experts.ids: range '5-2' runs backwards; write \"2-5\"",
        "adapt.lora.rank: 0 is not valid: Input should be greater than 0",
        "adapt.lora.alpha: missing, and required",
        "optimizer.name: 'adam' is not valid; it may be 'adamw', 'adamw8bit', 'paged_adamw', "
        "'paged_adamw8bit', 'lion8bit', 'ademamix8bit', 'adafactor', 'sgd', 'lomo' or 'adalomo'. Did you mean 'adamw'?",
        "optimizer.betas.1: 2 is not valid: Input should be less than 1",
        "train.steps: 'many' is not valid: Input should be a valid integer, unable to parse string as an integer",
        "train.seed: 99999999999 is not valid: Input should be less than 4294967296",
        "train.report_to: 5 is not a list; write [5]",
        "data: 5 is not a section; write keys under it. Keys: train, eval, split, format, packing, "
        "chat_template, template, too_long, validation",
        "hardware: None is not a section; write keys under it. Keys: gpu, gpus, host_memory, count, without_kernels",
        "sheduler: unknown key. Known keys: model, adapt, optimizer, train, data, parallel, hardware, output.",
    ]
    assert sorted(line.strip() for line in lines) == sorted(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must hold a mapping with model: and adapt:"),
        ("- model", "must hold a mapping"),
        ("model: [", "is not valid YAML: .*line 1, column 9"),
        ("a: 1\n\tb: 2", "is not valid YAML: .*line 2"),
        (BASE + "model: {}", "is not valid YAML: key 'model' is written twice.*line 3"),
        (BASE + 'more: {0: [1], "0": [2, 3]}', "key '0' is written twice"),  # a number, and the same as text
        ("? [a]\n: b", "is not valid YAML: .*unhashable key"),
        ("a: 2025-02-30", "is not valid YAML: day is out of range"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML: could not determine a constructor"),
        ("a: 1\n---\nb: 2", "is not valid YAML: expected a single document"),
        ("[" * 3000, "is not valid YAML"),
        (BASE + "train: {steps: true, epochs: no}", "steps: True is no number.*epochs: False is no number"),
        (BASE + "train: {steps: 1:30, seed: 1:30.5}", "steps: '1:30' is not valid.*seed: '1:30.5' is not valid"),
        (BASE + "output: ${OUT}/run", r"output: '\$\{OUT\}/run' names a variable"),
        (BASE + "output: $HOME/run", r"output: '\$HOME/run' names a variable"),
    ],
)
def test_what_is_not_a_run_file(tmp_path: Path, text: str, message: str) -> None:
    told = problems(tmp_path, text)
    assert told.startswith(f"run file '{tmp_path}/run.yaml'")
    assert "unicode string" not in told
    with pytest.raises(UserError, match=f"(?s){message}"):
        raise UserError(told)


def test_yaml_merge_keys_work(tmp_path: Path) -> None:
    train = load(tmp_path, f"{BASE}train: {{<<: {{steps: 3, seed: 1}}, seed: 2}}\n").train
    assert (train.steps, train.seed) == (3, 2)
    assert load(tmp_path, f"{BASE}train: {{steps: 010}}").train.steps == 10  # as in YAML 1.2; 8 in 1.1


def test_what_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    reasons = {
        "missing.yaml": "cannot be read: No such file",
        "binary.yaml": "cannot be read: 'utf-8'",
        "": f"is a folder; give the file in it, as {tmp_path}/run.yaml",
    }
    for name, reason in reasons.items():
        with pytest.raises(UserError, match=reason):
            load_run_config(tmp_path / name)


def test_set_overrides_any_key_in_order(tmp_path: Path) -> None:
    overrides = (
        *("train.steps=7", "train.steps=8", "adapt.router=0-1", "adapt.lora={rank: 2, alpha: 4}"),
        *("adapt.lora.rank=3", "data.train=a=b.jsonl", "output=null", "optimizer.lr=1e-3"),
    )
    config = load(tmp_path, BASE + "output: runs/a", *overrides)
    assert config.train.steps == 8
    assert config.adapt.router == (0, 1)
    assert config.adapt.lora is not None
    assert (config.adapt.lora.rank, config.adapt.lora.alpha) == (3, 4)
    assert config.data is not None
    assert config.data.train == "a=b.jsonl"
    assert config.output is None
    assert config.optimizer.lr == 1e-3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "--set 'train.steps': write it as section.key=value"),
        ("=5", "write it as section.key=value"),
        ("train..steps=5", "write it as section.key=value"),
        ("train.steps= ", "--set 'train.steps= ': has no value"),
        ("optimizer={lr: 1,5e-4}", "optimizer.5e-4: unknown key"),
        ("train.steps=[", "--set 'train.steps=[': the value '[' is not valid YAML"),
        ("model.path.x=1", "--set 'model.path.x=1': model.path holds a value, not a section"),
        ("train.stepz=5", "train.stepz: unknown key. Did you mean 'steps'?"),
        *((f"optimizer.lr={value}", "optimizer.lr") for value in (".nan", ".inf", "-1", "0")),
        ("train=5", "train: 5 is not a section"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, message: str) -> None:
    assert message in problems(tmp_path, BASE, override)


def test_problems_of_several_data_sets_are_named(tmp_path: Path) -> None:
    text = """
model: {path: tiny-mixtral}
adapt: {router: all}
data: {train: [a.jsonl, {path: b.jsonl, wieght: 2}, {weight: 0}], eval: []}
"""
    assert sorted(line.strip() for line in problems(tmp_path, text).splitlines()[1:]) == [
        "data.eval: [] is not valid: Tuple should have at least 1 item after validation, not 0",
        "data.train.1.wieght: unknown key. Did you mean 'weight'?",
        "data.train.2.path: missing, and required",
        "data.train.2.weight: 0 is not valid: Input should be greater than 0",
    ]


def test_paths_are_looked_for_beside_the_run_file_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, here = tmp_path / "runs", tmp_path / "here"
    for folder in (beside, here):
        folder.mkdir()
        (folder / "both.jsonl").write_text("")
    (beside / "beside.jsonl").write_text("")
    (here / "here.jsonl").write_text("")
    (beside / "tiny-mixtral").mkdir()  # no model
    monkeypatch.chdir(here)
    (beside / "run.yaml").write_text(
        "model: {path: tiny-mixtral}\nadapt: {router: all}\n"
        "data: {train: [both.jsonl, {path: beside.jsonl}], eval: here.jsonl, chat_template: none.jinja}\n"
    )
    config = load_run_config(beside / "run.yaml")
    assert config.data is not None
    first, second = config.data.train
    assert (first, second.path) == (str(beside / "both.jsonl"), str(beside / "beside.jsonl"))
    assert (config.data.eval, config.model.path) == ("here.jsonl", "tiny-mixtral")
    # What is typed here is meant here.
    overridden = load_run_config(beside / "run.yaml", ["data.train=both.jsonl", "data.eval=beside.jsonl"])
    assert overridden.data is not None
    assert (overridden.data.train, overridden.data.eval) == ("both.jsonl", str(beside / "beside.jsonl"))
    split = load_run_config(beside / "run.yaml", ["data.train=beside.jsonl:en:test"]).data
    assert split is not None
    assert split.train == f"{beside / 'beside.jsonl'}:en:test"
    with pytest.raises(UserError) as caught:
        refuse_missing_files(config, beside / "run.yaml")
    assert str(caught.value) == (
        f"no such file: 'none.jinja', neither beside the run file ({str(beside / 'none.jinja')!r}) nor in the working "
        f"directory ({str(here / 'none.jinja')!r})."
    )


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("train: {lr: 1}", "train.lr: unknown key. Here it is optimizer.lr."),
        ("learning_rate: 1", "learning_rate: unknown key. Here it is optimizer.lr."),
        ("adapt: {lora: {rank: 1, alpha: 1, r: 8}}", "adapt.lora.r: unknown key. Here it is adapt.lora.rank."),
        ("lora_alpha: 16", "lora_alpha: unknown key. Here it is adapt.lora.alpha."),
    ],
)
def test_keys_of_other_tools_are_named(written: str, said: str, tmp_path: Path) -> None:
    text = (
        f"model: {{path: tiny-mixtral}}\n{'' if written.startswith('adapt') else 'adapt: {router: all}'}\n{written}\n"
    )
    assert problems(tmp_path, text).splitlines()[1:] == [f"  {said}"]


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("base_model: a/b\nsequence_len: 4\nstrict: false\ntf32: true", "is for Axolotl; moetune init writes one"),
        ("stage: sft\ndo_train: true", "is for LLaMA-Factory; moetune init"),
        ("compute_environment: LOCAL_MACHINE", "is for accelerate launch .* moetune train starts its own ranks"),
        ('{"zero_optimization": {"stage": 3}}', "is DeepSpeed's; parallel.deepspeed takes it"),
        ('{"peft_type": "LORA", "r": 8}', "is an adapter's settings; adapt.start_from takes its folder"),
        ('{"architectures": ["MixtralForCausalLM"]}', "is a model's config.json; model.path takes its folder"),
    ],
)
def test_a_file_of_another_tool_is_named(written: str, said: str, tmp_path: Path) -> None:
    """And its keys that none here is like are in one line."""
    first, *rest = problems(tmp_path, written).splitlines()
    assert re.search(said, first)
    assert sum("Known keys" in line for line in rest) <= 1
    assert "  model: missing, and required" in rest
    assert ("  strict, tf32: unknown keys. Known keys: model, adapt" in "\n".join(rest)) is ("tf32" in written)


@pytest.mark.parametrize(("written", "kept"), [("wandb", ("wandb",)), ("[wandb]", ("wandb",)), ("none", ())])
def test_a_reporter_needs_no_brackets(written: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    assert load(tmp_path, BASE + f"train: {{report_to: {written}}}").train.report_to == kept


@pytest.mark.parametrize(
    ("train", "overrides", "length"),
    [
        ("{steps: 100}", ["train.epochs=3"], (None, 3)),
        ("{epochs: 2}", ["train.steps=7"], (7, None)),
        ("{steps: 100}", ["train.steps=null", "train.epochs=3"], (None, 3)),
        ("{steps: null, epochs: 1}", [], (None, 1)),
        ("{steps: 100}", ["train.epochs=null"], (100, None)),
    ],
)
def test_what_is_said_last_says_how_long_to_train(
    train: str, overrides: list[str], length: tuple[int | None, float | None], tmp_path: Path
) -> None:
    config = load(tmp_path, BASE + f"train: {train}", *overrides)
    steps, epochs = length
    assert config.train.epochs == epochs
    assert steps is None or config.train.steps == steps
    assert RunConfig.model_validate(yaml.safe_load(config.to_yaml())).train == config.train


def test_a_recipe_that_is_not_here_is_answered_with_init(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"moetune init tiny-lora --out tiny-lora\.yaml writes that recipe here"):
        load_run_config(tmp_path / "configs" / "tiny-lora.yaml")


def test_steps_and_epochs_in_one_file_are_refused(tmp_path: Path) -> None:
    assert "train: steps and epochs both say how long" in problems(tmp_path, BASE + "train: {steps: 4, epochs: 2}")


def test_every_name_of_another_tool_leads_to_a_key() -> None:
    for ours in OTHER_NAMES.values():
        *section, key = ours.split(".")
        assert key in _fields_at(section), ours

"""What a run, an adapter or a checkpoint was, and what it is now: every command that opens it answers alike."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moetune.adapters.files import PREFIX
from moetune.config.schema import RunConfig
from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.inference.opened import find
from moetune.training.folder.manifest import write_manifest
from moetune.training.folder.run_folder import RunFolder
from moetune.watch import memory_record
from tests import small
from tests.exporting.runs import write_run
from tests.resolved import train, write_quantized_base
from tests.thinned import in_pairs

Change = Callable[[Path], object]
ADAPT = {"lora": {"rank": 2, "alpha": 4, "targets": ["attention"]}, "router": "all"}
STEP = "run/checkpoints/step-2"
REFUSED, SAID, AS_BEFORE = "refused", "said", "as before"
COMMANDS = ("eval", "generate", "chat", "drift", "export", "report", "train", "score")


def values(file: str, change: Callable[[dict[str, Tensor]], object]) -> Change:
    """Change the tensors of a file."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / file)
        change(tensors)
        save_file(tensors, folder / file, {"format": "pt"})

    return apply


def said(file: str, **new: Any) -> Change:
    """Change keys of a JSON file."""

    def apply(folder: Path) -> None:
        there = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
        (folder / file).write_text(json.dumps(there | new))

    return apply


def text(file: str, old: str, new: str) -> Change:
    return lambda folder: (folder / file).write_text((folder / file).read_text().replace(old, new))


def gone(file: str) -> Change:
    return lambda folder: (folder / file).unlink()


def sealed(change: Change) -> Change:
    """Change a checkpoint as one would who can seal it again."""

    def apply(folder: Path) -> None:
        change(folder)
        write_manifest(folder / STEP, 2)

    return apply


def broken(part: str, value: float, tensors: dict[str, Tensor]) -> None:
    """In one place; a loss may be finite all the same."""
    next(tensors[name] for name in sorted(tensors) if part in name).view(-1)[3] = value


def first(tensors: dict[str, Tensor], value: float) -> None:
    tensors[min(tensors)].view(-1)[0] = value


MODEL, TRAINED = "model/model.safetensors", f"{STEP}/trained.safetensors"
ALL = dict.fromkeys(COMMANDS[:7], REFUSED)
WEIGHTS = ALL | {"report": AS_BEFORE}
NOTED = dict.fromkeys(COMMANDS[:7], SAID)
OLDER = NOTED | {"report": AS_BEFORE}
REST, BANK = "packed/rest.safetensors", "packed/model.layers.1.mlp.experts.safetensors"
PACKED = WEIGHTS | {"export": AS_BEFORE}
"""An export goes by the checkpoint that was packed."""

RUNS: dict[str, tuple[Change, str, dict[str, str]]] = {
    "nothing": (lambda folder: None, "", dict.fromkeys(COMMANDS[:7], AS_BEFORE)),
    "base: one value": (
        values(MODEL, lambda t: t["model.embed_tokens.weight"][0].add_(1)), "model.safetensors", WEIGHTS,
    ),
    "base: a tensor less": (values(MODEL, lambda t: t.pop("model.norm.weight")), "model.norm.weight", WEIGHTS),
    "base: weights gone": (gone(MODEL), "model.safetensors", WEIGHTS),
    "config: fewer experts a token": (
        said("model/config.json", num_experts_per_tok=1), "num_experts_per_tok is 1, and was 2", ALL,
    ),
    "config: version": (
        said("model/config.json", transformers_version="9"), "", dict.fromkeys(COMMANDS[:7], AS_BEFORE),
    ),
    "config: broken": (lambda f: (f / "model/config.json").write_text("{"), "config.json", ALL),
    "tokenizer: lower case": (
        said("model/tokenizer.json", normalizer={"type": "Lowercase"}), "tokenizer.json", ALL,
    ),
    "tokenizer: gone": (gone("model/tokenizer.json"), "tokenizer", ALL),
    "tokenizer: a template": (
        lambda f: (f / "model/chat_template.jinja").write_text("{{ messages[0].content }}"), "chat_template",
        NOTED | {"chat": REFUSED},  # for it writes one message of a chat
    ),
    "generation settings": (said("model/generation_config.json", top_k=3), "generation_config.json", NOTED),
    "data: other tokens": (
        text("data.jsonl", "router", "retour"), "data.train has changed",
        dict.fromkeys(COMMANDS[:7], AS_BEFORE) | {"train": REFUSED},
    ),
    "run file: other seed": (text("run/run.yaml", "seed: 0", "seed: 1"), "seed", WEIGHTS),
    "base.json: edited": (text("run/base.json", '"schema": 1', '"schema": 2'), "base.json", WEIGHTS),
    "base.json: gone": (gone("run/base.json"), "base.json.* is missing", WEIGHTS | {"train": SAID}),
    "inputs.json: edited": (text("run/inputs.json", '"schema": 1', '"schema": 2'), "inputs.json", ALL),
    "inputs.json: gone": (gone("run/inputs.json"), "inputs.json", ALL),
    "newest checkpoint: a byte": (values(TRAINED, lambda t: first(t, 3.0)), "step-2", OLDER),
    "newest checkpoint: no seal": (gone(f"{STEP}/manifest.json"), "step-2.*manifest.json is missing", OLDER),
    "newest checkpoint: not a number": (
        sealed(values(TRAINED, lambda t: first(t, float("nan")))), "not finite", WEIGHTS,
    ),
    "newest checkpoint: a tensor less": (
        sealed(values(TRAINED, lambda t: t.pop(min(t)))), r"self_attn|gate", WEIGHTS,
    ),
    "newest checkpoint: another shape": (
        sealed(values(TRAINED, lambda t: t.update({min(t): torch.ones(2, 2)}))), r"self_attn|gate", WEIGHTS,
    ),
    "every checkpoint gone": (
        lambda f: shutil.rmtree(f / "run/checkpoints"), "no checkpoint|not a run folder|without checkpoints", WEIGHTS,
    ),
    "packed: nothing": (lambda folder: None, "", dict.fromkeys(COMMANDS[:7], AS_BEFORE)),
    "packed: experts": (values(BANK, lambda t: first(t, 3.0)), "experts.safetensors' was changed", PACKED),
    "packed: a file gone": (gone(BANK), "experts.safetensors' is missing", PACKED),
    "packed: of another checkpoint": (
        text("packed/packed.json", "F32 [2048", "F16 [2048"), "has changed since", PACKED,
    ),
    "packed: a manifest cut short": (
        lambda f: (f / "packed/packed.json").write_text("{"), "packed.json' cannot be read", ALL,
    ),
    "packed: its checkpoint gone": (
        gone(MODEL), "model.safetensors|'.*model'", dict.fromkeys(COMMANDS[:7], AS_BEFORE) | {"export": REFUSED},
    ),
    "packed: its checkpoint changed": (
        values(MODEL, lambda t: t["lm_head.weight"].add_(1)), "has changed since",
        dict.fromkeys(COMMANDS[:7], AS_BEFORE) | {"export": REFUSED},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with its base and data, and its adapter."""
    folder = tmp_path_factory.mktemp("changed")
    shutil.copytree(small_model, folder / "model")
    data, held_out = small.write_data(folder / "data.jsonl"), small.write_data(folder / "held.jsonl", small.DATA[:2])
    file = small.run_file(
        folder / "model", data, folder / "run", model={"base": "fp32"}, data={"eval": str(held_out)},
        train={"steps": 2, "save_every": 1, "eval_every": 2},
    ) | {"adapt": ADAPT}  # fmt: skip
    train(RunConfig.model_validate(file), device="cpu")
    write_quantized_base(str(folder / "model"), folder / "packed", "nf4", True)
    packed = file | {"model": {"path": str(folder / "packed"), "base": "nf4"}, "output": str(folder / "packed_run")}
    train(RunConfig.model_validate(packed), device="cpu")
    lora = file | {"adapt": {"lora": ADAPT["lora"]}, "output": str(folder / "lora")}
    train(RunConfig.model_validate(lora), device="cpu")
    export(folder / "lora", "peft", folder / "adapter")
    for which in (file, packed):
        longer = RunConfig.model_validate(which | {"train": file["train"] | {"steps": 3}})
        (folder / f"{Path(which['output']).name}.yaml").write_text(longer.to_yaml())
    start = file | {"adapt": {"lora": ADAPT["lora"], "start_from": str(folder / "adapter")}}
    (folder / "start.yaml").write_text(RunConfig.model_validate(start | {"output": str(folder / "new")}).to_yaml())
    return folder


NEEDS = {
    "run": ("model", "run"),
    "packed_run": ("model", "packed", "packed_run"),
    "adapter": ("model", "adapter"),
    "model": ("model", "adapter"),
}
"""Folders that are read with one."""


def copied(made: Path, folder: Path, what: str) -> Path:
    """The same elsewhere, without the folders that are not read: what is in it says where."""
    others = {item.name for item in made.iterdir() if item.is_dir()} - set(NEEDS[what])
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns(*others))
    names = (folder / "adapter/adapter_config.json", folder / "packed/packed.json")
    for file in (*folder.rglob("*.yaml"), *filter(Path.is_file, names)):
        file.write_text(file.read_text().replace(str(made), str(folder)))
    for run in ("run", "packed_run"):
        for checkpoint in RunFolder(folder / run).checkpoints() if (folder / run).is_dir() else ():
            write_manifest(checkpoint, int(checkpoint.name[5:]))
    return folder


def answer(
    moetune: Any, monkeypatch: pytest.MonkeyPatch, command: str, folder: Path, what: str = "run"
) -> tuple[str, str]:
    """How a command takes what there is, and what it wrote to stderr."""
    monkeypatch.setattr(memory_record, "predicted", lambda *_: memory_record.Predicted())
    monkeypatch.setattr("sys.stdin", open(folder / "held.jsonl", encoding="utf-8"))  # noqa: SIM115
    few = ("--max-new-tokens", "2")
    arguments: tuple[str | Path, ...] = {
        "eval": ("eval", folder / what, "--data", folder / "held.jsonl"),
        "generate": ("generate", folder / what, "--prompt", "a router", *few),
        "chat": ("chat", folder / what, *few),
        "drift": ("drift", folder / what),
        "export": ("export", folder / what, "--format", "merged", "--out", folder / "out"),
        "report": ("report", folder / what, "--no-timeline"),
        "train": ("train", folder / f"{what}.yaml", "--resume", "auto"),
        "score": ("score", folder / "start.yaml", "--out", folder / "scores.json"),
    }[command]
    ended = moetune(*arguments)
    assert "Traceback" not in ended.err
    assert ended.code in (0, 2) or "does NOT fit" in ended.err, ended
    return (REFUSED if ended.code else SAID), ended.err


def is_sampled(row: int, column: int, name: str) -> bool:
    """On a push every other row has one command, and each command several rows, of each kind of change at least one."""
    first = [*(other.partition(":")[0] for other in RUNS)].index(name.partition(":")[0])
    return row % len(COMMANDS[:7]) == column and (row % 2 == 0 or row == first)


CELLS = [
    pytest.param(name, command, marks=[pytest.mark.full] * (not is_sampled(row, column, name)), id=f"{name}-{command}")
    for row, name in enumerate(RUNS)
    for column, command in enumerate(COMMANDS[:7])
]


@pytest.mark.one_in(12)
@pytest.mark.parametrize(("name", "command"), CELLS)
def test_a_run_of_which_something_changed(
    name: str, command: str, made: Path, tmp_path: Path, moetune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = "packed_run" if name.startswith("packed") else "run"
    folder = copied(made, tmp_path / "copy", what)
    change, message, expected = RUNS[name]
    change(folder)
    found, err = answer(moetune, monkeypatch, command, folder, what)
    mentions = bool(message) and re.search(message, err) is not None
    if expected[command] == AS_BEFORE:
        assert (found, "has changed" in err or "skipping" in err) == (SAID, False), err
    else:
        assert (found, mentions) == (expected[command], True), err


FACTORS = "adapter/adapter_model.safetensors"
ADAPTERS: dict[str, tuple[Change, str]] = {
    "a foreign prefix": (
        values(FACTORS, lambda t: [t.update({f"foreign.{k}": t.pop(k)}) for k in list(t)]), "foreign|factors",
    ),
    "half of them": (values(FACTORS, lambda t: [t.pop(k) for k in list(t)[: len(t) // 2]]), "lora_|no factors"),
    "other targets": (said("adapter/adapter_config.json", target_modules=["nosuch"]), "nosuch"),
    "a rank that its factors have not": (said("adapter/adapter_config.json", r=1), "size mismatch for .*lora_|says 1"),
    "a rank of 10,000,000": (said("adapter/adapter_config.json", r=10_000_000), "rank 10000000"),
    "a rank that is a word": (said("adapter/adapter_config.json", r="x"), "r: 'x'"),
    "an alpha as text": (said("adapter/adapter_config.json", lora_alpha="8"), "lora_alpha: '8'"),
    "a module that is not there": (said("adapter/adapter_config.json", modules_to_save=["lm_head"]), "lm_head: is in"),
    "an alpha of zero": (said("adapter/adapter_config.json", lora_alpha=0), "an alpha of 0 leaves"),
    "not a number": (values(FACTORS, lambda t: first(t, float("nan"))), "not finite"),
    "cut short": (lambda f: (f / FACTORS).write_bytes((f / FACTORS).read_bytes()[:-9]), "adapter_model.safetensors"),
    "a pickle": (lambda f: (f / FACTORS).rename(f / "adapter/adapter_model.bin"), "is a pickle"),
}  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "command"),
    [
        *in_pairs(ADAPTERS, ["eval", "score"], every=2),
        *(pytest.param(name, command, marks=pytest.mark.full) for name in ADAPTERS for command in ("generate", "chat")),
    ],
)
def test_an_adapter_that_matches_in_part(
    name: str, command: str, made: Path, tmp_path: Path, moetune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(made, tmp_path / "copy", "adapter")
    change, message = ADAPTERS[name]
    settings = (folder / "adapter/adapter_config.json").read_text()
    change(folder)
    found, err = answer(moetune, monkeypatch, command, folder, "adapter")
    if name == "other targets" and command == "score":  # which goes by the names of the factors, all of which fit
        changed = json.loads((folder / "scores.json").read_text())
        gone("scores.json")(folder)
        (folder / "adapter/adapter_config.json").write_text(settings)
        assert (found, "its settings leave out" in err) == (SAID, True)
        assert answer(moetune, monkeypatch, command, folder, "adapter") == (SAID, "")
        assert changed["layers"] == json.loads((folder / "scores.json").read_text())["layers"]
        return
    assert (found, re.search(message, err) is not None) == (REFUSED, True), err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": "tiny-mixtral", "revision": "v2"}, "revision 'v2' of 'tiny-mixtral', and main is"),
        ({"alora_invocation_tokens": [5, 6]}, r"alora_invocation_tokens \[5, 6\]"),
        (
            {"trainable_token_indices": {"embed_tokens": [5, 2050]}},
            "trains token 2050, and its base has embeddings for",
        ),
    ],
)
def test_an_adapter_of_another_base_or_of_later_tokens(
    settings: dict[str, Any], message: str, made: Path, tmp_path: Path
) -> None:
    folder = copied(made, tmp_path / "copy", "adapter")
    said("adapter/adapter_config.json", **settings)(folder)
    with pytest.raises(UserError, match=message):
        _ = find(str(folder / "adapter")).model


def test_an_adapter_under_other_names_that_peft_reads(made: Path, tmp_path: Path) -> None:
    """And one whose base is on the machine that trained it."""
    folder = copied(made, tmp_path / "copy", "adapter")
    expected = find(str(folder / "adapter")).model.state_dict()
    values(
        FACTORS,
        lambda t: [t.update({k.removeprefix(PREFIX).replace(".weight", ".default.weight"): t.pop(k)}) for k in list(t)],
    )(folder)
    for name, tensor in find(str(folder / "adapter")).model.state_dict().items():
        assert torch.equal(tensor, expected[name])
    head = torch.randn_like(expected["lm_head.weight"])  # where tokens were added, PEFT saves embeddings whole
    values(FACTORS, lambda t: t.update({f"{PREFIX}lm_head.weight": head}))(folder)
    assert torch.equal(find(str(folder / "adapter")).model.lm_head.weight, head)
    values(FACTORS, lambda t: t.update({f"{PREFIX}lm_head.weight": head[:-1]}))(folder)
    with pytest.raises(UserError, match=rf"lm_head.weight is \[{len(head) - 1}, "):
        _ = find(str(folder / "adapter")).model
    said("adapter/adapter_config.json", base_model_name_or_path="/gone/base")(folder)
    with pytest.raises(UserError, match=r"by its base_model_name_or_path: model '/gone/base'"):
        find(str(folder / "adapter"))


def test_an_adapter_for_vllm_is_refused_with_the_command_that_converts_it(small_model: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", small_model, small.ADAPT["lora"])
    export(run.path, "vllm", tmp_path / "vllm")
    export(run.path, "peft", tmp_path / "peft")
    said("peft/adapter_config.json", target_modules=["experts"])(tmp_path)  # as vLLM has it for gpt-oss
    for name, why in (("vllm", "in the layout per-expert"), ("peft", "names modules of experts in target_modules")):
        with pytest.raises(UserError, match=rf"{why}, .* adapter convert .* --to peft"):
            _ = find(str(tmp_path / name)).model


def test_an_adapter_is_asked_in_the_template_and_the_tokens_that_stand_beside_it(made: Path, tmp_path: Path) -> None:
    folder = copied(made, tmp_path / "copy", "adapter")
    before = find(str(folder / "adapter")).tokenizer
    (folder / "adapter" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    of_template = find(str(folder / "adapter")).tokenizer
    before.add_tokens("<new>")
    before.save_pretrained(folder / "adapter")
    of_both = find(str(folder / "adapter")).tokenizer
    assert (of_template.chat_template, len(of_both)) == ("{{ messages[0].content }}!", len(of_template) + 1)
    assert of_both.chat_template == before.chat_template


def less(part: str) -> Change:
    return values(MODEL, lambda t: [t.pop(name) for name in list(t) if part in name])


def typed(dtype: torch.dtype) -> Change:
    return values(MODEL, lambda t: t.update({name: t[name].to(dtype) for name in t if "experts" in name}))


def indexed(metadata: dict[str, Any]) -> Change:
    def apply(folder: Path) -> None:
        (folder / MODEL).rename(folder / "model/one.safetensors")
        names = dict.fromkeys(load_file(folder / "model/one.safetensors"), "one.safetensors")
        index = {"weight_map": names} | metadata
        (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))

    return apply


MODELS: dict[str, tuple[str, Change, str]] = {
    **{f"without {x}": ("eval", less(x), x) for x in ("embed_tokens", "norm", "gate", "experts", "lm_head")},
    "bool experts": ("eval", typed(torch.bool), "type BOOL"),
    "more experts a token": ("eval", said("model/config.json", num_experts_per_tok=99), "99 experts"),
    "a padding token": ("eval", said("model/config.json", pad_token_id=10**6), "Padding_idx|pad_token_id"),
    "an activation": ("eval", said("model/config.json", hidden_act="nosuch"), "nosuch"),
    "a thousand times the weights": ("eval", said("model/config.json", vocab_size=10**9), "128,000,172,864|NOT fit"),
    "an index without metadata": ("eval", indexed({}), ""),
    **{
        f"{value} in {name}": ("eval", values(MODEL, partial(broken, name, value)), rf"{name}\S* holds .* not finite")
        for name, value in (("embed_tokens", math.nan), ("q_proj", math.nan), ("gate", math.inf), ("w2", -math.inf))
    },
    "an end outside of the vocabulary": (
        "eval", said("model/tokenizer_config.json", eos_token="<no>", pad_token="<none>"), "token 20",
    ),
    "beams": ("generate", said("model/generation_config.json", num_beams=10**6), ""),
    "a penalty": ("generate", said("model/generation_config.json", repetition_penalty=0), "repetition_penalty: 0"),
    "generation settings that are a list": (
        "generate", lambda f: (f / "model/generation_config.json").write_text("[]"), "list|mapping",
    ),
}  # fmt: skip


def on_models() -> list[Any]:
    """On a push the command that is named, of what every command reads with `--all` two more."""
    cases = []
    for name, (command, *_) in MODELS.items():
        others = ("score", "generate") if command == "eval" else ()
        cases += [pytest.param(name, command), *(pytest.param(name, one, marks=pytest.mark.full) for one in others)]
    return cases


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "command"), on_models())
def test_a_model_that_cannot_be_used(
    name: str, command: str, made: Path, tmp_path: Path, moetune: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One error that names what is wrong, or, where the value decides nothing, an answer."""
    folder = copied(made, tmp_path / "copy", "model")
    _, change, message = MODELS[name]
    change(folder)
    found, err = answer(moetune, monkeypatch, command, folder, "model")
    assert (found, re.search(message, err) is not None) == (REFUSED if message else SAID, True), err


def test_eval_says_which_step_and_which_data(made: Path, moetune: Any) -> None:
    """Its own held-out data, those that it trained on, and others."""
    own = json.loads(moetune("eval", made / "run", "--json").out)
    assert (own["step"], own["held_out"]) == (2, True)
    trained = moetune("eval", made / "run", "--data", made / "data.jsonl").out
    assert "held-out" not in trained
    assert "data.jsonl, which the run trained on" in trained
    other = json.loads(moetune("eval", made / "model", "--data", made / "data.jsonl", "--json").out)
    assert (other["step"], other["held_out"]) == (None, None)
    with pytest.raises(UserError, match=r"step-2' is a checkpoint; give its run, '.*run'"):
        find(str(made / "run/checkpoints/step-2"))


def test_a_pattern_that_never_ends(made: Path, tmp_path: Path, moetune: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copied(made, tmp_path / "copy", "adapter")
    said("adapter/adapter_config.json", target_modules="(.+)+(.+)+(.+)+(.+)+!")(folder)
    monkeypatch.setattr("moetune.errors.time_limit.__wrapped__.__defaults__", (0.5,))
    found, err = answer(moetune, monkeypatch, "eval", folder, "adapter")
    assert (found, "no end after 0.5 s" in err) == (REFUSED, True), err
    checked = moetune("adapter", "check", made / "model", folder / "adapter")
    assert (checked.code, "no end after 0.5 s" in checked.err) == (2, True)


def test_scores_of_another_base(made: Path, tmp_path: Path, moetune: Any) -> None:
    """Of equal shapes: refused by `train` and by `select`, which name both."""
    folder = copied(made, tmp_path / "copy", "run")
    moetune("score", folder / "start.yaml", "--set", "adapt.start_from=null", "--out", folder / "scores.json")
    adapt = f"adapt={{experts: {{from: {folder / 'scores.json'}, k: 1}}}}"
    choice = ("--set", adapt, "--set", f"output={folder / 'new'}")
    values(MODEL, lambda t: t["lm_head.weight"].add_(1))(folder)
    for arguments in (
        ("train", folder / "run.yaml", *choice),
        ("select", folder / "scores.json", "--k", "1", "--run", folder / "run.yaml"),
    ):
        ended = moetune(*arguments)
        assert ended.code == 2, ended
        assert re.search(r"the scores are of '.*model' \(base \w+\), and model.path is '.*model' \(base", ended.err)
    assert not (folder / "new").exists()

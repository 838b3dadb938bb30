"""`moetune serve`: the commands for a server, whose answers scripts/test_serving.sh compares with PEFT's."""

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from moetune.errors import DoesNotFit, UserError
from moetune.exporting.adapter import convert_adapter, merge_adapter
from moetune.exporting.export import export
from moetune.inference.serving import Serving, serving
from tests.exporting.runs import ToyRun, write_base, write_run

LORA: dict[str, Any] = {"rank": 12, "alpha": 24, "targets": ["attention", "experts"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ToyRun]:
    made: dict[str, ToyRun] = {}

    def run(model_type: str) -> ToyRun:
        if model_type not in made:
            folder = tmp_path_factory.mktemp(model_type)
            base = write_base(folder / "base", model_type, num_hidden_layers=2, max_position_embeddings=4096)
            made[model_type] = write_run(folder / "run", base, {"lora": LORA})
        return made[model_type]

    return run


def options(plan: Serving) -> dict[str, str]:
    """Option -> value of the server's command; options without one are left out."""
    command = plan.commands[-1]
    return {word: after for word, after in pairwise(command) if word.startswith("--")}


@pytest.mark.full
def test_a_run_is_exported_and_its_rank_rounded_up(runs: Callable[[str], ToyRun]) -> None:
    run = runs("mixtral")
    plan = serving(str(run.path), "vllm", gpu="24GiB")
    served = run.path.with_name("run-served")
    assert plan.commands[-1][:3] == ["vllm", "serve", str(run.base)]
    given = options(plan)
    assert given["--max-lora-rank"] == "16"
    assert json.loads(given["--lora-modules"]) == {"name": "mine", "path": str(served)}
    assert (given["--dtype"], given["--max-model-len"], given["--host"]) == ("float32", "4096", "127.0.0.1")
    assert "--max-loras" not in given
    assert json.loads((served / "adapter_config.json").read_text())["r"] == 12
    assert "as it was exported before, not the run's newest" in serving(str(run.path), "vllm").notes[0]
    assert options(serving(str(run.path), "vllm"))["--max-loras"] == "2"  # for a CPU


def test_what_the_export_of_a_run_says_is_said(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", "mixtral", num_hidden_layers=2, max_position_embeddings=4096)
    run = write_run(tmp_path / "run", base, {"lora": LORA | {"rank": {"attention": 4, "experts": 12}}})
    assert any("its ranks 4, 12 became 12" in note for note in serving(str(run.path), "vllm").notes)


@pytest.mark.full
def test_factors_in_pefts_layout_need_the_mixed_format_or_are_refused(runs: Callable[[str], ToyRun]) -> None:
    """Mixtral's experts have another name in vLLM, which drops them without a message."""
    for model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
        export(runs(model_type).path, "peft", runs(model_type).path.with_name("peft"))
    plan = serving(str(runs("qwen3_moe").path.with_name("peft")), "vllm", name="own")
    module = json.loads(options(plan)["--lora-modules"])
    assert (module["name"], module["is_3d_lora_weight"]) == ("own", True)
    assert "--enable-mixed-moe-lora-format" in plan.commands[-1]
    with pytest.raises(UserError, match=r"convert --to vllm: it accepts the adapter and drops its experts without a m"):
        serving(str(runs("mixtral").path.with_name("peft")), "vllm")
    with pytest.raises(UserError, match=r"cannot read it: .*merge"):
        serving(str(runs("gpt_oss").path.with_name("peft")), "llama.cpp")


@pytest.mark.full
def test_the_context_is_what_the_card_holds_beside_the_weights_and_an_adapter(
    runs: Callable[[str], ToyRun], tmp_path: Path
) -> None:
    run = runs("qwen3_moe")  # without a sliding window, beyond which nothing is kept
    base, own = str(run.base), str(tmp_path / "own")
    export(run.path, "vllm", tmp_path / "own")
    asked = ((base, 1024), (base, 2048), (own, 2048))
    some, more, beside = (serving(what, "vllm", gpu="1GiB", requests=count).context for what, count in asked)
    assert some is not None
    assert more is not None
    assert beside is not None
    assert 256 <= beside <= more < some <= 4096
    assert abs(some / more - 2) < 0.5
    with pytest.raises(DoesNotFit, match="give fewer --requests"):
        serving(base, "vllm", gpu="1GiB", requests=1 << 16)


def test_llama_converts_what_is_not_there_yet(runs: Callable[[str], ToyRun], tmp_path: Path) -> None:
    run = runs("mixtral")
    adapter = tmp_path / "own"
    export(run.path, "vllm", adapter)
    plan = serving(str(adapter), "llama.cpp", requests=2)
    assert [command[0] for command in plan.commands[:2]] == ["convert_hf_to_gguf.py", "convert_lora_to_gguf.py"]
    assert (plan.commands[0][1], plan.commands[1][1:4]) == (str(run.base), [str(adapter), "--base", str(run.base)])
    assert options(plan)["--lora"] == str(tmp_path / "own.gguf")
    assert set(plan.missing) >= {"llama-server"} - {shutil.which("llama-server") and "llama-server"}
    (tmp_path / "own.gguf").touch()
    assert [command[0] for command in serving(str(adapter), "llama.cpp").commands] == [
        "convert_hf_to_gguf.py",
        "llama-server",
    ]


def test_a_template_of_its_own_is_given_to_the_server(runs: Callable[[str], ToyRun], tmp_path: Path) -> None:
    """Also after `adapter convert` and `merge`, which take it along."""
    run = runs("mixtral")
    export(run.path, "peft", tmp_path / "peft")
    (tmp_path / "peft" / "chat_template.jinja").write_text("{{ messages }}")
    own = tmp_path / "own"
    convert_adapter(str(run.base), tmp_path / "peft", "vllm", own)
    for program, option in (("vllm", "--chat-template"), ("llama.cpp", "--chat-template-file")):
        plan = serving(str(own), program)  # type: ignore[arg-type]
        assert options(plan)[option] == str(own / "chat_template.jinja")
        assert option not in serving(str(run.path), program).commands[-1]  # type: ignore[arg-type]
    merge_adapter(str(run.base), own, tmp_path / "merged")
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_name_with_separators_and_a_folder_that_is_here(
    runs: Callable[[str], ToyRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM splits NAME=PATH at the first sign, and takes what has a comma for JSON."""
    run = runs("mixtral")
    monkeypatch.chdir(run.path)
    plan = serving(".", "vllm", name="a=b,c")
    module = json.loads(options(plan)["--lora-modules"])
    assert module == {"name": "a=b,c", "path": str(run.path.resolve().with_name("run-served"))}


@pytest.mark.full
def test_no_file_is_made_in_the_catalog_or_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = serving("tiny-mixtral", "llama.cpp")
    assert options(plan)["--model"] == "tiny-mixtral.gguf"
    with pytest.raises(UserError, match=r"hf download mistralai/Mixtral-8x7B-v0\.1"):
        serving("mixtral-8x7b", "llama.cpp")
    with pytest.raises(
        DoesNotFit, match=r"with weights of 86\.\d+ GiB, need 1\d\.\d+ GiB more than vllm has .*--requests, or"
    ):
        serving("mixtral-8x7b", "vllm", gpu="80GiB")


@pytest.fixture
def port() -> int:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_the_server_takes_the_place_of_the_process(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr("os.execvp", lambda program, command: called.append(command))
    (tmp_path / "model").write_text("weights")
    made = tmp_path / "model.gguf"
    server = ["llama-server", "--model", str(made)]
    Serving("llama.cpp", [["cp", str(tmp_path / "model"), str(made)], server], port, 1, None, [], []).start()
    assert called == [server]
    assert made.read_text() == "weights"
    converter = ["sh", "-c", 'echo half > "$0"; exit 3', str(tmp_path / "other")]
    with pytest.raises(UserError, match="sh ended with exit code 3"):
        Serving("llama.cpp", [converter, server], port, 1, None, [], []).start()
    assert not (tmp_path / "other").exists()  # which the next call would take for the whole
    with socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UserError, match=f"port {port} .*--port"):
            Serving("vllm", [["vllm", "serve"]], port, 1, None, [], []).start()
    assert called == [server]

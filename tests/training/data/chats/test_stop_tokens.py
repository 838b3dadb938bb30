"""The tokens at which generation ends, and what is said of turns that end with others."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig

from moetune.errors import UserError
from moetune.exporting.export import export
from moetune.training.data.chats.stop_tokens import end_notes, stop_tokens, turn_ends
from moetune.training.preview import preview
from tests import small
from tests.chat_templates import tokenizer_with
from tests.resolved import train

# Ends no turn itself: the next role's token does.
OPEN = (
    "{{ bos_token }}{% for m in messages %}{{ '[INST]' if m.role == 'user' else '[/INST]' }}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[/INST]{% endif %}"
)
CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4


def test_stop_tokens_of_tokenizer_configuration_and_generation_config(tmp_path: Path) -> None:
    tokenizer = tokenizer_with("<|user|><|observation|><|end|>")
    user, observation = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>"])
    config = MixtralConfig(eos_token_id=observation)
    assert stop_tokens(tokenizer, config, str(tmp_path)) == {"</s>", "<|observation|>"}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [user, tokenizer.eos_token_id]}))
    assert stop_tokens(tokenizer, config, str(tmp_path)) == {"</s>", "<|observation|>", "<|user|>"}
    assert stop_tokens(tokenizer, config, None) == {"</s>", "<|observation|>"}


@pytest.mark.parametrize("settings", ["[]", '{"eos_token_id": 99999}', '{"eos_token_id": -1}'])
def test_settings_of_generation_without_a_token(settings: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(settings)
    assert stop_tokens(tokenizer_with("<|end|>"), MixtralConfig(eos_token_id=None), str(tmp_path)) == {"</s>"}


@pytest.mark.parametrize("value", ["</s>", "2", 2.0, True, [2, "</s>"], [[1]], {"id": 2}])
def test_a_stop_token_that_is_no_id_is_refused(value: Any, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    wrong = value[-1] if isinstance(value, list) else value
    with pytest.raises(UserError, match=re.escape(f"eos_token_id in generation_config.json: {wrong!r} is no id")):
        stop_tokens(tokenizer_with("<|end|>"), MixtralConfig(eos_token_id=None), str(tmp_path))


def test_the_end_of_a_turn_is_the_first_token_at_which_generation_stops() -> None:
    ends = {("</tool_call>", "<|im_end|>"): 2, ("<|im_end|>",): 3, (): 1, ("<|end|>", "</s>"): 9}
    assert turn_ends(ends, {"<|end|>", "</s>"}) == {"<|end|>": 9, "<|im_end|>": 5, "": 1}
    stops, other, none = end_notes({"<|end|>": 9, "<|im_end|>": 5, "": 1}, {"<|end|>", "</s>"})
    assert stops == "<|end|> ends 9 turns of the assistant"
    for part in ("warning: <|im_end|> ends 5 turns", "eos_token_id (</s>, <|end|>)", "add it", "data.chat_template"):
        assert part in other
    assert "warning: no token ends 1 turn of" in none
    assert "data.chat_template" in none


def test_data_train_and_export_warn_where_generation_would_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, file = small.write_model(tmp_path / "base"), tmp_path / "open.jinja"
    file.write_text(OPEN)
    data = small.write_data(tmp_path / "chat.jsonl", CHAT)
    config = small.run_config(
        base, data, tmp_path / "run", data={"chat_template": str(file)}, train={"steps": 1, "report_to": []}
    )
    warning = "[INST] ends 4 turns of the assistant, and is not in the model's eos_token_id (</s>)"

    def found() -> Any:
        return preview(config)[1]

    assert found()["train"]["ends"] == {"[INST]": 4}
    assert any(warning in note for note in found()["notes"])
    train(config)
    assert warning in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "inputs.json").read_text())["ends"] == {"[INST]": 4}
    assert any(warning in note for note in export(tmp_path / "run", "delta", tmp_path / "one").notes)
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    assert "[INST] ends 4 turns of the assistant" in found()["notes"]
    assert not any("[INST]" in note for note in export(tmp_path / "run", "delta", tmp_path / "two").notes)

"""LLaMA-Factory's folders: the files and keys that `dataset_info.json` names."""

import json

from tests.training.data.files.read import message, notes, records, write_lines

OPENAI = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
LISTING = {
    "plain": {"file_name": "plain.json"},
    "renamed": {"file_name": "renamed.jsonl", "columns": {"prompt": "q", "query": "c", "response": "a", "system": "s"}},
    "corpus": {"file_name": "corpus.jsonl", "columns": {"prompt": "content"}},
    "chats": {"file_name": "chats.jsonl", "formatting": "sharegpt"},
    "openai": {"file_name": "openai.jsonl", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": OPENAI},
    "dpo": {"file_name": "plain.json", "ranking": True},
    "away": {"hf_hub_url": "org/data"},
    "gone": {"file_name": "gone.json"},
    "outside": {"file_name": "../outside.jsonl"},
}
ALPACA = {"instruction": "ask", "input": "more", "output": "answer"}
TURNS = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]


def make(tmp_path, **listing):
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    (folder / "dataset_info.json").write_text(json.dumps(listing))
    (folder / "plain.json").write_text(json.dumps([ALPACA]))
    write_lines(
        folder / "renamed.jsonl", {"q": "ask", "c": "more", "a": "answer", "s": "be brief", "output": "another"}
    )
    write_lines(folder / "corpus.jsonl", {"content": "words"})
    write_lines(folder / "chats.jsonl", {"conversations": TURNS})
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "weight": 0}]
    write_lines(folder / "openai.jsonl", {"talk": talk})
    write_lines(tmp_path / "outside.jsonl", {"text": "not of this folder"})
    return folder


def test_each_entry_has_its_file_and_keys(tmp_path):
    folder = make(tmp_path, **LISTING)
    renamed = {**ALPACA, "system": "be brief", "output (not in columns)": "another"}
    openai = {"conversations": [TURNS[0], {**TURNS[1], "weight": 0}]}
    expected = [ALPACA, renamed, {"text": "words"}, {"conversations": TURNS}, openai]
    assert records(folder) == expected
    assert notes(folder)[0].endswith("passed over: dpo, away, gone, outside")
    for name, record in zip(LISTING, expected, strict=False):
        assert records(f"{folder}:{name}") == [record]


def test_what_cannot_be_read_is_named(tmp_path):
    folder = make(tmp_path, **LISTING)
    for name in ("dpo", "away", "gone", "outside", "plian"):
        said = message(f"{folder}:{name}")
        assert f"holds no data set {name!r}" in said
        assert "names plain, renamed, corpus, chats, openai whose data are there" in said
    assert "Did you mean 'plain'?" in said
    columns = {"messages": "conversations", "kto_tag": "liked", "images": "photos"}
    folder = make(tmp_path, kto={"file_name": "kto.jsonl", "formatting": "sharegpt", "columns": columns})
    write_lines(folder / "kto.jsonl", {"conversations": TURNS, "liked": False, "photos": ["a.png"]})
    assert records(folder) == [{"conversations": TURNS, "kto_tag": False, "images": ["a.png"]}]
    folder = make(tmp_path, few={"file_name": "plain.json", "num_samples": 5})
    assert "sets num_samples for 'few', which is not applied; name the file plain.json itself" in message(folder)


def test_other_files_of_this_name_are_none(tmp_path):
    folder = make(tmp_path, description="", features={})
    (folder / "plain.json").unlink()
    assert len(records(folder)) == 4
    (folder / "dataset_info.json").write_text("no JSON")
    assert len(records(folder)) == 4

"""Records to tokens and labels, token by token, with a tokenizer of one token a byte."""

import json
import random
import re
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from moetune.config.schema import DataConfig, TrainConfig
from moetune.errors import UserError
from moetune.training.data import encoder
from moetune.training.data.chats import chat_template
from moetune.training.data.load import load_data, pad_token_id, tokenizer_of
from moetune.training.step.batch import collate

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)
USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
TALK = [{"role": "system", "content": "s"}, USER, ASSISTANT, {"role": "user", "content": "?"}, ASSISTANT]


def make_tokenizer(template=None, bos=True, trim_offsets=False, merges=()):
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in merges:
        vocabulary["".join(pair)] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
        chat_template=template,
    )
    steps = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        steps.append(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]))
    tokenizer.backend_tokenizer.post_processor = processors.Sequence(steps)
    return tokenizer


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def load(train, tokenizer, length=64, **data):
    return load_data(DataConfig(train=str(train), **data), tokenizer, TrainConfig(sequence_length=length))


def load_one(tmp_path, record, tokenizer, length=512, **data):
    """The ids and labels of a single record, unpacked."""
    file = write(tmp_path / "one.jsonl", record)
    (item,) = load(file, tokenizer, length, packing=False, **data).train
    return item["input_ids"], item["labels"]


def trained_text(tokenizer, ids, labels):
    """The text that carries loss; every label that counts is the token it stands under."""
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    return tokenizer.decode([label for label in labels if label != -100])


def message(*args, **kwargs):
    with pytest.raises(UserError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


def test_text_gets_bos_and_eos(tmp_path):
    tokenizer = make_tokenizer()
    a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert load_one(tmp_path, {"text": "ab"}, tokenizer) == ([bos, a, b, eos], [-100, a, b, eos])
    assert load_one(tmp_path, {"text": "ab"}, make_tokenizer(bos=False)) == ([a, b, eos], [-100, b, eos])


def test_text_that_spells_its_bos_and_eos_gets_no_second(tmp_path):
    tokenizer = make_tokenizer()
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    plain = load_one(tmp_path, {"text": "ab"}, tokenizer)
    assert load_one(tmp_path, {"text": f"{bos}ab{eos}"}, tokenizer) == plain
    pair = load_one(tmp_path, {"prompt": "a", "completion": "b"}, tokenizer)
    assert load_one(tmp_path, {"prompt": f"{bos}a", "completion": f"b{eos}"}, tokenizer) == pair


def test_only_the_completion_trains(tmp_path):
    # The merge would join "?" and "n" if both sides were tokenized as one text.
    tokenizer = make_tokenizer(merges=[("?", "n")])
    ids, labels = load_one(tmp_path, {"prompt": "why?", "completion": "no"}, tokenizer)
    assert tokenizer.decode(ids) == "<s>why?no</s>"
    assert trained_text(tokenizer, ids, labels) == "no</s>"


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_chat_trains_what_follows_each_generation_prompt(tmp_path, trim_offsets):
    tokenizer, talk = make_tokenizer(CHATML, trim_offsets=trim_offsets), [{"role": "system", "content": ""}, *TALK]
    ids, labels = load_one(tmp_path, {"messages": talk}, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(talk, tokenize=False)
    assert trained_text(tokenizer, ids, labels) == "yes<|im_end|>\nyes<|im_end|>\n"


def test_an_assistant_that_speaks_first_needs_markers(tmp_path):
    record = {"messages": [ASSISTANT, USER, ASSISTANT]}
    tokenizer = make_tokenizer(MARKED)
    assert trained_text(tokenizer, *load_one(tmp_path, record, tokenizer)) == "yes</s>yes</s>"
    assert "line 1: the assistant speaks first" in message(tmp_path / "one.jsonl", make_tokenizer(CHATML))


def test_chat_trains_what_a_template_marks(tmp_path):
    tokenizer = make_tokenizer(MARKED)
    ids, labels = load_one(tmp_path, {"messages": TALK}, tokenizer)
    assert tokenizer.decode(ids) == "<s>[s][hi]yes</s>[?]yes</s>"
    assert trained_text(tokenizer, ids, labels) == "yes</s>yes</s>"
    reference = tokenizer.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
    assert reference["input_ids"] == ids
    assert reference["assistant_masks"] == [int(label != -100) for label in labels]


def test_a_header_within_the_marks_is_not_the_assistants(tmp_path):
    marked = CHATML.replace(
        "{% for m in messages %}", "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    )
    turn = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    marked = marked.replace(
        f"{turn}{{% endfor %}}", f"{turn}{{% endgeneration %}}{{% else %}}{turn}{{% endif %}}{{% endfor %}}"
    )
    assert load_one(tmp_path, {"messages": TALK}, make_tokenizer(marked)) == load_one(
        tmp_path, {"messages": TALK}, make_tokenizer(CHATML)
    )


def test_chats_that_were_rendered_are_said_to_train_whole(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[INST]"]})
    counts = load(write(tmp_path / "data.jsonl", {"text": "<s>[INST]a</s>"}), tokenizer, length=64).counts
    assert "text with [INST], the loss on all of it" in counts.unread[0]


def test_characters_that_a_tokenizer_does_not_know_are_counted(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"unk_token": "<unk>"})
    counts = load(write(tmp_path / "data.jsonl", {"text": "a<unk>b<unk>"}), tokenizer, length=64).counts
    assert counts.unread == ("2 tokens for characters that the tokenizer does not know (its unk_token)",)


def test_the_same_input_gives_the_same_bytes(tmp_path):
    file = write(tmp_path / "data.jsonl", *({"text": "x" * n} for n in range(1, 40)))
    first, again = (load(file, make_tokenizer(), 32, eval=file) for _ in range(2))
    assert first.train.data.table.equals(again.train.data.table)
    assert first.eval is not None
    assert first.eval.data.table.equals(first.train.data.table)
    assert not first.train.cache_files


def test_every_malformed_record_is_listed_with_its_line(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_bytes(
        b'{"text": "fine"}\n'
        b'{"text": }\n'
        b"\n"
        b'{"text": "\xff"}\n'
        b"[1]\n"
        b'{"txt": "a"}\n'
        b'{"text": 5}\n'
        b'{"text": "  "}\n'
        b'{"text": "\\ud83d"}\n'
        b'{"text": "fine too"}\n'
    )
    assert message(file, make_tokenizer()).splitlines() == [
        f"'{file}': 7 records cannot be used",
        "  line 2: not valid JSON: Expecting value (column 10)",
        "  line 4: not valid UTF-8",
        "  line 5: a list, not an object with keys",
        "  line 6: no 'text'; it holds txt",
        "  line 7: text is a number, not text",
        "  line 8: text is empty",
        "  line 9: text holds half of a surrogate pair, which is no character",
    ]


def test_alike_problems_are_one_with_a_count_for_either_data_set(tmp_path):
    train = write(
        tmp_path / "train.jsonl",
        {"prompt": "a", "completion": "b"},
        *({"prompt": "a"} for _ in range(25)),
        {"prompt": 1, "completion": "b"},
        *({"prompt": "a" * length, "completion": "b"} for length in (70, 80, 90, 99)),
    )
    assert message(train, make_tokenizer(), eval=str(tmp_path / "gone.jsonl")).splitlines() == [
        f"'{train}': 30 records cannot be used",
        "  lines 2, 3, 4, and 22 more: no 'completion'; it holds prompt",
        "  line 27: prompt is a number, not text",
        "  lines 28, 29, 30, and 1 more: 73 tokens do not fit train.sequence_length 64",
        "  prompts and chats are not cut by themselves: raise train.sequence_length to 102, or set data.too_long: drop "
        "or truncate",
        f"no such file: '{tmp_path / 'gone.jsonl'}'. Did you mean 'train.jsonl'?",
    ]
    unlike = write(tmp_path / "unlike.jsonl", *({"text": 7, "id" * row: 1} for row in range(30)))
    file = write(tmp_path / "bad.jsonl", *({"a" * row: 1} for row in range(1, 24)))
    assert message(unlike, make_tokenizer()).count("\n") == 1
    lines = message(file, make_tokenizer()).splitlines()
    assert (len(lines), lines[-1]) == (22, "  and 3 more")


ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Below is an instruction"}
SHAREGPT = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}], "system": "s"}


def test_alpaca_is_a_chat_where_there_is_a_template(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    record = ALPACA | {"system": "s", "history": [["hi", "yes"]]}
    ids, labels = load_one(tmp_path, record, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [*TALK[:3], {"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}], tokenize=False
    )
    assert trained_text(tokenizer, ids, labels) == "yes<|im_end|>\n3<|im_end|>\n"


@pytest.mark.parametrize("history", [[["q"]], ["qa"], "text"])
def test_a_history_that_is_no_list_of_pairs(tmp_path, history):
    file = write(tmp_path / "one.jsonl", ALPACA | {"history": history})
    assert "line 1: history is not a list of pairs" in message(file, make_tokenizer(CHATML))


def test_alpaca_is_stanfords_prompt_where_there_is_none(tmp_path):
    tokenizer = make_tokenizer(bos=False)
    ids, labels = load_one(tmp_path, ALPACA, tokenizer)
    assert tokenizer.decode(ids) == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd.\n\n### Input:\n1 2\n\n"
        "### Response:\n3</s>"
    )
    assert trained_text(tokenizer, ids, labels) == "3</s>"
    ids, _ = load_one(tmp_path, {"instruction": "Add.", "input": "", "output": "3"}, tokenizer)
    assert tokenizer.decode(ids).endswith("describes a task. Write a response that appropriately completes the "
                                          "request.\n\n### Instruction:\nAdd.\n\n### Response:\n3</s>")  # fmt: skip


def test_sharegpt_is_a_chat(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    ids, labels = load_one(tmp_path, SHAREGPT, tokenizer)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(TALK[:3], tokenize=False)
    assert trained_text(tokenizer, ids, labels) == "yes<|im_end|>\n"
    file = write(tmp_path / "bad.jsonl", {"conversations": [{"from": "alien", "value": "hi"}]}, {"conversations": 1})
    lines = message(file, tokenizer).splitlines()
    assert lines[1].startswith("  line 1: turn 1: unknown speaker 'alien'; it may be system,")
    assert lines[2] == "  line 2: conversations is a number, not a list"


def test_formats_of_several_files_are_told_apart(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "alpaca.json").write_text(json.dumps([ALPACA, ALPACA]))
    write(tmp_path / "data" / "sharegpt.jsonl", SHAREGPT)
    (tmp_path / "data" / "text.csv").write_text("text\nabc\n")
    data = load(tmp_path / "data", make_tokenizer(CHATML), 256)
    assert data.counts.lengths.tolist()[-1] == len("<s>abc</s>") - 5
    assert data.counts.tokens == data.counts.lengths.sum()
    assert (data.counts.tokens + data.counts.padding) == 256 * data.counts.sequences


def test_a_chat_template_can_be_a_file_or_anothers(tmp_path):
    file = write(tmp_path / "one.jsonl", {"messages": [USER, ASSISTANT]})
    (tmp_path / "own.jinja").write_text(CHATML)
    tokenizer = make_tokenizer()
    (row,) = load(file, tokenizer, packing=False, chat_template=str(tmp_path / "own.jinja")).train
    assert trained_text(tokenizer, row["input_ids"], row["labels"]) == "yes<|im_end|>\n"
    plain = write(tmp_path / "plain.jsonl", {"prompt": "hi", "completion": "yes"})
    for spec, data in (
        (file, {"chat_template": "tiny-mixtral"}),
        (plain, {}),
        (plain, {"chat_template": "tiny-mixtral"}),
    ):
        notes = load(spec, tokenizer, 512, **data).counts.unread
        assert ["are not used" in note for note in notes] == [True] * (spec == plain and len(data))
    assert tokenizer.chat_template != CHATML
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "mixtral"}')
    other = make_tokenizer({"default": CHATML, "tools": CHATML})
    load(file, other, 512, chat_template=str(tmp_path / "model"))
    assert other.chat_template == tokenizer.chat_template
    assert "chat template cannot be used" in message(file, make_tokenizer({"tools": CHATML, "plain": CHATML}))
    assert "no such file: 'no.jinja'" in message(file, tokenizer, chat_template="no.jinja")


def test_a_template_in_json_as_models_of_images_publish_it(tmp_path):
    """Named, it is not taken for a template's text; beside a tokenizer without one, it is that of the model."""
    file = write(tmp_path / "one.jsonl", {"messages": [USER, ASSISTANT]})
    tokenizer = make_tokenizer()
    for name, value in (("chat_template", {"chat_template": CHATML}), ("tokenizer_config", {"chat_template": CHATML})):
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
        (row,) = load(file, tokenizer, packing=False, chat_template=str(tmp_path / f"{name}.json")).train
        assert tokenizer.decode(row["input_ids"]).startswith("<|im_start|>")
    (tmp_path / "other.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": CHATML}]}))
    assert "no text under chat_template" in message(file, tokenizer, chat_template=str(tmp_path / "other.json"))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "model")
    assert not tokenizer_of("model", str(tmp_path / "model")).chat_template
    shutil.copy(tmp_path / "chat_template.json", tmp_path / "model")
    assert tokenizer_of("model", str(tmp_path / "model")).chat_template == CHATML


def test_what_is_too_long_is_dropped_or_cut_where_that_is_asked_for(tmp_path):
    tokenizer = make_tokenizer()
    records = [{"prompt": "a" * prompt, "completion": "b" * 9} for prompt in (5, 30, 60, 90)]
    file = write(tmp_path / "data.jsonl", *records)
    dropped = load(file, tokenizer, packing=False, too_long="drop")
    assert (dropped.counts.dropped, dropped.counts.cut, dropped.counts.lengths.tolist()) == (2, 0, [16, 41])
    cut = load(file, tokenizer, packing=False, too_long="truncate")
    assert (cut.counts.dropped, cut.counts.cut, cut.counts.lengths.tolist()) == (1, 1, [16, 41, 64])
    assert [sum(label != -100 for label in row["labels"]) for row in cut.train] == [10, 10, 3]
    assert "all of its 4 records are longer" in message(file, tokenizer, 10, too_long="drop")


def test_weights_and_a_held_out_share(tmp_path):
    tokenizer = make_tokenizer()
    one = write(tmp_path / "one.jsonl", *({"prompt": f"{row}", "completion": "a"} for row in range(10)))
    two = write(tmp_path / "two.jsonl", *({"prompt": f"{row}", "completion": "b"} for row in range(6)))

    def read(**more):
        train = [{"path": one, "weight": 2.5}, two]
        config = DataConfig.model_validate({"train": train, "packing": False, **more})
        return load_data(config, tokenizer, TrainConfig(sequence_length=64))

    def texts(rows):
        return [tokenizer.decode(row["input_ids"]) for row in rows]

    data = read()
    assert data.train.data.table.equals(read().train.data.table)
    seen = texts(data.train)
    assert sorted({text: seen.count(text) for text in seen}.values()) == [1] * 6 + [2] * 5 + [3] * 5
    split = read(validation=0.25)
    assert split.eval is not None
    assert len(split.eval) == 4
    assert set(texts(split.eval)) | set(texts(split.train)) == set(seen)
    assert not set(texts(split.eval)) & set(texts(split.train))
    both = read(eval=[one, write(tmp_path / "three.jsonl", {"prompt": "new", "completion": "c"})]).eval_counts
    assert (split.eval_counts.unread, both.unread) == ((), ("10 of 11 held-out documents are trained on too",))
    copy = write(tmp_path / "copy.jsonl", *({"prompt": f"{row}", "completion": "b"} for row in range(6)))
    again = read(train=[two, copy]).counts
    assert again.unread == (f"{again.records // 2} of {again.records} training documents are repetitions of others",)
    with pytest.raises(ValueError, match=r"train names .* twice; write \{path: .*, weight: 2\}"):
        read(train=[one, two, one])
    with pytest.raises(ValueError, match="leave one"):
        read(validation=0.25, eval=two)
    with pytest.raises(UserError, match="leaves none to train on"):
        read(validation=0.99)
    for sets in ({"eval": [{"path": two, "weight": 0.01}]}, {"train": [one, {"path": two, "weight": 0.01}]}):
        with pytest.raises(UserError, match=r"two\.jsonl': a weight of 0\.01 leaves none of its records \(6\)"):
            read(**sets)


def test_empty_data_sets_are_named(tmp_path):
    for name in ("data.jsonl", "data.txt"):
        (tmp_path / name).write_text("\n \n")
        assert message(tmp_path / name, make_tokenizer()) == f"'{tmp_path / name}' is empty: it holds no record"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), tmp_path / "data.parquet")
    assert "is empty" in message(tmp_path / "data.parquet", make_tokenizer())


def test_the_first_record_decides_the_format(tmp_path):
    file = write(tmp_path / "data.jsonl", {"prompt": "a", "completion": "b"}, {"text": "a"})
    assert "line 2: no 'prompt' and no 'completion'; it holds text" in message(file, make_tokenizer())
    file = write(tmp_path / "data.jsonl", {"text": "a", "messages": None})
    assert len(load(file, make_tokenizer()).train) == 1
    assert "line 1: no 'messages'; it holds text" in message(file, make_tokenizer(CHATML), format="chat")
    file = write(tmp_path / "data.jsonl", {"question": "a"})
    assert "line 1: it holds question; a record needs 'text', 'prompt' and" in message(file, make_tokenizer())
    file = write(tmp_path / "data.jsonl", {}, {"text": "a"}, {"prompt": "a", "completion": "b"})
    assert [line[:14] for line in message(file, make_tokenizer()).splitlines()[1:]] == [
        "  line 1: it h",
        "  line 3: no '",
    ]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("record", [{"prompt": "a" * 20, "completion": "b"}, {"messages": [USER, ASSISTANT] * 9}])
def test_what_must_stay_whole_and_does_not_fit_is_refused(tmp_path, packing, record):
    tokenizer = make_tokenizer(MARKED)
    fits = {"prompt": "a", "completion": "b"} if "prompt" in record else {"messages": [USER, ASSISTANT]}
    needed = len(load_one(tmp_path, record, tokenizer)[0])
    file = write(tmp_path / "data.jsonl", fits, record)
    assert message(file, tokenizer, length=16, packing=packing).splitlines()[1:] == [
        f"  line 2: {needed} tokens do not fit train.sequence_length 16",
        f"  prompts and chats are not cut by themselves: raise train.sequence_length to {needed}, or set "
        "data.too_long: drop or truncate",
    ]
    assert len(load(file, tokenizer, length=needed, packing=packing).train) == 2


@pytest.mark.parametrize("packing", [True, False])
def test_long_text_is_cut_and_nothing_lost(tmp_path, packing):
    tokenizer = make_tokenizer()
    (tmp_path / "long.txt").write_text("0123456789" * 5)
    items = list(load(tmp_path / "long.txt", tokenizer, length=16, packing=packing).train)
    assert [len(item["input_ids"]) for item in items] == [16, 16, 16, 16 if packing else 7]
    text = "".join(trained_text(tokenizer, item["input_ids"], item["labels"]) for item in items)
    assert text == "0123456789" * 5 + "</s>"


def test_a_tokenizer_that_cannot_serve_is_refused(tmp_path):
    chat = write(tmp_path / "chat.jsonl", {"messages": [USER, ASSISTANT]})
    text = write(tmp_path / "text.jsonl", {"text": "a"})
    assert message(chat, make_tokenizer(), eval=chat).startswith("the tokenizer has no chat template")
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert "no end-of-sequence token" in message(text, tokenizer)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (
            CHATML.replace("assistant\n", "assistant\n<think>\n"),
            "the chat template does not begin message 3 with its own generation prompt, which ends in "
            "'<|im_start|>assistant\\n<think>\\n', so what is the assistant's cannot be told; name one in "
            "data.chat_template (a chat_template.jinja) that does, or that has {% generation %} markers",
        ),
        (
            "{{ raise_exception('roles must alternate') }}",
            "the chat template refuses it: roles must alternate",
        ),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% generation %}{% endgeneration %}",
            "the chat template has message 3, the assistant's, outside of {% generation %}, so that it would not "
            "train; name another in data.chat_template",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            "the chat template has message 1, the system's, within {% generation %}, so that it would "
            "train; name another in data.chat_template",
        ),
    ],
)
def test_a_template_that_hides_the_assistant_is_refused(tmp_path, template, problem):
    file = write(tmp_path / "data.jsonl", {"messages": TALK})
    assert message(file, make_tokenizer(template)).splitlines()[1] == f"  line 1: {problem}"


def test_packed_batches_have_positions_and_no_mask(tmp_path):
    tokenizer = make_tokenizer()
    file = write(tmp_path / "data.jsonl", {"text": "abc"}, {"text": "d"}, {"text": "efghij"})
    batch = collate(list(load(file, tokenizer, length=10).train), pad_token_id(tokenizer))
    assert tokenizer.decode(batch["input_ids"][0]) == "<s>abc</s><s>d</s><s>e"
    assert tokenizer.decode(batch["input_ids"][1]) == "efghij</s>" + "</s>" * 3
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]]
    assert (batch["labels"] == -100).int().tolist() == [
        [1, 0, 0, 0, 0, 1, 0, 0, 1, 0],
        [1] + [0] * 6 + [1] * 3,
    ]
    assert batch["is_token"].tolist() == [[1] * 10, [1] * 7 + [0] * 3]
    assert set(batch) == {"input_ids", "labels", "position_ids", "is_token"}
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_separate_batches_are_padded_on_the_right(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    file = write(tmp_path / "data.jsonl", {"text": "abc"}, {"text": "d"})
    batch = collate(list(load(file, tokenizer, packing=False).train), pad_token_id(tokenizer))
    pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    assert pad != eos
    assert batch["input_ids"][1, 2:].tolist() == [eos, pad, pad]
    assert batch["labels"][1, 2:].tolist() == [eos, -100, -100]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert set(batch) == {"input_ids", "labels", "attention_mask"}


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    ("written", "lost"),
    [
        ("m.content.split('</note>')[-1]", "'<note>small"),
        ("m.content[:31]", "'<note>small"),
        ("m.content.split('</think>')[-1]", "the text before </think> in message 2"),
        ("m.content | tojson | upper | trim", ""),
    ],
)
def test_content_that_a_template_drops_is_refused(tmp_path, template, written, lost):
    messages = [
        {"role": "user", "content": ' <note>small\n"note"</note> small note '},
        {"role": "assistant", "content": "<think>x</think>yes"},
    ]
    file = write(tmp_path / "data.jsonl", {"messages": messages})
    tokenizer = make_tokenizer(template.replace("m.content", written))
    if lost:
        assert f"line 1: the chat template leaves out {lost}" in message(file, tokenizer)
    else:
        assert len(load(file, tokenizer, 256).train) == 1


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_a_message_of_weight_zero_does_not_train(tmp_path, template):
    talk = [USER, {"role": "assistant", "content": "no", "weight": 0}, USER, ASSISTANT | {"weight": 1}]
    tokenizer = make_tokenizer(template)
    assert trained_text(tokenizer, *load_one(tmp_path, {"messages": talk}, tokenizer)).startswith("yes")
    file = write(tmp_path / "data.jsonl", {"messages": [USER, ASSISTANT | {"weight": 0.5}]})
    assert "weight of message 2 is 0.5" in message(file, tokenizer)


@pytest.mark.parametrize("name", ["data.jsonl", "data.json"])
def test_a_key_that_stands_twice_is_refused(tmp_path, name):
    line = '{"text": "a", "meta": {"k": 1, "k": 2}}'
    (tmp_path / name).write_text(line if name == "data.jsonl" else f"[{line}]")
    assert "the key 'k' appears more than once" in message(tmp_path / name, make_tokenizer())


def test_a_template_that_does_not_end_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    file = write(tmp_path / "data.jsonl", {"messages": TALK})
    assert "no end after 0.2 s" in message(file, make_tokenizer(loops))


# In the manner of published templates: reasoning of earlier turns is dropped (thinking, harmony), or turns after a
# tool's have no generation prompt (bars).
THINKING = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ m.reasoning_content or '' }}\n</think>\n{% endif %}{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HARMONY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'assistant' %}{% if loop.last and m.thinking %}"
    "<|c|>analysis<|m|>{{ m.thinking }}<|im_end|><|im_start|>assistant{% endif %}<|c|>final<|m|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|im_end|>' }}{% else %}<|m|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
BARS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}|A|{% endif %}{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'tool' %}<o>{{ m.content }}</o>{% elif m.role == 'user' %}|U|{{ m.content }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}|A|{% endif %}"
)


def _answer(template, message, last):
    """What the assistant writes for a message that stands last, or that others follow."""
    reason = message.get("reasoning_content") or message.get("thinking")
    if template is THINKING:
        return f"<think>\n{reason or ''}\n</think>\n{message['content']}<|im_end|>\n"
    if template is HARMONY:
        thought = f"<|c|>analysis<|m|>{reason}<|im_end|><|im_start|>assistant" if reason else ""
        return f"{thought}<|c|>final<|m|>{message['content']}" + ("<|return|>" if last else "<|im_end|>")
    return message["content"] + ("</s>" if template is BARS else "<|im_end|>\n")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("template", [CHATML, THINKING, HARMONY, BARS], ids=["chatml", "thinking", "harmony", "bars"])
def test_exactly_what_the_assistant_writes_trains(tmp_path, template, seed):
    draw = random.Random(seed)

    def words():
        return "".join(draw.choice(["a", "\n", " ", "é", "🙂", "b|", "<", "the"]) for _ in range(9)) + "."

    reasons = {THINKING: "reasoning_content", HARMONY: "thinking"}
    talks = []
    for _ in range(8):
        talk = [{"role": "system", "content": words()}] * draw.randrange(2)
        for _ in range(draw.randrange(1, 5)):
            talk.append({"role": "user", "content": words()})
            for _ in range(draw.randrange(3) if template in (THINKING, BARS) else 0):
                talk += [{"role": "assistant", "content": words()}, {"role": "tool", "content": words()}]
            talk.append({"role": "assistant", "content": words()})
            if template in reasons and draw.random() < 0.5:
                talk[-1][reasons[template]] = words()
        talk[0] = {**talk[0], "content": f"#{len(talks)};" + words()}
        talks.append(talk)
    file = write(tmp_path / "talks.jsonl", *({"messages": talk} for talk in talks))
    tokenizer = make_tokenizer(
        template, merges=[("Ċ", "Ċ"), ("t", "h"), ("Ċ", "t"), (".", "<"), ("|", "a"), ("<", "|")]
    )
    data = load(file, tokenizer, 4096, packing=False)
    # Each is trained once, in a document that ends as it would be generated, whole turns in one where they agree.
    expected = [_answer(template, m, last=True) for talk in talks for m in talk if m["role"] == "assistant"]
    trained = [trained_text(tokenizer, row["input_ids"], row["labels"]) for row in data.train]
    assert "".join(trained) == "".join(expected)
    assert data.counts.records == len(talks) == data.counts.chats.total()
    assert ("turns" in data.counts.chats) == (template in reasons) == (len(data.train) > len(talks))
    rendered = {tokenizer.apply_chat_template(talk[:at], tokenize=False) for talk in talks for at in range(1, 99)}
    assert all(tokenizer.decode(row["input_ids"]) in rendered for row in data.train)
    held = load(file, tokenizer, 4096, packing=False, validation=0.3)
    parts = [[tokenizer.decode(row["input_ids"]) for row in part] for part in (held.train, held.eval)]
    assert (held.counts.records, held.eval_counts.records) == (6, 2)
    assert sorted(parts[0] + parts[1]) == sorted(tokenizer.decode(row["input_ids"]) for row in data.train)
    openings = [{re.search(r"#\d+;", text).group() for text in part} for part in parts]
    assert not openings[0] & openings[1]


def test_a_cut_chat_ends_with_a_whole_turn(tmp_path):
    tokenizer = make_tokenizer(CHATML)
    talk = [USER, ASSISTANT, USER, {"role": "assistant", "content": "b" * 90}]
    file = write(tmp_path / "data.jsonl", {"messages": talk}, {"messages": talk[2:]})
    data = load(file, tokenizer, 64, packing=False, too_long="truncate")
    texts = [trained_text(tokenizer, row["input_ids"], row["labels"]) for row in data.train]
    assert texts[0] == "yes<|im_end|>\n"
    assert set(texts[1]) == {"b"}
    assert (data.counts.cut, data.counts.unended) == (2, 1)


def _unlike(kind):
    """A tokenizer whose words are cut by a pattern, whose tokens hold spaces, or that marks the first word."""
    tokenizer = make_tokenizer(merges=[("a", "b"), ("Ġ", "ab"), ("Ċ", "Ċ"), ("c", "Ġ"), ("ab", "ab")])
    if kind == "pattern":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)
    if kind == "metaspace":
        words = [
            ("▁ab", -2.0),
            ("▁", -3.0),
            ("ab", -3.0),
            ("bab", -3.5),
            ("\n", -2.0),
            *((c, -5.0) for c in "abc é🙂/s<>"),
        ]
        backend = Tokenizer(models.Unigram([("<unk>", -9.0), *words], unk_id=0))
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>")
    return tokenizer


@pytest.mark.parametrize("kind", ["spaces", "pattern", "metaspace"])
@pytest.mark.parametrize("template", [None, CHATML])
def test_a_long_record_is_tokenized_in_parts(tmp_path, monkeypatch, kind, template):
    """Cut after lines, before spaces or anywhere; what it says and what trains of it stay."""
    tokenizer, text = _unlike(kind), "ab ab\nabab" + " ab" * 30 + "ab" * 40 + "é🙂" * 9 + "\n"
    tokenizer.chat_template = template
    record = {"messages": [USER, {"role": "assistant", "content": text}]} if template else {"text": text}
    ids, labels = load_one(tmp_path, record, tokenizer)
    monkeypatch.setattr(encoder, "_WINDOW", 32)
    parts, part_labels = load_one(tmp_path, record, tokenizer)
    assert len(parts) > len(ids) or (template and kind != "spaces")  # whole, for the offsets of its characters
    for one, other in ((parts, ids), ([i for i in part_labels if i != -100], [i for i in labels if i != -100])):
        one, other = (re.sub("[ ▁]", "", tokenizer.decode(some)) for some in (one, other))
        assert one == other


def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path):
    steps = {"normalizer": normalizers.Replace("a", "a" * 9), "decoder": decoders.Replace("a", "a" * 9)}
    for part, step in steps.items():
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(tmp_path / part)
        assert tokenizer_of("own", str(tmp_path / part)).is_fast
        sequence = normalizers.Sequence if part == "normalizer" else decoders.Sequence
        setattr(tokenizer.backend_tokenizer, part, sequence([step] * 30))
        tokenizer.save_pretrained(tmp_path / part)
        with pytest.raises(UserError, match=rf"{part} in tokenizer.json .* 4.24e\+28 times"):
            tokenizer_of("own", str(tmp_path / part))


def test_a_system_message_beside_messages_is_the_first(tmp_path):
    tokenizer, talk = make_tokenizer(CHATML), [USER, ASSISTANT]
    beside = load_one(tmp_path, {"system": "be kind", "messages": talk}, tokenizer)
    first = load_one(tmp_path, {"messages": [{"role": "system", "content": "be kind"}, *talk]}, tokenizer)
    assert beside == first


def test_a_device_is_no_file_of_data():
    assert "'/dev/null' is a pipe or a device" in message("/dev/null", make_tokenizer())


@pytest.mark.parametrize("first", [["<s>"], ["<|im_start|>", "<s>"]])
def test_a_text_begins_as_its_tokenizer_begins_it(tmp_path, first):
    """Also with two tokens, or with one that is named in tokenizer.json alone."""
    tokenizer = make_tokenizer()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in first]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=[*first, "$A"], special_tokens=special
    )
    tokenizer.bos_token = None
    file = write(tmp_path / "a.jsonl", {"text": "ab"}, {"text": "".join(first) + "ab"})
    rows = load_data(DataConfig(train=file, packing=False), tokenizer, TrainConfig(sequence_length=64)).train
    ids = [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id]
    assert [(row["input_ids"], row["labels"]) for row in rows] == [(ids, [-100] * len(first) + ids[len(first) :])] * 2

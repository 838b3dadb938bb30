"""A JSON array read value by value, beside `json.loads` of the whole."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetune.training.data.files import json_array
from moetune.training.data.files.json_array import JsonArray

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(autouse=True, params=[1, 20, 2**16])
def at_once(request, monkeypatch):
    monkeypatch.setattr(json_array, "_BYTES", request.param)


@given(st.lists(VALUES, max_size=6), st.sampled_from([None, 1]), st.booleans(), st.sampled_from(["", " \r\n"]))
def test_values_are_those_of_the_whole(values, indent, ascii, white):
    text = white + json.dumps(values, indent=indent, ensure_ascii=ascii) + white
    raw = text.encode(errors="replace")
    assert [*JsonArray(io.BytesIO(raw))] == json.loads(raw)


WRONG = ["[", "[1", '[\n1, {"a": "b', "[1 2]", '[{"a": 1},\n\n {"a" 1}, 3]', "[1]\n2", "[1, tru]", '["a\nb"]', "[1.e5]"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_wrong_is_said_as_of_the_whole(text):
    array = JsonArray(io.BytesIO(text.encode()))
    with pytest.raises(json.JSONDecodeError) as expected:
        json.loads(text)
    with pytest.raises(json.JSONDecodeError) as found:
        list(array)
    there = expected.value
    assert (found.value.msg, *array.where(found.value)) == (there.msg, there.lineno, there.colno)

"""`data:` of a run file: data sets, and how they become sequences."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from moetune.config.fields import FilePath
from moetune.config.schema.section import Section


class WeightedData(Section):
    """One of several data sets.

    Attributes:
        path: a file, folder, catalog data set or hub data set.
        weight: how often each record occurs in an epoch; 0.5 takes a random half of the records.
    """

    path: FilePath
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0


_MaybeWeighted = Annotated[
    Annotated[FilePath, Tag("one")] | Annotated[WeightedData, Tag("weighted")],
    Discriminator(lambda raw: "one" if isinstance(raw, str) else "weighted"),
]
OneOrSeveral = Annotated[
    Annotated[FilePath, Tag("one")] | Annotated[tuple[_MaybeWeighted, ...], Field(min_length=1), Tag("several")],
    Discriminator(lambda raw: "several" if isinstance(raw, (list, tuple)) else "one"),
]


def _check_arguments(arguments: object) -> object:
    """Return arguments of a chat template unchanged; raise `ValueError` for a name that none has, a null or a date."""
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is no name of a variable; write {{enable_thinking: false}}")
        if value is None:
            raise ValueError(f"{name} has no value; leave it out, and the chat template takes its own")
        if isinstance(value, date):
            raise ValueError(f"{name}: YAML reads {value} as a date; write it in quotes")
    return arguments


class DataConfig(Section):
    """Training and evaluation data (`data:`).

    A data set is a file, a folder, a catalog data set, or a hub data set, each also with a split, or with a
    configuration and a split: `folder:test`, `org/name:config:split`.

    Attributes:
        train: one data set or several, which may have weights.
        split: split of the training data sets that name none; None for `train`.
        eval: data sets for evaluation; None for none.
        format: format of the records; `auto` detects it from the first.
        packing: fill each sequence with several documents, which do not attend to each other.
        chat_template: a file, or a model whose template is used; None for the tokenizer's own.
        template: arguments that the chat template reads, such as `{enable_thinking: false}`.
        too_long: what to do with prompts and chats longer than a sequence: report an error, drop or truncate them.
        validation: fraction of the training records to hold out for evaluation, if `eval` is not given; None for none.
    """

    train: OneOrSeveral
    eval: OneOrSeveral | None = None
    split: Annotated[str, Field(min_length=1)] | None = None
    format: Literal["auto", "text", "prompt", "chat", "alpaca", "sharegpt"] = "auto"
    packing: bool = True
    chat_template: FilePath | None = None
    template: Annotated[dict[str, JsonValue], BeforeValidator(_check_arguments)] = Field(default_factory=dict)
    too_long: Literal["error", "drop", "truncate"] = "error"
    validation: Annotated[float, Field(gt=0, lt=1)] | None = None

    @model_validator(mode="after")
    def _named_once(self) -> "DataConfig":
        """Raise `ValueError` if both `validation` and `eval` are set, or a data set is named twice."""
        for key, written in (("train", self.train), ("eval", self.eval)):
            names = [name for name, _ in data_sets(written)]
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise ValueError(f"{key} names {twice!r} twice; write {{path: {twice}, weight: 2}} to read it twice")
        if self.eval is not None and self.validation is not None:
            raise ValueError("validation splits held-out records off the training data, and eval names some; leave one")
        return self

    @property
    def evaluates(self) -> bool:
        """Whether the run has held-out data."""
        return self.eval is not None or self.validation is not None


def data_sets(written: str | Sequence[str | WeightedData] | None, split: str | None = None) -> list[tuple[str, float]]:
    """Return (name, weight) of each data set under `data.train` or `data.eval`; an empty list for None.

    Names end with `split`, the value of `data.split`, unless they name a split themselves.
    """
    several = (written,) if isinstance(written, str) else written or ()
    weighted = [(entry, 1.0) if isinstance(entry, str) else (entry.path, entry.weight) for entry in several]
    return [(name if split is None else _of_split(name, split), weight) for name, weight in weighted]


def _of_split(name: str, split: str) -> str:
    path, after = path_and_split(name)
    names_one = after or (":" in name and not Path(path).expanduser().exists())
    return name if names_one else f"{name}:{split}"


def path_and_split(spec: str, beside: Path = Path()) -> tuple[str, str]:
    """Return the path of a local data set, relative to the folder `beside` or absolute, and what is written after it.

    These are `("folder", "test")` for `folder:test` if there is a file or folder of this name, and none `folder:test`.
    Names of which there is nothing are returned whole, with "".
    """
    for colons in range(3):
        path, *after = spec.rsplit(":", colons)
        if path and (beside / Path(path).expanduser()).exists():
            return path, ":".join(after)
    return spec, ""

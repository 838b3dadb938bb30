"""`data.template` and the clock: what a chat template reads, written into its text.

They are lines at the top of the template's text, so whatever renders it, here or in another library, uses them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from transformers import PreTrainedTokenizerBase

from moetune.compat.transformers import chat_template_environment
from moetune.errors import UserError, raise_problems, reading, suggest

_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
"""Variables that come from the records, or from what is rendered; special tokens and functions are so too."""
_CLOCK = "strftime_now"
_GIVEN = re.compile(r"\{% set (\w+) = \1 if \1 is defined else .* %\}\n")


@dataclass(frozen=True)
class TemplateReads:
    """What a chat template reads.

    Attributes:
        arguments: names of the variables that may be passed to it, without `reserved`.
        reserved: names that it takes from the records, the tokenizer and transformers.
        words: all text constants in its code, and names of attributes; those keys of a message that it reads are there.
        clock: whether it reads today's date or the time of day.
    """

    arguments: frozenset[str]
    reserved: frozenset[str]
    words: frozenset[str]
    clock: bool


@lru_cache(maxsize=16)
def reads(template: str) -> TemplateReads:
    """Return what a chat template reads; `UserError` if its syntax is wrong.

    It is parsed, not compiled: jinja's compiler computes constants, such as a text repeated 10¹⁰ times.
    """
    with reading("the chat template"):
        environment = chat_template_environment()
        tree = environment.parse(template)
        macros = [*tree.find_all(nodes.Macro)]
        own = {macro.name for macro in macros} | {"loop", "caller", "varargs", "kwargs"}
        inside: set[int] = set()  # ids of the nodes that read a parameter of the macro that they are in
        for macro in macros:
            parameters = {parameter.name for parameter in macro.args}
            inside |= {id(name) for name in macro.find_all(nodes.Name) if name.name in parameters}
        names = [name for name in tree.find_all(nodes.Name) if id(name) not in inside]
        read, assigned = ({name.name for name in names if name.ctx == usage} - own for usage in ("load", "store"))
        # A name that the template also assigns is an argument only if the template asks whether it was given.
        asks = [test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
        asks += [given.node for given in tree.find_all(nodes.Filter) if given.name in ("default", "d") and given.node]
        asks += [either.left for either in tree.find_all(nodes.Or)]
        asked = {node.name for node in asks if isinstance(node, nodes.Name) and id(node) not in inside}
        words = {constant.value for constant in tree.find_all(nodes.Const) if isinstance(constant.value, str)}
        words |= {attribute.attr for attribute in tree.find_all(nodes.Getattr)}
    reserved = {*_RESERVED, *environment.globals, *(name for name in read if name.endswith("_token"))}
    return TemplateReads(
        arguments=frozenset(read - reserved - (assigned - asked)),
        reserved=frozenset(reserved),
        words=frozenset(words),
        clock=_CLOCK in read,
    )


def given(template: str) -> set[str]:
    """Return the names of the arguments that `fix_template` wrote into a template."""
    names, end = set(), 0
    while (line := _GIVEN.match(template, end)) is not None:
        names.add(line[1])
        end = line.end()
    return names


def fix_template(tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any], now: datetime) -> datetime | None:
    """Write arguments (`data.template`) and a time into the chat template of a tokenizer, or into each of several.

    Arguments become the template's defaults, which arguments of a rendering replace. The template's clock stands at
    `now`. Returns `now` if the template reads the clock, else None.

    Raises:
        UserError: there is no template that reads an argument, or it is not for the run file to give; or a template
            begins with a byte order mark.
    """
    texts = tokenizer.chat_template
    if not texts:
        if arguments:
            raise UserError("data.template: the tokenizer has no chat template; name one in data.chat_template")
        return None
    named: dict[str, str] = texts if isinstance(texts, dict) else {"": texts}
    if any(text.startswith("\ufeff") for text in named.values()):
        raise UserError("the chat template begins with a byte order mark, as would every chat: save it without one")
    clocks = {name: _clock(text, now) if _CLOCK in text and reads(text).clock else "" for name, text in named.items()}
    named = {name: with_arguments(clocks[name] + text, arguments) for name, text in named.items()}
    tokenizer.chat_template = named if isinstance(texts, dict) else named[""]
    return now if any(clocks.values()) else None


def with_arguments(template: str, arguments: Mapping[str, Any]) -> str:
    """Return a chat template with other defaults of arguments that it reads.

    Raises:
        UserError: it does not read an argument of this name, or that is not for the run file to give.
    """
    if not arguments:
        return template
    known = reads(template)
    problems = []
    for name, value in arguments.items():
        if name in known.reserved or name.endswith("_token"):
            problems.append(f"data.template.{name}: it comes from the records or the tokenizer; leave it out")
        elif name not in known.arguments:
            names = f" It reads {', '.join(sorted(known.arguments)) or 'none'}."
            near = suggest(name, known.arguments) or names
            problems.append(f"data.template.{name}: the chat template reads no argument of this name.{near}")
        elif str(value).lower() in ("true", "false") and isinstance(value, str) and value not in known.words:
            problems.append(f"data.template.{name}: {value!r} is text, and any text is true; write {value.lower()}")
    raise_problems(problems)
    lines = (f"{{% set {name} = {name} if {name} is defined else {value!r} %}}\n" for name, value in arguments.items())
    return "".join(lines) + template


def _clock(template: str, now: datetime) -> str:
    """Return a definition of `strftime_now`, for the top of a template, by which it always is `now`.

    The function is a macro that replaces the directives (`%Y`, `%-d`) of the texts in the template, so that a format
    may also be put together from several texts. transformers passes no functions to templates.
    """
    texts = (text for text in reads(template).words if "%" in text)
    directives = {directive for text in texts for directive in re.findall(r"%[-_0^#]*[a-zA-Z%]", text)}
    values = {directive: now.strftime(directive) for directive in sorted(directives, key=lambda name: name == "%%")}
    return (
        f"{{% macro {_CLOCK}(format) %}}{{% set written = namespace(text=format) %}}"
        f"{{% for directive, value in {values!r}.items() %}}"
        "{% set written.text = written.text.replace(directive, value) %}"
        "{% endfor %}{{ written.text }}{% endmacro %}\n"
    )

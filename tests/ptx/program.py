"""PTX text read into instructions."""

import hashlib
import re
from dataclasses import dataclass

REGISTER_BITS = {"pred": 1, "b16": 16, "b32": 32, "f32": 32, "b64": 64}


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@%p1 ld.global.b32 %r1, [%rd1];` has the name "ld" and the modifiers "global" and "b32"."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str  # a predicate register; empty if none
    negated: bool  # whether the guard is `@!`
    text: str

    @property
    def type(self) -> str:
        """The last modifier."""
        return self.modifiers[-1]


class Program:
    """The kernel in a PTX text: its instructions, the places of labels among them, and the width of its registers.

    Raises:
        NotImplementedError: if the text has more than Triton writes for one kernel.
    """

    def __init__(self, text: str) -> None:
        text = re.sub(r"//.*", "", text)
        self.digest = hashlib.sha1(text.encode()).hexdigest()
        head = re.search(r"\.entry\s+(\w+)\((.*?)\)\s*\.reqntid (\d+)[^{]*\{", text, re.DOTALL)
        if head is None or len(re.findall(r"\.entry|\.func", text)) != 1:
            raise NotImplementedError("not one kernel with a fixed number of threads")
        self.name, self.threads = head[1], int(head[3])
        self.parameters = re.findall(r"(\w+)\s*(?:,|$)", head[2].strip())
        self.labels: dict[str, int] = {}
        self.widths: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        body = text[head.end() : text.index("\n}", head.end())]
        body = re.sub(
            r"^\s*(\.loc\s.*|[{}][ \t]*)$", "", body, flags=re.MULTILINE
        )  # lines of source; scopes of inline PTX
        for statement in body.split(";"):
            self._read(statement.strip())

    def _read(self, statement: str) -> None:
        while label := re.match(r"(\$?\w+):\s*", statement):
            self.labels[label[1]] = len(self.instructions)
            statement = statement[label.end() :]
        if not statement or statement.startswith((".pragma", ".section")):
            return
        if declared := re.match(r"\.reg \.(\w+)\s+(.*)", statement, re.DOTALL):
            for name in declared[2].split(","):
                first, _, count = name.strip().partition("<")
                names = [f"{first}{number}" for number in range(int(count[:-1]))] if count else [first]
                self.widths |= dict.fromkeys(names, REGISTER_BITS[declared[1]])
            return
        found = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([a-z]\w*)((?:[.:][\w:]+)*)\s*(.*)", statement, re.DOTALL)
        if found is None:
            raise NotImplementedError(statement)
        negated, guard, name, modifiers, operands = found.groups("")
        listed = [one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", operands)]
        listed = tuple(one for one in listed if one)
        words = tuple(modifiers.replace("shared::cta", "shared").split(".")[1:])  # the same: that of the block
        text = " ".join(statement.split())
        self.instructions.append(Instruction(name, words, listed, guard, bool(negated), text))

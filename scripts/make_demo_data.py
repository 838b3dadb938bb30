"""Write the demonstration data: Unicode character names, a domain that tiny-mixtral has never seen.

    python scripts/make_demo_data.py

A document is a run of eight code points, one line each:

    U+00E8 LATIN SMALL LETTER E WITH GRAVE
    U+00E9 LATIN SMALL LETTER E WITH ACUTE

Every fifth run is held out, so that both files hold the same scripts but no common character. The names come
from `unicodedata.ucd_3_2_0`, which never changes: every Python version writes the same bytes.
"""

import json
from pathlib import Path
from unicodedata import ucd_3_2_0

OUT = Path(__file__).parents[1] / "moetune/models/catalog/data/unicode-names"

SCRIPTS = range(0x2000)  # the alphabets and syllabaries, from Latin to extended Greek
RUN = 8
HELD_OUT_EVERY = 5


def documents() -> dict[str, list[str]]:
    """Return the texts of each file."""
    runs = [run for start in SCRIPTS[::RUN] if (run := named_run(start))]
    return {
        "train": [run for number, run in enumerate(runs, 1) if number % HELD_OUT_EVERY],
        "heldout": runs[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY],
    }


def named_run(start: int) -> str:
    """Return the lines of those of the next eight code points that have a name."""
    names = {code: ucd_3_2_0.name(chr(code), None) for code in range(start, start + RUN)}
    return "\n".join(f"U+{code:04X} {name}" for code, name in names.items() if name)


def files() -> dict[str, bytes]:
    """Return the content of each file of the data set."""
    return {
        f"{name}.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        for name, texts in documents().items()
    }


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (OUT / name).write_bytes(content)
        print(f"{OUT / name}: {len(content):,} bytes")


if __name__ == "__main__":
    main()

"""Compares the programs' answers with PEFT's and writes the table: `python table.py FOLDER ANSWERS [--json FILE]`.

FOLDER is that of cases.py, and ANSWERS has a folder of answers for each program. Exit code 1: an export that should be
right is not, a planted fault is missing or not seen where the right export is read, or `moetune adapter check --for`
says otherwise than what was seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from scripts.bench._common import write_json, write_table

RIGHT = 5e-4
"""Largest difference of two log-probabilities, in float32, of an export that is right; a fault makes 0.05 or more."""
FAULTS = 3
"""Faults that cases.py plants in an export."""
ROUNDED = 0.2
"""The same of a quantized base, computed in bfloat16 or with activations of 8 bits; an adapter makes 0.8."""
EXPORTS = {
    "merged": "merged",
    "quantized": "checkpoint",
    "vllm": "adapter, `--format vllm`",
    "peft": "adapter, `--format peft`",
}
PROGRAMS = {"vllm": "vLLM", "llama": "llama.cpp", "mlx": "mlx-lm"}
CHECKED_AS = {"vllm": "vllm", "llama": "llama.cpp"}
"""Program -> its name for `moetune adapter check --for`."""
READ = {"vllm": ("int4", "awq"), "llama": ("int4", "gptq", "fp8", "nvfp4", "mxfp4"), "mlx": ("mxfp4",)}
"""Program -> the formats of checkpoints that it reads on a CPU; another one must be refused."""
AVX512 = "cpu_gemm_wna16"
"""vLLM's kernel of INT4, which its build for CPUs without AVX-512 lacks; then it says so and gives no answer."""
KNOWN: dict[tuple[str, str, str], str] = {
    ("mlx", "gpt_oss", "merged"): "it does not take the names of these experts",
    **dict.fromkeys(
        (("vllm", "qwen3_moe-gptq", export) for export in ("quantized", "vllm")),
        "its kernel for GPTQ's linear layers on a CPU is off; with attention in 16 bits it is right",
    ),
}
"""(program, model type, export) -> why there is no answer, where that is the program's limit; see adapters.md."""


def answer_of(folder: Path, name: str) -> np.ndarray | str | None:
    """Return the log-probabilities that a program gave, the reason why it gave none, or None if it was not asked."""
    if (file := folder / f"{name}.npy").exists():
        return np.load(file)
    return file.read_text() if (file := folder / f"{name}.txt").exists() else None


def results(folder: Path, answers: Path) -> list[dict[str, Any]]:
    """Return one entry for each program and case: its largest difference from PEFT, or the reason why there is none."""
    entries = []
    for case in json.loads((folder / "cases.json").read_text())["cases"]:
        expected = np.load(folder / "expected" / case["expected"])
        of_base = np.load(folder / "expected" / f"{case['type']}-base.npy")
        effect = abs(expected - (of_base if case["export"] != "quantized" else expected.mean())).max()
        for program in PROGRAMS:
            answer = answer_of(answers / program, case["name"])
            if answer is None:
                continue
            kept = {key: case[key] for key in ("type", "kind", "export", "fault")}
            kept["check"] = case["check"].get(CHECKED_AS.get(program))
            limit = ROUNDED if "-" in case["type"] else RIGHT
            entry = {"program": program, **kept, "effect": float(effect), "limit": limit}
            if isinstance(answer, str):
                entry["refused"] = answer
            else:
                entry["difference"] = float(abs(answer - expected).max())
                entry["greedy"] = float((answer.argmax(-1) == expected.argmax(-1)).mean())
            entries.append(entry)
    return entries


def reads(entries: list[dict[str, Any]], program: str, model_type: str, export: str) -> bool:
    """Return whether a program computes the export of which there are faulty ones, so that they show something."""
    of_kind = {"program": program, "type": model_type, "export": export, "kind": "all experts", "fault": None}
    return any(entry.items() >= of_kind.items() and entry.get("difference", 9) < entry["limit"] for entry in entries)


def problems(entries: list[dict[str, Any]]) -> list[str]:
    """Return a line for each entry that is not as it should be, and for each cell that lacks a fault."""
    faults = Counter((x["program"], x["type"], x["export"]) for x in entries if x["fault"])
    cells = dict.fromkeys((x["program"], x["type"], x["export"]) for x in entries if "-" not in x["type"])
    lines = [
        f"{' '.join(place)}: {faults[place]} planted faults, not {FAULTS}"
        for place in cells
        if faults[place] != FAULTS and reads(entries, *place)
    ]
    for entry in entries:
        is_right = entry.get("difference", 9) < entry["limit"]
        format = entry["type"].partition("-")[2]
        told = entry["check"]
        # vLLM is asked for PEFT's layout with the option that check names
        expected = told is None or (entry["export"] == "peft" and "is_3d_lora_weight" in told)
        said = "{program} {type} {kind} {export}".format(**entry) + (
            f", fault {entry['fault']}" if entry["fault"] else ""
        )
        if entry["fault"]:
            is_wrong = is_right
        elif format:  # of a base in a format that it does not read, a program must say so
            is_read = format in READ[entry["program"]]
            is_wrong = ("difference" in entry and not is_right) or (
                entry["export"] == "quantized" and is_read != is_right
            )
        else:
            is_wrong = is_right != expected or entry["effect"] < 100 * RIGHT
        is_wrong &= (entry["program"], entry["type"], entry["export"]) not in KNOWN
        is_wrong &= AVX512 not in entry.get("refused", "")
        if is_wrong:
            lines.append(
                f"{said}: {entry.get('refused', entry.get('difference'))}; check says {entry['check'] or 'yes'}"
            )
    return lines


def cell(entries: list[dict[str, Any]]) -> str:
    """Return the text of a cell: the largest difference of all kinds of adapters, or what happened instead."""
    right = [entry for entry in entries if entry["fault"] is None]
    if not right:
        return ""
    refused = [entry for entry in right if "refused" in entry]
    wrong = [entry for entry in right if entry.get("difference", 0) >= entry["limit"]]
    good = [entry["difference"] for entry in right if entry.get("difference", 9) < entry["limit"]]
    parts = [f"{max(good):.0e} ({len(good)})"] if good else []
    if wrong:
        kinds = "" if len(wrong) == len(right) else ": " + ", ".join(entry["kind"] for entry in wrong)
        parts.append(f"**wrong by {max(entry['difference'] for entry in wrong):.2f}** ({len(wrong)}{kinds})")
    if refused:
        parts.append(f"refused ({len(refused)})")
    faults = [entry for entry in entries if entry["fault"] and entry.get("difference", 0) >= RIGHT]
    if faults and reads(entries, *(faults[0][key] for key in ("program", "type", "export"))):
        parts.append(f"{len(faults)} faults seen, from {min(entry['difference'] for entry in faults):.2f}")
    return "; ".join(parts)


def rows_of(entries: list[dict[str, Any]], name: str) -> list[str]:
    """Return the lines of a table with a row for each type; `name` stands above the rows."""
    columns = [
        (p, e) for e in EXPORTS for p in PROGRAMS if any(x["program"] == p and x["export"] == e for x in entries)
    ]
    rows = [f"| {name} | " + " | ".join(f"{PROGRAMS[p]}, {EXPORTS[e]}" for p, e in columns) + " |"]
    rows.append("|---" * (len(columns) + 1) + "|")
    for kind in dict.fromkeys(entry["type"] for entry in entries):
        cells = [[x for x in entries if (x["type"], x["program"], x["export"]) == (kind, p, e)] for p, e in columns]
        rows.append(f"| {kind.replace('-', ', ')} | " + " | ".join(map(cell, cells)) + " |")
    return rows


def lines_of(entries: list[dict[str, Any]], versions: dict[str, str]) -> Iterator[str]:
    """Yield the lines of the page's tables, and what programs say where they refuse."""
    plain, formats = ([x for x in entries if ("-" in x["type"]) == of_format] for of_format in (False, True))
    effects = [entry["effect"] for entry in plain] or [0]
    kinds = ", ".join(dict.fromkeys(entry["kind"] for entry in plain))
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield f"{len(entries)} comparisons; {made}. Kinds of adapters: {kinds}. An adapter changes log-probabilities by"
    yield f"{min(effects):.1f} to {max(effects):.1f}.\n"
    yield from rows_of(plain, "model type")
    if formats:
        yield "\n## Quantized\n"
        if any(AVX512 in entry.get("refused", "") for entry in formats):
            yield "This CPU lacks AVX-512, without which vLLM has no kernel of INT4 (int4, gptq, awq).\n"
        yield from rows_of(formats, "model type, format")
    refused = {
        f"- {PROGRAMS[x['program']]}, {x['type'].replace('-', ', ')}, {EXPORTS[x['export']]}: ": x["refused"]
        for x in reversed(entries) if "refused" in x and x["fault"] is None
    }  # fmt: skip
    if refused:
        yield "\n## Refused, in the programs' words\n"
        for place, said in sorted(refused.items()):
            yield place + " ".join(line.strip() for line in said.splitlines()[:3])[:200]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number here, and the page beside it")
    arguments = parser.parse_args()
    entries = results(arguments.folder, arguments.answers)
    versions = json.loads((arguments.answers / "versions.json").read_text())
    print(*lines_of(entries, versions), sep="\n")
    if arguments.json is not None:
        write_json({"versions": versions, "right": RIGHT, "results": entries}, arguments.json)
        write_table(lines_of(entries, versions), arguments.json.with_suffix(".md"))
    lines = problems(entries)
    print(*lines, sep="\n", file=sys.stderr)
    print(f"{len(entries)} comparisons, {len(lines)} not as they should be", file=sys.stderr)
    return int(bool(lines) or not entries)


if __name__ == "__main__":
    sys.exit(main())

"""Converts the exports of cases.py for llama.cpp: `python to_gguf.py FOLDER OUT LLAMA_CPP`.

OUT gets `NAME.gguf`, or `NAME.txt` with the last line of the converter's error. llama.cpp knows how a tokenizer divides
text by a hash of ids, among which those of a vocabulary of one's own are not; the toys' and tiny-mixtral's divide as
GPT-2's does, which is what is said here in place of the hash. `python to_gguf.py --script NAME LLAMA_CPP ARGUMENTS …`
runs one converter in the same way. Needs torch, transformers and sentencepiece.
"""

from __future__ import annotations

import json
import runpy
import sys
import traceback
from pathlib import Path


def prepare(llama: Path) -> None:
    sys.path[:0] = [str(llama), str(llama / "gguf-py")]
    import conversion.base

    conversion.base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"


def main(folder: Path, out: Path, llama: Path) -> None:
    prepare(llama)
    cases = json.loads((folder / "cases.json").read_text())["cases"]
    done = {f"{case['type']}-base": ("convert_hf_to_gguf.py", case["base"]) for case in cases}
    done |= {
        case["name"]: ("convert_hf_to_gguf.py", case["path"])
        for case in cases
        if case["export"] in ("merged", "quantized")
    }
    done |= {
        case["name"]: ("convert_lora_to_gguf.py", case["path"], "--base", case["base"])
        for case in cases
        if case["export"] in ("vllm", "peft")
    }
    for name, (script, *arguments) in done.items():
        sys.argv = [script, *arguments, "--outtype", "f32", "--outfile", str(out / f"{name}.gguf")]
        try:
            runpy.run_path(str(llama / script), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                (out / f"{name}.txt").write_text(f"{script}: exit code {ended.code}")
        except Exception as error:
            (out / f"{name}.gguf").unlink(missing_ok=True)
            (out / f"{name}.txt").write_text(traceback.format_exception_only(error)[-1].strip())


if __name__ == "__main__":
    if sys.argv[1] == "--script":
        script = Path(sys.argv[3]) / sys.argv[2]
        prepare(script.parent)
        sys.argv = [str(script), *sys.argv[4:]]
        runpy.run_path(str(script), run_name="__main__")
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))

"""Pre-train tiny-mixtral: a Mixtral small enough for this repository, with experts that really specialize.

    python scripts/make_tiny_mixtral.py

It learns two unlike domains that every Python installation carries: English prose (the language reference
in `pydoc_data.topics` and the docstrings of the standard library) and bare code (that library without docstrings
and comments). A sequence holds one domain, never both, so the two can be told apart by which experts they use.
Everything is seeded. Another Python version has slightly other text, so it gives another model of the same quality:
`moetune eval` and `moetune score` of held-out text say so (tests/models/catalog/test_tiny_mixtral.py).

Shapes: B sequences of T tokens; S = B·T; D domains; E experts; L layers.
"""

import argparse
import ast
import math
import pydoc_data.topics
import random
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    GenerationConfig,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

OUT = Path(__file__).parents[1] / "moetune/models/catalog/tiny-mixtral"
SEED = 0

# --- The text -----------------------------------------------------------------------------------------------

# None of these topics repeats a paragraph of another one ("with", for example, is part of "compound").
HELD_OUT_TOPICS = ["calls", "import", "objects", "raise", "typesmapping"]

HELD_OUT_MODULES = ["csv", "heapq", "queue", "shlex", "textwrap"]

TRAINING_MODULES = """
    _collections_abc _pydecimal _pyio _strptime abc argparse ast asyncio.base_events asyncio.events
    asyncio.locks asyncio.selector_events asyncio.streams asyncio.tasks base64 bdb calendar cmd code codecs
    collections.__init__ compileall concurrent.futures._base concurrent.futures.process configparser
    contextlib copy dataclasses difflib dis doctest email._header_value_parser email.message email.utils
    enum filecmp fileinput fractions ftplib functools getopt gettext gzip html.parser http.client
    http.cookiejar http.cookies http.server imaplib inspect ipaddress json.decoder json.encoder linecache
    locale logging.__init__ logging.config logging.handlers mailbox mimetypes modulefinder
    multiprocessing.connection multiprocessing.managers multiprocessing.pool multiprocessing.util netrc
    ntpath numbers operator optparse os pdb pickle pickletools pkgutil platform plistlib poplib posixpath
    pprint profile pstats pyclbr random reprlib runpy sched selectors shelve shutil site smtplib socket
    socketserver sqlite3.dump ssl statistics string subprocess symtable sysconfig tarfile tempfile threading
    timeit tokenize trace traceback turtle types typing unittest.case unittest.loader unittest.mock
    urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom.minidom xml.etree.ElementTree
    xmlrpc.client zipapp
""".split()  # noqa: SIM905 - a list of strings would take a line each


@dataclass(frozen=True)
class Domain:
    """Documents of one kind, divided so that no document is on both sides."""

    train: list[str]
    held_out: list[str]


def domains() -> tuple[Domain, Domain]:
    """Return the two domains, prose and code, both from the running Python."""
    topics = pydoc_data.topics.topics
    train = [divide(source) for source in read_modules(TRAINING_MODULES)]
    held_out = [divide(source) for source in read_modules(HELD_OUT_MODULES)]
    prose = Domain(
        train=[text for name, text in sorted(topics.items()) if name not in HELD_OUT_TOPICS]
        + [docstrings for docstrings, _ in train],
        held_out=[topics[name] for name in HELD_OUT_TOPICS] + [docstrings for docstrings, _ in held_out],
    )
    code = Domain([bare for _, bare in train], [bare for _, bare in held_out])
    return prose, code


def read_modules(names: list[str]) -> list[str]:
    """Return the sources of standard-library modules; a version of Python that lacks one skips it."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    paths = [stdlib / (name.replace(".", "/") + ".py") for name in names]
    return [path.read_text(encoding="utf-8") for path in paths if path.exists()]


def divide(source: str) -> tuple[str, str]:
    """Return the docstrings of a module, which are prose, and its code without docstrings and comments."""
    tree, docstrings = ast.parse(source), []
    for node in ast.walk(tree):
        documentable = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documentable and (docstring := ast.get_docstring(node)) is not None:
            docstrings.append(docstring)
            node.body = node.body[1:] or [ast.Pass()]
    return "\n\n".join(docstrings), ast.unparse(tree) + "\n"


# --- The tokenizer ------------------------------------------------------------------------------------------

VOCABULARY = 2048
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]"]  # their ids are 0 to 5

# `generation` marks what `return_assistant_tokens_mask` returns: the assistant's words and the end of a turn.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message['role'] == 'assistant' -%}
        {%- generation -%}{{- message['content'] + eos_token -}}{%- endgeneration -%}
    {%- else -%}
        {{- '[INST]' + message['content'] + '[/INST]' -}}
    {%- endif -%}
{%- endfor -%}
"""


def train_tokenizer(domains: list[Domain]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on equal amounts of text from each domain."""
    texts = ["\n".join(domain.train) for domain in domains]
    shortest = min(map(len, texts))
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text[:shortest] for text in texts], trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", SPECIAL_TOKENS.index("<s>"))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=MODEL.max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """Return the documents one after the other, `<s> document </s> <s> document </s> …`, as a row of ids."""
    stream = []
    for document in documents:
        stream += [*tokenizer(document, verbose=False)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(stream)


# --- The training -------------------------------------------------------------------------------------------

MODEL = MixtralConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_local_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=1024,
    bos_token_id=SPECIAL_TOKENS.index("<s>"),
    eos_token_id=SPECIAL_TOKENS.index("</s>"),
    pad_token_id=SPECIAL_TOKENS.index("<pad>"),
)
DOMAINS = 2
SEQUENCE = 256
SEQUENCES_PER_DOMAIN = 8
BALANCE = 0.01
SPECIALIZE = 0.03
STEPS = 700
WARMUP = 100
LEARNING_RATE = 4e-3


def pretrain(streams: list[torch.Tensor], steps: int) -> MixtralForCausalLM:
    """Train a new model on random pieces of the domains' token streams."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    # eager loops over the experts, which is fast on a CPU
    model = MixtralForCausalLM._from_config(MODEL, experts_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps))),
    )
    started = time.perf_counter()
    for step in range(1, steps + 1):
        ids_BT = torch.stack(
            [
                stream[start : start + SEQUENCE]
                for stream in streams
                for start in rng.choices(range(len(stream) - SEQUENCE), k=SEQUENCES_PER_DOMAIN)
            ]
        )
        output = model(input_ids=ids_BT, output_router_logits=True)
        loss = model.loss_function(output.logits, ids_BT, VOCABULARY)
        (loss + routing_loss(output.router_logits)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            seconds = time.perf_counter() - started
            print(f"step {step:5}  loss {loss.item():.3f}  {seconds:.0f} s", file=sys.stderr, flush=True)
    return model


def routing_loss(router_logits_LSE: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the loss that keeps every expert alive and sets the domains apart, averaged over the layers.

    The first part is the usual load-balancing loss, but layer by layer: transformers' own sum takes all layers at
    once, where an expert that one layer never uses is made up for by the same number in another layer. The second
    is the mutual information between domain and expert, I = H(E) - H(E|D), from Mod-Squad (arXiv 2212.08066).
    """
    losses = []
    for logits_SE in router_logits_LSE:
        balance = load_balancing_loss_func((logits_SE,), MODEL.num_local_experts, MODEL.num_experts_per_tok)
        # a batch holds the domains one after the other
        chances_DE = logits_SE.softmax(-1).unflatten(0, (DOMAINS, -1)).mean(1)
        information = entropy(chances_DE.mean(0)) - entropy(chances_DE).mean()
        losses.append(BALANCE * balance - SPECIALIZE * information)
    return torch.stack(losses).mean()


def entropy(chances: torch.Tensor) -> torch.Tensor:
    return -(chances * chances.log()).sum(-1)


# --- The checkpoint -----------------------------------------------------------------------------------------


def save(model: MixtralForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the files of a Hub checkpoint: bfloat16, one tensor per expert."""
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner only
    GenerationConfig.from_model_config(model.config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    torch.set_num_threads(2)  # part of the recipe: sums in another order end in another model

    prose, code = domains()
    tokenizer = train_tokenizer([prose, code])
    streams = [token_stream(tokenizer, domain.train) for domain in (prose, code)]
    save(pretrain(streams, arguments.steps), tokenizer, arguments.out)


if __name__ == "__main__":
    main()

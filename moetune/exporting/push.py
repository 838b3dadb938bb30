"""`push`: upload an export to the hub, with a model card."""

from pathlib import Path

from huggingface_hub import HfApi, ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id

from moetune.config.load import load_run_config
from moetune.config.lora_rank import ranks_as_text
from moetune.errors import UserError, one_line
from moetune.files import Ledger, expanded
from moetune.models.hub.delta_folder import MANIFEST
from moetune.training.folder.run_folder import RUN_FILE, RunFolder

_LIBRARIES = {"merged": "transformers", "peft": "peft", "vllm": "peft", "sglang": "peft", "delta": None}


def model_card(run: Path, format: str) -> ModelCard:
    """Return a model card: the base, the trained parts, training settings and held-out losses of a run.

    The card names no path of this machine: a base in a local folder appears by the folder's name. `run` is the run
    folder; `format`, the export format, decides which library the card names.
    """
    config, folder = load_run_config(run / RUN_FILE), RunFolder(run)
    base = config.model.path if not expanded(config.model.path).exists() else Path(config.model.path).name
    train, lora = config.train, config.adapt.lora
    facts = {
        "routers": None if config.adapt.router == "none" else "in full precision",
        "experts": None if config.adapt.experts is None else "chosen ones, in full precision",
        "LoRA": None if lora is None else f"rank {ranks_as_text(lora.rank)}, alpha {lora.alpha:g}",
        "further parts": ", ".join(config.adapt.also) or None,
        "steps": f"{train.steps} of {train.micro_batch * train.accumulate} × {train.sequence_length} tokens",
        "optimizer": ", ".join({f"{opt.name}, lr {opt.lr:g}": None for opt in config.optimizers.values()}),
    }
    losses = [(line["step"], loss) for line in folder.metrics() if (loss := line.get("eval_loss")) is not None]
    for step, loss in losses[:1] + losses[1:][-1:]:
        facts[f"held-out loss at step {step}"] = f"{loss:.4f}"
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)
    trained = f"Trained with moetune on {base}, whose frozen weights stayed in {config.model.base}."
    tags = ["moetune", "mixture-of-experts"]
    data = ModelCardData(base_model=base if "/" in base else None, library_name=_LIBRARIES[format], tags=tags)
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {run.resolve().name}\n\n{trained}\n\n| | |\n|---|---|\n{table}\n"
    )


def check_push(repository: str) -> None:
    """Raise `UserError` if the repository's name is invalid, the hub cannot be reached, or nobody is logged in.

    Call it before a long export.
    """
    try:
        validate_repo_id(repository)
        HfApi().whoami()
    except Exception as error:
        raise UserError(
            f"cannot push to {repository!r}: {one_line(error)}; name it ORG/NAME and log in (hf auth login), or leave "
            "--push out"
        ) from None


def push(run: Path, exported: Path, format: str, repository: str, *, private: bool = True) -> str:
    """Upload an exported folder to the hub, with a model card; return the URL of the commit.

    The manifest, which names local paths, is not uploaded.

    Args:
        run: the run folder, for the model card.
        exported: the folder that `export` wrote. The model card is written into it as `README.md`.
        format: the export format: `delta`, `peft`, `merged` or `vllm`.
        repository: `ORG/NAME`; created if it does not exist.
        private: whether a new repository is private.

    Raises:
        UserError: the hub cannot be reached, nobody is logged in, or the user may not write to the repository.
    """
    Ledger(exported).add("export", "README.md")
    model_card(run, format).save(exported / "README.md")
    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository,
            folder_path=exported,
            ignore_patterns=[MANIFEST, Ledger.NAME],
            commit_message="moetune export",
        )
    except Exception as error:  # no network, no login or no permission
        raise UserError(
            f"{str(exported)!r} was written, and could not be pushed to {repository!r}: {one_line(error)}; "
            f"hf auth login, then hf upload {repository} {exported}"
        ) from None
    return str(commit.commit_url)

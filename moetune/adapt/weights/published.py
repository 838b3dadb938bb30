"""Read a Hugging Face checkpoint, 16-bit or quantized, into a model."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from moetune.adapt.weights.random import realize_buffers
from moetune.adapt.weights.target import LoadTarget
from moetune.compat.transformers import unmatched_keys
from moetune.errors import UserError, counted, first_of, note, reading
from moetune.formats.base import Quantized
from moetune.formats.checkpoint import open_checkpoint
from moetune.formats.source_quantization import SAVE_AGAIN
from moetune.models.hub.key_mapping import KeyMapping, key_mappings
from moetune.models.moe import MoeLayer
from moetune.run.names import stacks
from moetune.run.resolve import ResolvedModel
from moetune.tensor_files import NAMES, Stored, weight_files

WEIGHTS = ("F64", "F32", "F16", "BF16")
"""Safetensors dtypes that a tensor of weights may have if it is not in a quantized format."""
_WRAPPER = re.compile(r"(?:^|\.)(module|_orig_mod|_\w+_wrapped_module|base_model\.model|base_layer)\.")
"""Parts that wrappers of a model or a module put into names: DDP, torch.compile, FSDP, checkpointing, PEFT."""


class CheckpointReader:
    """Reads a checkpoint into a model, expert by expert and tensor by tensor; each is freed before the next is read.

    Weights are quantized from the values and dtype that the checkpoint has, whatever the compute dtype, so that
    `moetune quantize` writes what every run would quantize. Weights that the checkpoint holds quantized are first
    rounded to the compute dtype.

    Creating the reader checks names, shapes and dtypes, and reads no weight; it raises `UserError` if they do not fit.

    Args:
        plain: the model as transformers builds it, on the meta device; `name` is its name in messages.
        target: stores the tensors in the model that is loaded.
        tensors: the checkpoint's tensors by name; None for those in `folder`.
        published: the value of `model.base` that keeps the format which config.json says; None if none does.
    """

    def __init__(
        self,
        folder: Path,
        plain: PreTrainedModel,
        name: str,
        target: LoadTarget,
        tensors: Mapping[str, Stored] | None = None,
        published: object = None,
    ) -> None:
        self._target, self._published = target, published
        self._stored = {
            key: replace(stored, dtype=NAMES[target.dtype]) if isinstance(stored, Quantized) else stored
            for key, stored in (open_checkpoint(folder) if tensors is None else tensors).items()
        }
        self._mappings = key_mappings(plain, self._stored, split=True)
        self._names = set(plain.state_dict())
        self._missing = self._names - self._mappings.keys()
        described = sum(parameter.numel() for parameter in plain.parameters())
        held = sum(tensor.numel for tensor in self._stored.values())
        if described > 2 * held:
            raise UserError(
                f"the weights in {str(folder)!r} do not fit {name!r}: config.json describes {described:,} parameters, "
                f"and there are {held:,}"
            )
        with reading(f"the weights of {name!r} in {str(folder)!r}"):
            is_half_packed = any(key.endswith(("_blocks", "_scale_inv")) for key in self._stored)
            remedy = SAVE_AGAIN if is_half_packed else ""
            for part in sorted({match[1] for match in map(_WRAPPER.search, self._stored) if match}):
                remedy = f"{part!r} in its names is of a wrapper: save the model without it, or rename them"
            refuse_misfit([*self._problems(plain)], f"the weights in {str(folder)!r}", name, remedy)
            matrices = [key for key, x in self._stored.items() if type(x) is Stored and len(x.shape) > 1]
            some = matrices[:: len(matrices) // 1000 + 1]  # each is a read at another place of the disk
            if zeros := [key for key in some if not key.endswith("bias") and self._stored[key].is_blank()]:
                what = f"{counted(len(zeros), 'tensor')} of {name!r}, as {zeros[0]}"
                note(f"only zeros in {what}: a file that was not downloaded whole looks so")
            others = {*folder.glob("*.safetensors")}.difference(weight_files(folder)) if tensors is None else ()
            if unread := sorted(file.name for file in others if not file.name.startswith("consolidated")):
                note(f"{folder}: files of weights that are not read: {', '.join(first_of(unread))}")

    def read_all(self, model: PreTrainedModel) -> None:
        """Read all weights into `model`, that of the `LoadTarget`, and replace its experts by banks."""
        self._target.make_banks()
        for path in self._target.layers:
            self.read_experts(path)
            self._target.install(path)
        self.read_rest(model)

    def read_experts(self, path: str) -> None:
        """Read the experts of the module at `path`, as far as this rank holds them, into the layer's bank."""
        layer = self._target.layers[path]
        for stack in stacks(layer):
            mapping = self._mappings[f"{path}.{stack}"]
            if mapping.has_experts_apart:
                self._read_apart(path, stack, mapping)
            elif mapping.conversion is None:
                self._read_rows(path, stack, self._stored[mapping.every_key()[0]])
            else:
                whole = mapping.to_model(self._read)
                for expert in self._target.bank(path).held:
                    self._target.put_expert(path, stack, expert, whole[expert])

    def read_rest(self, model: PreTrainedModel) -> None:
        """Read all tensors other than the experts, tie weights, and compute buffers that no checkpoint contains."""
        held = model.state_dict().keys()  # experts are in banks now, and of a pipeline this rank holds some layers
        for name, mapping in self._mappings.items():
            path = name.removesuffix(".weight")
            if name not in held or name not in self._names:
                continue
            stored, *others = (self._stored[key] for key in mapping.every_key())
            if mapping.only_joins_rows and path != name and self._target.put_table(path, [stored, *others]):
                continue
            if path not in self._target.linears or path == name:
                self._target.put(name, self._converted(mapping))
            elif mapping.conversion is None and self._is_kept(stored, stored.shape, path):
                self._target.put_quantized_linear(path, stored)
            else:
                self._target.put_linear(path, mapping.to_model(self._read))
        model.tie_weights(missing_keys=self._missing & held, recompute_mapping=False)
        realize_buffers(model, self._target.device)

    def _read_apart(self, path: str, stack: str, mapping: KeyMapping) -> None:
        """Read the experts of a layer whose checkpoint has separate tensors for each expert. Frozen experts that are
        already quantized as `model.base` says are stored as they are."""
        for expert in self._target.bank(path).held:
            of_expert = mapping.of_expert(expert)
            pieces = [self._stored[key] for key in of_expert.every_key()]
            wanted = self._target.pieces_of(path, stack, expert)
            if wanted is not None and len(pieces) == wanted[0] and of_expert.only_merges:
                kept = [piece.quantized() for piece in pieces if self._is_kept(piece, wanted[1], path)]
                if len(kept) == len(pieces):
                    self._target.put_quantized_expert(path, stack, expert, *kept)
                    continue
            self._target.put_expert(path, stack, expert, of_expert.to_model(self._read)[0])

    def _read_rows(self, path: str, stack: str, stored: Stored) -> None:
        """Read the experts of a layer from the rows of one tensor. Frozen experts that are already quantized as
        `model.base` says are stored as they are."""
        kept = stored if self._is_kept(stored, stored.shape, path) and stored.STACKS else None
        for expert in self._target.bank(path).held:
            if kept is not None and self._target.pieces_of(path, stack, expert) is not None:
                self._target.put_quantized_expert(path, stack, expert, kept.quantized(expert))
            else:
                rows = _narrowed(stored.rows(expert, expert + 1, self._target.device))
                self._target.put_expert(path, stack, expert, rows[0])

    def _is_kept(self, stored: Stored, shape: tuple[int, ...], path: str) -> TypeGuard[Quantized]:
        """Return whether a matrix of the module at `path` has this shape and is quantized as `model.base` says, and so
        is stored as it is."""
        return isinstance(stored, Quantized) and stored.is_in(self._target.formats[path]) and stored.shape == shape

    def _read(self, key: str) -> Tensor:
        return _narrowed(self._stored[key].whole(self._target.device))

    def _converted(self, mapping: KeyMapping) -> Tensor:
        """Return a parameter in the checkpoint's dtype, converted on the CPU if transformers marks it as too large for
        a GPU."""
        on_host = mapping.conversion is not None and mapping.conversion.force_cpu
        device = torch.device("cpu") if on_host else self._target.device
        return mapping.to_model(lambda key: self._stored[key].whole(device))

    # --- What does not fit ------------------------------------------------------------------------------------------

    def _problems(self, plain: PreTrainedModel) -> Iterator[str]:
        """Yield a line for each tensor that is missing, unexpected, or has another shape or dtype than the model's."""
        yield from self._unlike_others()
        state = plain.state_dict()
        unmapped = self._stored.keys() - {key for mapping in self._mappings.values() for key in mapping.every_key()}
        too_many = unmapped | (self._mappings.keys() - self._names)
        missing, unexpected = unmatched_keys(plain, self._missing, too_many)
        head = getattr(plain.get_output_embeddings(), "weight", None)
        for name in sorted(missing):
            is_head = plain.get_parameter_or_buffer(name) is head
            hint = " (set tie_word_embeddings: true in config.json if the embedding is the head)" if is_head else ""
            twice = " (it is there in two spellings: remove one from the files)" if name in unexpected else ""
            yield f"missing {name}{hint}{twice}"
        yield from (f"unexpected {name}" for name in sorted(without_drafts(unexpected)))
        of_experts = {f"{path}.{stack}": x for path, x in self._target.layers.items() for stack in stacks(x)}
        for name, mapping in self._mappings.items():
            if (expected := state.get(name)) is None:
                continue
            keys = mapping.every_key()
            if expected.is_floating_point():
                types = {key: self._stored[key].dtype for key in keys}
                yield from (
                    f"{key} has type {kind}, which is not one of weights"
                    for key, kind in types.items()
                    if kind not in WEIGHTS
                )
            if mapping.has_experts_apart and name not in of_experts:
                continue  # of a layer on another rank, which checks it
            if name in of_experts and mapping.has_experts_apart:
                yield from self._misfits_apart(of_experts[name], mapping, [1, *expected.shape[1:]])
                continue
            shape, layer = self._shape(mapping), of_experts.get(name)
            is_stack = isinstance(first := self._stored[keys[0]], Quantized) and first.STACKS
            if is_stack and (layer is None or not layer.shape.is_transposed):
                yield f"{name} is {shape}, not {[*expected.shape]}, and [experts, in, out] is gpt-oss' layout of MXFP4"
            elif shape != [*expected.shape]:
                yield f"{name} is {shape}, not {[*expected.shape]}"

    def _unlike_others(self) -> Iterator[str]:
        """Yield a line for each matrix that is stored otherwise than a checkpoint that `model.base` keeps says."""
        experts = {f"{path}.{stack}": path for path, layer in self._target.layers.items() for stack in stacks(layer)}
        formats, linears = self._target.formats, self._target.linears
        modules = experts | {f"{path}.weight": path for path in linears if formats[path].quantizes_linears}
        kept, unlike = set[str](), list[tuple[str, str]]()  # storages; tensors that are not in theirs, with it
        for name, mapping in self._mappings.items():
            is_apart = mapping.has_experts_apart if name in experts else mapping.conversion is None
            format = formats[modules[name]] if name in modules else None
            of_stack = name in experts and not is_apart and not name.endswith("bias")
            # bitsandbytes packs linear layers alone
            if format is None or format.has_own_linear or not (of_stack or (is_apart and format.is_read_apart)):
                continue
            for key in mapping.every_key():
                stored = self._stored[key]
                if self._is_kept(stored, stored.shape, modules[name]):
                    kept.add(format.name)
                elif len(stored.shape) == 2 or (of_stack and not isinstance(stored, Quantized)):
                    unlike.append((key, format.name))
        for key, storage in unlike:
            if storage in kept or storage == self._published:
                kind = "in another layout" if isinstance(self._stored[key], Quantized) else self._stored[key].dtype
                told = f"others are {storage}" if storage in kept else f"config.json says {storage}"
                left = "" if storage in kept else ", or take out of config.json what another checkpoint left there"
                yield f"{key} is {kind} and {told}; set model.base: nf4 to quantize all anew{left}"

    def _misfits_apart(self, layer: MoeLayer, mapping: KeyMapping, expected: list[int]) -> Iterator[str]:
        name, count = mapping.parameter, layer.shape.num_experts
        known: dict[tuple[tuple[int, ...], ...], list[int] | str] = {}
        for expert in range(count):
            of_expert = mapping.experts.get(expert)
            if of_expert is None or not of_expert.is_whole:
                yield f"missing {name} of expert {expert}"
                continue
            shapes = tuple(self._stored[key].shape for key in of_expert.every_key())
            if shapes not in known:
                known[shapes] = self._shape(of_expert)
            if isinstance(shape := known[shapes], str):
                yield f"{name}, expert {expert}: {shape}"
            elif shape != expected:
                yield f"{name} of expert {expert} is {shape}, not {expected}"
        for expert in sorted(mapping.experts.keys() - set(range(count))):
            yield f"unexpected expert {expert} for {name}, which has {count}"

    def _shape(self, mapping: KeyMapping) -> list[int] | str:
        """Return the shape of the parameter that a mapping computes, or why its tensors do not fit together."""
        try:
            return [*mapping.to_model(lambda key: torch.empty(self._stored[key].shape, device="meta")).shape]
        except (RuntimeError, IndexError, ValueError) as error:
            return str(error).strip().splitlines()[0]


def _narrowed(weight: Tensor) -> Tensor:
    """Convert a float64 weight to float32, because no quantizer takes float64; return any other weight as it is."""
    return weight.float() if weight.dtype == torch.float64 else weight


def read_published(target: LoadTarget, model: ResolvedModel) -> None:
    """Read the checkpoint of a model into the target's model, which is on the meta device; download it first if needed.
    Raise `UserError` if it cannot be found, downloaded or read, or does not fit the model."""
    folder = model.source.weights()
    if model.source.with_tensors().is_apart != model.source.is_apart:  # they have just been downloaded
        raise UserError(
            f"the weights of {model.source.name!r} hold an LM head of their own, although config.json ties it to the "
            "embedding (tie_word_embeddings); they are on this machine now: run the command again"
        )
    published = model.source.quantization.base
    CheckpointReader(folder, model.plain, model.source.name, target, published=published).read_all(target.model)
    finish_reading(target.model, folder)


def finish_reading(model: PreTrainedModel, folder: Path) -> None:
    """Set what transformers sets on a model it has loaded from `folder`: path, generation settings, evaluation mode."""
    model.config.name_or_path = str(folder)
    if (folder / "generation_config.json").is_file():
        with reading(repr(str(folder / "generation_config.json"))):
            model.generation_config = GenerationConfig.from_pretrained(str(folder))
    model.eval()


def without_drafts(names: Collection[str]) -> set[str]:
    """Return names of tensors without those of layers after the last that predict further tokens, as DeepSeek-V3 has:
    transformers ignores them by their numbers in the models that it knows."""
    drafts = tuple(name.partition("eh_proj.")[0] for name in names if ".eh_proj." in name)
    return {name for name in names if not name.startswith(drafts)}


def refuse_misfit(wrong: Collection[str], what: str, model: str, remedy: str = "") -> None:
    """Raise `UserError` if `wrong`, descriptions of tensors that do not fit, is not empty; the message lists ten, of
    what is missing and of what is there as many, and ends with `remedy`. `what` names the weights, in the plural."""
    if wrong:
        kinds = [[line for line in sorted(wrong) if line.startswith("unexpected ") == is_there] for is_there in (0, 1)]
        share = 10 // sum(map(bool, kinds))
        told = [*first_of(kinds[0], share), *first_of(kinds[1], share), *filter(None, [remedy])]
        raise UserError(f"{what} do not fit {model!r}: {'; '.join(told)}")

"""`AdapterBase`: the model of an adapter, with experts' and layers' names in every program.

A role is a projection of an expert: `gate`, `up` and `down`, or `gate_up` for gate and up in one matrix.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from moetune.adapters.factors import DOWN, GATE_UP
from moetune.adapters.files import StoredAdapter
from moetune.compat import llama4
from moetune.errors import UserError, shown
from moetune.files import expanded
from moetune.formats.checkpoint import weights_of
from moetune.models.hub.fingerprint import headers
from moetune.models.hub.key_mapping import KeyMapping, key_mappings, published_names, renamed_again
from moetune.models.moe import MoeLayer
from moetune.models.source import ModelSource
from moetune.models.structure import ModelStructure
from moetune.tensor_files import INDEX_FILE, SINGLE_FILE

_ROLES = {
    "w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": DOWN, "down_proj": DOWN,
    "gate_up_proj": GATE_UP, "gate_up_projs": GATE_UP, "down_projs": DOWN,
}  # fmt: skip
"""Name of an expert's projection -> its role, for names that the base's own checkpoint does not have."""
_OF_EXPERTS = re.compile(
    r"(.+\.experts)\.(?:(?P<id>\d+)\.(?P<leaf>\w+)|(?P<plural>\w+_projs)\.(?P<last>\d+)|(?P<all>[a-z]\w*))"
)
"""The name of a projection: of one expert (`….experts.3.w1`, `….experts.down_projs.3`), or of all of them."""


@dataclass(frozen=True)
class ExpertNames:
    """The names of one layer's projections in the base checkpoint.

    Attributes:
        prefix: path of the experts there, such as `model.layers.0.block_sparse_moe.experts`.
        roles: role -> the projection's name behind the expert's number: `gate`, `up` and `down` -> `w1`, `w3`, `w2`.
            Empty if the checkpoint stores all experts in one tensor.
    """

    prefix: str
    roles: Mapping[str, str]

    def of(self, expert: int, role: str) -> str:
        """Return the name of one expert's projection; `KeyError` if the checkpoint has no names for single experts."""
        return f"{self.prefix}.{expert}.{self.roles[role]}"


@dataclass(frozen=True)
class AdapterBase:
    """The model that an adapter was made for, without weights.

    Attributes:
        name: the name or path that the user gave.
        plain: the model on the meta device, as transformers builds it.
        structure: its parameters, linear layers and expert layers.
        names: tensor names of its checkpoint: read from its files, or as transformers would save it.
    """

    name: str
    plain: PreTrainedModel = field(repr=False)
    structure: ModelStructure = field(repr=False)
    names: tuple[str, ...] = field(repr=False)

    @cached_property
    def mappings(self) -> dict[str, KeyMapping]:
        """Name of a parameter -> the tensors of the checkpoint that it is made of."""
        return key_mappings(self.plain, self.names)

    @cached_property
    def layers(self) -> dict[str, MoeLayer]:
        """Path of a layer's experts in the plain model -> the layer."""
        return {layer.experts: layer for layer in self.structure.moe_layers}

    @cached_property
    def expert_names(self) -> dict[str, ExpertNames]:
        """Path of a layer's experts in the plain model -> names in the checkpoint, for the layers that have any.

        A checkpoint that stacks experts under different paths for their projections has none.
        """
        names = {}
        for path, layer in self.layers.items():
            gate_up, down = (self.mappings.get(f"{path}.{stack}") for stack in stacks_of(layer).values())
            if gate_up is None or down is None:
                continue
            if gate_up.has_experts_apart and down.has_experts_apart:
                roles = _roles(layer, gate_up, down)
                first = down.of_expert(0).every_key()[0].removesuffix(".weight")
                names[path] = ExpertNames(first.removesuffix(f".0.{roles[DOWN]}"), roles)
            elif gate_up.only_transposes and down.only_transposes:
                prefixes = {mapping.every_key()[0].rpartition(".")[0] for mapping in (gate_up, down)}
                if len(prefixes) == 1:
                    names[path] = ExpertNames(prefixes.pop(), {})
        return names

    @cached_property
    def peft_layout(self) -> str:
        """The stacked layout that PEFT writes and reads for this model, a key of `ORDERS`: with the factors exchanged
        where it takes experts' inputs for their outputs."""
        experts = map(self.plain.get_submodule, self.layers)
        return "peft-0.18" if any(isinstance(module, llama4.Experts) for module in experts) else "peft"

    @cached_property
    def peft_names(self) -> dict[str, str]:
        """Path of a linear layer or router -> the name by which PEFT finds its factors: the checkpoint's where PEFT,
        which renames as transformers does on loading, would not find the path (Laguna's shared experts)."""
        paths = self.structure.lora_layers()
        lost = renamed_again(self.plain, (f"{path}.lora_A.weight" for path in paths))
        return {path: self.linear_name(path) if f"{path}.lora_A.weight" in lost else path for path in paths}

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Path of the block around experts, in the plain model or in the checkpoint -> path of the experts."""
        paths = {path.removesuffix(".experts"): path for path in self.layers}
        for path, names in self.expert_names.items():
            paths.setdefault(names.prefix.removesuffix(".experts"), path)
        return paths

    @cached_property
    def _linears(self) -> dict[str, str]:
        """Name of a linear layer or router in the checkpoint or in the plain model -> its path in the plain model."""
        known = self.structure.lora_layers()
        names = {}
        for path in known:
            mapping = self.mappings.get(f"{path}.weight")
            if mapping is not None and mapping.conversion is None:
                names[mapping.every_key()[0].removesuffix(".weight")] = path
        return names | {path: path for path in known}

    def linear(self, name: str) -> str | None:
        """Return the path of the linear layer or router with this name in the plain model or the checkpoint.

        None if there is none.
        """
        return self._linears.get(_as_here(name, self._linears))

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Name in the plain model -> its parameter or buffer, on the meta device."""
        plain = self.plain
        return {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}

    @cached_property
    def _parameters(self) -> dict[str, str]:
        """Name of a parameter or buffer in the checkpoint or in the plain model -> its name in the plain model."""
        names = {mapping.every_key()[0]: name for name, mapping in self.mappings.items() if mapping.conversion is None}
        return names | {name: name for name in self.parameters}

    def parameter(self, name: str) -> str | None:
        """Return the name in the plain model of the parameter or buffer with this name there or in the checkpoint; None
        if there is none."""
        return self._parameters.get(_as_here(name, self._parameters))

    def linear_name(self, path: str) -> str:
        """Return a linear layer's name in the checkpoint.

        Raises `UserError` if it has none because transformers converts its weight.
        """
        mapping = self.mappings.get(f"{path}.weight")
        if mapping is None or mapping.conversion is not None:
            raise UserError(f"the base checkpoint has no name for {path} that other programs could know; merge instead")
        return mapping.every_key()[0].removesuffix(".weight")

    def experts(self, name: str) -> MoeLayer | None:
        """Return the layer whose experts have this path, in the plain model or in the checkpoint; None if none."""
        path = self._paths.get(_as_here(name.removesuffix(".experts"), self._paths))
        return None if path is None or not name.endswith(".experts") else self.layers[path]

    def projection(self, name: str) -> tuple[MoeLayer, int | None, str] | None:
        """Return (layer, expert id, role) for the name of a projection of one expert, or, with None as the id, of all
        (`….experts.gate_proj`); None for any other name. The base may not have an expert of this id."""
        if (match := _OF_EXPERTS.fullmatch(name)) is None:
            return None
        expert, leaf = match["id"] or match["last"], match["leaf"] or match["plural"] or match["all"]
        layer = self.experts(match[1])
        role = None if layer is None else self._role(layer, leaf)
        return None if layer is None or role is None else (layer, None if expert is None else int(expert), role)

    def _role(self, layer: MoeLayer, leaf: str) -> str | None:
        """Return the role of a projection by the last part of its name; None if the name is unknown."""
        own = self.expert_names.get(layer.experts)
        by_leaf = {} if own is None else {name: role for role, name in own.roles.items()}
        return (by_leaf | {name: role for name, role in _ROLES.items() if name not in by_leaf}).get(leaf)


def base_of(source: ModelSource, plain: PreTrainedModel, structure: ModelStructure, name: str) -> AdapterBase:
    """Return the base of adapters for a resolved model.

    `name` is what the user called it. Tensor names are those of its checkpoint if that is on this machine, else those
    under which transformers would save it.
    """
    folder = source.local_folder() if source.quantized_base is None else source.quantized_base.source
    if folder is not None and any((folder / file).is_file() for file in (SINGLE_FILE, INDEX_FILE)):
        return AdapterBase(name, plain, structure, tuple(weights_of(headers(folder))))
    return AdapterBase(name, plain, structure, tuple(published_names(plain)))


def stacks_of(layer: MoeLayer) -> dict[str, str]:
    """Return projection (`gate_up`, `down`) -> transformers' name of the parameter with all experts' weights."""
    return {GATE_UP: "gate_up_proj" if layer.shape.has_gate else "up_proj", DOWN: "down_proj"}


def sizes_of(layer: MoeLayer) -> dict[str, tuple[int, int]]:
    """Return projection -> (inputs, outputs) of one expert; gate and up together under `gate_up`."""
    shape = layer.shape
    return {GATE_UP: (shape.hidden, shape.gate_up_rows), DOWN: (shape.intermediate, shape.hidden)}


def _roles(layer: MoeLayer, gate_up: KeyMapping, down: KeyMapping) -> dict[str, str]:
    """Return role -> name in the checkpoint of an expert's projections.

    To tell gate from up, a tensor with ones in the gate's rows and zeros in up's is converted to the checkpoint's
    layout.
    """
    (last,) = down.of_expert(0).every_key()
    roles = {DOWN: _leaf(last)}
    keys = gate_up.of_expert(0).every_key()
    if not layer.shape.has_gate:
        return roles | {GATE_UP: _leaf(keys[0])}
    marked = torch.zeros(1, *gate_up.model.get_parameter(gate_up.parameter).shape[1:])
    rows = layer.shape.gate_and_up[0]
    (marked[0].T if layer.shape.is_transposed else marked[0])[rows] = 1
    marks = gate_up.of_expert(0).to_checkpoint(marked)
    return roles | {("gate" if mark.any() else "up"): _leaf(key) for key, mark in marks.items()}


def _leaf(key: str) -> str:
    return key.removesuffix(".weight").rpartition(".")[2]


def _as_here(name: str, known: Collection[str]) -> str:
    """Return a name as the base has it, if it differs in what models of text and images put before the names of their
    language model, and that of text alone does not: one in `known`, or else `name` itself."""
    if name in known:
        return name
    for prefix in ("model.language_model.", "language_model.model.", "model."):
        for ours in ("model.", "", "model.language_model.", "language_model.model."):
            if name.startswith(prefix) and (here := ours + name.removeprefix(prefix)) in known:
                return here
    return name


def named_base(stored: StoredAdapter) -> str | None:
    """Return the base that an adapter's settings name; None if they name none."""
    named = stored.settings.get("base_model_name_or_path")
    return named if isinstance(named, str) and named else None


def of_another_base(stored: StoredAdapter, base: str, source: ModelSource) -> list[str]:
    """Return a note if an adapter's settings name another base than the one that the user named, `base`, found as
    `source`; else an empty list. Two names may stand for the same weights, so this is no error."""
    named, revision = named_base(stored), stored.settings.get("revision")
    known = {base, source.name, source.folder}
    known |= {str(path) for folder in source.local_folders() for path in (folder.absolute(), folder.resolve())}
    if named == base and revision not in (None, "main") and not expanded(base).is_dir():
        return [f"{stored} names revision {shown(revision)} of its base, and main is read"]
    if named is None or named in known or os.path.abspath(os.path.expanduser(named)) in known:
        return []
    return [f"{stored} names the base {shown(named)}, and it is read with {base!r}"]

"""Component of each parameter (`attention`, `experts`, `norm`, …), by its position in the module tree.

Routers and experts are found by structure (moe.py). All other parameters are classified by the class and the name of
the modules around them, for example an `nn.Embedding`, a norm class, or `self_attn` or `mlp` inside a layer. Parameters
of modules for images or audio are `other`.
"""

import re
from collections.abc import Mapping
from typing import Literal, get_args

from torch import nn
from transformers import PreTrainedModel

Component = Literal[
    "embedding", "attention", "router", "experts", "shared_experts", "dense_mlp", "norm", "lm_head", "other"
]
"""Components of a model; every parameter belongs to exactly one."""
COMPONENTS: tuple[Component, ...] = get_args(Component)

_NORM_CLASS = re.compile(r"norm(gated|alization|\dd)?$", re.IGNORECASE)
_MLP_CLASS = re.compile(r"(mlp|moe)$", re.IGNORECASE)
MODALITY = re.compile(r"vision|visual|image|img|audio|speech|multi_?modal|mm_proj", re.IGNORECASE)
"""Names of modules for images or audio, whose parameters are of the component `other`."""
_SHARED = re.compile(r"^shared_(expert|mlp)")
_NEITHER = re.compile(r"residual|_hc$|^altup|^laurel$|^per_layer")
"""Names of modules inside a layer that are neither attention nor feed-forward."""
_ATTENTION = re.compile(r"attn|attention|mamba|conv|temporal_block|lstm|^mixer$")
_MLP = re.compile(r"mlp|ffn|feed_?forward|^ff$|^fc\d$|^intermediate$|^output$|sparse_moe|^mixer$")


class Landmarks:
    """The modules of one model that its parameters are classified by, such as the decoder layers and the LM head.

    `marked` is parameter name -> component for routers and experts, which are found by structure before (moe.py).

    Attributes:
        base: prefix of the base model's parameter names (`model.`), empty if the model is its own base.
        head: prefix of the LM head's parameter names; None without a head.
        stacks: prefixes of the outermost module lists (`model.layers.`), those of vision towers included.
        main_stacks: prefixes of the module lists that hold the decoder layers.
        num_layers: number of decoder layers.
        moe_layers: indices of the layers with experts, as far as `marked` names them.
    """

    def __init__(self, model: PreTrainedModel, marked: Mapping[str, Component] | None = None) -> None:
        self.marked = dict(marked or {})
        self.modules = dict(model.named_modules())
        paths = {id(module): name for name, module in self.modules.items()}
        base = paths[id(model.base_model)]
        self.base = f"{base}." if base else ""
        head = paths.get(id(model.get_output_embeddings()))
        self.head = None if head is None else f"{head}."
        self.stacks = _outer_stacks(self.modules)
        self.main_stacks, self.num_layers = _main_stacks(self.modules, self.stacks)
        self.moe_layers = {self.layer_of(name) for name, part in self.marked.items() if part == "experts"}

    def layer_of(self, name: str) -> int | None:
        """Return the index of the decoder layer that a parameter or module is in; None outside the decoder layers."""
        for stack in self.main_stacks:
            if name.startswith(stack):
                return int(name[len(stack) :].partition(".")[0])
        return None

    def is_chooser(self, name: str) -> bool:
        """Return whether a parameter or module is in an indexer, which selects keys for a query by comparing scores.

        No gradient reaches its weights.
        """
        return any(type(self.modules[path]).__name__.endswith("Indexer") for path in _ancestors(name))

    def component_of(self, name: str) -> Component:
        """Return the component of a parameter, given its full name, such as `model.layers.0.self_attn.q_proj.weight`.

        Every module that mixes tokens is attention: softmax, linear and state-space attention, convolutions, recurrent
        blocks. Norms are `norm` wherever they are. Feed-forward weights that every token uses are `dense_mlp` unless
        they belong to a shared expert; this includes projections into and out of a latent space of experts.
        """
        if name in self.marked:
            return self.marked[name]
        if MODALITY.search(name):
            return "other"
        parents = _ancestors(name)
        if any(_NORM_CLASS.search(type(self.modules[path]).__name__) for path in parents):
            return "norm"
        stack = next((stack for stack in self.stacks if name.startswith(stack)), None)
        if stack is not None:
            return self._inside_layer(name, [path for path in parents if len(path) >= len(stack) - 1] + [name])
        if any("embed" in path or isinstance(self.modules[path], nn.Embedding) for path in parents):
            return "embedding"
        if not name.startswith(self.base) or (self.head is not None and name.startswith(self.head)):
            return "lm_head"
        return "lm_head" if "lm_head" in name else "other"

    def _inside_layer(self, name: str, paths: list[str]) -> Component:
        """Return the component of a parameter inside a layer.

        It is a shared expert if any module around it is named so; else the outermost module with a known name decides.
        `paths` are the paths of the modules around it inside the layer, outermost first, and its own name.
        """
        if any(_SHARED.search(path.rpartition(".")[2]) for path in paths):
            return "shared_experts" if self.layer_of(name) in self.moe_layers else "dense_mlp"
        for path in paths:
            segment = path.rpartition(".")[2]
            if _NEITHER.search(segment):
                return "other"
            is_mlp_class = path in self.modules and _MLP_CLASS.search(type(self.modules[path]).__name__)
            if _ATTENTION.search(segment) and not is_mlp_class:
                return "attention"
            if _MLP.search(segment):
                return "dense_mlp"
        return "other"


def _ancestors(name: str) -> list[str]:
    """Return the paths of the modules around a parameter, outermost first, without the root."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts))]


def _outer_stacks(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the prefixes (`model.layers.`) of all `nn.ModuleList`s that are in no other one."""
    stacks: list[str] = []
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(stack) for stack in stacks):
            stacks.append(f"{name}.")
    return stacks


def _main_stacks(modules: Mapping[str, nn.Module], stacks: list[str]) -> tuple[list[str], int]:
    """Return the prefixes of the module lists that hold the decoder layers, and the number of layers.

    The decoder is the list with the most parameters, together with lists of equal length beside it: some models have a
    list for each role (`attentions`, `ffns`) instead of one list of layers.
    """
    sizes = {
        stack: sum(parameter.numel() for parameter in modules[stack[:-1]].parameters())
        for stack in stacks
        if not MODALITY.search(stack)
    }
    if not sizes:
        return [], 0
    kinds = {stack: (stack[:-1].rpartition(".")[0], len([*modules[stack[:-1]].children()])) for stack in sizes}
    largest = kinds[max(sizes, key=lambda stack: sizes[stack])]
    return [stack for stack, kind in kinds.items() if kind == largest], largest[1]

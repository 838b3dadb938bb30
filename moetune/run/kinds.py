"""Which decoder layers of a run are identical: a few of them can stand for all."""

from collections.abc import Hashable
from itertools import pairwise

from moetune.models.stack import made_alike
from moetune.run.keeps import recomputes_layers
from moetune.run.resolved import ResolvedRun


def kinds_of(run: ResolvedRun, ep: int) -> tuple[list[Hashable], list[Hashable]]:
    """Return for each decoder layer its kind and its side: all properties that its own memory and calls depend on, and
    those that its neighbours' memory depends on; equal in every process. `ep` is the rank's position on the `ep` axis,
    which decides the experts that it holds."""
    selection, held = run.selection, {layer: of_ranks[ep] for layer, of_ranks in run.placement.items()}
    outside = {part.name for part in run.structure.parameters if part.layer is None}
    # Whether gradients pass through the layer even if nothing in it trains: always under checkpointing, else if an
    # earlier layer or a weight outside of the layers trains.
    arrive = recomputes_layers(run.config.train) or bool(selection.full & outside)
    shapes = {layer.index: layer.shape for layer in run.structure.moe_layers}
    kinds, sides = list[Hashable](), list[Hashable]()
    for number, (path, made) in enumerate(made_alike(run.model.plain).items()):
        trains = (
            tuple(sorted(name.removeprefix(path) for name in selection.full if name.startswith(f"{path}."))),
            tuple(
                sorted(
                    (name.removeprefix(path), rank)
                    for name, rank in selection.ranks.items()
                    if name.startswith(f"{path}.")
                )
            ),
            selection.experts.get(number, ()),
            selection.lora_experts.get(number, ()),
        )
        linears = run.quantized_linears.items()
        stored = tuple(sorted((at.removeprefix(path), storage) for at, storage in linears if at.startswith(f"{path}.")))
        kept = tuple(sorted(run.keeps.get(number, ())))
        stays = "host" in kept and number == 0  # its input, a frozen embedding's output, stays on the GPU
        carried = number in run.carried_layers
        experts = run.config.model.storage_of("experts", number), held.get(number, ()), shapes.get(number)
        sides.append((arrive, stays, carried, kept, any(trains), experts))
        kinds.append((sides[-1], trains, stored, made))
        arrive = arrive or any(trains)
    layers = [*shapes]
    if run.config.model.experts_on == "host" and any(after - before > 1 for before, after in pairwise(layers)):
        # while a layer computes, experts of layers that are not its neighbours are copied from the host
        around = [None, *(sides[layer] for layer in layers), None]
        fetched = dict(zip(layers, zip(around, around[2:], strict=False), strict=True))
        for values in (kinds, sides):
            values[:] = [(value, fetched.get(number)) for number, value in enumerate(values)]
    return kinds, sides

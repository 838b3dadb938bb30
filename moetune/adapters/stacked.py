"""Stacked layouts: all experts' factors in two matrices, [E·r, …] and […, r·E].

PEFT wraps a module of experts once for each of its parameters that has LoRA (`target_parameters`). The outermost
wrapper's factors are at `<experts>.lora_A`, those of the next at `<experts>.base_layer.lora_A`, and so on. The two
matrices have the same shapes in four ways of reading them, which `Order` names.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Order:
    """How two stacked matrices are read.

    Attributes:
        is_grouped: in the second matrix the expert is the slowest index of the columns, [out, E, r]; otherwise it is
            the fastest, [out, r, E]. In the first matrix it is the slowest in every program.
        is_swapped: the first matrix maps from the outputs, and the second to the inputs: A = second^T, B = first^T.
    """

    is_grouped: bool
    is_swapped: bool

    def read(self, first: Tensor, second: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Return A [E, r, in] and B [E, out, r] of the stored matrices `first` [E·r, …] and `second` […, r·E].

        `experts` is E. Views where possible.
        """
        first = first.unflatten(0, (experts, -1))
        if self.is_grouped:
            second = second.unflatten(1, (experts, -1)).transpose(0, 1)
        else:
            second = second.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return (second.mT, first.mT) if self.is_swapped else (first, second)

    def write(self, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two matrices of A [E, r, in] and B [E, out, r], the reverse of `read`."""
        first, second = (B.mT, A.mT) if self.is_swapped else (A, B)
        by_columns = second.transpose(0, 1) if self.is_grouped else second.permute(1, 2, 0)
        return first.flatten(0, 1), by_columns.flatten(1)


ORDERS: dict[str, Order] = {
    "peft": Order(is_grouped=False, is_swapped=False),
    "peft-0.18": Order(is_grouped=False, is_swapped=True),
    "unsloth-grouped": Order(is_grouped=True, is_swapped=False),
    "megatron": Order(is_grouped=True, is_swapped=True),
}
"""Name of a stacked layout -> how its matrices are read. Sources: docs/reference/adapters.md."""


def named_order(order: Order) -> str:
    """Return the name of the layout with this order."""
    return next(name for name, known in ORDERS.items() if known == order)

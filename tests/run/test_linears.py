"""Which linear layers are stored in base precision: those that stay frozen, are large enough, and are only called."""

import pytest

from moetune.config.resolved import ResolvedModelConfig
from moetune.models.selection import NOTHING
from moetune.models.structure import meta_model, read_structure
from moetune.run.linears import linears_to_quantize, read_directly
from tests.reference import small_linears_are_quantized
from tests.toys import toy_config

NF4 = ResolvedModelConfig.named("x", base="nf4", dtype="fp32", attention="eager")


@pytest.mark.parametrize(
    ("model_type", "name", "whole", "dtype"),
    [
        ("jamba", "dt_proj", True, True),
        ("jamba", "in_proj", False, False),
        ("nemotron_h", "out_proj", True, True),
        ("granitemoehybrid", "out_proj", True, True),
        ("deepseek_v32", "weights_proj", False, True),  # casts its input to the weight's dtype
        ("deepseek_v32", "wk", False, False),
        ("mixtral", "q_proj", False, False),
    ],
)
def test_a_weight_that_the_model_reads_itself_stays_a_plain_one(
    model_type: str, name: str, whole: bool, dtype: bool
) -> None:
    """Quantized, it is bytes of another shape and dtype."""
    model = meta_model(toy_config(model_type, **({"index_n_heads": 8} if name == "weights_proj" else {})))
    structure = read_structure(model)
    with small_linears_are_quantized():
        chosen = linears_to_quantize(model, structure, NOTHING, NF4)
    paths = [path for path in structure.linears("attention") if path.endswith(f".{name}")]
    assert paths
    for path in paths:
        assert read_directly(model, path) == whole
        assert read_directly(model, path, or_its_dtype=True) == dtype
        linear = structure.linears()[path]
        assert (path in chosen) == (min(linear.in_features, linear.out_features) >= 8 and not dtype)


def test_small_linears_are_left_alone() -> None:
    model = meta_model(toy_config("mixtral"))
    assert linears_to_quantize(model, read_structure(model), NOTHING, NF4) == {}

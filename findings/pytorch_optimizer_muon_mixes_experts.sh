#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: Muon flattens a parameter of three dimensions to one matrix, [experts, out x in] for fused experts,
# and orthogonalizes that: an expert is a row, its update depends on the gradients of its siblings, and is a fifth as
# large as that of the same expert by itself. No warning; torch's own Muon refuses such a parameter. Hurts whoever trains the
# experts of transformers 5, all of which are fused.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 pytorch-optimizer==4.1.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'EOF'
import sys
from importlib.metadata import version

import torch
from pytorch_optimizer import Muon

print("torch", torch.__version__, "pytorch-optimizer", version("pytorch-optimizer"))
print("expected: experts in one parameter are updated as in parameters of their own, or an error")
torch.manual_seed(0)
gradients = torch.randn(4, 16, 8)


def updates(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Take a step of Muon from zero with these gradients, and return what each parameter moved."""
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    Muon([{"params": parameters, "use_muon": True}], lr=1.0).step()
    return [-parameter.detach() for parameter in parameters]


each = torch.stack(updates(list(gradients)))
(fused,) = updates([gradients])
others = gradients.clone()
others[1:] = torch.randn(3, 16, 8)
(with_others,) = updates([others])
sizes = [update[0].norm().item() for update in (each, fused)]
depends = not torch.allclose(fused[0], with_others[0], atol=1e-3)
print(f"update of expert 0: norm {sizes[0]:.2f} alone, {sizes[1]:.2f} with its siblings in one parameter")
print(f"it changes with the siblings' gradients: {depends}")
try:
    torch.optim.Muon([torch.nn.Parameter(gradients)])
    refused = "accepted"
except ValueError as error:
    refused = str(error)
print(f"torch.optim.Muon: {refused}")
as_found = depends and sizes[1] < sizes[0] / 3 and "2D" in refused
sys.exit(0 if as_found else "changed since this was found")
EOF

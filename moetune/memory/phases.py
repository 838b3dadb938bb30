"""The phases of a run, by which memory and work are counted."""

from typing import Literal, get_args

ForwardPhase = Literal["generation", "old_logprobs", "reference", "forward", "evaluation"]
FORWARD_PHASES: tuple[ForwardPhase, ...] = get_args(ForwardPhase)
Phase = Literal[ForwardPhase, "load", "recompute", "backward", "optimizer"]
"""Phases of a run; `recompute` repeats the forward pass of a checkpointed layer during backward, `reference` is a
forward pass of the model as it was before training, for preferences, `old_logprobs` one of the model that generated,
over what it generated."""
ONCE_PHASES: tuple[Phase, ...] = ("optimizer", "evaluation")
"""Phases that a step has once, after its micro-steps."""

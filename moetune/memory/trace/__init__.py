"""The trace: the trainer's own steps on fake or real tensors, every storage recorded."""

from moetune.memory.trace.steps import Steps, batches_of, vocabulary_of
from moetune.memory.trace.tracing import NotTraceable, trace
from moetune.memory.trace.views import Trace
from moetune.memory.trace.watched import named_modules

__all__ = ["NotTraceable", "Steps", "Trace", "batches_of", "named_modules", "trace", "vocabulary_of"]

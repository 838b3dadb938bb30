"""torch: a quick mode of fake tensors, and their answers that differ from torch's."""

import functools
import logging
import operator
from collections.abc import Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from moetune.compat.torch import unguarded


@functools.cache
def add_missing_fakes() -> torch.library.Library:
    """Register fake kernels for fused SGD, which torch lacks; return the library that holds them.

    Without them torch would run the real kernel on real zeros. Done once per process.
    """
    fakes = torch.library.Library("aten", "IMPL")
    for overload in ("_fused_sgd_", "_fused_sgd_.tensor_lr"):
        fakes.impl(overload, lambda *args, **kwargs: None, "Meta")
    return fakes


@contextmanager
def without_fake_reports() -> Iterator[None]:
    """Stop torch from printing the errors of operations on fake tensors, which it also raises, within the `with`."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _operations(names: str) -> frozenset[Any]:
    """Return the ATen operations named in a string of `NAME.OVERLOAD` separated by spaces."""
    return frozenset(operator.attrgetter(name)(torch.ops.aten) for name in names.split())


_IN_PLACE = _operations(
    "add_.Tensor addmm_.default bitwise_and_.Scalar copy_.default exp_.default index_add_.default index_copy_.default "
    "index_put_.default mul_.Tensor pow_.Scalar scatter_add_.default sub_.Tensor zero_.default"
)
_ON_META = _IN_PLACE | _operations(
    "_to_copy.default _unsafe_view.default add.Tensor alias.default as_strided.default bmm.default cat.default "
    "detach.default div.Scalar div.Tensor expand.default gather.default linalg_vector_norm.default mean.dim mm.default "
    "mul.Scalar mul.Tensor neg.default permute.default pow.Tensor_Scalar rsqrt.default select.int silu.default "
    "silu_backward.default slice.Tensor split.Tensor split_with_sizes.default squeeze.dim sum.dim_IntList t.default "
    "transpose.int unbind.int unsqueeze.default view.default view.dtype"
)


_ONLY_VALUES = ("moetune", "bitsandbytes", "fsdp")
"""Namespaces whose operators, when they write to an argument, change its values but no shape, stride or storage."""


_LIFT = torch.ops.aten.lift_fresh.default
"""Makes what `torch.tensor` returns known to dispatch modes."""
_NONZERO = torch.ops.aten.nonzero.default
"""Which elements a mask selects, as torch asks where a tensor is indexed by one."""


class _Made(NamedTuple):
    """Description of a fake tensor that fills its storage, from which an equal one can be made."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def on_meta(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")


def _makes_anew(func: Any) -> bool:
    """Return whether an operation's results are new tensors, by its schema: it returns no view and mutates no argument.

    Operators of moetune and bitsandbytes may mutate arguments: that changes only values, which fake tensors lack.
    """
    schema = func._schema
    mutates = schema.is_mutable and func.namespace not in _ONLY_VALUES
    return not mutates and all(result.alias_info is None for result in schema.returns)


_Way = Literal["nothing", "passed on", "in place", "anew", "on meta", "by torch"]
_WAYS: dict[int, tuple[_Way, bool]] = {}
"""id of an operation, which torch never frees and hashes slowly -> what `_way_of` returns for it."""


def _way_of(func: Any) -> tuple[_Way, bool]:
    """Return how `QuickFakeMode` runs an operation, and whether it can run directly on meta tensors.

    "nothing": not at all; "passed on": outside of the mode; "in place": by returning the first argument; "anew": from
    the cache of results; "on meta": on the meta tensors inside the fake ones; "by torch": as torch's own mode does.
    """
    on_meta = func in _ON_META
    way: _Way = "anew" if _makes_anew(func) else "on meta" if on_meta else "by torch"
    if func.namespace in _ONLY_VALUES and not func._schema.returns:
        way = "nothing"  # has no effect on fake tensors
    elif func.namespace == "profiler":
        way = "passed on"
    elif func in _IN_PLACE:
        way = "in place"
    return _WAYS.setdefault(id(func), (way, on_meta))


def answering_no() -> AbstractContextManager[Any]:
    """Return a context in which a fake tensor that is asked whether it is true says no, instead of raising an error.

    It may be asked by `bool` or, if its dtype is bool, by `item`.
    """

    def item(self: FakeTensor) -> Any:
        return False if self.dtype == torch.bool else torch.Tensor.item(self)

    return patch.multiple(FakeTensor, __bool__=lambda self: False, item=item)


@unguarded
class QuickFakeMode(FakeTensorMode):
    """A `FakeTensorMode` whose operations take a third of the time of torch's.

    The most common operations (`_ON_META`) run their shape function directly on the meta tensor inside a fake tensor,
    without torch's search for an implementation. Operations in place, and operators of moetune and bitsandbytes that
    return nothing, do nothing. Results of all operations that return new tensors are cached by shapes, strides, dtypes
    and other arguments. torch's own cache has a slower key and leaves out operators of other libraries.

    Args:
        select_all: indexing by a mask of one axis selects all of it; else it is refused, as all that reads values.
    """

    _known: ClassVar[dict[Hashable, tuple[type, list[_Made]] | None]] = {}

    def __init__(self, *, select_all: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.select_all = select_all
        self._attributes: dict[torch.device, dict[str, Any]] = {}  # of any fake tensor on a device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (way, on_meta), kwargs = _WAYS.get(id(func)) or _way_of(func), kwargs or {}
        if way == "nothing":
            return None
        if way == "passed on":
            return func(*args, **kwargs)
        key = self._key((id(func), *args, *kwargs.items())) if way == "anew" else None
        known = None if key is None else self._known.get(key)
        if known is None:
            out = self._make(func, types, args, kwargs, way, on_meta)
            if key is not None and key not in self._known:
                self._known[key] = _noted(out, (args, kwargs))
            return out
        kind, results = known
        tensors = [self._fake(result.on_meta(), result.device) for result in results]
        return tensors[0] if kind is FakeTensor else kind(tensors)

    def _make(self, func: Any, types: Any, args: Any, kwargs: Any, way: _Way, on_meta: bool) -> Any:
        if func is _LIFT and type(args[0]) is Tensor and args[0].numel() > 1:  # of fewer torch keeps the values
            result = _Made(args[0].shape, args[0].stride(), args[0].dtype, args[0].device)
            return self._fake(result.on_meta(), result.device)
        if self.select_all and func is _NONZERO and args[0].dtype is torch.bool and args[0].dim() == 1:
            return self._fake(torch.empty(args[0].numel(), 1, dtype=torch.long, device="meta"), args[0].device)
        device = self._device_of(args) if on_meta and "device" not in kwargs else None
        if device is None:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if way == "in place":
            return args[0]
        # as torch's `in_kernel_invocation_manager`, which takes longer than most operations
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            torch._C._set_meta_in_tls_dispatch_include(True)
            self.in_kernel_invocation = True
            try:
                out = func(*args, **kwargs)
            finally:
                self.in_kernel_invocation = False
        return self._fake(out, device) if isinstance(out, Tensor) else [self._fake(o, device) for o in out]

    def _fake(self, meta: Tensor, device: torch.device) -> FakeTensor:
        """Return a fake tensor on `device` around `meta`: `FakeTensor(self, meta, device)` without its checks."""
        if (attributes := self._attributes.get(device)) is None:
            fake = FakeTensor(self, meta, device)
            self._attributes[device] = dict(vars(fake))
            return fake
        fake = Tensor._make_subclass(
            FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
        )
        vars(fake).update(attributes)
        return fake

    def _key(self, values: Any) -> Hashable | None:
        """Return a cache key of an operation's arguments; None if results may depend on tensor values."""
        keys: list[Hashable] = []
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.fake_mode is not self or value.constant is not None:
                    return None
                keys.append((value.shape, value.stride(), value.dtype, value.fake_device))
            elif kind is list or kind is tuple:
                if (inside := self._key(value)) is None:
                    return None
                keys.append(inside)
            elif kind is Tensor:  # torch makes it a fake tensor, whose values are not known
                keys.append(("real", value.shape, value.stride(), value.dtype, value.device))
            elif isinstance(value, Tensor):
                return None
            else:
                keys.append((kind, value))  # 1, 1.0 and True are equal but give different dtypes
        return tuple(keys)

    def _device_of(self, args: Any) -> torch.device | None:
        """Return the device that all tensors in `args` share; None without one, or if a tensor has a constant value."""
        device = None
        for value in args:
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if type(tensor) is FakeTensor and tensor.fake_mode is self and tensor.constant is None:
                    if device is not None and device != tensor.fake_device:
                        return None
                    device = tensor.fake_device
                elif isinstance(tensor, Tensor):
                    return None
        return device


def run_below(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation, as `func(*args, **kwargs)` does, in the mode below the dispatch mode that handles it.

    On fake tensors that mode is called directly: torch's way to it, through the dispatcher, takes as long as the mode.
    """
    if not torch._C._len_torch_dispatch_stack() or any(kind is not FakeTensor for kind in types):
        return func(*args, **kwargs)
    mode = torch._C._pop_torch_dispatch_stack(None)
    try:
        return mode.__torch_dispatch__(func, types, args, kwargs)
    finally:
        torch._C._push_on_torch_dispatch_stack(mode)


def _noted(out: Any, arguments: Any) -> tuple[type, list[_Made]] | None:
    """Describe an operation's results for the cache: (type of the result, descriptions of the tensors).

    None unless all results are fake tensors, each of which fills a storage that none of the `arguments` shares.
    """
    results = [out] if isinstance(out, Tensor) else out
    if not isinstance(results, (list, tuple)) or any(
        not isinstance(result, FakeTensor) or result.constant is not None for result in results
    ):
        return None
    made = [_Made(result.shape, result.stride(), result.dtype, result.fake_device) for result in results]
    storages = [result.untyped_storage() for result in results]
    of_arguments = {id(leaf.untyped_storage()) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    is_anew = len({id(storage) for storage in storages} - of_arguments) == len(results)
    sizes = [result.on_meta().untyped_storage().nbytes() for result in made]
    kind = tuple if isinstance(out, tuple) else type(out)  # a named tuple counts as a tuple
    return (kind, made) if is_anew and sizes == [storage.nbytes() for storage in storages] else None

"""Private names of DistributedDataParallel and of the parameters that it marks."""

import warnings
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from torch import Tensor
from torch.distributed.utils import _free_storage
from torch.nn.parallel import DistributedDataParallel

# -- the model -------------------------------------------------------------------------------------------------------


def comm_hook_of(model: DistributedDataParallel) -> tuple[Any, Any] | None:
    """The function that the model calls for every bucket, and the state it passes; None without a hook."""
    hooks: list[tuple[Any, Any]] = model._comm_hooks
    return hooks[0] if hooks else None


_register_builtin: Any = DistributedDataParallel._register_builtin_comm_hook


def guard_register_builtin(check: Callable[[DistributedDataParallel, str], None]) -> None:
    """Call `check(model, name)` before any DDP model registers a hook of torch's C++ code; the last call counts."""

    def register_builtin(self: DistributedDataParallel, comm_hook_type: object) -> None:
        check(self, str(comm_hook_type))
        _register_builtin(self, comm_hook_type)

    setattr(DistributedDataParallel, "_register_builtin_comm_hook", register_builtin)  # noqa: B010 - mypy


def has_python_reducer(model: DistributedDataParallel) -> bool:
    """Whether the model averages gradient by gradient, traced by compiled autograd, and has no buckets."""
    return bool(getattr(model, "_use_python_reducer", False))


def has_delayed_params(model: DistributedDataParallel) -> bool:
    """Whether the model was made with `delay_all_reduce_named_params`."""
    return bool(getattr(model, "_delay_all_reduce_params", None))


def had_forward(model: DistributedDataParallel) -> bool:
    """Whether the first forward pass has begun, before which DDP registers what it registers late."""
    return bool(getattr(model, "_lazy_init_ran", True))


def skip_late_registration(model: DistributedDataParallel) -> None:
    """Let DDP believe that it has registered its own hook for optimizers in backward."""
    model._lazy_init_ran = True


def has_rebuilt_buckets(model: DistributedDataParallel) -> bool:
    """Whether the buckets are final: DDP orders them anew after the first backward pass."""
    return bool(model._has_rebuilt_buckets)


def averaged_params(model: DistributedDataParallel) -> list[Tensor]:
    """The parameters that DDP found when it was made, without those to ignore."""
    return list(model._module_parameters)


def skips_unused_buckets(model: DistributedDataParallel) -> bool:
    """Whether buckets without a used parameter are not handed over: an option that is in torch 2.9.1, not in 2.7.1."""
    return bool(getattr(model, "skip_all_reduce_unused_params", False))


def counted_parameters(model: DistributedDataParallel) -> tuple[int | None, int | None]:
    """How many tensors DDP averages, and their bytes, as it counted them when it was made."""
    known = model._get_ddp_logging_data()
    return known.get("num_parameter_tensors"), known.get("total_parameter_size_bytes")


def rebuild_reducer(model: Any, cap_bytes: int) -> None:
    """Do again what the end of DDP's constructor does, with buckets of `cap_bytes`.

    The old reducer goes, and its hooks on the parameters with it. `_bucket_config` is in torch 2.13.0, not in 2.9.1.
    """
    if (config := getattr(model, "_bucket_config", None)) is not None:
        model._bucket_config = config.create(
            bucket_cap_mb=cap_bytes / (1 << 20), bucket_cap_mb_list=None, use_python_reducer=False
        )
        model.bucket_bytes_cap_list = []
    model.bucket_bytes_cap, model.bucket_bytes_cap_default = cap_bytes, False
    params, sparse = model._build_params_for_reducer()
    model._ddp_init_helper(params, sparse, model._build_debug_param_to_name_mapping(params), model.static_graph)
    model._has_rebuilt_buckets = False
    if model.static_graph:
        model.static_graph = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the user has been warned by the constructor
            model._set_static_graph()


# -- uneven inputs (Join) --------------------------------------------------------------------------------------------


in_join: Callable[[DistributedDataParallel], bool] = attrgetter("_join_config.enable")
"""Whether the model runs inside `Join`, where ranks may run out of inputs. Read in every step."""


def divides_by_all_ranks(model: DistributedDataParallel) -> bool:
    """The option `divide_by_initial_world_size` of `Join`. The attribute exists inside `Join` only."""
    return bool(model._divide_by_initial_world_size)


def on_shadowed_backward(model: DistributedDataParallel, call: Callable[[], None]) -> None:
    """From now on DDP calls `call` for a backward pass of the other ranks when this rank has run out of inputs."""
    setattr(model, "_match_all_reduce_for_bwd_pass", call)  # noqa: B010 - mypy, methods are not attributes


def shadow_backward(model: DistributedDataParallel) -> None:
    """What DDP itself does then: hand over its buckets with zeros."""
    type(model)._match_all_reduce_for_bwd_pass(model)


# -- mixed precision -------------------------------------------------------------------------------------------------


def use_full_precision(param: Any) -> None:
    """Point the parameter to its values in full precision, which DDP keeps beside the 16-bit ones."""
    param.data = param._fp_param


def free_low_precision(param: Any) -> None:
    """Free the memory of the 16-bit copy; the next forward pass makes it anew."""
    _free_storage(param._mp_param)


def drop_precision_hook(param: Any) -> None:
    """Remove the hook by which DDP notices the gradient of this parameter; the next forward pass makes a new one."""
    if hasattr(param, "_ddp_mp_hook_state"):
        param._ddp_mp_hook_state[1].remove()
        del param._ddp_mp_hook_state


def is_ignored(param: Any) -> bool:
    """Whether the parameter is one of `parameters_to_ignore`, which mixed precision leaves as they are."""
    return hasattr(param, "_ddp_ignored")

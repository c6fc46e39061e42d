"""The interpreter's equations: which of a kernel's primitives become which callbacks (machine.py)."""

import functools
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import callback, source_info_util
from jax._src import core as jax_core
from jax._src.pallas.mosaic_gpu import core as gpu
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.state import discharge
from jax._src.state import types as state

from tests.mosaic import machine

_stock_interpret = jaxpr_interpret.JaxprInterpreter.interpret


def interpret(self, jaxpr, token, *args):
    """Equation by equation: to a handler of ours, or as a jaxpr of one equation to jax's interpreter."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), args, strict=True))

    def read(var):
        return var.val if isinstance(var, jax_core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        handler = _HANDLERS.get(eqn.primitive)
        done = None
        if handler is not None:
            with source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
                done = handler(self, eqn, token, [read(var) for var in eqn.invars])
        if done is not None:
            token, results = done
            env.update(zip(eqn.outvars, results, strict=True))
            continue
        inputs = list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, jax_core.Literal)))
        outputs = [var for var in eqn.outvars if not isinstance(var, jax_core.DropVar)]
        alone = types.SimpleNamespace(constvars=[], invars=inputs, eqns=[eqn], outvars=outputs)
        token, results = _stock_interpret(self, alone, token, *(env[var] for var in inputs))  # pyright: ignore
        env.update(zip(outputs, results, strict=True))
    return token, [read(var) for var in jaxpr.outvars]


def _call(self, eqn, token, function, *args, out=None, **static):
    return callback.io_callback(
        functools.partial(function, source_info=eqn.source_info, **static),
        gpu_callbacks.TOKEN_SHAPE_DTYPE if out is None else (gpu_callbacks.TOKEN_SHAPE_DTYPE, out),
        token,
        self.mesh_location,
        self.thread,
        *args,
    )


def _is_ref(var) -> bool:
    return isinstance(var.aval, state.AbstractRef)


def _to_registers(self, eqn, token, value):
    token, request = gpu_callbacks.call_make_allocation_request_array(
        token=token, compute_unit=self.thread, memory_space_id=machine.REGS, initial_ref_count=1
    )
    return gpu_callbacks.call_allocate_buffer(
        token, self.mesh_location, self.thread, request, value, source_info=eqn.source_info
    )


def _free_registers(self, eqn, token, key):
    token = _call(self, eqn, token, machine.forget_registers, key)
    return gpu_callbacks.call_deallocate_buffer(
        token, self.mesh_location, self.thread, key, source_info=eqn.source_info
    )


def _run_state(self, eqn, token, values):
    """Accumulators and the values that the body closes over become registers; refs pass through."""
    if not all(eqn.params["is_initialized"]):
        raise NotImplementedError("run_state with refs that have no value")
    body, keys = eqn.params["jaxpr"], []
    for var, value in zip(eqn.invars, values, strict=True):
        if not _is_ref(var):
            token, value = _to_registers(self, eqn, token, value)
        keys.append(value)
    token, _ = self.interpret(body, token, *keys)
    token = _call(self, eqn, token, machine.wgmma_wait, n=0)
    results = []
    for var, inner, key in zip(eqn.invars, body.invars, keys, strict=True):
        result = key
        if not _is_ref(var):
            token, result = _call(self, eqn, token, machine.registers, key, None, out=inner.aval.inner_aval)
            token = _free_registers(self, eqn, token, key)
        results.append(result)
    return token, results


def _wgmma(self, eqn, token, values):
    if _is_ref(eqn.invars[1]):
        return None
    acc, a, *rest = values
    token, key = _to_registers(self, eqn, token, a)
    token, _ = self._interpret_wgmma_ref_p(eqn, token, lambda: [acc, key, *rest])
    return _free_registers(self, eqn, token, key), []


def _wgmma_wait(self, eqn, token, values):
    del values
    return _call(self, eqn, token, machine.wgmma_wait, n=eqn.params["n"]), []


def _accumulator_store(self, eqn, token, values):
    acc, value = values
    return _call(self, eqn, token, machine.registers, acc, value), [value]


def _atomic(self, eqn, token, values):
    ref, transforms, value = jax.tree.unflatten(eqn.params["args_tree"], values)
    ref, transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, ref, tuple(transforms or ()))
    operation = eqn.params["atomic_type"].value
    return _call(self, eqn, token, machine.atomic, ref, transforms, value, operation=operation), []


def _copy_to_gmem(self, eqn, token, values):
    params = dict(eqn.params)
    operation = params["reduction_op"]
    if operation is None and not params["has_user_predicate"]:
        return None
    predicate = values.pop() if params["has_user_predicate"] else None
    params["has_user_predicate"] = False

    def copy(token):
        if operation is None:
            return self._interpret_copy_smem_to_gmem_p(eqn, token, *values, **params)[0]
        src, dst, *flat = values
        trees = (params["src_transforms_treedef"], params["dst_transforms_treedef"])
        src_transforms, dst_transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), flat)
        src, src_transforms = jaxpr_interpret.resolve_ref(eqn.invars[0].aval, src, tuple(src_transforms))
        where = (src, src_transforms, dst, tuple(dst_transforms))
        return _call(self, eqn, token, machine.reducing_copy, *where, operation=str(operation))

    return (copy(token) if predicate is None else lax.cond(predicate, copy, lambda token: token, token)), []


def _copy_to_smem(self, eqn, token, values):
    """A copy whose predicate is false still arrives at its barrier."""
    params = eqn.params
    if not params["has_user_predicate"]:
        return None
    *values, predicate = values
    sizes = [params[f"{side}_transforms_treedef"].num_leaves for side in ("src", "dst")]
    barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(
        values[2], params["barrier_transforms_treedef"], values[3 + sum(sizes) :]
    )

    def copy(token):
        return self._interpret_copy_gmem_to_smem_p(eqn, token, lambda: values)[0]

    def arrive(token):
        return gpu_callbacks.call_barrier_arrive(token, self.mesh_location, self.thread, barrier, eqn.source_info)

    return lax.cond(predicate, copy, arrive, token), []


def _store_to_peer(self, eqn, token, values):
    params = eqn.params
    if params["atomic"] is not None:
        raise NotImplementedError("async_store_smem that adds or compares")
    value, ref, barrier, index, *flat = values
    count = params["ref_transforms_treedef"].num_leaves
    transforms = jax.tree.unflatten(params["ref_transforms_treedef"], flat[:count])
    ref, transforms = jaxpr_interpret.resolve_ref(eqn.invars[1].aval, ref, tuple(transforms))
    barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(
        barrier, params["barrier_transforms_treedef"], flat[count:]
    )
    axis = self.mesh.cluster_names.index(params["cluster_dim"])
    blocks = (index - self.mesh_location.block_coords[axis]) * math.prod(self.mesh.cluster[axis + 1 :])
    return _call(self, eqn, token, machine.store_to_peer, ref, transforms, value, barrier, blocks), []


def _inline(self, eqn, token, values):
    params = eqn.params
    function, count = params["mgpu_fn"], params["pytree_args"].num_leaves
    args = values[:count]
    transforms = jax.tree.unflatten(params["pytree_ref_transforms"], values[count:])
    refs = {}
    for position, var in enumerate(eqn.invars[:count]):
        if _is_ref(var):
            if isinstance(var.aval, gpu.AbstractRefUnion):
                raise NotImplementedError("a RefUnion as an argument of an inline function")
            refs[position] = (var.aval, args[position], tuple(transforms[position]))
    means = getattr(function, "interpret", None)
    if means == ("product",):
        return _product(self, eqn, token, refs)
    if isinstance(means, tuple):
        return _operation(self, eqn, token, means, args, refs), []
    if hasattr(function, "interpret_refs"):
        return _inline_with_refs(self, eqn, token, args, refs)
    if means is None or refs:
        return None
    return token, jax.tree.leaves(means(*jax.tree.unflatten(params["pytree_args"], args)))


def _inline_with_refs(self, eqn, token, args, refs):
    args = list(args)
    for position, (aval, key, transforms) in refs.items():
        shape = state.TransformedRef(aval, transforms)
        token, args[position] = gpu_callbacks.call_get(
            token=token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(shape.shape, shape.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=key,
            transforms=transforms,
            source_info=eqn.source_info,
        )
    arguments = jax.tree.unflatten(eqn.params["pytree_args"], args)
    results, written = eqn.params["mgpu_fn"].interpret_refs(*arguments)
    for position, value in written.items():
        _, key, transforms = refs[position]
        old = args[position]
        token, _ = gpu_callbacks.call_swap(
            token=token,
            result_shape_and_dtype=jax.ShapeDtypeStruct(old.shape, old.dtype),
            mesh_location=self.mesh_location,
            thread=self.thread,
            allocation_key_as_array=key,
            transforms=transforms,
            val=value.astype(old.dtype),
            mask=None,
            source_info=eqn.source_info,
        )
    return token, jax.tree.leaves(results)


def _product(self, eqn, token, refs):
    """As a wgmma into zeros, which reads its operands until somebody waits for it."""
    out = eqn.outvars[0].aval
    token, key = _to_registers(self, eqn, token, jnp.zeros(out.shape, out.dtype))
    operands = {}
    for name, (aval, ref, transforms) in zip("ab", refs.values(), strict=True):
        whole = state.TransformedRef(aval, transforms)
        where = (whole if name == "a" else whole.T).transforms
        operands |= {f"{name}_allocation_key_as_array": ref, f"{name}_transforms": where}
    token = callback.io_callback(
        functools.partial(machine.wgmma, source_info=eqn.source_info),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        acc_allocation_key_as_array=key,
        acc_transforms=(),
        **operands,
    )
    token, result = _call(self, eqn, token, machine.registers, key, None, out=out)
    return _free_registers(self, eqn, token, key), [result]


def _operation(self, eqn, token, means, args, refs):
    match means:
        case ("nothing",):
            return token
        case ("fence",):
            return callback.io_callback(
                functools.partial(gpu_callbacks.commit_smem, source_info=eqn.source_info),
                gpu_callbacks.TOKEN_SHAPE_DTYPE,
                token=token,
                mesh_location=self.mesh_location,
                thread=self.thread,
            )
        case ("bar.sync" | "bar.arrive", int(threads), *barrier):
            (barrier,) = (*barrier, *args)
            sync = means[0] == "bar.sync"
            return _call(self, eqn, token, machine.named_barrier, barrier, threads=threads, sync=sync)
        case ("turn.wait",) | ("turn.add",):
            operation = machine.turn_wait if means == ("turn.wait",) else machine.turn_add
            _, key, transforms = refs[0]
            return _call(self, eqn, token, operation, key, transforms, *args[1:])
    raise NotImplementedError(f"{eqn.params['mgpu_fn'].__qualname__} has the unknown operation {means}")


_HANDLERS: dict[Any, Callable[..., Any]] = {
    discharge.run_state_p: _run_state,
    primitives.wgmma_ref_p: _wgmma,
    primitives.wgmma_wait_p: _wgmma_wait,
    primitives.wgmma_accumulator_store_p: _accumulator_store,
    primitives.atomic_store_p: _atomic,
    primitives.copy_smem_to_gmem_p: _copy_to_gmem,
    primitives.copy_gmem_to_smem_p: _copy_to_smem,
    primitives.async_store_smem_p: _store_to_peer,
    primitives.inline_mgpu_p: _inline,
}

"""The loops that people write by hand, as good as they can be written.

They place state and batch once and forever, donate the state, and keep two calls in
flight: what they are compared with shall not win by their carelessness.
"""

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lockstep.bench.contender import Contender
from lockstep.bench.workload import Workload
from lockstep.metrics import Mean
from lockstep.step.loss import Loss

IN_FLIGHT = 2


def whole_batch(work: Workload) -> Callable[..., Any]:
    """The single-device step: `((params, opt_state, model_state, key), batch)`."""
    return _step(work, work.loss, lambda tree: tree, lambda key: key)


def one_shard(work: Workload) -> Callable[..., Any]:
    """The step of one device, which averages over the axis "data"."""
    loss = work.device_loss or work.loss

    def own(key: Any) -> Any:
        return jax.random.fold_in(key, lax.axis_index("data"))

    return _step(work, loss, lambda tree: lax.pmean(tree, "data"), own)


def start(work: Workload) -> Any:
    """A fresh state of the handwritten steps."""
    return work.params, work.optimizer.init(work.params), work.model_state, work.key


def jitted(work: Workload, mesh: Mesh) -> Contender:
    """`jit` and `NamedSharding`."""
    step = jax.jit(whole_batch(work), donate_argnums=0)
    return _looped("hand-written jit", step, work, mesh)


def sharded(work: Workload, mesh: Mesh) -> Contender:
    """`shard_map` and `pmean`."""
    local = jax.shard_map(
        one_shard(work),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("data")),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    step = jax.jit(local, donate_argnums=0)
    return _looped("hand-written shard_map", step, work, mesh)


def alone(work: Workload, mesh: Mesh) -> Contender:
    """One device with the whole batch: the floor."""
    one = Mesh(mesh.devices.flat[:1], ("data",))
    step = jax.jit(whole_batch(work), donate_argnums=0)
    return _looped("one device", step, work, one)


def bounded(call: Callable[[], Any], steps: int) -> None:
    """Call `steps` times, at most two calls ahead of the devices; wait for the last."""
    running: collections.deque[Any] = collections.deque()
    for _ in range(steps):
        running.append(call())
        if len(running) > IN_FLIGHT:
            jax.block_until_ready(running.popleft())
    jax.block_until_ready(list(running))  # a deque is no tree to JAX


def _step(
    work: Workload,
    loss: Callable[..., Any],
    average: Callable[[Any], Any],
    own: Callable[[Any], Any],
) -> Callable[..., Any]:
    call = Loss.read(loss, work.model_state is not None)

    def objective(params: Any, model_state: Any, batch: Any, key: Any) -> Any:
        value, _, model_state = call(params, model_state, batch, key)
        if isinstance(value, Mean):
            return value.total / value.count, model_state
        return jnp.mean(value), model_state

    def step(state: Any, batch: Any) -> Any:
        params, opt_state, model_state, key = state
        now = None
        if key is not None:
            key, now = jax.random.split(key)
            now = own(now)
        (value, model_state), grads = jax.value_and_grad(objective, has_aux=True)(
            params, model_state, batch, now
        )
        value, model_state, grads = average((value, model_state, grads))
        updates, opt_state = work.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, model_state, key), {"loss": value}

    return step


def _looped(name: str, step: Any, work: Workload, mesh: Mesh) -> Contender:
    everywhere = NamedSharding(mesh, PartitionSpec())
    batch = jax.device_put(work.batch, NamedSharding(mesh, PartitionSpec("data")))
    # A copy: the parameters are those of all contenders.
    state = jax.jit(lambda tree: tree, out_shardings=everywhere)(start(work))
    held = [state]

    def call() -> Any:
        held[0], metrics = step(held[0], batch)
        return metrics

    return Contender(
        name,
        lambda steps: bounded(call, steps),
        lambda: step.lower(held[0], batch).compile(),
    )

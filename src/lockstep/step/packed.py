"""A train state with its small leaves in vectors, as the device view carries it on.

The parameters, every tree of the optimizer that is like them, and the moving average
are packed alike; the optimizer then runs on the packed trees as if they were the
parameters. That is allowed where its update, read from its jaxpr, is the same formula
for every number of the joined leaves.
"""

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from lockstep.jaxprs.elementwise import Form, Leaf, NotElementwise, check_same
from lockstep.packing import Packing, pack
from lockstep.step.train_state import TrainState, check_belongs
from lockstep.tree import is_array

# Below this many leaves in vectors nothing would be gained.
WORTHWHILE = 8


class PackingChoice:
    """Whether the states of one optimizer are packed, and how; decided once a form."""

    def __init__(self, optimizer: Any, *, sliced: bool = False) -> None:
        """Nothing is traced yet.

        Args:
            optimizer: an optax `GradientTransformation`.
            sliced: whether each device will see a slice of the packed trees only.
        """
        self._optimizer, self._sliced = optimizer, sliced
        self._known: dict[Any, Packing | str] = {}

    def __call__(self, state: TrainState) -> Packing | str:
        """The packing of an ordinary state, or why it has none.

        Args:
            state: of arrays, of tracers or of descriptions.

        Raises:
            ValueError: its trees are not all of the same parameters.
        """
        leaves, structure = jax.tree.flatten((state.params, state.opt_state))
        if not all(map(is_array, leaves)):
            return "has values in its state that are no arrays"
        key = structure, *((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        if key not in self._known:
            check_belongs(state, self._optimizer)
            try:
                self._known[key] = self._find(state)
            except NotElementwise as why:
                self._known[key] = str(why)
        return self._known[key]

    def _find(self, state: TrainState) -> Packing:
        import optax

        if isinstance(state.params, optax.LookaheadParams):
            raise NotElementwise("tells fast parameters from slow ones")
        packing = Packing.of(state.params)
        if self._sliced:
            check_optimizer(self._optimizer, state, packing.cut_for(2), sums=False)
            return packing
        if packing.joined < WORTHWHILE:
            raise NotElementwise(f"has only {packing.joined} small leaves to join")
        check_optimizer(self._optimizer, state, packing)
        return packing


def check_optimizer(
    optimizer: Any, state: TrainState, packing: Packing, *, sums: bool = True
) -> None:
    """Check that an optimizer does to packed trees what it does to the leaves.

    Args:
        optimizer: an optax `GradientTransformation`.
        state: an ordinary state, of arrays, tracers or descriptions.
        packing: of its parameters.
        sums: whether it may look at sums over leaves, as a global norm is.

    Raises:
        NotElementwise: it does not, or it cannot be seen.
    """
    params, opt_state = jax.tree.map(_describe, (state.params, state.opt_state))
    packed = jax.eval_shape(lambda t: pack(t, packing), (params, opt_state))
    slot_of = {i: slot for slot, leaves in enumerate(packing.slots) for i in leaves}
    whole = _form(optimizer, params, opt_state, slot_of)
    slots = {i: i for i in range(len(packing.slots))}
    parts = _form(optimizer, packed[0], packed[1], slots)
    check_same(whole, parts, sums=sums)


def pack_state(
    state: TrainState, packing: Packing, slices: int | None = None
) -> TrainState:
    """A state with every tree that is like the parameters packed.

    Args:
        state: an ordinary state.
        packing: of its parameters.
        slices: into how many the optimizer's trees are to be cut.
    """
    params, ema = pack((state.params, state.ema), packing)
    opt_state = pack(state.opt_state, packing.cut_for(slices))
    return dataclasses.replace(state, params=params, opt_state=opt_state, ema=ema)


def pack_slices(
    state: TrainState, packing: Packing | str, devices: int | None
) -> TrainState:
    """A packed state whose optimizer's trees can be cut into a slice for each device.

    Raises:
        ValueError: `packing` says why that would change what the optimizer does.
        RuntimeError: nobody knows the devices.
    """
    if isinstance(packing, str):
        raise ValueError(
            "optimizer_sharding gives each device a slice of all leaves to update, and "
            f"this optimizer {packing}: the result would depend on where the slices "
            "end. Clip with make_train_step(clip_norm=...), which sees all slices; "
            "use the global view (no axis_name), which shards any optimizer; or leave "
            "optimizer_sharding out"
        )
    if devices is None:
        raise RuntimeError(
            "a step with optimizer_sharding needs its state cut into slices: run it "
            "with lockstep.per_device(step), not inside jax.shard_map"
        )
    return pack_state(state, packing, devices)


def update(
    optimizer: Any, grads: Any, opt_state: Any, params: Any, loss: Any
) -> tuple[Any, Any]:
    """The updates and the optimizer's new state.

    Some transformations, as `reduce_on_plateau`, look at the loss.
    """
    import optax

    if isinstance(params, optax.LookaheadParams):
        grads = grads.fast  # the slow ones follow, and have no gradient
    optimizer = optax.with_extra_args_support(optimizer)
    extra = {"value": loss} if _takes(optimizer.update, "value") else {}
    return optimizer.update(grads, opt_state, params, **extra)


def _takes(fn: Any, name: str) -> bool:
    """Whether a function has a parameter of that name, or takes any."""
    parameters = inspect.signature(fn).parameters
    anything = inspect.Parameter.VAR_KEYWORD
    return name in parameters or any(p.kind is anything for p in parameters.values())


def _form(optimizer: Any, params: Any, opt_state: Any, slots: dict[int, int]) -> Form:
    """One form of an optimizer's update, and which leaves are like parameters."""

    def fn(grads: Any, opt_state: Any, params: Any, loss: Any) -> Any:
        updates, new = update(optimizer, grads, opt_state, params, loss)
        if jax.tree.structure((updates, new)) != jax.tree.structure(
            (params, opt_state)
        ):
            raise NotElementwise("changes the structure of its state")
        return updates, new

    shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
    like = Packing.of(params).fits

    def leaves(role: str) -> list[Leaf | None]:
        return [Leaf(role, i, slots[i]) for i in range(len(shapes))]

    roles: list[Leaf | None] = []
    for i, node in enumerate(jax.tree.leaves(opt_state, is_leaf=like)):
        if like(node) and [x.shape for x in jax.tree.leaves(node)] != shapes:
            raise NotElementwise("keeps values of other shapes than the parameters'")
        roles += leaves(f"state {i}") if like(node) else [None]
    return Form(
        fn,
        (params, opt_state, params, jax.ShapeDtypeStruct((), jnp.float32)),
        inputs=[*leaves("grads"), *roles, *leaves("params"), None],
        outputs=[*leaves("updates"), *roles],
    )


def _describe(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

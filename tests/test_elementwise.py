"""Whether an update may run on joined leaves, read from its jaxpr."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from lockstep.jaxprs.elementwise import Form, Leaf, NotElementwise, check_same
from lockstep.packing import Packing
from lockstep.step.packed import check_optimizer
from lockstep.step.train_state import TrainState


def params():
    """Eight small leaves of ranks 0, 1 and 2, and a large one."""
    small = {f"l{i}": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for i in range(3)}
    return {**small, "scale": jnp.ones(()), "x": jnp.ones(2), "y": jnp.ones((200, 200))}


PACKING = Packing.of(params())
WARM_UP = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
SAME = {
    "sgd": optax.sgd(0.1),
    "nesterov": optax.sgd(WARM_UP, momentum=0.9, nesterov=True),
    "adam": optax.adam(1e-3),
    "adamw": optax.adamw(WARM_UP),
    "moments in 16 bits": optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "amsgrad": optax.amsgrad(1e-3),
    "lion": optax.lion(1e-4),
    "rmsprop": optax.rmsprop(1e-3, momentum=0.9),
    "adabelief": optax.adabelief(1e-3),
    "rprop": optax.rprop(1e-3),
    "a clipped norm": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
    "clipped numbers": optax.chain(optax.clip(1.0), optax.sgd(0.1)),
    "a norm of updates": optax.chain(
        optax.adam(1e-3), optax.normalize_by_update_norm()
    ),
    "injected": optax.inject_hyperparams(optax.adamw)(1e-3),
    "plateau": optax.chain(optax.adam(1e-3), optax.contrib.reduce_on_plateau()),
    "large leaves alone": optax.adamw(
        1e-3, mask=lambda tree: jax.tree.map(lambda x: x.size > 1000, tree)
    ),
}


def masked(test):
    return jax.tree_util.tree_map_with_path(
        lambda path, x: test(str(path), x), params()
    )


ONE_BY_ONE = optax.stateless_with_tree_map(lambda g, p: g * (1 + jnp.ndim(p)))
DIFFERENT = {
    "mask by path": (
        optax.adamw(1e-3, mask=masked(lambda path, x: "'b'" not in path)),
        "some leaves in another way",
    ),
    "mask by rank": (
        optax.adamw(1e-3, mask=lambda t: jax.tree.map(lambda x: x.ndim > 1, t)),
        "some leaves in another way",
    ),
    "mask of everything": (
        optax.adamw(1e-3, mask=masked(lambda path, x: True)),
        "fails on joined leaves",
    ),
    "frozen": (
        optax.chain(
            optax.sgd(WARM_UP),
            optax.masked(optax.set_to_zero(), masked(lambda path, x: "l0" in path)),
        ),
        "some leaves in another way",
    ),
    "lars": (optax.lars(0.1), "norm of some leaves"),
    "lamb": (optax.lamb(WARM_UP), "norm of some leaves"),
    "fromage": (optax.fromage(0.1), "norm of some leaves"),
    "block rms": (optax.clip_by_block_rms(1.0), "norm of some leaves"),
    "adafactor": (optax.adafactor(1e-3), "other shapes"),
    "novograd": (optax.novograd(1e-3), "other shapes"),
    "centralize": (optax.centralize(), "reduce_sum in centralize"),
    "two optimizers": (
        optax.multi_transform(
            {"a": optax.adam(1e-3), "b": optax.sgd(0.1)},
            masked(lambda path, x: "a" if x.ndim > 1 else "b"),
        ),
        "not elementwise",
    ),
    "noise": (optax.add_noise(0.1, 0.5, key=jax.random.key(0)), "in add_noise"),
    "steps merged by optax": (optax.MultiSteps(optax.adam(1e-3), 2), "cond"),
    "by rank": (ONE_BY_ONE, "some leaves in another way"),
    "muon": (optax.contrib.muon(1e-3), "scale_by_muon"),
}


def check(optimizer):
    tree = params()
    check_optimizer(optimizer, TrainState(0, tree, optimizer.init(tree)), PACKING)


class TestOptimizers:
    @pytest.mark.parametrize("name", SAME)
    def test_that_treat_every_number_alike(self, name):
        check(SAME[name])

    @pytest.mark.parametrize("name", DIFFERENT)
    def test_that_tell_leaves_apart(self, name):
        optimizer, reason = DIFFERENT[name]
        with pytest.raises(NotElementwise, match=reason):
            check(optimizer)


A, B, AB = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2, 3, 5))
TWO = [Leaf("grads", 0, slot=0), Leaf("grads", 1, slot=0)]
ONE = [Leaf("grads", 0, slot=0)]


def compare(two, one=None, **options):
    """Compare an update of two leaves with one of both together."""
    parts = Form(one or two, ([AB],), ONE, ONE)
    check_same(Form(two, ([A, B],), TWO, TWO), parts, **options)


class TestFormulas:
    def test_a_norm_over_all_leaves_is_one_number(self):
        def scaled(leaves):
            norm = jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))
            return [x / norm for x in leaves]

        compare(scaled)
        with pytest.raises(NotElementwise, match="takes a sum or norm"):
            compare(scaled, sums=False)

    def test_a_maximum_over_all_leaves(self):
        compare(lambda xs: [x / _largest(xs) for x in xs])

    def test_a_norm_that_counts_a_leaf_twice(self):
        def scaled(leaves):
            norm = sum(jnp.sum(x) for x in [*leaves, leaves[0]])
            return [x / norm for x in leaves]

        with pytest.raises(NotElementwise, match="some leaves by themselves"):
            compare(scaled)

    def test_a_sum_in_which_leaves_count_differently(self):
        def scaled(leaves):
            norm = sum(jnp.sum(x * (i + 1)) for i, x in enumerate(leaves))
            return [x / norm for x in leaves]

        with pytest.raises(NotElementwise, match="some leaves by themselves"):
            compare(scaled)

    def test_a_factor_by_size_shows_in_the_joined_form_alone(self):
        with pytest.raises(NotElementwise, match="by their shape"):
            compare(lambda xs: [x * (2.0 if x.size < 4 else 3.0) for x in xs])

    def test_an_array_of_its_own(self):
        with pytest.raises(NotElementwise, match="not elementwise"):
            compare(lambda xs: [x * jnp.arange(x.size) for x in xs])

    def test_positions_inside_a_leaf(self):
        for move in (jnp.flip, jnp.cumsum, jnp.sort, lambda x: jnp.roll(x, 1)):
            with pytest.raises(NotElementwise, match="not elementwise"):
                compare(lambda xs, move=move: [move(x) for x in xs])

    def test_a_leaf_in_the_place_of_another(self):
        two = [Leaf("grads", 0, slot=0), Leaf("grads", 1, slot=1)]
        form = Form(lambda xs: xs[::-1], ([A, A],), two, two)
        with pytest.raises(NotElementwise, match="from one leaf to another"):
            check_same(form, form)

    def test_a_constant_update_is_the_same_everywhere(self):
        compare(lambda xs: [jnp.zeros_like(x) for x in xs])
        with pytest.raises(NotElementwise, match="some leaves in another way"):
            compare(lambda xs: [jnp.full_like(x, i) for i, x in enumerate(xs)])

    def test_inside_other_functions(self):
        @jax.jit
        def inner(x):
            return jax.checkpoint(jax.nn.relu)(x) ** 3

        compare(lambda xs: [inner(x) for x in xs])
        with pytest.raises(NotElementwise, match="not elementwise"):
            compare(lambda xs: [jax.jit(jnp.flip)(x) for x in xs])

    def test_a_barrier_is_no_operation(self):
        compare(lambda xs: [lax.optimization_barrier((x, 2.0))[0] for x in xs])
        compare(lax.optimization_barrier)

    def test_other_number_types(self):
        with pytest.raises(NotElementwise, match="by their shape"):
            compare(
                lambda xs: [x * 2 for x in xs],
                lambda xs: [(x.astype(jnp.bfloat16) * 2).astype(x.dtype) for x in xs],
            )


def _largest(leaves):
    first, *rest = (jnp.max(jnp.abs(x)) for x in leaves)
    for x in rest:
        first = jnp.maximum(first, x)
    return first

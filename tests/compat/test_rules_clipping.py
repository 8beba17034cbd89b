"""Gradients that are clipped before they are averaged, and those that may be."""

import pytest
from marked_lines import assert_marked


class TestClipBeforePmean:
    def found(self, text):
        assert_marked("clip-before-pmean", text)

    def test_a_helper(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                grads = jax.grad(loss)(w, x)
                grads = clip_by_global_norm(grads, 1.0)  # <-
                grads = lax.pmean(grads, "i")
                return w - grads
        """)

    def test_nested_in_the_call(self):
        self.found("""
            def step(w, grads):
                return w - lax.pmean(clip_grads(grads), "i")  # <-
        """)

    def test_gradients_by_another_name(self):
        self.found("""
            def step(w, x):
                g = jax.grad(loss)(w, x)
                g = jax.tree.map(lambda t: jnp.clip(t, -1, 1), g)  # <-
                return w - lax.pmean(g, "i")

            def with_loss(w, x):
                value, g = jax.value_and_grad(loss)(w, x)
                g = optax.clip_by_global_norm(1.0).update(g, None)[0]  # <-
                return w - lax.pmean(g, "i")

            def of_the_loss(w, x):
                value, g = jax.value_and_grad(loss)(w, x)
                (v, aux), g = jax.value_and_grad(loss, has_aux=True)(w, x)
                value, aux = jnp.clip(value, 0, 1), clip(aux)
                return lax.pmean((value, clip(v), aux, g), "i")
        """)

    def test_element_by_element(self):
        self.found("""
            def step(w, grads):
                grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)  # <-
                return lax.pmean(grads, axis_name="i")
        """)

    def test_an_optax_transformation(self):
        self.found("""
            clipper = optax.clip_by_global_norm(1.0)

            def step(w, grads, state):
                grads, state = clipper.update(grads, state)  # <-
                return lax.pmean(grads, axis_name="i")
        """)

    @pytest.mark.parametrize(
        "made",
        [
            "optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))",
            "optax.chain(optax.trace(0.9), clip)",
            "optax.MultiSteps(optax.chain(clip, sgd), every_k_schedule=2)",
            "optax.apply_if_finite(inner=optax.chain(clip), max_consecutive_errors=5)",
            "optax.adaptive_grad_clip(0.1)",
        ],
    )
    def test_a_chain_in_a_variable(self, made):
        self.found(f"""
            clip, sgd = optax.clip(1.0), optax.sgd(0.1)
            optimizer = {made}

            def step(params, grads, state):
                updates, state = optimizer.update(grads, state, params)  # <-
                updates = lax.pmean(updates, axis_name="i")
                return optax.apply_updates(params, updates), state
        """)

    def test_an_optimizer_that_the_class_holds(self):
        self.found("""
            class Learner:
                def __init__(self):
                    self._optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))

                def step(self, grads, state):
                    updates, state = self._optimizer.update(grads, state)  # <-
                    return lax.pmean(updates, axis_name="i"), state
        """)

    def test_through_tuples(self):
        self.found("""
            def step(w, x):
                loss, grads = jax.value_and_grad(loss_of)(w, x)
                grads, norm = clip_by_global_norm(grads, 1.0)  # <-
                loss, grads = lax.pmean((loss, grads), "i")
                return w - grads

            def other(w, x):
                loss, grads = jax.value_and_grad(loss_of)(w, x)
                both = {"loss": loss, "grads": clip(grads)}  # <-
                return lax.pmean(both, "i")
        """)

    def test_chains_and_tuples_of_averages_are_right(self):
        self.found("""
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

            def step(w, x, state):
                loss, grads = jax.value_and_grad(loss_of)(w, x)
                loss, grads = lax.pmean((loss, grads), "i")
                updates, state = optimizer.update(grads, state)
                return optax.apply_updates(w, updates), lax.pmean(norm(updates), "i")

            def by_leaves(w, x, state):
                grads = jax.grad(loss_of)(w, x)
                grads = jax.tree.map(lambda g: lax.pmean(g, "i"), grads)
                updates, state = optimizer.update(grads, state)
                return lax.pmean(updates, "i")

            def unclipped(w, grads, state):
                updates, state = optax.adam(1e-3).update(grads, state)
                return lax.pmean(updates, "i")
        """)

    def test_after_the_average_is_right(self):
        self.found("""
            optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))

            @partial(jax.pmap, axis_name="i")
            def step(w, x, state):
                grads = lax.pmean(jax.grad(loss)(w, x), "i")
                grads = clip_by_global_norm(grads, 1.0)
                updates, state = optimizer.update(grads, state)
                return optax.apply_updates(w, updates), lax.pmean(norm(grads), "i")
        """)

    def test_rows_clipped_one_by_one_are_right(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def private_step(w, x):
                row_grads = jax.vmap(jax.grad(loss), (None, 0))(w, x)
                grads = jax.tree.map(jnp.sum, clip_rows(row_grads, 1.0))
                return w - lax.pmean(grads, "i")
        """)

    def test_so_is_what_is_averaged_and_clipped_again(self):
        self.found("""
            def step(w, x):
                grads = lax.pmean(jax.grad(loss)(w, x), "i")
                clipped = clip(grads)
                return lax.pmean(clipped, "i")
        """)

    def test_ratios_and_losses_may_be_clipped(self):
        self.found("""
            def step(ratio, advantage):
                surrogate = jnp.clip(ratio, 0.8, 1.2) * advantage
                ratio = jnp.clip(ratio, 0.8, 1.2)
                return lax.pmean(surrogate.mean(), "i"), lax.pmean(ratio, "i")
        """)

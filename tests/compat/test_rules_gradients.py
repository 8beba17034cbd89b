"""Gradients and means over devices: what is wrong is found, what is right is not."""

import textwrap

import pytest
from marked_lines import assert_marked

STEP = """
def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)

"""


class TestNoReduction:
    def found(self, text):
        assert_marked("no-reduction", STEP + textwrap.dedent(text))

    def test_a_step_that_never_averages_drifts(self):
        self.found("""
            def train_step(state, batch):
                loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
                return state.apply_gradients(grads=grads), loss

            p_step = jax.pmap(train_step, axis_name="batch")  # <-
        """)

    @pytest.mark.parametrize(
        "line",
        [
            'loss = lax.pmean(loss, "batch")',
            'metrics = lax.pmean({"loss": loss}, axis_name="batch")',
            'train_metrics = lax.psum((loss, batch_count), "batch")',
        ],
    )
    def test_one_that_averages_its_loss_alone_drifts(self, line):
        text = """
            def train_step(state, batch, batch_count):
                loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
                {line}
                return state.apply_gradients(grads=grads), loss

            p_step = jax.pmap(train_step, axis_name="batch")"""
        self.found(text.format(line=line) + "  # <-")
        both = 'loss, grads = lax.pmean((loss, grads), axis_name="batch")'
        self.found(text.format(line=f"{line}; {both}"))

    def test_as_a_decorator_and_through_helpers(self):
        self.found("""
            def update(params, batch):
                grads = jax.grad(loss_fn)(params, batch)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

            @partial(jax.pmap, axis_name="i")  # <-
            def train_step(params, batch):
                return update(params, batch)
        """)

    def test_in_a_class(self):
        self.found("""
            class Trainer:
                def __init__(self):
                    self.step = jax.pmap(self._step, "i")  # <-

                def _step(self, params, batch):
                    return jax.grad(loss_fn)(params, batch)
        """)

    @pytest.mark.parametrize(
        "line",
        [
            'grads = lax.pmean(grads, "i")',
            'grads = jax.tree.map(lambda g: lax.psum(g, "i") / 4, grads)',
            'loss_and_grads = lax.pmean(loss_and_grads, "i")',
            'grads = jax.tree.map(partial(lax.pmean, axis_name="i"), grads)',
            'grads = lax.all_gather(grads, "i")',
            "grads = average_over_hosts(grads)",
            'updates = optimizer.update(grads, axis_name="i")',
            "grads = self_written.pmean_if_pmap(grads)",
        ],
    )
    def test_one_that_reduces_or_may_do_so_out_of_sight(self, line):
        self.found(f"""
            from helpers import average_over_hosts, self_written, optimizer

            @partial(jax.pmap, axis_name="i")
            def train_step(params, batch):
                grads = jax.grad(loss_fn)(params, batch)
                {line}
                return grads
        """)

    def test_reduction_in_a_function_that_is_handed_on(self):
        self.found("""
            def reduced(grads):
                return lax.pmean(grads, "i")

            def body(params, batch):
                return reduced(jax.grad(loss_fn)(params, batch)), None

            p = jax.pmap(lambda p, b: lax.scan(body, p, b), axis_name="i")
        """)

    def test_reduction_in_a_part_of_the_optimizer(self):
        text = """
            def averaging(axis):
                def update(updates, state, params=None):
                    return {reduced}, state
                return optax.GradientTransformation(lambda params: (), update)

            optimizer = optax.chain(averaging("i"), optax.adam(1e-3))

            def step(params, state, batch):
                grads = jax.grad(loss_fn)(params, batch)
                updates, state = optimizer.update(grads, state, params)
                return optax.apply_updates(params, updates), state

            p_step = jax.pmap(step, axis_name="batch")"""
        self.found(text.format(reduced="jax.lax.pmean(updates, axis)"))
        self.found(text.format(reduced="updates") + "  # <-")

    def test_what_takes_no_gradient_needs_none(self):
        self.found("""
            p_init = jax.pmap(lambda key: model.init(key, jnp.ones(3)))
            p_eval = jax.pmap(lambda params, batch: loss_fn(params, batch))
            p_square = jax.pmap(lambda x: x ** 2)
        """)

    def test_what_is_not_mapped_needs_none(self):
        self.found("""
            @jax.jit
            def train_step(params, batch):
                return jax.grad(loss_fn)(params, batch)
        """)

    def test_a_function_from_elsewhere_is_not_judged(self):
        self.found("""
            from steps import train_step
            p_step = jax.pmap(train_step, axis_name="batch")
        """)

    @pytest.mark.parametrize(
        "line",
        [
            "g = jax.grad(loss_of, argnums=1)(params, x)",
            'g = jax.grad(lambda image: loss_of(params, image))(batch["image"])',
            "g = jax.vmap(jax.grad(lambda row: loss_of(params, row)))(x)",
            "take = jax.grad(loss_of, 1); g = take(params, x + 0.1)",
            "g = jax.value_and_grad(lambda d: loss_of(params, x + d))(delta)[1]",
            "g = jax.grad(energy, argnums=(1, 2))(params, a, b)",
            "g = jax.grad(by_input)(some)",
        ],
    )
    def test_gradients_by_inputs_are_each_device_s_own(self, line):
        self.found(f"""
            def by_input(x): ...

            @partial(jax.pmap, axis_name="i")
            def attack(params, x, batch, delta, a, b, some):
                {line}
                return x + 0.1 * jnp.sign(g)
        """)

    def test_a_step_that_also_differentiates_by_inputs_is_still_one(self):
        text = """
            def penalized(params, x):
                slope = jax.grad(critic, argnums=1)(params, x)
                return jnp.mean((norm(slope) - 1) ** 2)

            @partial(jax.pmap, axis_name="i"){mark}
            def step(params, x):
                grads = jax.grad(penalized)(params, x)
                {line}
                return params - 0.1 * grads
        """
        self.found(text.format(mark="", line='grads = lax.pmean(grads, "i")'))
        self.found(text.format(mark="  # <-", line="pass"))


class TestPmeanInLoss:
    def found(self, text):
        assert_marked("pmean-in-loss", text)

    def test_alone_it_leaves_gradients_local(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                def loss(w):
                    return lax.pmean(jnp.mean(w * x), "i")  # <-
                return w - jax.grad(loss)(w)
        """)

    def test_through_a_name_and_with_other_results(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                def loss(w):
                    local = jnp.mean(w * x)
                    total = jax.lax.pmean(local, "i")  # <-
                    return total, local
                (value, _), grads = jax.value_and_grad(loss, has_aux=True)(w)
                return w - grads
        """)

    def test_with_an_average_after_it_is_right(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                def loss(w):
                    return lax.pmean(jnp.mean(w * x), "i")
                g = jax.grad(loss)(w)
                g = lax.pmean(g, "i")
                return w - g
        """)

    def test_metrics_may_be_averaged_inside(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                def loss(w):
                    value = jnp.mean(w * x)
                    return value, lax.pmean(value, "i")
                (value, metric), d = jax.value_and_grad(loss, has_aux=True)(w)
                return w - d, metric
        """)

    def test_the_count_may_be_summed_inside(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x, mask):
                def loss(w):
                    return (w * x * mask).sum() / lax.psum(mask.sum(), "i")
                return lax.psum(jax.grad(loss)(w), "i")
        """)

    def test_embeddings_may_be_gathered_inside(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                def loss(w):
                    others = lax.all_gather(x @ w, "i")
                    return jnp.mean(others @ (x @ w).T)
                return lax.pmean(jax.grad(loss)(w), "i")
        """)

    def test_an_evaluation_without_gradient_may(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def evaluate(w, x):
                return lax.pmean(jnp.mean(w * x), "i")
        """)


class TestMeanOfMeans:
    def found(self, text):
        assert_marked("mean-of-means", text)

    def test_a_masked_mean_before_pmean(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, batch):
                def loss(w):
                    values = (batch["x"] * w) ** 2
                    return (values * batch["mask"]).sum() / batch["mask"].sum()  # <-
                return lax.pmean(jax.grad(loss)(w), "i")
        """)

    def test_through_names_and_a_floor(self):
        self.found("""
            def loss(w, x, weights):
                total = jnp.sum(x * w * weights)
                count = jnp.maximum(jnp.sum(weights), 1)
                return total / count  # <-

            p = jax.pmap(lambda w, x, m: lax.pmean(jax.grad(loss)(w, x, m), "i"), "i")
        """)

    def test_of_sums_from_a_helper_beside_a_metric_that_is_summed(self):
        self.found("""
            def weighted(values, weights=None):
                total, count = values.sum(), values.size
                if weights is not None:
                    total, count = (values * weights).sum(), weights.sum()
                return total, count

            def metrics_of(values, weights):
                total, count = weighted(values, weights)
                return lax.psum({"loss": total, "count": count}, "i")

            def train_step(w, x, weights):
                def loss(w):
                    total, count = weighted(w * x, weights)
                    mean = total / count  # <-
                    return mean
                grads = lax.pmean(jax.grad(loss)(w), "i")
                return w - grads, metrics_of(w * x, weights)

            p_train_step = jax.pmap(train_step, axis_name="i")
        """)

    def test_spelled_as_mean_or_average(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def evaluate(x, mask):
                a = jnp.mean(x, where=mask)  # <-
                b = jnp.average(x, weights=mask)  # <-
                return lax.pmean((a, b), "i")
        """)

    def test_sums_reduced_first_are_right(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x, mask):
                total = lax.psum((w * x * mask).sum(), "i")
                count = lax.psum(mask.sum(), "i")
                return lax.pmean(w, "i"), total / count
        """)

    def test_so_are_both_in_one_psum(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def evaluate(x, mask):
                total, count = lax.psum(((x * mask).sum(), mask.sum()), "i")
                return total / count
        """)

    def test_and_plain_means_of_equal_shards(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                loss = jnp.mean(w * x)
                accuracy = jnp.sum(x > 0) / x.size
                return lax.pmean(loss, "i"), lax.pmean(accuracy, "i")
        """)

    def test_and_masks_inside_one_row(self):
        self.found("""
            def pooled(x, mask):
                return (x * mask).sum(axis=1) / mask.sum(axis=1)

            def row_loss(tokens, mask):
                return (tokens * mask).sum() / mask.sum()

            @partial(jax.pmap, axis_name="i")
            def step(x, mask):
                losses = jax.vmap(row_loss)(x, mask)
                return lax.pmean(losses.mean() + pooled(x, mask).mean(), "i")
        """)

    def test_and_normalized_weights(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                attention = jnp.exp(x) / jnp.exp(x).sum()
                return lax.pmean((attention * w / w.sum()).mean(), "i")
        """)

    def test_and_masked_means_on_one_device(self):
        self.found("""
            @jax.jit
            def evaluate(x, mask):
                return (x * mask).sum() / mask.sum()
        """)

"""Random keys: shared and wrongly split keys are found, right ones are not."""

import pytest
from marked_lines import assert_marked


class TestKeysSplitInBatches:
    def found(self, text):
        assert_marked("keys-split-in-batches", text)

    def test_a_batch_refreshed_by_split(self):
        self.found("""
            def epoch(rng, loader):
                rngs = jax.random.split(rng, jax.local_device_count())
                for batch in loader:
                    step(batch, rngs)
                    rngs = jax.random.split(rngs, 2)[:, 0]  # <-
        """)

    def test_a_batch_from_flax(self):
        self.found("""
            from flax.training.common_utils import shard_prng_key

            keys = shard_prng_key(jax.random.PRNGKey(0))
            new = jax.random.split(keys, 2)  # <-
        """)

    def test_a_batch_that_was_split_so_before(self):
        self.found("""
            def refresh(keys, n):
                keys = jax.random.split(keys, n)[:, 0]
                keys = jax.random.split(keys, n)[:, 0]  # <-
        """)

    @pytest.mark.parametrize(
        "lines",
        [
            "key, sub = jax.random.split(key)\nkeys = jax.random.split(sub, 4)",
            "keys = jax.random.split(key, 3)\na = jax.random.split(keys[0])",
            "keys = jax.random.split(key, 4)\nkeys = jax.vmap(jax.random.split)(keys)",
            "keys = jax.random.split(key, 4)\nfor k in keys: jax.random.split(k)",
            "key = jax.random.split(key)[0]\nkey = jax.random.split(key)[1]",
            "keys = jax.random.split(key, 4)\nkeys = jax.random.PRNGKey(1)\n"
            "jax.random.split(keys)",
            "keys = jax.random.split(key, 4)\nkeys = refresh_keys(keys)",
            "jax.random.split(state.rng, 4)",
        ],
    )
    def test_right_ways_to_split(self, lines):
        self.found(f"key = jax.random.PRNGKey(0)\n{lines}")

    def test_the_key_inside_a_mapped_function_is_one_key(self):
        self.found("""
            keys = jax.random.split(jax.random.PRNGKey(0), 4)

            @jax.pmap
            def draw(keys):
                new, sub = jax.random.split(keys)
                return jax.random.split(sub, 3)
        """)


class TestOneKeyForAllDevices:
    def found(self, text):
        assert_marked("one-key-for-all-devices", text)

    def test_made_inside_the_step(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                key = jax.random.PRNGKey(0)  # <-
                grads = jax.grad(loss)(w, dropout(x, key))
                return w - lax.pmean(grads, "i")
        """)

    @pytest.mark.parametrize("seed", ["SEED", "int(time.time())", "self.seed", ""])
    def test_made_of_what_is_no_argument(self, seed):
        self.found(f"""
            import time
            SEED = 3

            @partial(jax.pmap, axis_name="i")
            def step(w, x):
                rngs = {{"dropout": jax.random.key({seed})}}  # <-
                return lax.pmean(jax.grad(loss)(w, x, rngs), "i")
        """)

    @pytest.mark.parametrize("seed", ["seed", "state.step", "n + 1"])
    def test_made_of_an_argument_it_may_be_right(self, seed):
        self.found(f"""
            @partial(jax.pmap, axis_name="i")
            def step(state, x, seed):
                n = seed * 2
                rngs = {{"dropout": jax.random.key({seed})}}
                return lax.pmean(jax.grad(loss)(state, x, rngs), "i")
        """)

    def test_broadcast_by_in_axes(self):
        self.found("""
            def train_step(w, x, rng):
                return lax.pmean(jax.grad(loss)(w, x, rng), "i")

            p_step = jax.pmap(train_step, "i", in_axes=(0, 0, None))  # <-
        """)

    def test_broadcast_under_a_name_of_its_own(self):
        self.found("""
            def loss(w, x, k):
                return (w * x * jax.random.bernoulli(k, 0.5, x.shape)).sum()

            def train_step(w, x, k, c):
                return lax.pmean(jax.grad(loss)(w, x, k), "i") * c

            a = jax.pmap(train_step, "i", in_axes=(0, 0, None, None))  # <-
            b = jax.pmap(train_step, "i", in_axes=(0, 0, 0, None))
        """)

    @pytest.mark.parametrize(
        "made",
        [
            "jax_utils.replicate(jax.random.PRNGKey(1))",
            "jax.device_put_replicated(rng, jax.local_devices())",
            "jnp.stack([rng] * 4)",
            "jnp.broadcast_to(rng, (4, 2))",
        ],
    )
    def test_copied(self, made):
        self.found(f"""
            @partial(jax.pmap, axis_name="i")
            def step(w, x, key):
                return lax.pmean(jax.grad(loss)(w, x, key), "i")

            def train(w, x, rng):
                keys = {made}  # <-
                w = step(w, x, keys)
        """)

    def test_folded_with_the_device_it_is_right(self):
        self.found("""
            @partial(jax.pmap, axis_name="i", in_axes=(0, 0, None))
            def step(w, x, key):
                key = jax.random.fold_in(key, lax.axis_index("i"))
                return lax.pmean(jax.grad(loss)(w, x, key), "i")

            step(w, x, jax_utils.replicate(jax.random.PRNGKey(1)))
        """)

    def test_split_for_the_devices_it_is_right(self):
        self.found("""
            @partial(jax.pmap, axis_name="i")
            def step(w, x, key):
                return lax.pmean(jax.grad(loss)(w, x, key), "i")

            keys = jax.random.split(jax.random.PRNGKey(0), jax.local_device_count())
            step(jax_utils.replicate(w), x, keys)
        """)

    def test_equal_parameters_want_one_key(self):
        self.found("""
            p_init = jax.pmap(lambda key: model.init(key, x), in_axes=None)
            p_init(jax_utils.replicate(jax.random.PRNGKey(0)))

            @jax.pmap
            def init(_):
                return model.init(jax.random.PRNGKey(0), x)
        """)

    def test_other_arguments_may_be_broadcast(self):
        self.found("""
            def train_step(w, x, learning_rate):
                return w - learning_rate * lax.pmean(jax.grad(loss)(w, x), "i")

            p_step = jax.pmap(train_step, "i", in_axes=(0, 0, None))
        """)

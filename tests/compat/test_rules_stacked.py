"""Stacked state, layers and texts around pmap; and the next rung of the ladder."""

import pytest
from marked_lines import IMPORTS, assert_marked, findings_in

STEP = """
@partial(jax.pmap, axis_name="i")
def train_step(state, batch):
    return state, lax.pmean(batch, "i")

"""


class TestRowOfStackedState:
    def found(self, text):
        assert_marked("row-of-stacked-state", STEP + text)

    @pytest.mark.parametrize(
        "line",
        [
            "jax.tree.map(lambda x: x[0], state)",
            "jax.device_get(jax.tree_util.tree_map(lambda x: x[0], state.params))",
            "jax.tree_map(lambda v: v[0], stacked)",
            "jax.tree.map(lambda x: x[0], self.opt_state)",
            'save(jax.tree.map(lambda x: x[0], new["params"]))',
        ],
    )
    def test_of_state(self, line):
        self.found(
            "stacked = jax_utils.replicate(weights)\n"
            "new, metrics = train_step(stacked, batch)\n"
            f"row = {line}  # <-\n"
        )

    def test_in_a_function_of_the_state(self):
        self.found(
            "def save(train_state):\n"
            "    return jax.tree.map(lambda x: x[0], train_state)  # <-\n"
        )

    @pytest.mark.parametrize(
        "line",
        [
            "jax_utils.unreplicate(state)",
            "jax.tree.map(lambda x: x[0], batch)",
            "jax.tree.map(lambda x: x[0], next(iterator))",
            "jax.tree.map(lambda x: x[:, 0], state)",
            "jax.tree.map(lambda x: x.addressable_shards[0].data, state)",
            "jax.tree.map(lambda x: x[0], on_host)",
        ],
    )
    def test_what_gathers_nothing(self, line):
        self.found(f"on_host = jax.device_get(state)\nrow = {line}\n")

    def test_rows_inside_a_mapped_function(self):
        text = (
            "@jax.pmap\ndef f(state):\n    return jax.tree.map(lambda x: x[0], state)\n"
        )
        self.found(text)

    def test_programs_without_pmap(self):
        text = "state = jax.tree.map(lambda x: x[0], ensemble_state)"
        assert_marked("row-of-stacked-state", text)


class TestMapOverListsOfShards:
    def found(self, text):
        assert_marked("map-over-lists-of-shards", text)

    def test_a_list_is_no_leaf(self):
        self.found("""
            def to_device(tree):
                shards = jax.tree.map(lambda x: [x[i] for i in range(4)], tree)
                return jax.tree.map(
                    lambda xs: jax.device_put_sharded(xs, jax.local_devices()),  # <-
                    shards,
                )
        """)

    @pytest.mark.parametrize(
        "call",
        [
            "jax.tree.map(lambda x: jax.device_put_sharded(list(x), devices), tree)",
            "jax.device_put_sharded([tree_of(i) for i in range(4)], devices)",
            "jax.tree.map(lambda x: jax.device_put_sharded(x, devices), tree, "
            "is_leaf=lambda x: isinstance(x, list))",
            "jax.tree.map(lambda a, b: jax.device_put_sharded([a, b], devices), t, u)",
            "jax.tree.map(lambda x: jax.device_put_replicated(x, devices), tree)",
        ],
    )
    def test_right_ways(self, call):
        self.found(f"placed = {call}")


class TestReplicatedNumber:
    def found(self, text):
        assert_marked("replicated-number", text)

    def test_a_number(self):
        self.found(
            "lr = jax_utils.replicate(0.1)  # <-\n"
            "n = 3\n"
            "s = jax_utils.replicate(n)  # <-"
        )

    def test_trees_and_arrays(self):
        self.found(
            "a = jax_utils.replicate(params)\nb = jax_utils.replicate(jnp.ones(3))"
        )

    def test_the_helper_that_keeps_it_weak(self):
        self.found("from lockstep.compat import replicate\nlr = replicate(0.1)")


class TestBatchNorm:
    def test_of_one_device(self):
        assert_marked(
            "batchnorm-of-one-device",
            STEP
            + "x = nn.BatchNorm(use_running_average=False)(x)  # <-\n"
            + "norm = partial(nn.BatchNorm, momentum=0.9)  # <-\n"
            + "y = nn.BatchNorm(axis_name=None)(x)  # <-\n",
        )

    def test_of_all_devices(self):
        text = STEP + 'x = nn.BatchNorm(axis_name="i")(x)'
        assert_marked("batchnorm-of-one-device", text)
        assert_marked("batchnorm-with-axis-name", text + "  # <-")

    def test_of_haiku(self):
        text = STEP + "import haiku as hk\n"
        line = "x = hk.BatchNorm(True, True, 0.9, cross_replica_axis='i')"
        assert_marked("batchnorm-with-axis-name", text + line + "  # <-")
        assert_marked(
            "batchnorm-of-one-device", text + "x = hk.BatchNorm(True, True, 0.9)  # <-"
        )

    def test_without_batch_statistics_or_without_devices(self):
        frozen = "nn.BatchNorm(use_running_average=True)(x)\nnn.LayerNorm()(x)\n"
        assert_marked("batchnorm-of-one-device", STEP + frozen)
        whole = (
            "import lockstep as ls\nstep = ls.parallelize(train)\nnn.BatchNorm()(x)\n"
        )
        assert_marked("batchnorm-of-one-device", whole)
        assert_marked("batchnorm-of-one-device", "x = nn.BatchNorm()(x)")


class TestUnpackedPop:
    def test_of_variables(self):
        assert_marked(
            "unpacked-pop",
            """
            variables = model.init(key, x)
            model_state, params = variables.pop("params")  # <-
            """,
        )

    def test_ways_that_work(self):
        assert_marked(
            "unpacked-pop",
            """
            params = variables.pop("params")
            params, rest = variables.pop("params"), variables
            model_state, params = flax.core.pop(variables, "params")
            a, b = stack.pop("other")
            a, b = queue.pop()
            """,
        )


class TestTexts:
    @pytest.mark.parametrize(
        "text",
        [
            "# In JAX 0.9+ a function under pmap sees arrays with the device axis\n"
            "# preserved, not squeezed.",
            '"""pmap uses pmap_no_rank_reduction: expect (1, batch)."""',
            "# pmap no longer removes the leading axis",
            "# Since 0.8 the mapped axis is no longer dropped by pmap.",
            "# under pmap the function sees arrays of the same rank as the input",
        ],
    )
    def test_a_claim_that_pmap_keeps_the_device_axis(self, text):
        (finding,) = findings_in(text, "rank-claim")
        assert finding.line == 1
        assert "[rows, ...] inside" in finding.text

    @pytest.mark.parametrize(
        "text",
        [
            "# pmap removes the leading axis: the function sees (batch, features).",
            "# Inputs of pmap need a leading device axis.",
            "# Unlike pmap, shard_map keeps the device axis.",
            "# The device axis is preserved by shard_map, not by pmap.",
            "# keeps the leading axis of the batch",
            '"""Trains with pmap. The order of the rows is preserved."""',
            "x = 'pmap no longer removes the leading axis'",
        ],
    )
    def test_texts_that_say_nothing_of_the_kind(self, text):
        assert not findings_in(text, "rank-claim")

    @pytest.mark.parametrize(
        "text",
        [
            '%pip install -q "jax[cuda12_pip]" flax',
            "!pip install --upgrade 'jax[cuda11_cudnn82]' -f https://example.com",
            '# pip install "jax[cuda12_pip]"',
            'subprocess.run(["pip", "install", "jax[cuda12_pip]"])',
            'extras = {"gpu": ["jax[cuda12-pip]>=0.4"]}',
        ],
    )
    def test_an_extra_that_is_gone(self, text):
        (finding,) = findings_in(text, "dead-extra")
        assert "write jax[cuda12]" in finding.text

    @pytest.mark.parametrize(
        "text",
        [
            '%pip install "jax[cuda12]"',
            '%pip install "jax[cuda13]" "jax[cuda12_local]" "jax[tpu]"',
            'x = jax["cuda12_pip"]',
            "# with jax[cuda12_pip] pip installs a JAX for CPUs",
        ],
    )
    def test_extras_that_are_there(self, text):
        assert not findings_in(text, "dead-extra")


class TestLadder:
    def next_steps(self, text):
        return [f.text for f in findings_in(IMPORTS + text, "next-step")]

    def test_from_jax_to_compat(self):
        (text,) = self.next_steps(STEP)
        assert "next for train_step: lockstep.compat.pmap" in text

    def test_from_compat_to_per_device(self):
        (text,) = self.next_steps(
            "from lockstep import compat\nf = compat.pmap(lambda x: x)"
        )
        assert "next for the lambda: lockstep.per_device" in text

    def test_from_per_device_to_parallelize(self):
        step = "def step(state, batch):\n    return state, lax.pmean(batch, 'data')\n"
        (text,) = self.next_steps(
            f"import lockstep as ls\n{step}p = ls.per_device(step)"
        )
        assert "lockstep.parallelize, without the pmean lines" in text

    def test_what_needs_the_device_view_stays_there(self):
        step = "def step(x):\n    return lax.pmean(x, 'd') + lax.axis_index('d')\n"
        assert not self.next_steps(
            f"import lockstep as ls\n{step}p = ls.per_device(step)"
        )

    def test_the_last_rung_has_none(self):
        assert not self.next_steps(
            "import lockstep as ls\np = ls.parallelize(lambda s, b: s)"
        )

"""The meaning of `compat.pmap`: options, results, errors, and how often it traces."""

import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from lockstep import notices
from lockstep.compat import pmap


def rows(*shape):
    """Distinct numbers `[8, *shape]`."""
    size = 8 * int(np.prod(shape, dtype=int))
    return np.arange(size, dtype=np.float32).reshape(8, *shape)


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fun):
        self.fun, self.traces = fun, 0

    def __call__(self, *args, **kwargs):
        self.traces += 1
        return self.fun(*args, **kwargs)


@pytest.fixture
def compiles(monkeypatch):
    """The names of what XLA was asked to compile (or to load from the cache)."""
    names = []
    logger = logging.getLogger("jax._src.interpreters.pxla")
    handler = logging.Handler()
    handler.emit = lambda record: names.append(record.getMessage())
    logger.addHandler(handler)
    with jax.log_compiles():
        yield names
    logger.removeHandler(handler)


class TestOptions:
    def test_a_collective_runs_over_all_devices(self):
        x = rows(2)
        out = pmap(lambda x: x - lax.psum(x, "i"), "i")(x)
        np.testing.assert_array_equal(out, x - x.sum(0))

    def test_in_axes_out_axes_and_none(self):
        x, y = np.moveaxis(rows(2, 3), 0, 1), np.float32(10)
        f = pmap(lambda x, y: (x + y, y), in_axes=(1, None), out_axes=(2, None))
        out, same = f(x, y)
        np.testing.assert_array_equal(out, np.moveaxis(x, 1, 2) + y)
        assert same.shape == () and float(same) == 10

    def test_in_axes_inside_an_argument(self):
        batch = {"x": rows(3), "lr": np.float32(2)}
        f = pmap(lambda b: b["x"] * b["lr"], in_axes=({"x": 0, "lr": None},))
        np.testing.assert_array_equal(f(batch), 2 * batch["x"])

    def test_a_list_of_in_axes(self):
        out = pmap(lambda x, y: x + y, in_axes=[0, None])(rows(), 1.0)
        np.testing.assert_array_equal(out, rows() + 1)

    def test_keyword_arguments_are_mapped_over_axis_0(self):
        f = pmap(lambda x, scale: x * scale, in_axes=(None,))
        np.testing.assert_array_equal(f(3.0, scale=rows()), 3 * rows())
        np.testing.assert_array_equal(pmap(lambda *, x: x + 1)(x=rows()), rows() + 1)

    def test_static_arguments_keep_their_places(self):
        def f(before, power, x, act):
            return act(before + x**power)

        mapped = pmap(f, static_broadcasted_argnums=(1, 3), in_axes=(0, None, 0, None))
        out = mapped(rows(), 2, rows(), jnp.negative)
        np.testing.assert_array_equal(out, -(rows() + rows() ** 2))

    def test_a_donated_argument_is_gone_and_others_are_not(self):
        f = pmap(lambda tree, y: (tree["a"] + y, tree["b"]), donate_argnums=0)
        start = pmap(lambda x: x)
        tree, y = {"a": start(rows()), "b": start(rows())}, start(rows())
        f(tree, y)
        assert tree["a"].is_deleted() and tree["b"].is_deleted()
        assert not y.is_deleted()

    def test_donating_counts_static_arguments(self):
        f = pmap(
            lambda n, x, y: x + y + n, static_broadcasted_argnums=0, donate_argnums=2
        )
        x, y = pmap(lambda x: (x, x))(rows())
        f(1, x, y)
        assert y.is_deleted() and not x.is_deleted()

    def test_devices_in_the_given_order(self):
        devices = jax.devices()[5:2:-1]
        out = pmap(lambda x: 2 * x, devices=devices)(np.arange(3))
        assert [s.device for s in out.addressable_shards] == devices
        np.testing.assert_array_equal(out, [0, 2, 4])

    def test_a_shorter_axis_takes_the_first_devices(self):
        out = pmap(lambda x: lax.psum(x, "i"), "i")(np.ones(3))
        assert [s.device for s in out.addressable_shards] == jax.devices()[:3]
        assert out.tolist() == [3, 3, 3]

    def test_axis_size_is_checked(self):
        f = pmap(lambda x: x, axis_size=4)
        assert f(np.arange(4)).tolist() == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="axis_size 4 .* axis_size 8"):
            f(rows())

    def test_backend_and_the_shapes_of_2022(self):
        f = pmap(lambda x: x + 1, backend="cpu", global_arg_shapes=None)
        np.testing.assert_array_equal(f(rows()), rows() + 1)

    def test_results_that_are_numbers_or_nothing(self):
        out = pmap(lambda x: {"n": 3, "none": None, "flag": True})(rows())
        assert out["n"].tolist() == [3] * 8 and out["n"].dtype == jnp.int32
        assert out["none"] is None and out["flag"].dtype == bool

    def test_it_describes_itself_as_the_function(self):
        def train_step(state):
            """Trains."""
            return state

        mapped = pmap(train_step)
        assert mapped.__wrapped__ is train_step
        assert (mapped.__name__, mapped.__doc__) == ("train_step", "Trains.")
        assert "pmap." in str(mapped)
        assert "@jit_train_step" in mapped.lower(rows()).as_text()

    @pytest.mark.parametrize(
        ("options", "error", "text"),
        [
            ({"devices": []}, ValueError, "non-empty"),
            ({"axis_name": 3}, TypeError, "must be a string"),
            ({"in_axes": -1}, TypeError, "in_axes must be an int"),
            ({"in_axes": (0, "i")}, TypeError, "in_axes must be an int"),
            ({"out_axes": 1.0}, TypeError, "out_axes must be an int"),
            ({"static_broadcasted_argnums": -1}, ValueError, "from the left"),
            (
                {"static_broadcasted_argnums": 1, "donate_argnums": (0, 1)},
                ValueError,
                r"cannot donate its static arguments \[1\]",
            ),
        ],
    )
    def test_wrong_options_are_refused_at_once(self, options, error, text):
        with pytest.raises(error, match=text):
            pmap(lambda x: x, **options)

    def test_what_is_no_function_is_refused(self):
        with pytest.raises(TypeError, match="needs a function, got 3"):
            pmap(3)


class TestAxesThatAreNotBound:
    @pytest.mark.parametrize(
        ("axis_name", "said"),
        [("i", "binds 'i': write that name"), (None, "binds no name: give it axis_")],
    )
    def test_those_that_are_bound_are_named(self, axis_name, said):
        def step(x):
            return lax.pmean(x, "batch")

        with pytest.raises(NameError, match="unbound axis name: batch") as caught:
            pmap(step, axis_name)(rows())
        assert f"pmap(step) {said}" in str(caught.value)

    def test_both_of_a_map_inside_a_map(self):
        inner = pmap(lambda x: lax.pmean(x, "batch"), "j")
        with pytest.raises(NameError, match="binds 'i', 'j'"):
            pmap(lambda x: inner(x), "i")(rows().reshape(4, 2))

    def test_other_missing_names_are_left_alone(self):
        with pytest.raises(NameError) as caught:
            pmap(lambda x: eval("undefined"), "i")(rows())
        assert str(caught.value) == "name 'undefined' is not defined"


class TestOneKeyForTwoDevices:
    """A raw key has two words, so that it can be split over two devices."""

    def test_an_error_about_the_key_says_what_happened(self):
        def step(rngs, x):
            return x + jax.random.normal(rngs["dropout"], x.shape)

        step = pmap(step, devices=jax.devices()[:2])
        with pytest.raises(TypeError, match="PRNG key") as caught:
            step({"dropout": jax.random.PRNGKey(0)}, np.ones((2, 3)))
        (note,) = (n for n in caught.value.__notes__ if "pmap(step)" in n)
        assert "took rngs['dropout'], uint32[2], for one row on each of 2" in note
        assert "shard_prng_key" in note

    def test_other_errors_and_other_numbers_are_left_alone(self):
        def step(counts, x):
            raise ValueError("mine")

        step = pmap(step, devices=jax.devices()[:2])
        with pytest.raises(ValueError, match="mine") as caught:
            step(np.ones(2, np.uint32), np.ones((2, 3)))
        assert "pmap(step)" not in str(caught.value.__notes__)  # JAX has one of its own
        counted = pmap(lambda n: n + 1, devices=jax.devices()[:2])
        assert counted(np.ones(2, np.uint32)).tolist() == [2, 2]


class TestResultsThatAreNotStacked:
    def test_those_that_differ_between_devices_are_told_of(self, caplog):
        notices.reset()

        def step(w, x):
            mean = lax.pmean(x * w, "i")
            return {"w": w + mean, "local": x.sum(), "count": 3}

        f = pmap(step, "i", in_axes=(None, 0), out_axes=None)
        for _ in range(2):
            out = f(1.0, rows())
        assert f.compiles.count == 1
        assert out["w"].tolist() == 4.5 and out["count"] == 3
        (message,) = caplog.messages
        assert "returns result['local'] with out_axes=None" in message

    def test_nothing_is_told_of_equal_ones_and_of_stacked_ones(self, caplog):
        notices.reset()
        big = jnp.arange(3.0)
        f = pmap(lambda x: (lax.psum(x, "i") + big[1], x), "i", out_axes=(None, 0))
        f(rows(2))
        assert not caplog.messages


class TestTransformations:
    def test_grad_vmap_and_jit_around_it(self):
        f = pmap(lambda w, x: lax.pmean(jnp.sin(w) * x, "i"), "i")
        w, x = rows(2) / 10, rows(2)

        def loss(w):
            return f(w, x).sum()

        want = jax.grad(lambda w: (jnp.sin(w) * x).sum())(w)
        np.testing.assert_allclose(jax.grad(loss)(w), want, rtol=1e-6)
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(w), want, rtol=1e-6)
        stacked = jax.vmap(f)(np.stack([w, 2 * w]), np.stack([x, x]))
        np.testing.assert_allclose(stacked[1], f(2 * w, x), rtol=1e-6)

    def test_jvp_of_arrays_that_are_in_place(self):
        """Tracers that stand for placed arrays are not taken for them."""
        f = pmap(lambda x: x**2)
        x = f(rows())
        value, slope = jax.jvp(f, (x,), (jnp.ones_like(x),))
        np.testing.assert_array_equal(value, x**2)
        np.testing.assert_array_equal(slope, 2 * x)

    def test_it_can_be_lowered_compiled_and_called(self):
        f = pmap(lambda tree, *, y: tree["x"] + y)
        shape = jax.ShapeDtypeStruct((8, 2), jnp.float32)
        compiled = f.lower({"x": shape}, y=shape).compile()
        np.testing.assert_array_equal(compiled({"x": rows(2)}, y=rows(2)), 2 * rows(2))

    def test_lowering_a_function_that_nobody_else_holds(self):
        assert pmap(lambda x: x).lower(rows()).as_text()

    def test_without_jit(self):
        with jax.disable_jit():
            out = pmap(lambda x: lax.psum(x, "i"), "i")(np.arange(8))
        assert out.tolist() == [28] * 8

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    def test_under_a_mesh_that_the_caller_has_set(self, axis_type):
        mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(axis_type,) * 2)
        with jax.set_mesh(mesh):
            out = pmap(lambda x: lax.pmean(x, "i"), "i")(rows())
        assert out.tolist() == [3.5] * 8


class TestOneTrace:
    def test_wherever_the_arguments_lie(self, compiles):
        f = Counted(lambda x: x + 1)
        mapped = pmap(f, "i")
        mesh = Mesh(jax.devices(), ("other",))
        places = [
            rows(),
            jnp.asarray(rows()),
            jax.device_put(rows(), jax.devices()[3]),
            jax.device_put(rows(), NamedSharding(mesh, P("other"))),
            jax.device_put(rows(), NamedSharding(mesh, P())),
            mapped(rows()) - 1,
        ]
        assert len([c for c in compiles if "jit(Counted)" in c]) == 1
        compiles.clear()
        for x in places:
            np.testing.assert_array_equal(mapped(x), rows() + 1)
        assert f.traces == 1
        assert not [c for c in compiles if "jit(Counted)" in c]

    def test_over_a_loop_with_python_numbers_in_the_state(self, compiles):
        from lockstep.compat import replicate

        f = Counted(lambda s: {"step": s["step"] + 1, "w": s["w"] * s["lr"], "lr": 0.5})
        mapped = pmap(f)
        state = replicate({"step": 0, "w": np.ones(3, np.float32), "lr": 0.5})
        for _ in range(3):
            state = mapped(state)
        assert f.traces == 1 and state["step"].tolist() == [3] * 8
        assert len([c for c in compiles if "jit(Counted)" in c]) == 1

    def test_mapping_inline_in_a_loop(self):
        f = Counted(lambda x: x + 1)
        x = rows()
        for _ in range(3):
            x = pmap(f, axis_name="i")(x)
        assert f.traces == 1
        pmap(f, axis_name="j")(x)
        assert f.traces == 2

    def test_the_same_trace_serves_other_transformations(self):
        f = Counted(lambda x: x * 2)
        mapped = pmap(f)
        x = mapped(rows())
        jax.jit(mapped)(x)
        assert f.traces == 1
        mapped.lower(x)
        assert f.traces == 1

    def test_equal_functions_are_not_the_same_function(self):
        class Scale:
            def __init__(self, by):
                self.by = by

            def __eq__(self, other):
                return isinstance(other, Scale)

            def __hash__(self):
                return 0

            def __call__(self, x):
                return self.by * x

        two, three = Scale(2), Scale(3)
        assert pmap(two)(rows())[1] == 2 and pmap(three)(rows())[1] == 3

    def test_a_callable_without_hash_or_weak_references(self):
        class Slotted:
            __slots__ = ()
            __hash__ = None  # pyright: ignore

            def __call__(self, x):
                return x + 1

        np.testing.assert_array_equal(pmap(Slotted())(rows()), rows() + 1)

    def test_bound_methods(self):
        class Model:
            def apply(self, x):
                return x + 1

        model = Model()
        first, second = pmap(model.apply), pmap(model.apply)
        first(rows())
        del first
        gc.collect()
        np.testing.assert_array_equal(second(rows()), rows() + 1)

    def test_nothing_keeps_a_function_alive_that_is_no_longer_mapped(self):
        big = np.ones((8, 1024))

        def f(x):
            return x + big[0]

        alive = weakref.ref(f)
        mapped = pmap(f)
        mapped(rows(1024)).block_until_ready()
        del mapped, f
        gc.collect()
        assert alive() is None


class TestWhatCannotBeSplit:
    def test_parameters_that_were_not_replicated(self):
        def step(params, batch):
            return params

        params = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}
        with pytest.raises(ValueError) as caught:
            pmap(step)(params, np.ones((8, 5, 3)))
        assert str(caught.value).splitlines() == [
            "pmap(step) maps over 8 devices, and 2 of 3 leaves cannot be split so:",
            "  params['b']: leading axis 2, expected 8 (devices): float32[2]",
            "  params['w']: leading axis 3, expected 8 (devices): float32[3,2]",
            "These look un-replicated: pass them through lockstep.compat.replicate(), "
            "or give in_axes=None to an argument that all devices share.",
        ]

    @pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
    def test_a_key_that_was_not_split(self, key):
        with pytest.raises(
            ValueError, match="rng: this leaf is one PRNG key"
        ) as caught:
            pmap(lambda x, rng: x)(rows(), rng=key(0))
        assert "shard_prng_key()" in str(caught.value)

    @pytest.mark.parametrize("scalar", [0.1, np.float32(0.1), jnp.float32(0.1)])
    def test_a_scalar(self, scalar):
        def step(state, batch):
            return batch

        with pytest.raises(ValueError, match=r"state\['lr'\]: rank 0, cannot be split"):
            pmap(step)({"lr": scalar}, rows())

    def test_a_leaf_that_is_no_array(self):
        with pytest.raises(ValueError, match=r"x\['opt'\]: rank 0, .*: str 'adam'"):
            pmap(lambda x: x)({"opt": "adam", "w": rows()})

    def test_rows_that_divide_are_not_split_further(self):
        """16 rows on 8 devices mean two a device to a mesh, and an error to `pmap`."""
        with pytest.raises(ValueError, match=r"y: leading axis 16, expected 8"):
            pmap(lambda x, y: x)(rows(), np.ones(16))

    def test_the_devices_are_what_is_expected_even_after_other_sizes(self):
        f = pmap(lambda b, x: x)
        f(np.ones(2), np.ones(2))
        with pytest.raises(ValueError, match="b: leading axis 2, expected 8"):
            f(np.ones(2), np.ones(8))

    def test_more_rows_than_devices(self):
        with pytest.raises(
            ValueError, match=r"requires 32 .* only 8 .*\(8, rows, ...\)"
        ):
            pmap(lambda x: x)(np.ones((32, 3)))

    @pytest.mark.parametrize("size", [2, 5])
    def test_as_many_rows_as_devices_were_named(self, size):
        f = pmap(lambda x: x, devices=jax.devices()[:4])
        with pytest.raises(ValueError, match=f"axis_size={size}, num_local_devices=4"):
            f(np.ones(size))

    def test_another_axis_than_the_first(self):
        f = pmap(lambda x, y: x, in_axes=(1, 2))
        with pytest.raises(ValueError, match=r"y: axis 2 4, expected 8 .*\[2,3,4\]"):
            f(np.ones((3, 8)), np.ones((2, 3, 4), np.float32))
        with pytest.raises(ValueError, match="y: rank 1, has no axis 2"):
            f(np.ones((3, 8)), np.ones(3))

    def test_long_lists_are_cut(self):
        with pytest.raises(
            ValueError, match=r"(?s)20 of 21 leaves .*and 10 more"
        ) as caught:
            pmap(lambda x, y: x)(rows(), [np.ones(3)] * 20)
        assert "y[9]" in str(caught.value) and "y[10]" not in str(caught.value)

    def test_static_arguments_do_not_shift_the_names(self):
        f = pmap(lambda n, x, *rest: x, static_broadcasted_argnums=0)
        with pytest.raises(ValueError, match=r"rest\[1\]: leading axis 3"):
            f(2, rows(), rows(), np.ones(3))

    def test_nothing_mapped(self):
        with pytest.raises(
            ValueError, match="at least one argument with a mapped axis"
        ):
            pmap(lambda x: x, in_axes=None)(1.0)

    def test_static_values_without_hash(self):
        f = pmap(lambda x, n: x, static_broadcasted_argnums=1)
        with pytest.raises(
            ValueError, match="Non-hashable static .* argument 1 .*list"
        ):
            f(rows(), [1])

    def test_an_error_of_the_function_itself_is_left_alone(self):
        def step(x):
            raise ValueError("mine")

        with pytest.raises(ValueError, match="^mine"):
            pmap(step)(jax.device_put(rows(), jax.devices()[1]))
        assert pmap(step).compiles.count == 0, "nothing came of it"


class TestMoves:
    def test_inputs_elsewhere_are_moved_counted_and_told_once(self, caplog):
        notices.reset()

        def eval_step(state, batch):
            return state["w"] + batch

        f = pmap(eval_step)
        w = jax.device_put(rows(), jax.devices()[2])
        for _ in range(2):
            np.testing.assert_array_equal(f({"w": w}, rows()), 2 * rows())
        assert (f.moves.calls, f.moves.leaves, f.moves.nbytes) == (2, 2, 2 * 8 * 4)
        assert len(caplog.messages) == 1
        assert "pmap(eval_step) moved 1 inputs" in caplog.text
        assert "state['w'] from devices [2]" in caplog.text
        assert not w.is_deleted()

    @pytest.mark.parametrize("spec", [P(), P("a"), P("b"), P("b", "a")])
    def test_arrays_spread_over_a_mesh(self, spec, mesh_of):
        mesh = mesh_of(8, {"a": 2, "b": 4})
        f = pmap(lambda x: x + 1)
        x = jax.device_put(rows(4), NamedSharding(mesh, spec))
        np.testing.assert_array_equal(f(x), rows(4) + 1)
        assert f.moves.leaves == 1

    def test_arrays_on_other_devices_of_the_same_number(self):
        """The second call of `jax.pmap` fails here, or ends the process."""
        x = pmap(lambda x: x)(np.arange(4.0))
        f = pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.devices()[4:])
        for _ in range(2):
            assert f(x).tolist() == [6] * 4
        assert f.moves.calls == 2

    def test_arrays_with_explicit_axes(self):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
        f = pmap(lambda x: x + 1)
        x = jax.device_put(rows(), NamedSharding(mesh, P("x")))
        np.testing.assert_array_equal(f(x), rows() + 1)
        assert f.moves.leaves == 0, "nothing had to leave its device"

    def test_nothing_is_told_of_what_needs_placing_anyway(self, caplog):
        f, g = pmap(lambda x, y: x + y), pmap(lambda x, y: x * y)
        f(rows(), jnp.asarray(rows()))
        g(f(rows(), rows()), y=rows())
        assert f.moves.calls == g.moves.calls == 0 and not caplog.messages


class TestOutOfMemory:
    def test_the_error_carries_the_report(self):
        def hungry(w, x):
            table = jnp.sort(x[:, :1] + jnp.zeros((1, 10**9)), 1)
            return w + jnp.sort(table, 0).sum()

        x = np.ones((4, 1000, 3), np.float32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EX") as caught:
            step = pmap(hungry, devices=jax.devices()[:4])
            jax.block_until_ready(step(np.zeros(4, np.float32), x))
        (note,) = caught.value.__notes__
        assert "one step of 4000 rows, on each device" in note
        assert "the next things to try:" in note

"""Printing from a step, in the order of the devices; drawing where an array lies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lockstep as ls
from lockstep.compat import pmap
from lockstep.debug import print_per_device, shapes, show_sharding


def printed(capfd):
    jax.effects_barrier()
    return capfd.readouterr().out.splitlines()


def test_the_device_view_prints_each_devices_own_values(mesh_of, capfd):
    def step(w, x):
        total = x.sum()
        print_per_device("rows {}, sum {total}", x, total=total)
        return w + jax.lax.pmean(total, "data"), None

    step = ls.per_device(step, mesh_of(4))
    step(0.0, np.arange(8, dtype=np.float32))
    assert printed(capfd) == [
        "device 0: rows [0. 1.], sum 1.0",
        "device 1: rows [2. 3.], sum 5.0",
        "device 2: rows [4. 5.], sum 9.0",
        "device 3: rows [6. 7.], sum 13.0",
    ]


def test_the_global_view_prints_the_part_on_each_device(mesh_of, capfd):
    def step(w, x):
        print_per_device("w {w:.1f}, x {}", x, w=w)
        return w + x.mean(), None

    step = ls.parallelize(step, mesh_of(4))
    w, _ = step(0.5, np.arange(8, dtype=np.float32))
    assert printed(capfd) == [
        "device 0: w 0.5, x [0. 1.]",
        "device 1: w 0.5, x [2. 3.]",
        "device 2: w 0.5, x [4. 5.]",
        "device 3: w 0.5, x [6. 7.]",
    ]
    step(w, np.zeros(8, np.float32))  # compiled: the parts are still known
    assert printed(capfd)[3] == "device 3: w 4.0, x [0. 0.]"


def test_inside_a_gradient_and_a_loop(mesh_of, capfd):
    def loss(w, x):
        def one(carry, row):
            print_per_device("carry {}", carry)
            return carry + w * row.sum(), None

        return jax.lax.scan(one, 0.0, jnp.stack([x, x]))[0]

    step = ls.parallelize(lambda w, x: (w - jax.grad(loss)(w, x), None), mesh_of(2))
    step(1.0, np.ones(2, np.float32))
    assert printed(capfd) == [
        "device 0: carry 0.0",
        "device 1: carry 0.0",
        "device 0: carry 2.0",
        "device 1: carry 2.0",
    ]


def test_compat_pmap_prints_each_devices_own_values(capfd):
    mapped = pmap(
        lambda x: print_per_device("{}", x) or 2 * x, devices=jax.devices()[:3]
    )
    mapped(np.arange(3))
    assert printed(capfd) == ["device 0: 0", "device 1: 1", "device 2: 2"]


def test_outside_of_a_step_it_prints_what_lies_where(mesh_of, capfd):
    x = ls.shard_batch(np.arange(4), mesh_of(2))
    print_per_device("{} of {n}", x, n=4)
    print_per_device("{}", 3)
    assert printed(capfd) == ["device 0: [0 1] of 4", "device 1: [2 3] of 4", "host: 3"]


def test_a_wrong_format_is_an_error_of_the_caller(mesh_of):
    with pytest.raises(IndexError):
        print_per_device("{} {}", 3)


class TestShowSharding:
    def test_rows(self, mesh_of):
        x = ls.shard_batch(np.ones((4, 3), np.float32), mesh_of(2))
        assert str(show_sharding(x)).splitlines() == [
            "float32[4,3] on 2 devices, [2,3] on each",
            "[0:2, :]  0",
            "[2:4, :]  1",
        ]

    def test_a_copy_on_every_device_and_a_scalar(self, mesh_of):
        w = ls.replicate({"w": np.ones(3, np.float32), "n": np.int32(1)}, mesh_of(4))
        assert str(show_sharding(w["w"])).splitlines()[1] == "[:]  0 1 2 3"
        assert str(show_sharding(w["n"])).splitlines()[1] == "[]  0 1 2 3"

    def test_two_axes_as_a_grid(self, mesh_of):
        mesh = mesh_of(8, {"data": 4, "model": 2})
        spec = jax.sharding.PartitionSpec("data", "model")
        x = jax.device_put(np.ones((8, 6)), jax.sharding.NamedSharding(mesh, spec))
        assert str(show_sharding(x)).splitlines()[1:3] == [
            "          0:3  3:6",
            "[0:2, |]  0    1",
        ]
        assert "<pre>float32[8,6] on 8 devices" in show_sharding(x)._repr_html_()

    def test_refuses_a_tree(self):
        with pytest.raises(TypeError, match=r"debug.shapes\(tree\) lists all leaves"):
            show_sharding({"w": np.ones(3)})


class TestShapes:
    def test_of_a_tree_with_all_kinds_of_leaves(self, mesh_of):
        mesh = mesh_of(4)
        tree = {
            "w": ls.replicate(np.ones((2, 3), np.float32), mesh),
            "x": ls.shard_batch(np.ones((8, 3), np.float32), mesh),
            "host": np.ones(2),
            "name": "adam",
        }
        text = str(shapes(tree, "state"))
        rows = [line.split() for line in text.splitlines()]
        assert ["state['w']", "float32[2,3]", "[2,3]", "P()", "24"] in rows
        assert ["state['x']", "float32[8,3]", "[2,3]", "P('data',)", "24"] in rows
        assert ["state['host']", "float64[2]", "host", "0"] in rows
        assert ["state['name']", "str", "'adam'", "static", "0"] in rows
        assert text.splitlines()[-1].split() == ["total", "48"]
        assert "<td>state[&#x27;w&#x27;]</td>" in shapes(tree, "state")._repr_html_()

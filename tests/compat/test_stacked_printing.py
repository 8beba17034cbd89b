"""Printing from all devices, in their order."""

import jax
import jax.numpy as jnp
import numpy as np

from lockstep.compat import debug_print, pmap


def test_one_line_a_device_in_order(capsys):
    def step(x):
        debug_print("loss {} of {name}", x.sum(), name=x[0])
        return x

    for _ in range(2):
        pmap(step)(np.arange(16).reshape(8, 2))
    jax.effects_barrier()
    want = [f"device {d}: loss {4 * d + 1} of {2 * d}" for d in range(8)]
    assert capsys.readouterr().out.splitlines() == want * 2


def test_inside_a_loop_and_with_text_alone(capsys):
    def step(x):
        debug_print("here")
        return jax.lax.fori_loop(0, 2, lambda i, x: debug_print("{}", i) or x + 1, x)

    pmap(step, devices=jax.devices()[:2])(np.zeros(2))
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["device 0: here", "device 1: here"]
    assert lines[2:] == ["device 0: 0", "device 1: 0", "device 0: 1", "device 1: 1"]


def test_on_one_device_it_is_the_print_of_jax(capsys):
    jax.jit(lambda x: debug_print("x is {}", x))(jnp.float32(2))
    jax.effects_barrier()
    assert capsys.readouterr().out == "x is 2.0\n"

"""Trains on a Ray of this machine; what it prints is judged by test_ray.py.

    python on_ray.py TRAIN FOLDER

All of Ray stays on the loopback address; see also the variables that test_ray.py sets.
"""

# pyright: reportMissingImports=false

import sys

import ray

import lockstep as ls

CPU = {"JAX_PLATFORMS": "cpu"}


def count_devices(first, second):
    """A function that every worker runs."""
    import lockstep as ls

    ls.initialize()
    import jax

    return jax.process_count(), jax.device_count(), first + second


def fail_in_process_1():
    import lockstep as ls

    ls.initialize()
    import jax
    import jax.numpy as jnp

    if jax.process_index() == 1:
        raise ValueError("row 7 is bad")
    step = ls.parallelize(lambda state, batch: (state + batch.sum(), {}))
    step(jnp.zeros(()), jnp.ones((2, 1)))  # waits for process 1


def main(train: str, folder: str) -> None:
    ray.init(
        num_cpus=2,
        object_store_memory=100 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    print("returned:", ls.ray.fit(count_devices, 3, 4, workers=2, environment=CPU))
    for function, workers in ((fail_in_process_1, 2), (count_devices, 3)):
        try:
            ls.ray.fit(function, workers=workers, environment=CPU, start_timeout_s=2)
        except RuntimeError as error:
            print("raised:", error, flush=True)
    run = ("--run", folder)
    ls.ray.fit(train, *run, workers=2, environment=CPU, max_restarts=2)
    print("trained", flush=True)
    ls.ray.fit(train, *run, "--steps", 10_000_000, workers=2, environment=CPU)


if __name__ == "__main__":
    main(*sys.argv[1:])

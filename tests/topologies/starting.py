"""One process of several that are told by hand who they are.

`starting.py HOST:PORT COUNT INDEX TIMEOUT [DELAY]`: after DELAY seconds it arrives,
says so, waits for a line of standard input, and adds up a one of each process.
"""

import sys
import time

import jax
import numpy as np

import lockstep as ls

address, count, index, timeout, *delay = sys.argv[1:]
time.sleep(float(*delay))
ls.initialize(address, int(count), int(index), timeout_s=float(timeout))
print("connected", flush=True)
sys.stdin.readline()
step = ls.parallelize(lambda w, x: (w, x.sum()))
print("sum", float(step(0.0, np.ones(jax.local_device_count(), np.float32))[1]))

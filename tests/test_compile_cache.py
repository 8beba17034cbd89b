"""`cache_compiles`: the second process compiles nothing."""

import pytest
from fresh_process import run_lockstep, run_python

from lockstep.compile_cache import cache_compiles

SCRIPT = """
import logging, sys
import lockstep as ls
import jax, jax.numpy as jnp, numpy as np

if len(sys.argv) > 1:
    ls.cache_compiles(sys.argv[1])
logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
step = ls.parallelize(lambda w, x: (w - 0.1 * jnp.sin(x).mean(), {"loss": w}))
w, metrics = step(jnp.zeros(()), np.ones(8, np.float32))
print("w is", float(w))
"""
HIT, MISS = "Persistent compilation cache hit", "PERSISTENT COMPILATION CACHE MISS"


def test_a_second_process_finds_the_step(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "made" / "compiled"
    first = run_python(str(script), str(folder))
    assert "w is -0.08" in first.stdout, first.stderr
    assert f"{HIT} for 'jit_outer'" not in first.stdout
    second = run_python(str(script), str(folder))
    assert "w is -0.08" in second.stdout
    assert f"{HIT} for 'jit_outer'" in second.stdout


@pytest.mark.full
def test_as_an_option_of_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    folder = tmp_path / "compiled"
    for _ in range(2):
        done = run_lockstep("run", "--compile-cache", str(folder), str(script))
        assert "w is -0.08" in done.stdout, done.stderr
    assert f"{HIT} for 'jit_outer'" in done.stdout


def test_what_is_no_folder_fails_at_once(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OSError, match="file"):
        cache_compiles(file)

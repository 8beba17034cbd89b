"""`cache_compiles`: the second process compiles nothing."""

import pytest
from fresh_process import run_lockstep, run_python

from lockstep import compile_cache
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


READ_ONLY = """
import pathlib, tempfile

def refuse(dir):
    raise PermissionError(13, "Permission denied")

# The tests may run as root, who can write everywhere.
tempfile.TemporaryFile = refuse
"""


@pytest.mark.full
def test_a_folder_that_cannot_be_written_is_read(tmp_path):
    script, folder = tmp_path / "train.py", tmp_path / "compiled"
    script.write_text(SCRIPT)
    run_python(str(script), str(folder))
    held = sorted(folder.iterdir())
    script.write_text(READ_ONLY + SCRIPT + "jax.jit(lambda x: x * 3)(w)")
    done = run_python(str(script), str(folder))
    assert "w is -0.08" in done.stdout, done.stderr
    assert f"{HIT} for 'jit_outer'" in done.stdout
    assert done.stderr.count("cannot be written (Permission denied)") == 1
    assert sorted(folder.iterdir()) == held


def test_what_is_neither_read_nor_written_fails(tmp_path, monkeypatch):
    def refuse(dir):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(compile_cache.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(compile_cache.os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="neither read nor written: Permission denied"):
        cache_compiles(tmp_path)


def test_what_is_no_folder_fails_at_once(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match="file is a file"):
        cache_compiles(file)
    with pytest.raises(OSError, match="below for compiled programs cannot be made"):
        cache_compiles(file / "below")
    with pytest.raises(ValueError, match="is empty"):
        cache_compiles("")
    for wrong in (None, 3, b"x", ["a"]):
        with pytest.raises(TypeError, match="give its path"):
            cache_compiles(wrong)  # pyright: ignore[reportArgumentType]


@pytest.mark.full
@pytest.mark.parametrize("place", ["train.py", ""])
def test_run_says_it_in_one_line(tmp_path, place):
    script = tmp_path / "train.py"
    script.write_text("print('started')")
    folder = str(tmp_path / place) if place else ""
    done = run_lockstep("run", "--compile-cache", folder, str(script))
    assert done.returncode == 2 and "started" not in done.stdout
    assert done.stderr.startswith("lockstep run: --compile-cache: ")
    assert len(done.stderr.splitlines()) == 1

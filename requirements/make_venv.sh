#!/bin/sh
# Makes an environment with the locked requirements and this package in it.
#
#   requirements/make_venv.sh FOLDER [VERSION]
#
# VERSION is 3.13, 3.12 or 3.11; without one the newest Python found is taken.
# PYTHON=path/to/python names one outright. Needs that Python and nothing else.
set -eu

folder=$1
versions=${2:-"3.13 3.12 3.11"}
here=$(dirname "$0")

# A name on PATH may be a shim without a Python behind it, and some systems ship
# Python without pip: so each candidate is run, and has to show what we need.
works() {
    "$1" -c "
import ensurepip, ssl, sys, venv
sys.exit('%d.%d' % sys.version_info[:2] != '$2')" >/dev/null 2>&1
}

find_python() {
    for version in $versions; do
        for python in ${PYTHON:-"python$version" python3 \
            "$HOME/.pyenv/versions/$version".*/bin/python3 \
            "$HOME/.local/share/uv/python/cpython-$version".*/bin/python3}; do
            if works "$python" "$version"; then
                echo "$python $version"
                return
            fi
        done
    done
    echo "No working Python $versions with venv and pip was found." >&2
    echo "Install one (Debian: python3-venv), or name one: PYTHON=/path/to/python make" >&2
    return 1
}

found=$(find_python)
python=${found% *}
version=${found##* }
lock=$here/py$(echo "$version" | tr -d .).txt

if ! works "$folder/bin/python" "$version"; then
    rm -rf "$folder"
    echo "Making $folder with Python $version"
    "$python" -m venv "$folder"
fi
echo "Installing $lock (the first time takes a few minutes)"
"$folder/bin/python" -m pip install -qq --disable-pip-version-check -r "$lock"
# The build backend is locked too, so this step asks no registry.
"$folder/bin/python" -m pip install -qq --disable-pip-version-check \
    --no-deps --no-build-isolation --editable "$here/.."
# JAX's CPU wheels are locked; on an accelerator name its extra: EXTRA=cuda12 make
if [ -n "${EXTRA:-}" ]; then
    jax=$("$folder/bin/python" -c 'import jax; print(jax.__version__)')
    "$folder/bin/python" -m pip install -qq "jax[$EXTRA]==$jax"
fi
touch "$folder/ready"

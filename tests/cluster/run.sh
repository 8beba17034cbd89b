#!/bin/sh
# Installs the launchers and runs their tests; says which could not be installed.
#
#   tests/cluster/run.sh PYTHON [pytest arguments]
set -u

python=$1
shift
here=$(dirname "$0")

ready=$here/test_guide.py
missing=
for kind in mpirun slurm ray kubernetes; do
    if "$here/install.sh" "$kind" "$python"; then
        ready="$ready $here/test_$kind.py"
    else
        missing="$missing $kind"
    fi
done

status=0
# Each launch has a limit of its own; this is the limit of all.
timeout 600 "$python" -m pytest -m cluster $ready "$@" || status=$?
for kind in $missing; do
    echo "NOT RUN: the tests of $kind, which cannot be installed here (see above)"
done
exit $status

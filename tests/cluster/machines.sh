#!/bin/sh
# Two machines on this one: each has a name and a network; a cable joins the two.
#
#   machines.sh on-node-1 COMMAND...    runs it on the first
#   machines.sh node-2 COMMAND...       what a program on the first uses as its ssh
set -eu

if [ "$1" != on-node-1 ]; then
    exec nsenter --net=/run/netns/"$1" unshare --uts sh -euc '
        hostname "$1"
        shift
        exec sh -c "$*"' sh "$@"
fi
shift
exec unshare --map-root-user --net --mount --uts sh -euc '
    hostname node-1
    mount -t tmpfs none /run
    printf "127.0.0.1 localhost\n10.77.0.1 node-1\n10.77.0.2 node-2\n" >/run/hosts
    mount --bind /run/hosts /etc/hosts

    ip netns add node-2
    ip link add cable type veth peer name cable netns node-2
    ip address add 10.77.0.1/24 dev cable
    ip -netns node-2 address add 10.77.0.2/24 dev cable
    for other in "" "-netns node-2"; do
        ip $other link set lo up
        ip $other link set cable up
    done
    exec "$@"' sh "$@"

#!/usr/bin/env bash
# The container of the nodes of one test (see nodes.py): container.sh DIRECTORY, in a mount namespace of its own.
#
# Prints "ready" when the bridge is there, and keeps the container until its standard input ends, which it does however
# the test ends; then nothing is left. If this process is killed, the kernel ends the container (parent-death signal) and
# the next container removes the empty control groups.
set -euo pipefail
directory=$1

mount -t tmpfs -o mode=755 container "$directory"
mkdir "$directory"/{cgroup,nodes}
# Processes of systemd's services are told apart by control groups alone; no controller has to be free for that.
mount -t cgroup2 cgroup2 "$directory/cgroup"

remove_groups() { # remove_groups GROUP: true when it is gone
  for _ in {1..600}; do # until the kernel has ended what was killed
    [[ -d "$1" ]] || return 0
    find "$1" -depth -type d -exec rmdir {} + 2>/dev/null || true
    [[ -d "$1" ]] || return 0
    sleep 0.1
  done
  return 1
}

for group in "$directory"/cgroup/hyperpod-ft-container-*; do
  if [[ -d "$group" ]] && ! kill -0 "${group##*-}" 2>/dev/null; then
    find "$group" -depth -type d -exec rmdir {} + 2>/dev/null || true
  fi
done
group="$directory/cgroup/hyperpod-ft-container-$$"
mkdir "$group"
ln -s "$group" "$directory/group"

# What Lustre's client would show as the source of its mount.
mkdir "$directory/lustre"
mount -t tmpfs -o mode=755 "$2" "$directory/lustre"

# shellcheck disable=SC2016 # expanded inside
setpriv --pdeathsig KILL unshare --net --pid --fork --kill-child --mount-proc bash -c '
  ip link set lo up
  ip link add nodes type bridge
  ip address add 10.1.0.1/24 dev nodes
  ip link set nodes up
  echo ready
  exec sleep infinity' &
container=$!
read -r _ || true
kill -KILL "$container" 2>/dev/null || true
wait "$container" 2>/dev/null || true
remove_groups "$group"

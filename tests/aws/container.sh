#!/usr/bin/env bash
# The container of one host of a training job (see containers.py), made of namespaces:
#
#   container.sh DIRECTORY HOSTNAME COMMAND...
#
# Its files are this machine's, read only; its own are /opt/ml, /tmp and /etc/hosts, from DIRECTORY, which also has
# `mounts`: lines "source<tab>target<tab>rw|ro" of what else is mounted. Its network is this machine's. It ends
# when this script's standard input ends, however the test ends.
set -euo pipefail

if [[ "$1" != --inside ]]; then
  user=()
  if [[ $EUID != 0 ]]; then user=(--user --map-root-user); fi
  exec 3<&0 </dev/null
  setpriv --pdeathsig KILL unshare "${user[@]}" --mount --propagation private --uts --ipc --pid --fork --kill-child \
    bash "$0" --inside "$@" 3<&- &
  container=$!
  { read -r _ <&3 || true; kill -KILL "$container" 2>/dev/null; } >/dev/null 2>&1 &
  watcher=$!
  status=0
  wait "$container" || status=$?
  kill "$watcher" 2>/dev/null || true
  exit "$status"
fi

trap 'exit 143' TERM # PID 1 would ignore it; the program that starts below has its own handler, or ignores it too
directory=$2 name=$3
shift 3
hostname "$name"
root=$directory/root
mkdir -p "$root"
mount -t tmpfs -o mode=755 root "$root"
for entry in /*; do
  case ${entry#/} in
    proc | sys | dev | tmp | opt | lost+found) ;;
    *)
      if [[ -L $entry ]]; then
        cp -P "$entry" "$root$entry"
      elif [[ -d $entry ]]; then
        mkdir "$root$entry"
        mount --rbind "$entry" "$root$entry"
        mount -o remount,bind,ro "$root$entry"
      fi
      ;;
  esac
done
mkdir -p "$root"/{proc,sys,dev,tmp,opt/ml,old}
for entry in /opt/*; do # pip may be configured to find packages there
  if [[ -d $entry && $entry != /opt/ml ]]; then
    mkdir "$root$entry"
    mount --rbind "$entry" "$root$entry"
    mount -o remount,bind,ro "$root$entry"
  fi
done
mount --bind "$directory/hosts" "$root/etc/hosts"
mount --bind "$directory/tmp" "$root/tmp"
mount --bind "$directory/ml" "$root/opt/ml"
while IFS=$'\t' read -r source target mode; do
  mkdir -p "$root$target"
  mount --bind "$source" "$root$target"
  if [[ $mode == ro ]]; then mount -o remount,bind,ro "$root$target"; fi
done <"$directory/mounts"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
cd "$root"
pivot_root . old
umount -l /old
rmdir /old
cd /
exec "$@"

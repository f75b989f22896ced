#!/usr/bin/env bash
# The power switch of a node (see nodes.py): node_boot.sh CONTAINER NAME ADDRESS, in mount and network namespaces of its
# own inside the container. Becomes the node's init (image.py), with namespaces for everything that a machine has one of.
set -euo pipefail
container=$1 name=$2 address=$3
node="$container/nodes/$name"

if [[ "${4:-}" != inside ]]; then
  mkdir -p "$container/group/$name"
  echo $$ >"$container/group/$name/cgroup.procs"
  nsenter --net=/proc/1/ns/net ip link add name "node${address##*.}" up master nodes type veth peer name eth0 netns $$
  ip link set lo up
  ip address add 169.254.169.254/32 dev lo # where the instance metadata service answers
  ip address add "$address/24" dev eth0
  ip link set eth0 up
  ip route add default via 10.1.0.1 # a bridge that forwards nothing
  layers="lowerdir=$node/instance:$container/image:/,upperdir=$node/upper,workdir=$node/work"
  mount -t overlay overlay -o "$layers" "$node/root"
  exec unshare --uts --ipc --pid --cgroup --mount --fork --kill-child bash "$0" "$container" "$name" "$address" inside
fi

hostname "$name"
cd "$node/root"
mount -t proc proc proc
# The kernel is this machine's: what has no namespace may be read only, as in any container.
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --bind /proc/sys/net proc/sys/net
mount -t sysfs -o ro sysfs sys
mount -t cgroup2 cgroup2 sys/fs/cgroup
mount -t tmpfs -o mode=755 tmpfs run
mount -t tmpfs -o mode=1777 tmpfs tmp
mount -t tmpfs -o mode=755 tmpfs dev
for device in null zero full random urandom tty; do
  touch "dev/$device"
  mount --bind "/dev/$device" "dev/$device"
done
mkdir dev/shm dev/pts
mount -t tmpfs -o mode=1777 tmpfs dev/shm
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
for stream in 0:stdin 1:stdout 2:stderr; do ln -s "fd/${stream%:*}" "dev/${stream#*:}"; done
touch dev/console
mount --bind "$node/console.log" dev/console
mount --bind "$container/lustre" srv/lustre
if [[ ${PACKAGES:-} ]]; then # wherever they are on this machine
  mkdir -p opt/stand-ins/packages
  mount --bind "$PACKAGES" opt/stand-ins/packages
fi
pivot_root . mnt
umount --lazy /mnt
exec env -i container=namespaces PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
  setpriv --bounding-set=-sys_module,-sys_time,-syslog,-sys_rawio \
  /opt/stand-ins/init --system --log-target=console --show-status=false

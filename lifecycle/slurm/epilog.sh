#!/bin/bash
# Slurm's Epilog: runs as root on each node after the last step of a job there.
#
# What a job left behind takes memory and accelerators from the next one: stray processes of its user, and their files in
# /dev/shm. Only where that user has no other job on the node, never for system accounts, and always exit status 0:
# another one drains the node.

user=${SLURM_JOB_UID:-}
node=${SLURMD_NODENAME:-}
export PATH=/opt/slurm/bin:$PATH:/usr/bin:/bin

[[ $user =~ ^[0-9]+$ && $user -ge 1000 && $user -ne 65534 && -n $node ]] || exit 0

# When Slurm does not answer, nobody knows whether there is another job: leave everything alone.
jobs=$(timeout 30 squeue --noheader --format=%A --user="$user" --nodelist="$node" --states=RUNNING,COMPLETING,SUSPENDED,CONFIGURING) || exit 0
others=$(grep -vx -e "${SLURM_JOB_ID:-}" -e '' <<<"$jobs")
[[ -z $others ]] || exit 0

# People who are logged in (on login nodes; or for debugging) keep what they run.
if loginctl --no-legend list-sessions 2>/dev/null | awk '{print $2}' | grep -qx "$user"; then
  exit 0
fi

if pkill -TERM -U "$user"; then
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    pgrep -U "$user" >/dev/null || break
    sleep 0.5
  done
  pkill -KILL -U "$user"
  logger -t slurm-epilog -- "job ${SLURM_JOB_ID:-?}: ended processes that uid $user left behind" 2>/dev/null
fi
find /dev/shm -mindepth 1 -xdev -uid "$user" -delete 2>/dev/null
exit 0

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

# Looked at before Slurm is asked, so that what a job brings that starts meanwhile is not among it.
started=$(date +%s.%N)
stray=$(pgrep -U "$user")

# When Slurm does not answer, nobody knows whether there is another job: leave everything alone.
# Of no particular states: --states=RUNNING would not list a job that was stopped or is being resized.
jobs=$(timeout 30 squeue --noheader --format=%A --user="$user" --nodelist="$node") || exit 0
others=$(grep -vx -e "${SLURM_JOB_ID:-}" -e '' <<<"$jobs")
[[ -z $others ]] || exit 0

# People who are logged in keep what they run. Whether somebody is may not be known either.
sessions=$(loginctl --no-legend list-sessions 2>/dev/null) || exit 0
if awk '{print $2}' <<<"$sessions" | grep -qx "$user"; then
  exit 0
fi

alive() {
  local process
  for process in $stray; do
    # A number that was given to somebody else's process meanwhile is not ours.
    [[ $(stat -c %u "/proc/$process" 2>/dev/null) == "$user" ]] && printf '%s\n' "$process"
  done
}

signal() {
  local processes
  mapfile -t processes < <(alive)
  ((${#processes[@]} == 0)) || kill "-$1" "${processes[@]}" 2>/dev/null
}

if [[ -n $(alive) ]]; then
  signal TERM
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    [[ -n $(alive) ]] || break
    sleep 0.5
  done
  signal KILL
  logger -t slurm-epilog -- "job ${SLURM_JOB_ID:-?}: ended processes that uid $user left behind" 2>/dev/null
fi
find /dev/shm -mindepth 1 -xdev -uid "$user" ! -newerct "@$started" -delete 2>/dev/null
exit 0

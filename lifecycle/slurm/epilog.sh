#!/bin/bash
# Slurm's Epilog: runs as root on each node after the last step of a job there.
#
# Remove what a job left behind, which would take memory and accelerators from the next one: stray processes of its
# user and their files in /dev/shm. Only if that user has no other job on the node, and never for system accounts.
# Memory checkpoints stay for an hour, then anyone's are removed: a job that Slurm requeues resumes from them. The exit
# status is always 0: any other drains the node.

user=${SLURM_JOB_UID:-}
node=${SLURMD_NODENAME:-}
export PATH=/opt/slurm/bin:$PATH:/usr/bin:/bin

[[ $user =~ ^[0-9]+$ && $user -ge 1000 && $user -ne 65534 && -n $node ]] || exit 0

# Listed before asking Slurm, so that processes of a job that starts later are not included.
started=$(date +%s.%N)
stray=$(pgrep -U "$user")

# If Slurm does not answer, there may be another job: do nothing.
# No --states: RUNNING would not list a job that is stopped or being resized.
jobs=$(timeout 30 squeue --noheader --format=%A --user="$user" --nodelist="$node") || exit 0
others=$(grep -vx -e "${SLURM_JOB_ID:-}" -e '' <<<"$jobs")
[[ -z $others ]] || exit 0

# Logged-in users keep their processes, as does everyone if the sessions cannot be listed.
sessions=$(loginctl --no-legend list-sessions 2>/dev/null) || exit 0
if awk '{print $2}' <<<"$sessions" | grep -qx "$user"; then
  exit 0
fi

alive() {
  local process
  for process in $stray; do
    # The pid may now belong to another user's process.
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

spared=()
for memory in /dev/shm/hyperpod-ft-*; do
  if [[ -n $(find "$memory" -mmin -60 -print -quit 2>/dev/null) ]]; then
    spared+=(! -path "$memory" ! -path "$memory/*")
  elif ! pgrep -U "$(stat -c %u "$memory" 2>/dev/null)" >/dev/null; then
    find "$memory" -xdev -delete 2>/dev/null # of a user without a process here: no job has it in use
  fi
done
find /dev/shm -mindepth 1 -xdev -uid "$user" ! -newerct "@$started" "${spared[@]}" -delete 2>/dev/null
exit 0

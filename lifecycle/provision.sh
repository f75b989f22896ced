#!/usr/bin/env bash
# HyperPod runs this on each node as root: as OnCreate on the legacy path, as OnInitComplete if HyperPod sets up Slurm.
#
#   bash provision.sh [--dry-run] [--only STEP ...]     (all arguments are passed to `python3 -m provision`)
#
# HyperPod's agent ships /var/log/provision/provisioning.log to CloudWatch, until a failed script ends:
# hence the wait at the end. Environment: PROVISION_DNS_SECONDS (60), PROVISION_SLURM_SECONDS (60; see
# provision/steps/slurm.py), PROVISION_FAILURE_WAIT_SECONDS (60).
set -uo pipefail

LOG=/var/log/provision/provisioning.log
FOLDER=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1

say() {
  printf '%s provision.sh: %s\n' "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$*"
}

# The agent may be restarting the resolver. Steps that need a name report it if it still does not resolve.
wait_for_dns() {
  local name deadline
  name=$(sed -n 's/.*"dns_name": *"\([^"]*\)".*/\1/p' "$FOLDER/settings.json" | head -n 1)
  [[ -n $name ]] || return 0
  deadline=$((SECONDS + ${PROVISION_DNS_SECONDS:-60}))
  until getent hosts "$name" >/dev/null; do
    if ((SECONDS >= deadline)); then
      say "the name $name does not resolve yet; continuing"
      return 0
    fi
    sleep 2
  done
}

# The cluster names this folder by the digest of SHA256SUMS (LifeCycleConfig.SourceS3Uri), which no node can change. A
# folder of any other name is a copy that somebody may edit.
check_files() {
  local digest=${FOLDER##*/} actual added
  [[ $digest =~ ^[0-9a-f]{32}$ ]] || return 0
  actual=$(sha256sum SHA256SUMS) || return 1
  if [[ $actual != "$digest"* ]]; then
    say "SHA256SUMS is not the one whose digest names this folder"
    return 1
  fi
  sha256sum --check --strict --quiet SHA256SUMS || return 1
  # Python would import these instead of what they are named after.
  added=$(find . -regex '.*\.\(py\|pyc\|so\)' -printf '%P\n' | grep -vxF -f <(cut -c 67- SHA256SUMS))
  [[ -z $added ]] || say "not in SHA256SUMS: ${added//$'\n'/, }"
  [[ -z $added ]]
}

find_python() {
  local candidate
  for candidate in python3 python3.{14..8} /usr/bin/python3; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 8))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

main() {
  local python
  cd "$FOLDER" || return 1
  if ! check_files; then
    say "the files in $FOLDER are not those that the cluster was given; run \`hyperpod-ft cluster create\` again"
    return 1
  fi
  wait_for_dns
  if ! python=$(find_python); then
    say "no Python 3.8 or newer on this node; use an AMI that has one"
    return 1
  fi
  "$python" -B -u -m provision "$@"
}

mkdir -p "$(dirname "$LOG")"
exec {log}> >(exec tee -a "$LOG")
tee=$!
main "$@" >&"$log" 2>&1
status=$?
((status == 0)) || say "failed with exit status $status; waiting for the log to be uploaded" >&"$log"
exec {log}>&-
# A killed step that waits in the kernel for a dead file system keeps the pipe open, and so tee running, forever.
for _ in {1..50}; do
  kill -0 "$tee" 2>/dev/null || break
  sleep 0.1
done
kill "$tee" 2>/dev/null
((status == 0)) || sleep "${PROVISION_FAILURE_WAIT_SECONDS:-60}"
exit "$status"

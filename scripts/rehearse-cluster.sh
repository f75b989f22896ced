#!/usr/bin/env bash
# Run a cluster's life cycle, from init to delete, against a stand-in for AWS on this machine. Costs nothing.
#
#   ./scripts/rehearse-cluster.sh
#
# Sets up .venv, starts tests/aws/server.py on the loopback interface, and runs `hyperpod-ft cluster` from init to delete
# in a temporary directory. It contacts no real AWS endpoint and reads no credentials.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh
# shellcheck source=scripts/stand_in.sh
source scripts/stand_in.sh

setup_python aws dev
repository=$PWD
start_stand_in 0.1
export HOME=$directory
mkdir -m 700 "$directory/.ssh"
ssh-keygen -q -t ed25519 -N '' -f "$directory/.ssh/id_ed25519"
cd "$directory"

kit() {
  say "hyperpod-ft cluster $*"
  run "$repository/.venv/bin/hyperpod-ft" cluster "$@"
}

kit init
kit validate
kit create
kit status
kit status --nodes >nodes.txt
cat nodes.txt
kit ssh --dry-run
kit replace-node cluster.yaml "$(awk '/worker-group-1/ { print $2; exit }' nodes.txt)" --yes
kit scale cluster.yaml worker-group-1 2
kit scale cluster.yaml worker-group-1 1 --yes
kit logs
kit events
kit delete --confirm ml-cluster
kit delete --confirm ml-cluster --delete-data
say "Rehearsed: created, inspected, changed and deleted, all on this machine"

#!/usr/bin/env bash
# Fine-tune a language model through a chain of real Slurm jobs on this machine. Needs no setup.
#
#   ./scripts/quickstart.sh
#
# Sets up .venv and Slurm, starts a private Slurm with two nodes, submits the quickstart recipe, follows it, shows
# answers before and after to requests that the model never saw, and stops Slurm again. It writes to .venv, .quickstart
# and, so that commands find the run, ~/.local/state/hyperpod-ft. A second run skips finished stages. If Slurm is missing
# and cannot be installed, plain processes run the same scripts.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

mkdir -p .quickstart
exec 9>.quickstart/lock
if command -v flock >/dev/null && ! flock --nonblock 9; then
  die "another quickstart is running in this checkout; wait for it, or stop it with Ctrl-C"
fi

setup_python torch
kit=.venv/bin/hyperpod-ft
export HYPERPOD_FT_LOCAL="$PWD/.quickstart/slurm"
unset SLURM_CONF

launcher=process
stopped=""
# shellcheck disable=SC2119 # no additional packages
if setup_slurm; then
  launcher=slurm
  stopped=", and the private Slurm is stopped"
else
  say "Continuing without Slurm: plain processes run the same scripts"
fi

stop() {
  local status=$?
  trap '' INT TERM
  if [[ $status -ne 0 ]]; then "$kit" cancel quickstart >/dev/null 2>&1 || true; fi
  if [[ $launcher == slurm ]]; then "$kit" local down >/dev/null || true; fi
  case $status in
    0) say "Done$stopped. Next: docs/first-run-cpus.md, from its step 2" ;;
    130 | 143) say "Stopped; no job is left running. ./scripts/quickstart.sh resumes from here" ;;
  esac
  exit "$status"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

if [[ $launcher == slurm ]]; then
  say "Starting a private Slurm: two nodes on this machine"
  # it also stops if this script is killed
  "$kit" local up --nodes 2 --cpus 4 --die-with $$ >/dev/null
fi
say "Submitting the quickstart recipe"
"$kit" submit quickstart --launcher "$launcher" --watch
.venv/bin/python examples/quickstart/count_unseen.py .quickstart/runs/quickstart
say "The base model could name the parts of a request; from 1,216 others the tuned one learned to answer in flags"

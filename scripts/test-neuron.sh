#!/usr/bin/env bash
# Run the tests of engine neuron on CPUs: optimum-neuron, neuronx-distributed and torch_xla as released, with
# stand-ins for the Neuron runtime (tests/stand_ins/neuron_runtime). benchmarks/fidelity.md lists what the tests cover.
#
#   git clone --branch v2.26.0 https://github.com/aws-neuron/neuronx-distributed /some/where
#   ./scripts/test-neuron.sh /some/where [PYTEST_ARGUMENT...]
#   ./scripts/test-neuron.sh /some/where --checkpoints DIRECTORY [NAME...]    regenerate tests/data/nxd in DIRECTORY
#
# Needs Python 3.10 or 3.11. Creates the environment .venv-neuron, or NEURON_VENV: downloads 3 GB, takes 7 GB, in three
# minutes; the tests take as long again on two processors. -k selects some.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

venv=${NEURON_VENV:-.venv-neuron}
# what was not compiled when it was installed is compiled when it is first imported, once
unset PYTHONDONTWRITEBYTECODE
# AWS publishes these for Trainium nodes only
from_aws='libneuronxla|neuronx-cc|neuronx-distributed|torch-neuronx'

# python_of_neuron: print an interpreter that optimum-neuron 0.4.5 supports.
python_of_neuron() {
  local candidate
  for candidate in "${PYTHON:-}" python3.11 python3.10 python3; do
    if [[ -n "$candidate" ]] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.10 or 3.11 with venv found; install one or set PYTHON"
}

# setup_packages: install the pins of a Trainium node except AWS's packages, the dependencies of those, and pytest.
setup_packages() {
  local packages wanted python stamp="$venv/.setup"
  mapfile -t packages < <(
    grep --extended-regexp --invert-match "^(#|($from_aws)==)" hyperpod_ft/pins/neuron-2.26.1.txt
    printf '%s\n' torch_xla==2.8.0 scipy==1.13.1 datasets==3.6.0 pyarrow==20.0.0 boto3 tenacity
    sed --quiet 's/^  "\(pytest[^"]*\)",$/\1/p' pyproject.toml
  )
  wanted=$(cat pyproject.toml <(printf '%s ' "${packages[@]}" "$PWD") | cksum)
  if [[ "$(cat "$stamp" 2>/dev/null)" == "$wanted" ]]; then return; fi
  say "Setting up $venv: downloads 3 GB"
  python=$(python_of_neuron)
  [[ -x "$venv/bin/python" ]] || "$python" -m venv "$venv"
  # most modules are never imported
  "$venv/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile --editable . "${packages[@]}"
  printf '%s\n' "$wanted" >"$stamp"
}

# setup_runtime SOURCE: make neuronx-distributed importable in the environment, and load the stand-ins in every rank.
setup_runtime() {
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  printf '%s\n' "$1/src" "$PWD/tests/stand_ins" 'import neuron_runtime.at_start' >"$site/neuron_runtime.pth"
}

[[ -f "${1:-}/src/neuronx_distributed/__init__.py" ]] ||
  die "usage: $0 NEURONX_DISTRIBUTED [ARGUMENT...]: a checkout of aws-neuron/neuronx-distributed at its tag v2.26.0"
nxd=$(realpath "$1")
shift
setup_packages
setup_runtime "$nxd"
python=$(realpath --no-symlinks "$venv/bin/python")

if [[ "${1:-}" == --checkpoints ]]; then
  shift
  exec "$python" tests/neuron/make_checkpoints.py "$@"
fi
say "pytest"
# the last one: importing torch._inductor would start a process for each CPU
export HYPERPOD_FT_NEURON_PYTHON=$python TORCHINDUCTOR_COMPILE_THREADS=1
# the flagship recipe starts many programs that each import torch
exec "$python" -m pytest --override-ini testpaths=tests/neuron --timeout=1800 "$@"

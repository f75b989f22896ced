#!/usr/bin/env bash
# Run the tests that matter most of engine torch on CPUs with another release of torch than the pinned one: TORCH_FROM
# and TORCH_TESTED in hyperpod_ft/planning/pins.py say which it accepts.
#
#   ./scripts/test-torch.sh [VERSION [PYTEST_ARGUMENT...]]     by default with 2.14.1
#
# Creates the environment .venv-torch-VERSION, or TORCH_VENV, on top of .venv, as stage env does on an image: with what
# this torch needs in other versions than .venv has. Where pip finds the CUDA build, it takes 3 GB. All of it takes three
# minutes of one core.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

version=${1:-2.14.1}
(($# == 0)) || shift
venv=${TORCH_VENV:-.venv-torch-$version}
python=$venv/bin/python
setup_for_tests
# what was not compiled when it was installed is compiled when it is first imported, once
unset PYTHONDONTWRITEBYTECODE
if [[ "$(cat "$venv/.torch" 2>/dev/null)" != "$version" ]]; then
  say "Setting up $venv: torch $version on top of .venv"
  .venv/bin/python -c 'import pathlib, sys
from hyperpod_ft.environments import interpreters
interpreters.create_on_top_of(*map(pathlib.Path, sys.argv[1:]))' "$PWD/.venv/bin/python" "$venv"
  "$python" -m pip --disable-pip-version-check --quiet install --no-compile "torch==$version"
  printf '%s\n' "$version" >"$venv/.torch"
fi

say "pytest with torch $version"
# LoRA and full, packed: killed and continued, moved; tensor, pipeline and context parallelism, every sharding; compiled
# layers; certificates; checkpoints consolidated and merged
exec "$python" -m pytest -p no:cacheprovider \
  tests/training/test_{one_rank,restart,layouts,compiled,certificate,packed_families}.py \
  tests/training/test_sharding.py::test_two_ranks \
  tests/training/test_pipeline_parallel.py::test_restart_best_weights_and_export \
  tests/unit/engines/torch/test_{mesh,neuron_device,nf4,pieces}.py "$@"

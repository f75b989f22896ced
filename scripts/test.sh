#!/usr/bin/env bash
# Set up what the tests need and run all of them. Further arguments go to pytest.
#
#   ./scripts/test.sh
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

setup_for_tests
setup_neuron_sources
# Tests of cluster nodes start these daemons too, in namespaces; without them they are skipped.
setup_slurm slurmdbd mariadb-server openssh-server || has_slurm || die "the tests need Slurm"
# The chat page of `serve` is tested in a browser.
setup_chromium || say "Without Chromium, the tests of the chat page are skipped"

export HYPERPOD_FT_REQUIRE_SLURM=1 PATH="$PWD/.venv/bin:$PATH:/usr/local/sbin:/usr/sbin:/sbin"
# without compiled modules, each of the hundreds of programs that the tests start compiles the kit's again
unset SLURM_CONF HF_TOKEN PYTHONDONTWRITEBYTECODE

say "ruff, import-linter, mypy, shellcheck"
# Meanwhile, on another core: pytest compiles the test modules, which each of its workers would do otherwise. What is
# wrong with them is reported below.
pytest --collect-only --quiet &>/dev/null &
ruff check .
ruff format --check .
lint-imports
mypy
wait
shellcheck --external-sources scripts/*.sh slurm/*.sbatch lifecycle/*.sh lifecycle/slurm/*.sh hyperpod_ft/cluster/ssh/*.sh tests/lifecycle/*.sh tests/aws/*.sh

say "pytest"
# Four workers keep two cores busy: with three, they were idle for a quarter of the time, since tests with Slurm and
# containers wait much. The files that take longest come first by name, or by tests/conftest.py.
exec pytest --numprocesses=4 --dist=loadfile --no-loadscope-reorder "$@"

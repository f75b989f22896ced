# Sourced by quickstart.sh and test.sh: a virtual environment with pinned packages; Slurm and Chromium if allowed.
# shellcheck shell=bash

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 2
}

# find_python: print the newest interpreter that the kit supports.
find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.14 python3.13 python3.12 python3.11 python3.10 python3; do
    if [[ -n "$candidate" ]] && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  die "no Python 3.10 to 3.14 with venv found; install one (Debian, Ubuntu: apt-get install python3 python3-venv) or set PYTHON"
}

# setup_python EXTRA...: create .venv in the repository and install this checkout with what of these it lacks; `dev` is
# the dependency group. Each has a file that says from which versions it was installed.
setup_python() {
  local extra wanted missing=() extras='' group=()
  wanted=$(cat pyproject.toml constraints.txt <(printf '%s' "$PWD") | cksum)
  for extra in "$@"; do
    if [[ -x .venv/bin/python && "$(cat ".venv/.setup-$extra" 2>/dev/null)" == "$wanted" ]]; then continue; fi
    missing+=("$extra")
    if [[ $extra == dev ]]; then group=(--group dev); else extras+=${extras:+,}$extra; fi
  done
  if [[ ${#missing[@]} -eq 0 ]]; then return; fi
  if [[ ",$extras," == *,torch,* ]]; then
    say "Setting up .venv: downloads PyTorch: 0.2 GB for CPUs only, 3 GB if pip finds the CUDA build"
  else
    say "Setting up .venv"
  fi
  [[ -x .venv/bin/python ]] || "$(find_python)" -m venv .venv
  .venv/bin/python -m pip --disable-pip-version-check --quiet install --upgrade 'pip>=25.1'
  .venv/bin/python -m pip --disable-pip-version-check install --progress-bar on --constraint constraints.txt \
    --editable ".[$extras]" ${group[@]+"${group[@]}"}
  for extra in "${missing[@]}"; do printf '%s\n' "$wanted" >".venv/.setup-$extra"; done
}

# setup_for_tests: the same, of what the tests need. Scripts that run at the same time wait for each other here.
setup_for_tests() {
  local lock
  exec {lock}<pyproject.toml
  flock "$lock"
  setup_python torch aws tensorboard wandb mlflow trackio dev
  exec {lock}<&-
}

# setup_neuron_sources: tests read the arguments of optimum-neuron's trainer from its source, without importing it.
setup_neuron_sources() {
  local packages wanted=.venv/neuron-sources
  mapfile -t packages < <(sed -n 's/^\(optimum-neuron\)\[training\]\(==.*\)/\1\2/p' hyperpod_ft/pins/neuron-2.26.1.txt; echo trl==0.24.0)
  if [[ "$(cat "$wanted/.packages" 2>/dev/null)" == "${packages[*]}" ]]; then return; fi
  rm -rf "$wanted"
  .venv/bin/python -m pip --disable-pip-version-check --quiet install --no-deps --target "$wanted" "${packages[@]}"
  printf '%s\n' "${packages[*]}" >"$wanted/.packages"
}

has_slurm() {
  PATH="$PATH:/usr/sbin:/usr/local/sbin" command -v slurmctld slurmd sbatch munged >/dev/null
}

has_packages() {
  (($# == 0)) || dpkg-query --show --showformat '${db:Status-Status}\n' "$@" 2>/dev/null |
    awk -v wanted=$# '$1 == "installed" { found++ } END { exit found != wanted }'
}

# setup_slurm [PACKAGE...]: install Slurm, munge and the given packages from the distribution, if missing and allowed;
# return false if that fails. It leaves their daemons stopped and disabled.
setup_slurm() {
  if has_slurm && has_packages "$@"; then return 0; fi
  install_packages "Slurm or its dependencies are missing" slurmctld slurmd slurm-client munge "$@" &&
    has_slurm && has_packages "$@"
}

has_chromium() {
  command -v chromium >/dev/null && command -v chromedriver >/dev/null
}

# setup_chromium: the same for a browser and its driver.
setup_chromium() {
  has_chromium || { install_packages "Chromium is missing" chromium chromium-driver && has_chromium; }
}

# install_packages PROBLEM PACKAGE...: install packages from the distribution, if allowed; else print what to do.
install_packages() {
  local problem=$1 packages=("${@:2}") as_root=()
  if ! command -v apt-get >/dev/null; then
    printf '%s. On Debian or Ubuntu: apt-get install %s\n' "$problem" "${packages[*]}" >&2
    return 1
  fi
  if [[ $EUID -ne 0 ]]; then
    # never ask for a password in the middle of a script
    if ! sudo --non-interactive true 2>/dev/null; then
      printf '%s, and this user may not install packages. Run: sudo apt-get install %s\n' "$problem" "${packages[*]}" >&2
      return 1
    fi
    as_root=(sudo --non-interactive)
  fi
  say "Installing ${packages[*]}"
  ${as_root[@]+"${as_root[@]}"} bash -s -- "${packages[@]}" <<'AS_ROOT'
set -Eeuo pipefail
policy=/usr/sbin/policy-rc.d
fresh=()
for package in "$@"; do
  [[ $(dpkg-query --show --showformat '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || fresh+=("$package")
done
# On Debian, this file keeps packages from starting daemons while they are installed.
if [[ ! -e $policy ]]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=120 update </dev/null >/dev/null
apt-get -qq -o DPkg::Lock::Timeout=120 install --yes --no-install-recommends "${fresh[@]}" </dev/null >/dev/null
for package in "${fresh[@]}"; do
  case $package in
    openssh-server) systemctl --quiet disable ssh ;;
    mariadb-server) systemctl --quiet disable mariadb ;;
    slurmctld | slurmd | slurmdbd | munge) systemctl --quiet disable "$package" ;;
  esac
done 2>/dev/null || true
AS_ROOT
}

"""The steps, in the order in which they run."""

from __future__ import annotations

from provision.step import Step
from provision.steps.accounting import Accounting
from provision.steps.associations import Associations
from provision.steps.epilog import Epilog
from provision.steps.fsx import Fsx
from provision.steps.home import Home
from provision.steps.identify import Identify
from provision.steps.keep_scripts import KeepScripts
from provision.steps.limits import Limits
from provision.steps.logrotate import Logrotate
from provision.steps.neuron import Neuron
from provision.steps.slurm import Slurm
from provision.steps.slurm_configuration import SlurmConfiguration
from provision.steps.slurm_daemons import SlurmDaemons
from provision.steps.ssh_hosts import SshHosts
from provision.steps.ssh_keys import SshKeys
from provision.steps.users import Users

STEPS: tuple[Step, ...] = (
    Identify(),
    KeepScripts(),
    Limits(),
    Neuron(),
    Fsx(),
    Users(),
    Home(),
    SshKeys(),
    SshHosts(),
    Logrotate(),
    Epilog(),
    SlurmConfiguration(),
    Accounting(),
    Associations(),
    SlurmDaemons(),
    Slurm(),
)

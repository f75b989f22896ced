"""What each interpreter of the environment imports as it starts: the ranks of torchrun get the stand-ins."""

import os

import neuron_runtime

if "RANK" in os.environ:
    neuron_runtime.install()

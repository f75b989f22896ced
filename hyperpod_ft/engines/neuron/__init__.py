"""Engine neuron: optimum-neuron's trainer on Trainium."""

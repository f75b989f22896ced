"""Engine neuron before training: its rules, its memory, and the variables of its processes."""

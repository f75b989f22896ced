"""The certificate of a model: what a small random one of its kind proves before anything is trained.

A config.json is made small: a layer of each kind, small sizes. Documents that share a row are compared with the same
documents alone, in plain transformers: losses, gradients, and that a change in one reaches no other. Two steps are
trained with the run's adapters, saved, consolidated and merged by the functions of those stages; plain transformers and
PEFT must load the result with no missing or unexpected keys, and give the trained model's logits. What fails is
refused; only packing may fail.
"""

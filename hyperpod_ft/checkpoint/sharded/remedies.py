"""What to do about a sharded checkpoint that cannot be read: the remedies of its readers' errors."""

INCOMPLETE = "the checkpoint is incomplete: use an earlier one"
DAMAGED = "the checkpoint is damaged: use an earlier one"
DAMAGED_FILE = "the file is damaged: use an earlier checkpoint"
MIXED = "files of different checkpoints are mixed: use an earlier checkpoint"

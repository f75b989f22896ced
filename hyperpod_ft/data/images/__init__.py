"""Images of rows: found and checked, given to a model's processor, and kept with a prepared dataset."""

FILES = "images.bin"
"""The file of a prepared dataset that has all images. Here, so that who knows only its name imports no numpy."""

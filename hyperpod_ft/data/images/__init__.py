"""Images of rows: found and checked, given to a model's processor, and kept with a prepared dataset."""

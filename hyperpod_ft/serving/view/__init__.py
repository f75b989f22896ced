"""`view`: the report of every run below a root, served to a browser on this machine."""

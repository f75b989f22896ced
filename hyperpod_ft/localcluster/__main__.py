"""`python -m hyperpod_ft.localcluster RUNTIME`: run the cluster of RUNTIME/watch.json (see daemons.py)."""

from hyperpod_ft.localcluster.daemons import main

main()

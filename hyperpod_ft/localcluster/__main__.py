"""`python -m hyperpod_ft.localcluster RUNTIME`: keep the cluster ordered in RUNTIME/order.json (see daemons.py)."""

from hyperpod_ft.localcluster.daemons import main

main()

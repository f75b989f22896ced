"""`python -m hyperpod_ft.localcluster RUNTIME`: keep the cluster ordered in RUNTIME/order.json (see supervisor.py)."""

from hyperpod_ft.localcluster.supervisor import main

main()

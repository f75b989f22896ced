"""`python -m hyperpod_ft`: the same as `hyperpod-ft`."""

from hyperpod_ft.cli.main import main

main()
